"""The recording of ``nvprof-kit record``: its start, its end, and its messages."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvprof_kit._capture.recorder.record import RecordOptions, Traces, record
from nvprof_kit._instrument.loop import loop
from nvprof_kit._instrument.loop.schedule import Schedule, Window, Windows
from nvprof_kit._instrument.patches import skip_compiling

NOTHING_COUNTED = (
    "nothing was counted: the program ran no second step, or the capture began in it; add --annotate, or mark its "
    "steps with nvprof_kit.step"
)
"""What ``--count`` says if so."""

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(frozen=True)
class Limits:
    """Which part of a program to record.

    Attributes:
        schedule: Which steps, in the format of `Schedule.parse`; '' for all.
        seconds: Maximum length of the recording in seconds; 0 for no limit.
        memory_mb: Maximum growth of the process's memory since its first step, in MB, checked after each step; 0 for no
            limit.
    """

    schedule: str = ""
    seconds: float = 0
    memory_mb: int = 500


def say(text: str) -> None:
    """Print a message for the user on stderr."""
    with suppress(OSError):  # a closed stderr must not change the program's exit status
        print(f"nvprof-kit record: {text}", file=sys.stderr, flush=True)


class Recording:
    """The recording of a program, from its first use of torch to its end or a limit.

    Steps are those of `nvprof_kit.step`, else those of an optimizer. The first source seen counts.

    Args:
        path: The trace; with several windows, each trace is numbered.
        options: What to record.
        limits: Which part of the program to record.

    Attributes:
        shown: The trace's name in messages.
    """

    def __init__(self, path: str, options: RecordOptions, limits: Limits) -> None:
        self._path = path
        self.shown = min(path, os.path.relpath(path), key=len)
        self._options = options
        self._limits = limits
        self._recorder: record | None = None
        self._windows: Windows | None = None
        self._undo: list[Callable[[], None]] = []
        self._counts: object = None
        self._steps = 0
        self._base = 0
        self._began = self._wrote = self._empty = False
        self._thread = 0
        self._pid = os.getpid()

    def begin(self) -> None:
        """Called when torch has been imported."""
        self._thread = threading.get_ident()
        loop.on_step = lambda: self._count(loop.step, ends=False)
        self._undo.append(lambda: setattr(loop, "on_step", None))
        self._undo.append(after_optimizer_steps(lambda optimizer: self._count(id(optimizer), ends=True)))
        if self._limits.schedule:
            schedule = Schedule.parse(self._limits.schedule)
            traces = Traces(self._path, schedule.repeat != 1, self._options, self._announce)
            self._windows = Windows(schedule, traces)
            self._windows.__enter__()
        elif self._options.stacks:
            # every Python function call is an event: skip the imports and the model construction
            from torch.nn.modules.module import register_module_forward_pre_hook

            def called(*_call: object) -> None:
                first_call.remove()
                if self._recorder is None and os.getpid() == self._pid:
                    self._record()

            first_call = register_module_forward_pre_hook(called)
        else:
            self._record()

    def end(self) -> None:
        """Write the trace, at the program's end or at a limit."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        windows, self._windows = self._windows, None
        if windows is not None:
            if self._counts is loop.step:  # a step only signals its begin, and no next step ends the last one
                self._steps += 1
                windows.step()
            windows.__exit__()
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            try:
                recorder.__exit__(None, None, None)
            finally:  # also if a delayed signal ends the program
                if recorder.empty:
                    self._empty = True
                    recorder.path.unlink(missing_ok=True)
                elif recorder.written:
                    self._announce(recorder.path)

    def _announce(self, path: Path, window: Window | None = None) -> None:
        """Print that a trace is written."""
        self._wrote = True
        name = min(str(path), os.path.relpath(path), key=len)
        steps = f", steps {window.first_step} to {window.last_step}" if window is not None else ""
        say(f"wrote {name}{steps}; next: nvprof-kit layers {name}")

    def nothing(self) -> str:
        """Why there is no trace at the program's end; '' if there is one, or if the reason was already printed."""
        if self._limits.schedule and not self._wrote:
            steps = f"it took {self._steps} steps" if self._steps else "no step of nvprof_kit.step or an optimizer ran"
            return f"nothing was recorded by the schedule {self._limits.schedule}: {steps}"
        if self._options.stacks and not self._limits.schedule and not self._began:
            return "no module was called, which is when a recording with stacks begins: nothing was recorded"
        if self._empty:
            return (
                f"this process ran nothing of PyTorch: nothing was recorded, {self.shown} is not written; of other "
                "processes only the ranks of torchrun and accelerate launch are recorded"
            )
        return ""

    # begin

    def _record(self) -> None:
        self._recorder = record(self._path, **vars(self._options))
        self._recorder.__enter__()
        self._began = True
        if self._limits.seconds:
            why = f"after {self._limits.seconds:g} s, as --limit says"
            deadline = threading.Timer(self._limits.seconds, self._end_on_main_thread, [why])
            deadline.daemon = True
            deadline.start()
            self._undo.append(deadline.cancel)

    # steps

    def _count(self, source: object, *, ends: bool) -> None:
        """A source signals the end of a step, or the begin of one, which ends the one before."""
        is_first, self._counts = self._counts is None, self._counts or source
        if self._counts != source or (is_first and not ends):
            return
        if os.getpid() != self._pid or threading.get_ident() != self._thread:
            return
        self._steps += 1
        if self._windows is not None:
            self._windows.step()
            return
        if self._recorder is None or not self._limits.memory_mb:
            return
        try:
            grown = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES - self._base
        except (OSError, ValueError, IndexError):  # it is not known
            grown = -self._base
        if not self._base:
            self._base = grown
        elif grown > self._limits.memory_mb * 10**6:
            self._end_early(
                f"after {self._steps} steps, in which the process grew by {grown // 10**6} MB; --max-memory sets the "
                "limit, --schedule 50:60 records a few steps"
            )

    # limits

    def _end_early(self, why: str) -> None:
        if self._recorder is None:
            return
        say(f"the recording ended {why}; the program continues")
        self.end()

    def _end_on_main_thread(self, why: str) -> None:
        """End the recording between two bytecodes of the thread that started it; PyTorch requires that thread to stop
        it.
        """

        def pending(_: object) -> int:
            if threading.get_ident() == self._thread and os.getpid() == self._pid:
                self._end_early(why)
            return 0

        self._pending = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(pending)
        ctypes.pythonapi.Py_AddPendingCall(self._pending, None)


