"""Whether and where ranges are emitted: decided once from the environment, then changed only by recorders and watchers.

Code that emits ranges reads `backend`; None means that no ranges are emitted. Hooks on modules and optimizers are
listed in `annotated`, and installed or removed when the backend changes. Python's full garbage collections are ranged
while a tool is attached, from the first other range on: a collection stops the thread that triggers it, a full one can
drain the GPU's launch queue, and nothing else in an nsys capture shows it.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from sys import is_finalizing
from typing import Any, Literal, Protocol

from nvprof_kit._instrument.ranges.backends import Backend, Nvtx, NvtxWithMemory, Range, Read, read_cuda
from nvprof_kit._instrument.ranges.ranges import now
from nvprof_kit._instrument.torch_compat import skip_compiling, uncompiled
from nvprof_kit.names import GARBAGE, Category

LEAST = 1 if sys.version_info >= (3, 14) else 2
"""The youngest generation to range; 2 is a full collection. From Python 3.14, full collections are incremental, as
generation 1. Younger generations are collected often and quickly."""

Phase = Literal["start", "stop"]


class Collections:
    """Ranges ``gc`` on the thread that collects.

    They bypass the backends, which track each thread's ranges, because a collection may run while a backend opens a
    range. A range that begins and ends inside a single allocation keeps the order of the thread's ranges.
    """

    def __init__(self) -> None:
        backend = Nvtx()
        self._push: Callable[[], None] = backend.pusher(Range(GARBAGE, Category.USER))
        self._pop = backend.pop

    @uncompiled
    def __call__(self, phase: Phase, info: dict[str, int]) -> None:
        """Callback for ``gc.callbacks``, before and after each collection."""
        if info["generation"] < LEAST or is_finalizing():  # Python collects at exit
            return
        if phase == "start":
            self._push()
        else:
            self._pop()

    def begin(self) -> None:
        """Start ranging collections."""
        if self not in gc.callbacks:
            gc.callbacks.append(self)

    def end(self) -> None:
        """Stop; a second call does nothing."""
        if self in gc.callbacks:
            gc.callbacks.remove(self)


_MODES = ("auto", "on", "off")
_INJECTED = ("NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH")
"""Set by nsys (profile and launch, where it traces NVTX) and ncu to the library that NVTX loads."""

_TOOL_HINTS = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "NV_NSIGHT_INJECTION_TRANSPORT_TYPE")
"""Set by tools that may receive NVTX in another way; in this case, nvtx decides."""


class Installable(Protocol):
    """Something installed on an object of the program only while ranges are emitted."""

    def enable(self) -> None:
        """Install, unless installed."""

    def disable(self) -> None:
        """Uninstall."""


def read_mode(environ: Mapping[str, str]) -> str:
    """The mode in ``NVPROF_KIT``: ``auto`` (the default), ``on`` or ``off``; other values warn and mean ``auto``."""
    mode = environ.get("NVPROF_KIT", "auto").strip().lower() or "auto"
    if mode in _MODES:
        return mode
    warnings.warn(f"NVPROF_KIT={mode!r} is not one of {', '.join(_MODES)}; using auto", stacklevel=2)
    return "auto"


def tool_attached(environ: Mapping[str, str]) -> bool:
    """Whether a tool that records NVTX is attached; imports nvtx only if the environment suggests one."""
    if any(environ.get(name) for name in _INJECTED):
        return True
    if not any(environ.get(name) for name in _TOOL_HINTS):
        return False
    import nvtx
    from nvtx._lib import lib

    return hasattr(lib, "DummyDomain") and isinstance(nvtx.get_domain("nvprof_kit"), lib.Domain)


mode = read_mode(os.environ)
backend: Backend | None = None
"""The current backend; None while no ranges are emitted."""


class _Live(list[None], Enum):  # type: ignore[misc]  # the hash is the enumeration's
    """Whether ranges are emitted: the list is not empty.

    torch.compile treats a member of an enumeration as a constant, so code compiled while no ranges were emitted is not
    recompiled when they are. A plain variable would be guarded and cause a recompilation.
    """

    SWITCH = ()


gate: dict[str, Any] = {"__live": _Live.SWITCH}
"""Globals of the compiled forwarders of decorated functions: whether ranges are emitted (``__live``), and torch's
function that returns whether Dynamo is tracing (``__compiling``)."""

annotated: weakref.WeakKeyDictionary[object, Installable] = weakref.WeakKeyDictionary()
"""Annotated objects with their annotations, which live as long as the object."""

was_annotated = False
"""Whether anything was annotated in this process, also if it is gone."""


def _switch(new: Backend | None) -> None:
    global backend  # noqa: PLW0603
    backend = now.backend = new
    _Live.SWITCH[:] = [] if new is None else [None]
    if new is not None:
        skip_compiling(new.pop)
    for installable in list(annotated.values()):
        if new is None:
            installable.disable()
        else:
            installable.enable()


def _tool_backend() -> Nvtx | None:
    if mode == "off" or (mode == "auto" and not tool_attached(os.environ)):
        return None
    with_memory = os.environ.get("NVPROF_KIT_MEMORY", "").strip() not in ("", "0")
    return NvtxWithMemory(read_cuda) if with_memory else Nvtx()


def add_memory_marks(read: Read = read_cuda) -> None:
    """Add memory marks to layer ranges under an attached tool, until the process ends."""
    global _tool
    if _tool is None:
        return
    before, _tool = _tool, NvtxWithMemory(read, _tool)
    _tool.before_first = before.before_first
    if backend is before:
        _switch(_tool)


def activate(recorder: Backend) -> None:
    """Send ranges to a recorder and install all annotations, except under ``NVPROF_KIT=off``."""
    if mode != "off":
        _switch(recorder)


def deactivate() -> None:
    """Undo `activate`: send ranges to the attached tool, or uninstall all annotations.

    Closes ranges that the calling thread opened under the recorder and has not closed.
    """
    if backend is not None and backend is not _tool:
        backend.close_all()
        _switch(_tool)


def restore(watcher: Backend, before: Backend | None) -> None:
    """Send ranges to the backend before a watcher, if the watcher is still in use; open ranges stay open."""
    if backend is watcher:
        _switch(before)


def find_torch() -> bool:
    """Replacement of ``is_dynamo_compiling`` until torch is loaded; then installs torch's own functions."""
    global graph_task  # noqa: PLW0603
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "compiler"):
        return False
    if torch.compiler.is_dynamo_compiling():
        return True
    graph_task = torch._C._current_graph_task_id
    now.task, now.grad, now.sequence = graph_task, torch.is_grad_enabled, torch.autograd._get_sequence_nr
    gate["__compiling"] = torch.compiler.is_dynamo_compiling
    while _waiting:
        _waiting.popitem()[0]()
    return False


