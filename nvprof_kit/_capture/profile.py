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

from nvprof_kit._capture import nsys as command_lines
from nvprof_kit._capture.nsys import Options, Window
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
    refuse_existing,
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


def _fitted(settings: Sequence[str], extra: Sequence[str], options: Options, *, quiet: bool) -> list[str]:
    fitted, missing = command_lines.fit_settings(settings, options)
    for name in missing:
        say(f"this nsys has no {name}: left out", quiet=quiet)
    return command_lines.with_extra(fitted, extra, options)


def _window(
    step: int | None, text: str | None, schedule: str | None, windows: int | None, cuda_profiler: bool
) -> tuple[str, Window]:
    """The window to capture, with the option that chose it."""
    chosen: list[tuple[str, Window]] = []
    if step is not None:
        chosen.append(("step", command_lines.step_window(step)))
    if text is not None:
        chosen.append(("range", command_lines.range_window(text)))
    if schedule is not None:
        chosen.append(("schedule", command_lines.schedule_window(schedule)))
    if windows is not None:
        chosen.append(("windows", command_lines.own_windows(windows)))
    if cuda_profiler:
        chosen.append(("cuda-profiler", command_lines.CUDA_PROFILER))
    if len(chosen) > 1:
        raise UsageError(f"--{chosen[0][0]} and --{chosen[1][0]} exclude each other: each says what to capture")
    return chosen[0] if chosen else ("", Window())


def profile_program(  # noqa: PLR0912, PLR0915
    program: Sequence[str],
    output: str,
    *,
    force: bool = False,
    preset: str = "train",
    trace: str | None = None,
    nsys: Sequence[str] = (),
    min_free: int = 1024,
    quiet: bool = False,
    dry_run: bool = False,
    step: int | None = None,
    range: str | None = None,
    schedule: str | None = None,
    windows: int | None = None,
    cuda_profiler: bool = False,
    delay: float | None = None,
    duration: float | None = None,
    keep_running: bool = False,
    export: Literal["sqlite", "parquetdir", "none"] = "sqlite",
    environ: Mapping[str, str],
    is_empty: IsEmpty,
) -> int:
    """Run a program under ``nsys profile``.

    Args:
        program: The command line.
        output: Name of the report without suffix.
        force: Overwrite existing reports.
        preset: Settings: train, infer, graphs, memory, metrics, light, or a file like those in recipes/nsys/presets.
        trace: What nsys traces, instead of the preset's list.
        nsys: Additional option of nsys, passed unchanged: -x --stats=true. Repeatable.
        min_free: Refuse to start with less disk left.
        quiet: Print only errors, for the logs of batch jobs.
        dry_run: Print the equivalent nsys command and run nothing.
        step: Capture only the range of nvprof_kit.step(N).
        range: Capture only the first range TEXT in domain nvprof_kit; TEXT@DOMAIN for another domain, TEXT@ for none.
        schedule: Capture the windows of nvprof_kit.record(schedule=None) in the program with this schedule: early,
            stable, periodic, 50:60, or skip_first=50,active=10,repeat=2. Each of several windows has its report:
            NAME.1, NAME.2, ...
        windows: Capture N windows of the program's own nvprof_kit.record(schedule=...); 0: all.
        cuda_profiler: Capture from cudaProfilerStart to cudaProfilerStop.
        delay: Begin S seconds after the program's start.
        duration: End after S seconds, and the program with it (SIGTERM); goes with --delay.
        keep_running: With --duration: let the program continue; the verb then returns immediately with 0.
        export: What to export beside the report: NAME.sqlite, the folder NAME_pqtdir, which is faster, or nothing.
        environ: What to add to the program's environment.
        is_empty: Whether an export has nothing that nsys can trace.

    Returns:
        The program's exit status; 1 if nothing was captured or the report could not be brought to its place.
    """
    if not program:
        raise UsageError("no program to run; needed: nvprof-kit profile [OPTION]... -- python train.py")
    option, window = _window(step, range, schedule, windows, cuda_profiler)
    if option and (delay is not None or duration is not None):
        raise UsageError(f"--{option} goes without --delay and --duration: the {option} says when")
    if keep_running and duration is None:
        raise UsageError("--keep-running is of use only with --duration S")
    settings = command_lines.read_preset(preset)
    if trace:
        settings = command_lines.with_trace(settings, trace)
    settings += window.settings
    absent = window.absent
    if delay is not None:
        settings.append(f"--delay={delay:.9g}")
        absent = f"the program ended before the {delay:.9g} s of --delay were over"
    if duration is not None:
        settings.append(f"--duration={duration:.9g}")
    if keep_running:
        settings.append("--kill=none")
    tool = _nsys()
    settings = _fitted(settings, nsys, command_lines.read_options(tool, "profile"), quiet=quiet)
    added = {**window.environ, **environ}
    output = output.removesuffix(".nsys-rep")
    if dry_run:
        need_name(output)
        overwrite = ["--force-overwrite=true"] if force else []
        nsys_command = [tool, "profile", *settings, f"--export={export}", *overwrite, f"--output={output}", *program]
        print_command(nsys_command, environ=added, output=output)
        return 0
    output = expand_name(output)
    need_name(output)
    version = need_tool("nsys", tool, "Nsight Systems")
    if export == "parquetdir" and re.search(r" 20(1\d|2[0-2])\.", version):
        raise UsageError("--export parquetdir needs nsys 2023 or newer; use --export sqlite")
    refuse_existing(output, NSYS_SUFFIXES, force=force)
    need_program(program)
    if duration is not None and duration > 60:
        why = "beyond 60 s reports grow unwieldy and nsys may drop events; a few steps answer the question"
        say(f"--duration {duration:.9g}: {why}", quiet=quiet)
    if keep_running:  # the program may have its part of nsys's files there
        need_space(Path(os.environ.get("TMPDIR") or "/tmp"), min_free)
    need_space(Path(output).parent, min_free)
    # nsys would not wait for the program that it ends
    ends_with_capture = duration is not None and not any(setting.startswith("--kill=") for setting in settings)
    if ends_with_capture:
        settings.append("--kill=none")
    if any(setting.startswith(("--capture-range=", "--delay=")) for setting in settings):
        # what begins later misses the mark with which the program says at its begin which rank it is
        added["NVPROF_KIT_RANK_MARK"] = "step"
    stage = open_stage(output, force=force)
    state = stage / ".run"
    state.mkdir()
    supervisor = NsysSupervisor(
        stage,
        state,
        added,
        # an nsys that ends, with 0, before a program that handles the signal that nsys passes on
        stay=ends_with_capture or re.search(r" 20(1\d|2[0-3])\.", version) is not None,
        quiet=quiet,
        keep_running=keep_running,
        ends_with_capture=ends_with_capture,
    )
    start = time.monotonic()
    status = supervisor.run([tool, "profile", *settings, f"--export={export}", output_setting(stage, output)], program)
    has_begun, seconds = supervisor.began or supervisor.interrupted, int(time.monotonic() - start)
    shutil.rmtree(state, ignore_errors=True)
    if not keep_running and (status > 128 or supervisor.left_early or not any(stage.iterdir())):
        supervisor.end_orphans()
    if not option and duration is None and seconds > 60:
        why = "a window of a few steps is smaller and as good: see --step"
        say(f"all {seconds} s of the run were captured; {why}", quiet=quiet)
    if status:
        supervisor.print_withheld()
    absent = absent if has_begun else "nsys ended before it began the program"
    return finish_report(
        tool,
        stage,
        Path(output).parent,
        status,
        force=force,
        quiet=quiet,
        is_empty=is_empty,
        absent=absent,
        export=export,
    )