def after_optimizer_steps(then: Callable[[object], None]) -> Callable[[], None]:
    """Call a function after each step of optimizers created from now on, after PyTorch's own hooks.

    A recording cannot start or stop inside these hooks: PyTorch iterates over them, and a recording adds or removes
    hooks.

    Returns:
        A function that removes the callback.
    """
    from torch.optim import Optimizer

    patch: Any = Optimizer._patch_step_function
    inside = threading.local()
    waiting = [then]

    def wrapped(step: Any) -> Any:
        @functools.wraps(step)
        def stepped(optimizer: object, *args: Any, **kwargs: Any) -> Any:
            outermost = not getattr(inside, "a_step", False)
            inside.a_step = True
            try:
                return step(optimizer, *args, **kwargs)
            finally:
                if outermost:
                    inside.a_step = False
                    for call in list(waiting):
                        call(optimizer)

        skip_compiling(stepped, callees=False)
        stepped.nvprof_kit = True  # type: ignore[attr-defined]
        return stepped

    def patched(optimizer: Any) -> None:
        patch(optimizer)
        kind = type(optimizer)
        if not hasattr(kind.step, "nvprof_kit"):
            kind.step = wrapped(kind.step)

    def end() -> None:
        waiting.clear()
        Optimizer._patch_step_function = patch

    Optimizer._patch_step_function = patched
    return end