_waiting: dict[Callable[[], None], None] = {}


def when_torch(then: Callable[[], None]) -> None:
    """Call a function at the first range after torch is loaded, or now if there has been one."""
    if graph_task is _find_graph_task:
        _waiting[then] = None
    else:
        then()


def _find_graph_task() -> int:
    find_torch()
    return -1 if graph_task is _find_graph_task else graph_task()


graph_task: Callable[[], int] = _find_graph_task
"""Number of the backward pass running on this thread; -1 if none, or if torch is not loaded."""

gate["__compiling"] = find_torch
now.task = _find_graph_task
_tool = _tool_backend()
if _tool is not None:
    _tool.before_first = lambda: Collections().begin()  # without ranges, the program is not changed
_switch(_tool)


class Listener(Protocol):
    """Listener of ranges."""

    def entered(self, range_: Range) -> None:
        """A range has opened on the calling thread."""

    def left(self, range_: Range) -> None:
        """A range has closed on the calling thread."""


class Watch(Backend):
    """Sends ranges to a listener and to the previous backend.

    It shares the previous backend's per-thread state, so ranges may be open when it is attached or detached.

    Args:
        listener: The listener.

    Attributes:
        attached: Whether the listener is attached.
    """

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener
        self.attached = False
        self._before = backend
        if self._before is not None:
            self.thread = self._before.thread
        self._open = threading.local()
        self.pop = self._pop

    def attach(self) -> None:
        """Start notifying, and install all annotations, except under ``NVPROF_KIT=off``."""
        self.attached = True
        activate(self)

    def detach(self) -> None:
        """Stop notifying, and restore the previous backend."""
        self.attached = False
        restore(self, self._before)

    def pusher(self, range_: Range) -> Callable[[], None]:
        """A push that also pushes in the previous backend."""
        return partial(self._push, range_, None if self._before is None else self._before.pusher(range_))

    def _push(self, range_: Range, pass_on: Callable[[], None] | None) -> None:
        if pass_on is not None:
            pass_on()
        try:
            self._open.ranges.append(range_)
        except AttributeError:
            self._open.ranges = [range_]
        self._listener.entered(range_)

    def _pop(self) -> None:
        ranges = getattr(self._open, "ranges", None)
        if ranges:
            self._listener.left(ranges.pop())
        if self._before is not None:
            self._before.pop()

    def start(self, range_: Range) -> object:
        """Start a range in the previous backend only."""
        return None if self._before is None else self._before.start(range_)

    def end(self, started: Any) -> None:
        """End a started range in the previous backend."""
        if self._before is not None:
            self._before.end(started)

    def mark(self, range_: Range) -> None:
        """Emit a mark in the previous backend only."""
        if self._before is not None:
            self._before.mark(range_)