def launch_session(
    program: Sequence[str],
    *,
    session: str = "nvprof_kit",
    preset: str = "train",
    trace: str | None = None,
    nsys: Sequence[str] = (),
    quiet: bool = False,
    dry_run: bool = False,
    environ: Mapping[str, str],
) -> int:
    """Run a program in a new nsys session.

    Args:
        program: The command line.
        session: Name of the session, a letter first.
        preset: As in `profile_program`.
        trace: As in `profile_program`.
        nsys: As in `profile_program`.
        quiet: As in `profile_program`.
        dry_run: As in `profile_program`.
        environ: As in `profile_program`.

    Returns:
        The program's exit status.
    """
    if not program:
        raise UsageError("no program to run; needed: nvprof-kit session launch [OPTION]... -- python serve.py")
    need_session_name(session)
    settings = command_lines.read_preset(preset)
    if trace:
        settings = command_lines.with_trace(settings, trace)
    tool = _nsys()
    settings = _fitted(settings, nsys, command_lines.read_options(tool, "launch", "start"), quiet=quiet)
    nsys_command = [tool, "launch", f"--session-new={session}", *settings]
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
        # sessions are looked for in the spool folder; session stop --shutdown ends the program
        supervisor = NsysSupervisor(Path(folder), Path(folder), environ, stay=True, quiet=quiet, keep_spool=True)
        status = supervisor.run(nsys_command, program)
        if status > 128 or supervisor.left_early:
            supervisor.end_orphans()
    return status


