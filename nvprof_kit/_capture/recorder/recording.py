"""The recording of ``nvprof-kit record``: each process that imports torch begins one, as the environment says.

The program is the same as without the recorder: ``sys.argv``, ``sys.path``, ``__main__``, exit status, death by a
signal. The recording starts after the program has imported torch, so that earlier setup, such as
``CUDA_VISIBLE_DEVICES`` in ``os.environ``, still takes effect.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from nvprof_kit._capture.recorder.record import of_rank, record
from nvprof_kit._instrument.flops.count import awaits_second_step
from nvprof_kit._instrument.loop import loop
from nvprof_kit._instrument.loop.schedule import Window
from nvprof_kit._instrument.patches import Patch, Untraced, before, instead
from nvprof_kit.errors import NvprofKitError
from nvprof_kit.issues import Issue

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096

LAUNCHERS = frozenset(
    {
        *("torchrun", "torch.distributed.run", "torch.distributed.launch", "torch.distributed.launcher", "colossalai"),
        *("accelerate", "accelerate.commands.launch", "accelerate.commands.accelerate_cli", "composer", "fabric"),
        *("deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch"),
    }
)
"""Programs and modules that import torch and start the ranks to record."""


def say(text: str) -> None:
    """Print a message for the user on stderr."""
    with suppress(OSError):  # a closed stderr must not change the program's exit status
        print(f"nvprof-kit record: {text}", file=sys.stderr, flush=True)


def begin_recording(variable: str) -> None:
    """Record this process, which has imported torch, as a variable of the environment says, but not its children."""
    if Path(_program(sys.orig_argv[1:])).name in LAUNCHERS:
        return
    settings = json.loads(os.environ.pop(variable, "null"))
    if settings is None:
        return
    record.shares_path = True
    path = of_rank(Path(settings["path"]))
    recording = Recording(str(path), settings["options"], settings["schedule"], settings["memory_mb"])
    try:
        recording.begin()
    except NvprofKitError as error:
        say(str(error))
    else:
        _end_before_leaving(recording)


def _program(arguments: Sequence[str]) -> str:
    """The script or module of a Python's arguments, '' for neither."""
    remaining = iter(arguments)
    for word in remaining:
        if word in ("-W", "-X"):
            next(remaining, "")
        elif not word.startswith("-"):
            return word
    return ""


def _end_before_leaving(recording: Recording) -> None:
    """Write the trace at exit, also at those that skip Python's: signals, ``os._exit`` and ``os.exec*``."""
    process = os.getpid()
    atexit.register(recording.finish)

    def end_first(how: str, /, *_args: object, **_options: object) -> None:
        if os.getpid() == process:
            recording.end()
            if how != "_exit":
                say(f"the program becomes another by os.{how}, which is not recorded")

    for name in ("_exit", "execv", "execve"):  # all other exec functions of os call these
        Patch(os, name, before(partial(end_first, name)))

    def killed(number: int, _frame: FrameType | None) -> None:
        if os.getpid() == process:
            recording.end()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
            signal.signal(number, killed)

    def leave_in_child() -> None:
        # what C runs at exit hangs in a forked process while PyTorch's profiler is active
        libc = ctypes.CDLL(None)
        if hasattr(libc, "on_exit"):
            libc.on_exit(libc._exit, None)

    os.register_at_fork(after_in_child=leave_in_child)


