"""What the verbs ``profile`` and ``session launch|start|stop|status`` do: choose the nsys command, run it, end it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Literal

from nvprof_kit._capture.nsys import choose_window, fit_settings, option_words, parse_options, read_preset
from nvprof_kit._capture.session import (
    NSYS_SUFFIXES,
    IsEmpty,
    NsysSupervisor,
    expand_name,
    finish_report,
    need_name,
    need_program,
    need_session_name,
    need_space,
    need_tool,
    open_stage,
    output_setting,
    print_command,
    relay,
    say,
    session_state,
    state_file,
)
from nvprof_kit.errors import ToolError, UsageError

_PYTHON = re.compile(r"(python|pypy)\d*(\.\d+)*t?")


def program_name(command: Sequence[str]) -> str:
    """The program's name for its report: ``train`` for ``torchrun --nproc-per-node 8 train.py``.

    Uses the first Python script, else the module after ``-m``, else the first word.
    """
    arguments = list(command)
    script = next((word for word in arguments if word.endswith(".py") and not word.startswith("-")), None)
    if script is None and "-m" in arguments[:-1] and _PYTHON.fullmatch(PurePath(arguments[0]).name):
        script = arguments[arguments.index("-m") + 1].removesuffix(".__main__").rpartition(".")[2]
    name = PurePath(script or (arguments[0] if arguments else "")).name.removesuffix(".py").removesuffix(".sh")
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).strip(".-") or "run"


def report_name(command: Sequence[str], now: time.struct_time | None = None) -> str:
    """The default name of a report: program and time, ``train-20261122-221300``."""
    return f"{program_name(command)}-{time.strftime('%Y%m%d-%H%M%S', now or time.localtime())}"


def _nsys() -> str:
    return os.environ.get("NSYS") or "nsys"


def profile_program(
    program: Sequence[str],
    output: str,
    *,
    force: bool = False,
    preset: str = "train",
    step: int | None = None,
    schedule: str | None = None,
    nsys: Sequence[str] = (),
    export: Literal["sqlite", "parquetdir", "none"] = "sqlite",
    dry_run: bool = False,
    environ: Mapping[str, str],
    is_empty: IsEmpty,
) -> int:
    """Run a program under ``nsys profile``.

    Args:
        program: The command line.
        output: Name of the report without suffix.
        force: Overwrite existing reports.
        preset: Settings: train, infer, graphs, memory, metrics, light, or a file like those in recipes/nsys/presets.
        step: Capture only the range of nvprof_kit.step(N).
        schedule: Capture the windows of nvprof_kit.record(schedule=None) in the program with this schedule: early,
            stable, periodic, 50:60, or skip_first=50,active=10,repeat=2. Each of several windows has its report:
            NAME.1, NAME.2, ...
        nsys: Option of nsys in its own words, in place of the preset's: -x --trace=nvtx, -x --delay=60, -x
            --duration=20, -x '-c cudaProfilerApi'. Repeatable.
        export: What to export beside the report: NAME.sqlite, the folder NAME_pqtdir, which is faster, or nothing.
        dry_run: Print the equivalent nsys command and run nothing.
        environ: What to add to the program's environment.
        is_empty: Whether an export has nothing that nsys can trace.

    Returns:
        The program's exit status; 1 if nothing was captured or the report could not be brought to its place.
    """
    if not program:
        raise UsageError("no program to run; needed: nvprof-kit profile [OPTION]... -- python train.py")
    window = choose_window(step, schedule)
    tool = _nsys()
    settings = fit_settings({**read_preset(preset), **window.settings}, nsys, tool, "profile")
    if window.option and parse_options(nsys).keys() & {"delay", "duration", "capture-range"}:
        raise UsageError(
            f"{window.option} goes without --delay, --duration and --capture-range: it says when to capture"
        )
    added = {**window.environ, **environ}
    output = output.removesuffix(".nsys-rep")
    if dry_run:
        need_name(output)
        overwrite = ["--force-overwrite=true"] if force else []
        command = [
            tool,
            "profile",
            *option_words(settings),
            f"--export={export}",
            *overwrite,
            f"--output={output}",
            *program,
        ]
        print_command(command, environ=added, output=output)
        return 0
    output = expand_name(output)
    need_name(output)
    version = need_tool("nsys", tool, "Nsight Systems")
    if export == "parquetdir" and re.search(r" 20(1\d|2[0-2])\.", version):
        raise UsageError("--export parquetdir needs nsys 2023 or newer; use --export sqlite")
    # nsys would not wait for the program that it ends
    ends_with_capture = "duration" in settings and "kill" not in settings
    if ends_with_capture:
        settings["kill"] = "none"
    if settings.keys() & {"capture-range", "delay"}:
        # what begins later misses the mark with which the program says at its begin which rank it is
        added["NVPROF_KIT_RANK_MARK"] = "step"
    stage = open_stage(output, NSYS_SUFFIXES, program=program, force=force)
    if (duration := settings.get("duration", "")).isdecimal() and int(duration) > 60:
        why = "beyond 60 s reports grow unwieldy and nsys may drop events; a few steps answer the question"
        say(f"--duration {duration}: {why}")
    state = stage / ".run"
    state.mkdir()
    # releases that end, with 0, before a program that handles the signal that nsys passes on
    stay = ends_with_capture or re.search(r" 20(1\d|2[0-3])\.", version) is not None
    supervisor = NsysSupervisor(stage, state, added, stay=stay, ends_with_capture=ends_with_capture)
    start = time.monotonic()
    command = [tool, "profile", *option_words(settings), f"--export={export}", output_setting(stage, output)]
    status = supervisor.run(command, program)
    has_begun, seconds = supervisor.began or supervisor.interrupted, int(time.monotonic() - start)
    shutil.rmtree(state, ignore_errors=True)
    if status > 128 or supervisor.left_early or not any(stage.iterdir()):
        supervisor.end_orphans()
    if seconds > 60 and not settings.keys() & {"capture-range", "duration"}:
        say(f"all {seconds} s of the run were captured; a window of a few steps is smaller and as good: see --step")
    absent = window.absent
    if not has_begun:
        absent = "nsys ended before it began the program"
    elif "delay" in settings:
        absent = f"the program ended before the {settings['delay']} s of --delay were over"
    elif settings.get("capture-range") == "cudaProfilerApi":
        absent = "the program never called cudaProfilerStart"
    folder = Path(output).parent
    return finish_report(tool, stage, folder, status, force=force, is_empty=is_empty, absent=absent, export=export)


def launch_session(
    program: Sequence[str],
    *,
    session: str = "nvprof_kit",
    preset: str = "train",
    nsys: Sequence[str] = (),
    dry_run: bool = False,
    environ: Mapping[str, str],
) -> int:
    """Run a program in a new nsys session.

    Args:
        program: The command line.
        session: Name of the session, a letter first.
        preset: As in `profile_program`.
        nsys: As in `profile_program`.
        dry_run: As in `profile_program`.
        environ: As in `profile_program`.

    Returns:
        The program's exit status.
    """
    if not program:
        raise UsageError("no program to run; needed: nvprof-kit session launch [OPTION]... -- python serve.py")
    need_session_name(session)
    tool = _nsys()
    settings = fit_settings(read_preset(preset), nsys, tool, "launch", "start")
    nsys_command = [tool, "launch", f"--session-new={session}", *option_words(settings)]
    if dry_run:
        print_command([*nsys_command, *program], environ=environ)
        return 0
    need_tool("nsys", tool, "Nsight Systems")
    need_program(program)
    if session_state(tool, session):
        raise UsageError(
            f"a session {session} runs already; take another name with -s NAME, or end it: "
            f"nsys shutdown --session={session}"
        )
    need_space(Path(os.environ.get("TMPDIR") or "/tmp"), 1)  # nsys spools there
    with tempfile.TemporaryDirectory(prefix="nvprof_kit.", ignore_cleanup_errors=True) as folder:
        # a session misses the mark with which the program says at its begin which rank it is
        environ = {**environ, "NVPROF_KIT_RANK_MARK": "step"}
        # sessions are looked for in the spool folder; nsys shutdown ends the program
        supervisor = NsysSupervisor(Path(folder), Path(folder), environ, stay=True, keep_spool=True)
        status = supervisor.run(nsys_command, program)
        if status > 128 or supervisor.left_early:
            supervisor.end_orphans()
    return status


def start_session(
    *,
    session: str = "nvprof_kit",
    output: str | None = None,
    preset: str = "train",
    nsys: Sequence[str] = (),
    dry_run: bool = False,
) -> int:
    """Begin a capture in a session.

    Args:
        session: As in `launch_session`.
        output: Name of the report without suffix; %h is the host, %p this process, %q{VARIABLE} a variable. [default:
            SESSION.1, or the next number that is free]
        preset: As in `profile_program`.
        nsys: As in `profile_program`.
        dry_run: As in `profile_program`.
    """
    need_session_name(session)
    number = 1
    while any(os.path.lexists(f"{session}.{number}.{suffix}") for suffix in ("nsys-rep", "sqlite")):
        number += 1
    output = (output or f"{session}.{number}").removesuffix(".nsys-rep")
    need_name(output)
    tool = _nsys()
    settings = fit_settings(read_preset(preset), nsys, tool, "start", "launch")
    nsys_command = [tool, "start", f"--session={session}", *option_words(settings), "--export=sqlite"]
    if dry_run:
        print_command([*nsys_command, f"--output={output}"], output=output)
        return 0
    output = expand_name(output)
    need_name(output)
    need_tool("nsys", tool, "Nsight Systems")
    state_line = session_state(tool, session)
    if not state_line:
        raise UsageError(
            f"no session {session}; start the program with nvprof-kit session launch, and see nvprof-kit session status"
        )
    if "Collection" in state_line:
        raise UsageError(f"session {session} captures already; end that with nvprof-kit session stop -s {session}")
    need_space(Path(os.environ.get("TMPDIR") or "/tmp"))  # nsys spools there
    state = state_file(session)
    stage = open_stage(output, NSYS_SUFFIXES, force=False)
    state.write_text(f"{stage.resolve()}\n{Path(output).parent.resolve()}\n")
    status = subprocess.run([*nsys_command, output_setting(stage, output)], check=False).returncode
    if status:
        shutil.rmtree(stage, ignore_errors=True)
        state.unlink(missing_ok=True)
        error = ToolError("nsys did not start the capture")
        error.exit_code = status if status > 0 else 128 - status
        raise error
    say(f"session {session} captures into {output}; end it with nvprof-kit session stop")
    return 0


def stop_session(
    *,
    session: str = "nvprof_kit",
    is_empty: IsEmpty,
) -> int:
    """End the capture of a session and write its report.

    Args:
        session: As in `launch_session`.
        is_empty: As in `profile_program`.
    """
    need_session_name(session)
    nsys = _nsys()
    stop = [nsys, "stop", f"--session={session}"]
    need_tool("nsys", nsys, "Nsight Systems")
    state = state_file(session)
    state_line = session_state(nsys, session)
    if not state.is_file():
        raise UsageError(f"no capture to end in session {session}; begin one with nvprof-kit session start")
    stage, folder = state.read_text().splitlines()
    status = 0
    if "Collection" in state_line:
        result = subprocess.run(
            stop, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
        )
        status = result.returncode if result.returncode >= 0 else 128 - result.returncode
        for line in result.stdout.splitlines():
            relay(line, f"{stage}/")
    else:  # nsys wrote the report then
        say(f"session {session} captures no more: its program ended")
    state.unlink(missing_ok=True)
    return finish_report(nsys, Path(stage), Path(folder), status, force=False, is_empty=is_empty)


def print_status() -> None:
    """List the nsys sessions of this machine and their states."""
    need_tool("nsys", _nsys(), "Nsight Systems")
    subprocess.run([_nsys(), "sessions", "list"], check=False)
