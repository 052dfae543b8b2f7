"""The verbs ``session launch``, ``start``, ``stop`` and ``status``: several captures of one program that runs on."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from nvprof_kit._capture import report
from nvprof_kit._capture.machine import run_command
from nvprof_kit._capture.nsys import fit_settings, nsys_tool, option_words
from nvprof_kit._capture.supervisor import NsysSupervisor, relay
from nvprof_kit.errors import ToolError, UsageError
from nvprof_kit.names import RANK_MARK


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
        preset: Settings: train, infer, graphs, memory, metrics, light, or a file like those in recipes/nsys/presets.
        nsys: Option of nsys in its own words, in place of the preset's: -x --trace=nvtx. Repeatable.
        dry_run: Print the equivalent nsys command and run nothing.
        environ: What to add to the program's environment.

    Returns:
        The program's exit status.
    """
    if not program:
        raise UsageError("no program to run; needed: nvprof-kit session launch [OPTION]... -- python serve.py")
    _need_session(session)
    tool = nsys_tool()
    settings = fit_settings(preset, nsys, tool, "launch", "start")
    command = [tool, "launch", f"--session-new={session}", *option_words(settings)]
    if dry_run:
        report.print_command([*command, *program], environ=environ)
        return 0
    report.need_tool("nsys", tool, "Nsight Systems")
    report.need_program(program)
    if _state_line(tool, session):
        raise UsageError.of("session-runs", session=session)
    report.need_space(Path(os.environ.get("TMPDIR") or "/tmp"), 1)  # nsys spools there
    with tempfile.TemporaryDirectory(prefix="nvprof_kit.", ignore_cleanup_errors=True) as folder:
        # a session misses the mark with which the program says at its begin which rank it is
        environ = {**environ, RANK_MARK: "step"}
        # sessions are looked for in the spool folder; nsys shutdown ends the program
        supervisor = NsysSupervisor(Path(folder), Path(folder), environ, stay=True, keep_spool=True)
        status = supervisor.run(command, program)
        if status > 128 or supervisor.left_early:
            supervisor.end_orphans()
        report.say_what_nsys_lost("".join(supervisor.printed))
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
        preset: As in `launch_session`.
        nsys: As in `launch_session`.
        dry_run: As in `launch_session`.
    """
    _need_session(session)
    number = 1
    while any(os.path.lexists(f"{session}.{number}.{suffix}") for suffix in ("nsys-rep", "sqlite")):
        number += 1
    output = (output or f"{session}.{number}").removesuffix(".nsys-rep")
    report.need_name(output)
    tool = nsys_tool()
    settings = fit_settings(preset, nsys, tool, "start", "launch")
    command = [tool, "start", f"--session={session}", *option_words(settings), "--export=sqlite"]
    if dry_run:
        report.print_command([*command, f"--output={output}"], output=output)
        return 0
    output = report.expand_name(output)
    report.need_tool("nsys", tool, "Nsight Systems")
    state_line = _state_line(tool, session)
    if not state_line:
        raise UsageError.of("no-session", session=session)
    if "Collection" in state_line:
        raise UsageError(f"session {session} captures already; end that with nvprof-kit session stop -s {session}")
    report.need_space(Path(os.environ.get("TMPDIR") or "/tmp"))  # nsys spools there
    state = _state_file(session)
    stage = report.open_stage(output, report.NSYS_SUFFIXES, force=None)
    state.write_text(f"{stage.resolve()}\n")
    if status := subprocess.run([*command, report.output_setting(stage, output)], check=False).returncode:
        shutil.rmtree(stage, ignore_errors=True)
        state.unlink(missing_ok=True)
        raise ToolError("nsys did not start the capture", exit_code=status if status > 0 else 128 - status)
    report.say(f"session {session} captures into {output}; end it with nvprof-kit session stop")
    return 0


def stop_session(*, session: str = "nvprof_kit", is_empty: report.IsEmpty) -> int:
    """End the capture of a session and write its report.

    Args:
        session: As in `launch_session`.
        is_empty: Whether an export has nothing that nsys can trace.
    """
    _need_session(session)
    nsys = nsys_tool()
    report.need_tool("nsys", nsys, "Nsight Systems")
    state = _state_file(session)
    state_line = _state_line(nsys, session)
    if not state.is_file():
        raise UsageError(f"no capture to end in session {session}; begin one with nvprof-kit session start")
    stage = Path(state.read_text().splitlines()[0])
    status = 0
    if "Collection" in state_line:
        stop = [nsys, "stop", f"--session={session}"]
        with subprocess.Popen(
            stop, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as run:
            printed = ""
            for line in run.stdout or ():
                relay(line, f"{stage}/")
                printed += line
        report.say_what_nsys_lost(printed)
        status = run.returncode if run.returncode >= 0 else 128 - run.returncode
    else:  # nsys wrote the report then
        report.say(f"session {session} captures no more: its program ended")
    state.unlink(missing_ok=True)
    return report.finish_report(nsys, stage, status, force=False, is_empty=is_empty)


def print_status() -> None:
    """List the nsys sessions of this machine and their states."""
    report.need_tool("nsys", nsys_tool(), "Nsight Systems")
    subprocess.run([nsys_tool(), "sessions", "list"], check=False)


def _need_session(name: str) -> None:
    """Refuse names that nsys does not take."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,126}", name):
        raise UsageError(f"a session's name is letters, digits, _ and -, a letter first; not '{name}'")


def _state_line(nsys: str, name: str) -> str:
    """The session's line in nsys's list; '' if there is no such session."""
    listing = run_command([nsys, "sessions", "list"]) or ""
    return next((line for line in listing.splitlines() if line.split()[-1:] == [name]), "")


def _state_file(name: str) -> Path:
    """Where ``session start`` leaves for ``session stop`` what it captures into.

    A folder of the user's own that no variable moves, since the two may be called from an ssh session and a batch job.
    """
    folder = Path(f"/tmp/nvprof_kit-{os.getuid()}")
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
        raise ToolError(f"cannot write to {folder}, where session stop looks for what session start captures into")
    return folder / f"{os.uname().nodename}-{name}.capture"