class Recording:
    """The recording of a program, from its first use of torch to its end or a limit.

    Steps are those of `nvprof_kit.step`, else those of an optimizer. The first source seen counts.

    Args:
        path: The trace; with several windows, each trace is numbered.
        detail: The arguments ``stacks``, ``shapes`` and ``memory`` of `record`.
        schedule: Which steps, in the format of `Schedule.parse`; '' for all.
        memory_mb: Maximum growth of the process's memory since its first step, in MB, checked after each step; 0 for no
            limit.
    """

    def __init__(self, path: str, detail: Mapping[str, Any], schedule: str, memory_mb: int) -> None:
        self._path = path
        self._detail = detail
        self._schedule = schedule
        self._memory_mb = memory_mb
        self._recorder: record | None = None
        self._undo = ExitStack()
        self._counts: object = None
        self._steps = 0
        self._base = 0
        self._first_call: Untraced | None = None
        self._began = self._wrote = self._empty = False
        self._thread = threading.get_ident()
        self._pid = os.getpid()

    def begin(self) -> None:
        """Begin to record, or to wait for what the schedule says."""
        loop.on_step = lambda: self._count(loop.step, ends=False)
        self._undo.callback(setattr, loop, "on_step", None)
        self._undo.callback(after_optimizer_steps(lambda optimizer: self._count(id(optimizer), ends=True)))
        if self._detail["stacks"] and not self._schedule:
            # every Python function call is an event: skip the imports and the model construction
            from torch import nn

            start = before(lambda *_call, **_options: self._start())
            self._first_call = Untraced(lambda: [Patch(nn.Module, "__call__", start)])  # hooks are too late
        else:
            self._record()

    def end(self) -> None:
        """Write the trace, at the program's end or at a limit."""
        self._undo.close()
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            if self._schedule and self._counts is loop.step:
                self._steps += 1  # a step only signals its begin, and no next step ends the last one
                recorder.step()
            try:
                recorder.__exit__(None, None, None)
            finally:  # also if a delayed signal ends the program
                self._empty = recorder.empty
                if recorder.written:
                    self._announce(recorder.path)

    def _announce(self, path: Path, window: Window | None = None) -> None:
        """Print that a trace is written."""
        self._wrote = True
        name = min(str(path), os.path.relpath(path), key=len)
        steps = f", steps {window.first_step} to {window.last_step}" if window is not None else ""
        say(f"wrote {name}{steps}; next: nvprof-kit layers {name}")

    def finish(self) -> None:
        """Write the trace at the program's end, and say why there is none."""
        if os.getpid() != self._pid:
            return
        self.end()
        if self._schedule and not self._wrote:
            steps = f"it took {self._steps} steps" if self._steps else "no step of nvprof_kit.step or an optimizer ran"
            say(f"nothing was recorded by the schedule {self._schedule}: {steps}")
        elif self._detail["stacks"] and not self._schedule and not self._began:
            say("no module was called, which is when a recording with stacks begins: nothing was recorded")
        elif self._empty:
            say(Issue.of("nothing-recorded:process"))
        if awaits_second_step():
            say(Issue.of("nothing-counted:steps"))

    def _start(self) -> None:
        """Begin a recording with stacks, at the first call of a module, or after a step in which only compiled code
        called any.
        """
        first_call, self._first_call = self._first_call, None
        if first_call is None:
            return
        first_call.remove()  # PyTorch takes each frame with the code of nn.Module.__call__ for a module's call
        if os.getpid() == self._pid:
            try:
                self._record()
            except NvprofKitError as error:  # it must not end the program's forward
                say(str(error))

    def _record(self) -> None:
        schedule = self._schedule or "all"
        self._recorder = record(self._path, schedule=schedule, on_trace_ready=self._announce, **self._detail)
        self._recorder.__enter__()
        self._began = True

    def _count(self, source: object, *, ends: bool) -> None:
        """A source signals the end of a step, or the begin of one, which ends the one before."""
        is_first, self._counts = self._counts is None, self._counts or source
        if self._counts != source or (is_first and not ends):
            return
        if os.getpid() != self._pid or threading.get_ident() != self._thread:
            return
        self._steps += 1
        if self._recorder is None:
            self._start()
            return
        self._recorder.step()  # which the schedule follows
        if self._schedule or not self._memory_mb:
            return
        try:
            resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES
        except (OSError, ValueError, IndexError):  # it is not known
            return
        self._base = self._base or resident
        grown = resident - self._base
        if grown > self._memory_mb * 10**6:
            say(Issue.of("max-memory", steps=self._steps, grown_mb=grown // 10**6))
            self.end()


def after_optimizer_steps(then: Callable[[object], None]) -> Callable[[], None]:
    """Call a function after each step of optimizers created from now on, after PyTorch's own hooks.

    A recording cannot start or stop inside these hooks: PyTorch iterates over them, and a recording adds or removes
    hooks.

    Returns:
        A function that removes the callback.
    """
    from torch.optim import Optimizer

    thread_state = threading.local()
    callbacks = [then]

    def step_and_call(step: Callable[..., Any], optimizer: object, /, *args: Any, **kwargs: Any) -> Any:
        is_outermost = not getattr(thread_state, "in_step", False)
        thread_state.in_step = True
        try:
            return step(optimizer, *args, **kwargs)
        finally:
            if is_outermost:
                thread_state.in_step = False
                for call in list(callbacks):
                    call(optimizer)

    def patch_and_wrap(patch: Callable[..., Any], optimizer: Any) -> None:
        patch(optimizer)
        kind = type(optimizer)
        if not hasattr(kind.step, "nvprof_kit"):
            Patch(kind, "step", instead(step_and_call))
            kind.step.nvprof_kit = True

    patch = Patch(Optimizer, "_patch_step_function", instead(patch_and_wrap))

    def end() -> None:
        callbacks.clear()
        patch.remove()

    return end
