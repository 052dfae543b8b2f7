"""Runs a Python program under the embedded recorder, in the program's own interpreter.

Called by `nvprof_kit._capture.launch` as ``python -m nvprof_kit._capture.runner SETTINGS PROGRAM [ARGUMENT]…``, PROGRAM
being a script, ``-m module`` or ``-c code``. To the program everything is as without it: ``sys.argv``, ``sys.path``,
``__main__``, the exit status, death by a signal. The recording starts when the program has imported torch, so that what
it sets up before, as ``CUDA_VISIBLE_DEVICES`` in ``os.environ``, still counts.
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
from contextlib import ExitStack, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from types import FrameType, ModuleType, TracebackType
from typing import NoReturn
from zipfile import is_zipfile

from nvprof_kit._capture.record import RecordOptions, record
from nvprof_kit.errors import NvprofKitError


class _Terminated(BaseException):
    """SIGTERM came: unwinds the program, so that the trace is written before the process dies of it."""


class _AfterImport(MetaPathFinder):
    """Calls back once, when a module has been imported."""

    def __init__(self, module: str, then: Callable[[], object]) -> None:
        self._module = module
        self._then = then

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Leave the finding to the others, and the module's execution to its loader, with the call behind it."""
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self._then()

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def main(argv: Sequence[str]) -> int:
    """Run the program and give its exit status; the trace is written whichever way it ends."""
    settings = json.loads(argv[0])
    path = settings.pop("path")
    shown = min(path, os.path.relpath(path), key=len)
    _unwind_on_sigterm()
    try:
        with ExitStack() as recording:

            def start() -> None:
                recorder = record(path, RecordOptions(**settings))
                recording.callback(_report, recorder, shown)
                recording.enter_context(recorder)

            finder = _AfterImport("torch", start)
            sys.meta_path.insert(0, finder)
            _run(argv[1:])
            if finder in sys.meta_path:
                _say(f"the program never imported torch: nothing was recorded, {shown} is not written")
    except NvprofKitError as error:
        _say(str(error))
        return error.exit_code
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    except Exception as error:
        error.__traceback__ = _program_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _run(command: Sequence[str]) -> None:
    """Run a script, ``-m module`` or ``-c code`` as ``__main__``, as the interpreter itself would."""
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
        _run_script(command[0])


def _run_script(path: str) -> None:
    """Run a script; its ``__file__`` is absolute, unlike ``sys.argv[0]``, so that it holds when the program moves."""
    if os.path.isdir(path) or path.endswith(".pyc") or is_zipfile(path):
        runpy.run_path(path, run_name="__main__")
        return
    loader = SourceFileLoader("__main__", os.path.abspath(path))
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    main_module.__dict__.update(__file__=loader.path, __loader__=loader, __builtins__=builtins, __cached__=None)
    exec(compile(loader.get_data(path), loader.path, "exec", dont_inherit=True), main_module.__dict__)


def _unwind_on_sigterm() -> None:
    """Have SIGTERM raise in this process; in a forked worker it stays what it was."""
    pid = os.getpid()

    def terminate(number: int, frame: FrameType | None) -> None:
        if os.getpid() == pid:
            raise _Terminated
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminate)


def _program_frames(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's own first frame on."""
    while traceback is not None and any(traceback.tb_frame.f_globals is room for room in (globals(), vars(runpy))):
        traceback = traceback.tb_next
    return traceback


def _report(recorder: record, shown: str) -> None:
    if recorder.written:
        _say(f"wrote {shown}; next: nvprof-kit layers {shown}")


def _say(text: str) -> None:
    with suppress(OSError):  # a program whose standard error is closed has the same exit status as without us
        print(f"nvprof-kit record: {text}", file=sys.stderr)


def _end_fork(left: SystemExit) -> NoReturn:
    """End a process that the program forked, in which the interpreter cannot: PyTorch's profiler runs in it still."""
    status = left.code if isinstance(left.code, int) else int(left.code is not None)
    if left.code is not None and not isinstance(left.code, int):
        print(left.code, file=sys.stderr)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    process = os.getpid()
    try:
        sys.exit(main(sys.argv[1:]))
    except SystemExit as left:
        if os.getpid() == process:
            raise
        _end_fork(left)
