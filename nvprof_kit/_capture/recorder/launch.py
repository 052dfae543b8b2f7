"""Run a program whose Python processes record themselves, see `nvprof_kit._capture.recorder.recording`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from nvprof_kit._capture.recorder.record import check_path
from nvprof_kit._capture.recorder.recording import say
from nvprof_kit._capture.report import need_program
from nvprof_kit._instrument.loop.schedule import Schedule
from nvprof_kit.errors import UsageError


def record_program(
    path: Path, command: Sequence[str], schedule: str, *, force: bool, environ: Mapping[str, str]
) -> int:
    """Run a program with the environment that records it, until it ends; a signal that kills it kills this process.

    Args:
        path: Trace that it writes; ranks and windows have theirs beside it.
        command: The program's command line.
        schedule: Which steps, '' for all.
        force: Replace existing traces, once there is a new one.
        environ: Additional environment variables, with which its processes record themselves.

    Returns:
        The program's exit status; 1 if that is 0 and nothing was recorded.

    Raises:
        UsageError: There is no such program, the schedule is invalid, or the trace cannot be written or exists.
    """
    check_path(path)
    if schedule:
        Schedule.parse(schedule)
    if not command:
        raise UsageError("no program to record; needed: nvprof-kit record -- python train.py")
    need_program(command)
    existing = _traces(path)
    if existing and not force:
        raise UsageError(f"{existing[0]} exists; choose another name with -o, or replace it with --force")
    backups = {trace: trace.rename(trace.with_name(f".{trace.name}.old")) for trace in existing}
    sys.stdout.flush()
    program: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        # a terminal sends Ctrl-C to the program too
        if program and not (number == signal.SIGINT and os.isatty(0)):
            program[0].send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    try:
        program.append(subprocess.Popen(command, env={**os.environ, **environ}))
        status = program[0].wait()
    finally:
        has_recorded = bool(_traces(path))
        for trace, backup in backups.items():
            if has_recorded:
                backup.unlink()
            else:
                backup.rename(trace)
    if status < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    if status == 0 and not has_recorded:
        say(f"nothing was recorded, {path.name} is not written; only Python that imports torch is recorded")
        return 1
    return status


def _traces(path: Path) -> list[Path]:
    """The traces of a name, also those of ranks, windows and processes: ``run.rank0.json.gz``, ``run.1.json.gz``."""
    stem, dot, suffix = path.name.partition(".json")
    pattern = re.compile(rf"{re.escape(stem)}(\.rank\d+)?(\.\d+)*{re.escape(dot + suffix)}")
    return sorted(file for file in path.parent.iterdir() if pattern.fullmatch(file.name))
