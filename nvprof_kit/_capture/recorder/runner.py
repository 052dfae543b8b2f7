"""Run a Python program under the embedded recorder, in the program's interpreter.

Called by `nvprof_kit._capture.recorder.launch` as ``python -m nvprof_kit._capture.recorder.runner SETTINGS PROGRAM
[ARGUMENT]…``; PROGRAM is a script, ``-m module`` or ``-c code``. The program sees the same state as without the
recorder: ``sys.argv``, ``sys.path``, ``__main__``, exit status, death by a signal. The recording starts after the
program has imported torch, so that earlier setup, such as ``CUDA_VISIBLE_DEVICES`` in ``os.environ``, still takes
effect.
"""

from __future__ import annotations

import atexit
import builtins
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn
from zipfile import is_zipfile

from nvprof_kit._capture.recorder.record import RecordOptions, of_rank
from nvprof_kit._capture.recorder.recording import NOTHING_COUNTED, Limits, Recording, say
from nvprof_kit._instrument.flops.count import awaits_second_step
from nvprof_kit._instrument.patches import AfterImport
from nvprof_kit.errors import NvprofKitError


class _Ended(BaseException):
    """Raised by a terminating signal to unwind the program, so that the trace is written before the process dies."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main(argv: Sequence[str]) -> int:
    """Run the program and return its exit status; the trace is written however it ends."""
    settings = json.loads(argv[0])
    limits = Limits(**settings.pop("limits"))
    recording = Recording(str(of_rank(Path(settings.pop("path")))), RecordOptions(**settings), limits)
    _unwind_on_signals()
    _end_before_leaving(recording)
    finder = AfterImport("torch", lambda _: recording.begin())
    sys.meta_path.insert(0, finder)
    try:
        try:
            _run(argv[1:])
        except SystemExit as end:
            if end.code:
                raise
        finally:
            recording.end()
        nothing = recording.nothing()
        if finder in sys.meta_path:
            nothing = f"the program never imported torch: nothing was recorded, {recording.shown} is not written"
        if awaits_second_step():
            say(NOTHING_COUNTED)
        if nothing:
            say(nothing)
            return 1
    except NvprofKitError as error:
        say(str(error))
        return error.exit_code
    except _Ended as end:
        signal.signal(end.number, signal.SIG_DFL)
        os.kill(os.getpid(), end.number)
    except Exception as error:
        traceback = error.__traceback__  # from the program's first frame on
        while traceback is not None and any(traceback.tb_frame.f_globals is room for room in (globals(), vars(runpy))):
            traceback = traceback.tb_next
        error.__traceback__ = traceback
        sys.excepthook(type(error), error, traceback)
        return 1
    return 0


def _end_before_leaving(recording: Recording) -> None:
    """Write the trace before exits that skip Python's shutdown: ``os._exit`` and ``os.exec*``."""
    process = os.getpid()

    def first(leave: Callable[..., NoReturn], how: str) -> Callable[..., NoReturn]:
        def ended(*args: Any) -> NoReturn:
            if os.getpid() == process:
                recording.end()
                if how != "_exit":
                    say(f"the program becomes another by os.{how}, which is not recorded")
            leave(*args)

        return ended

    for name in ("_exit", "execv", "execve"):  # all other exec functions of os call these
        setattr(os, name, first(getattr(os, name), name))


def _run(command: Sequence[str]) -> None:
    """Run a script, ``-m module`` or ``-c code`` as ``__main__``, like the interpreter."""
    safe_path = getattr(sys.flags, "safe_path", False)  # since Python 3.11
    if command[0] == "-m":
        sys.argv = ["-m", *command[2:]]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        sys.path[:1] = sys.path[:1] if safe_path else [""]
        main_module = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(command[1], "<string>", "exec", dont_inherit=True), main_module.__dict__)
    else:
        sys.argv = list(command)
        sys.path[:1] = sys.path[:1] if safe_path else [os.path.dirname(os.path.realpath(command[0]))]
        if os.path.isdir(command[0]) or command[0].endswith(".pyc") or is_zipfile(command[0]):
            runpy.run_path(command[0], run_name="__main__")
            return
        # unlike sys.argv[0], __file__ is absolute, so that it stays valid after os.chdir
        loader = SourceFileLoader("__main__", os.path.abspath(command[0]))
        main_module = sys.modules["__main__"] = ModuleType("__main__")
        main_module.__dict__.update(__file__=loader.path, __loader__=loader, __builtins__=builtins, __cached__=None)
        exec(compile(loader.get_data(command[0]), loader.path, "exec", dont_inherit=True), main_module.__dict__)


def _unwind_on_signals() -> None:
    """Make SIGTERM and SIGHUP raise in this process; forked workers keep the previous handlers."""
    pid = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == pid:
            raise _Ended(number)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)


if __name__ == "__main__":
    process = os.getpid()
    try:
        sys.exit(main(sys.argv[1:]))
    except SystemExit as left:
        if os.getpid() == process:
            raise
        # a forked process ends without interpreter shutdown, which is impossible while PyTorch's profiler is active
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
        if left.code is not None and not isinstance(left.code, int):
            print(left.code, file=sys.stderr)
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status & 0xFF)