def start_session(
    *,
    session: str = "nvprof_kit",
    output: str | None = None,
    force: bool = False,
    preset: str = "train",
    nsys: Sequence[str] = (),
    min_free: int = 1024,
    quiet: bool = False,
    dry_run: bool = False,
) -> int:
    """Begin a capture in a session.

    Args:
        session: As in `launch_session`.
        output: Name of the report without suffix; %h is the host, %p this process, %q{VARIABLE} a variable. [default:
            SESSION.1, or the next number that is free]
        force: As in `profile_program`.
        preset: As in `profile_program`.
        nsys: As in `profile_program`.
        min_free: As in `profile_program`.
        quiet: As in `profile_program`.
        dry_run: As in `profile_program`.
    """
    need_session_name(session)
    number = 1
    while any(os.path.lexists(f"{session}.{number}.{suffix}") for suffix in ("nsys-rep", "sqlite")):
        number += 1
    output = (output or f"{session}.{number}").removesuffix(".nsys-rep")
    need_name(output)
    tool = _nsys()
    options = command_lines.read_options(tool, "start", "launch")
    settings = _fitted(command_lines.read_preset(preset), nsys, options, quiet=quiet)
    nsys_command = [tool, "start", f"--session={session}", *settings, "--export=sqlite"]
    if dry_run:
        print_command(
            [*nsys_command, *(["--force-overwrite=true"] if force else []), f"--output={output}"], output=output
        )
        return 0
    output = expand_name(output)
    need_name(output)
    need_tool("nsys", tool, "Nsight Systems")
    refuse_existing(output, NSYS_SUFFIXES, force=force)
    state_line = session_state(tool, session)
    if not state_line:
        raise UsageError(
            f"no session {session}; start the program with nvprof-kit session launch, and see nvprof-kit session status"
        )
    if "Collection" in state_line:
        raise UsageError(f"session {session} captures already; end that with nvprof-kit session stop -s {session}")
    need_space(Path(output).parent, min_free)
    need_space(Path(os.environ.get("TMPDIR") or "/tmp"), min_free)  # nsys spools there
    state = state_file(session)
    stage = open_stage(output, force=force)
    state.write_text(f"{stage.resolve()}\n{Path(output).parent.resolve()}\n{force}\n")
    status = subprocess.run([*nsys_command, output_setting(stage, output)], check=False).returncode
    if status:
        shutil.rmtree(stage, ignore_errors=True)
        state.unlink(missing_ok=True)
        error = ToolError("nsys did not start the capture")
        error.exit_code = status if status > 0 else 128 - status
        raise error
    say(f"session {session} captures into {output}; end it with nvprof-kit session stop", quiet=quiet)
    return 0


def stop_session(
    *,
    session: str = "nvprof_kit",
    shutdown: bool = False,
    quiet: bool = False,
    dry_run: bool = False,
    is_empty: IsEmpty,
) -> int:
    """End the capture of a session and write its report.

    Args:
        session: As in `launch_session`.
        shutdown: End the session too, and the program with it (SIGTERM).
        quiet: As in `profile_program`.
        dry_run: As in `profile_program`.
        is_empty: As in `profile_program`.
    """
    need_session_name(session)
    nsys = _nsys()
    stop = [nsys, "stop", f"--session={session}"]
    end = [nsys, "shutdown", f"--session={session}", "--kill=sigterm"]
    if dry_run:
        print_command(stop)
        if shutdown:
            print_command(end)
        return 0
    need_tool("nsys", nsys, "Nsight Systems")
    state = state_file(session)
    state_line = session_state(nsys, session)
    if not state.is_file():
        if shutdown and state_line:
            return subprocess.run(end, check=False).returncode
        raise UsageError(f"no capture to end in session {session}; begin one with nvprof-kit session start")
    stage, folder, force = state.read_text().splitlines()
    status = 0
    if "Collection" in state_line:
        supervisor = NsysSupervisor(Path(stage), Path(stage), {}, stay=False, quiet=quiet)
        result = subprocess.run(
            stop, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
        )
        status = result.returncode if result.returncode >= 0 else 128 - result.returncode
        for line in result.stdout.splitlines():
            supervisor.relay(line)
        if status:
            supervisor.print_withheld()
    else:  # nsys wrote the report then
        say(f"session {session} captures no more: its program ended", quiet=quiet)
    state.unlink(missing_ok=True)
    status = finish_report(
        nsys, Path(stage), Path(folder), status, force=force == "True", quiet=quiet, is_empty=is_empty
    )
    if shutdown and state_line:
        subprocess.run(end, check=False)
    return status


def print_status(*, environment: bool = False, dry_run: bool = False) -> None:
    """List the nsys sessions of this machine and their states.

    Args:
        environment: Also what nsys says about CPU sampling and the machine.
        dry_run: Print the equivalent nsys command and run nothing.
    """
    nsys = _nsys()
    commands = [[nsys, "sessions", "list"], *([[nsys, "status", "--environment"]] if environment else [])]
    if not dry_run:
        need_tool("nsys", nsys, "Nsight Systems")
    for command in commands:
        if dry_run:
            print_command(command)
        else:
            subprocess.run(command, check=False)  # it fails where it merely warns
