"""Whether and where ranges are emitted: decided once from the environment, then changed only by recorders and watchers.

Code that emits ranges reads `backend`; None means that no ranges are emitted. Hooks on modules and optimizers are
listed in `annotated`, and installed or removed when the backend changes. Python's full garbage collections are ranged
while a tool is attached, from the first other range on: a collection stops the thread that triggers it, a full one can
drain the GPU's launch queue, and nothing else in an nsys capture shows it.
"""

from __future__ import annotations

import builtins
import gc
import os
import sys
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import lru_cache, partial
from sys import is_finalizing
from typing import Any, NamedTuple, Protocol, TypeVar

from nvprof_kit import names
from nvprof_kit._instrument.patches import Removable, Stack, nothing, skip_compiling, uncompiled
from nvprof_kit._instrument.ranges import ranges
from nvprof_kit._instrument.ranges.ranges import Position, Range
from nvprof_kit.errors import UsageError
from nvprof_kit.names import DOMAIN, GARBAGE, LAYER_CATEGORIES, Category, kineto_name


class _Thread(threading.local):
    def __init__(self) -> None:
        self.position = Position()


class Backend:
    """Base of the backends, which emits nothing itself; balances push and pop per thread, also after exceptions.

    Attributes:
        thread: Thread-local; its ``position`` is the state of the calling thread.
        pop: Closes the innermost range of the calling thread.
        before_first: Called once, before the first range is opened.
    """

    pop: Callable[[], None] = staticmethod(nothing)
    before_first: Callable[[], None] | None = None

    def __init__(self) -> None:
        self.thread = _Thread()

    @uncompiled
    def open(self, range_: Range, owner: object) -> None:
        """Open a range on this thread. The owner, any object, identifies it for `close`."""
        if range_.backend is not self:
            self.prepare(range_)
        range_.push()
        self.thread.position.owners.append(owner)

    @uncompiled
    def close(self, owner: object) -> None:
        """Close the owner's innermost range on this thread and all ranges inside it; does nothing if there is none."""
        self.thread.position.close(owner, self.pop)

    @uncompiled
    def prepare(self, range_: Range) -> None:
        """Set the range's `push`."""
        if self.before_first is not None:
            before, self.before_first = self.before_first, None
            before()
        range_.push = self.pusher(range_)
        range_.backend = self
        skip_compiling(range_.push)

    def pusher(self, range_: Range) -> Callable[[], None]:
        """A function that opens the range in the tool on the calling thread."""
        return nothing

    def start(self, range_: Range) -> object:
        """Start a range in the tool that any thread may end; returns the argument of `end`."""

    def end(self, started: Any) -> None:
        """End a started range in the tool."""

    def mark(self, range_: Range) -> None:
        """Emit a mark in the tool."""


@lru_cache(maxsize=1)
def nvtx_domain() -> Any:
    """Our NVTX domain, which is real even if nvtx finds no attached tool.

    From 0.2.12, nvtx asks the tool whether it listens to a domain and otherwise returns a dummy. Nsight Systems up to
    2024.2 answers no although it records. So this function creates the domain as nvtx does for a tool that answers yes.
    """
    from nvtx._lib import lib

    if not hasattr(lib, "DummyDomain"):
        return lib.Domain(DOMAIN)
    domain = object.__new__(lib.Domain)
    domain.handle = lib.DomainHandle(DOMAIN)
    domain.__init__(DOMAIN)
    return domain


class Nvtx(Backend):
    """Ranges of our NVTX domain: registered strings, named categories, attributes built once per range."""

    def __init__(self) -> None:
        super().__init__()
        from nvtx._lib import lib

        self._lib = lib
        self._domain = nvtx_domain()
        self._handle = self._domain.handle
        self.pop = partial(lib.pop_range, self._handle)

    def _attributes(self, range_: Range) -> Any:
        return self._domain.get_event_attributes(
            message=range_.text, color=None, category=range_.category.value, payload=range_.payload
        )

    def pusher(self, range_: Range) -> Callable[[], None]:
        """A push of the range's attributes, which are built once, here."""
        return partial(self._lib.push_range, self._attributes(range_), self._handle)

    def start(self, range_: Range) -> object:
        """Start an NVTX process range."""
        return self._lib.start_range(self._attributes(range_), self._handle)

    def end(self, started: Any) -> None:
        """End an NVTX process range."""
        if isinstance(started, tuple):
            self._lib.end_range(*started)
        else:  # nvtx 0.2.11
            self._lib.end_range(started)

    def mark(self, range_: Range) -> None:
        """Emit an NVTX mark."""
        self._lib.mark(self._attributes(range_), self._handle)


class Kineto(Backend):
    """Ranges as events of PyTorch's profiler, with names from `names.kineto_name`."""

    def __init__(self) -> None:
        super().__init__()
        from torch._C._profiler import _RecordFunctionFast

        self._event = _RecordFunctionFast
        self._events = Stack()
        self.pop = self._pop

    def pusher(self, range_: Range) -> Callable[[], None]:
        """A push of a new event with the range's name."""
        return partial(self._push, range_)

    def _push(self, range_: Range) -> None:
        self._events.items.append(self.start(range_))

    def _pop(self) -> None:
        self.end(self._events.items.pop())

    def start(self, range_: Range) -> object:
        """Begin an event outside the thread's stack of ranges."""
        event = self._event(kineto_name(range_.text, range_.category))
        event.__enter__()
        return event

    def end(self, started: Any) -> None:
        """End a started event."""
        started.__exit__(None, None, None)

    def mark(self, range_: Range) -> None:
        """Record an event without duration."""
        self.end(self.start(range_))


class Level(NamedTuple):
    """Memory at one moment, in bytes: the allocated bytes and the allocator's peak."""

    allocated: int
    peak: int


Read = Callable[[], Level | None]
"""Reads the memory; returns None if there is nothing to read."""


_UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ
"""Whether caching is disabled: each tensor is then allocated by CUDA, and the allocator's counters stay 0."""


def read_cuda() -> Level | None:
    """PyTorch's CUDA allocator on the current device; None if CUDA is not initialized. Does not initialize CUDA."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or _UNCACHED:
        return None
    statistics = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]
    return Level(statistics["current"], statistics["peak"])


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
        before: The previous backend; by default the current one.

    Attributes:
        attached: Whether the listener is attached.
    """

    def __init__(self, listener: Listener, before: Backend | None = None) -> None:
        super().__init__()
        self._listener = listener
        self.attached = False
        self._previous = backend if before is None else before
        self._before = self._previous or Backend()
        self.thread = self._before.thread
        self._ranges = Stack()
        self.pop = self._pop

    def attach(self) -> None:
        """Start notifying, and install all annotations, except under ``NVPROF_KIT=off``."""
        self.attached = True
        activate(self)

    def detach(self) -> None:
        """Stop notifying, and restore the previous backend if this one is still in use; open ranges stay open."""
        self.attached = False
        if backend is self:
            _switch(self._previous)

    def pusher(self, range_: Range) -> Callable[[], None]:
        """A push that also pushes in the previous backend."""
        return partial(self._push, range_, self._before.pusher(range_))

    def _push(self, range_: Range, pass_on: Callable[[], None]) -> None:
        pass_on()
        self._ranges.items.append(range_)
        self._listener.entered(range_)

    def _pop(self) -> None:
        if self._ranges.items:
            self._listener.left(self._ranges.items.pop())
        self._before.pop()

    def start(self, range_: Range) -> object:
        """Start a range in the previous backend only."""
        return self._before.start(range_)

    def end(self, started: Any) -> None:
        """End a started range in the previous backend."""
        self._before.end(started)

    def mark(self, range_: Range) -> None:
        """Emit a mark in the previous backend only."""
        self._before.mark(range_)


class MemoryMarks:
    """Listener that emits the memory at the begin and end of each layer range, as marks.

    If the process's peak rises inside a range, a mark with the peak precedes the range's end.

    Args:
        read: Reads the memory.
        tool: Receives the marks.
    """

    def __init__(self, read: Read, tool: Backend) -> None:
        self._read = read
        self._tool = tool
        self._levels = Stack()

    def entered(self, range_: Range) -> None:
        """A range has opened."""
        if range_.category in LAYER_CATEGORIES:
            level = self._read()
            self._levels.items.append(level)
            if level is not None:
                self._mark(names.MEMORY_BEGIN, level.allocated)

    def left(self, range_: Range) -> None:
        """A range is about to close in the tool."""
        if range_.category in LAYER_CATEGORIES:
            before, after = self._levels.items.pop(), self._read()
            if before is not None and after is not None:
                if after.peak > before.peak:
                    self._mark(names.MEMORY_PEAK, after.peak)
                self._mark(names.MEMORY_END, after.allocated)

    def _mark(self, text: str, size: int) -> None:
        self._tool.mark(Range(text, Category.MEMORY, size))


LEAST = 1 if sys.version_info >= (3, 14) else 2
"""The youngest generation to range; 2 is a full collection. From Python 3.14, full collections are incremental, as
generation 1. Younger generations are collected often and quickly."""


def range_collections() -> None:
    """Range ``gc`` on the thread that collects, from now on.

    These ranges bypass the backends, which track each thread's ranges, because a collection may run while a backend
    opens a range. A range that begins and ends inside a single allocation keeps the order of the thread's ranges.
    """
    backend = Nvtx()
    push, pop = backend.pusher(Range(GARBAGE, Category.USER)), backend.pop

    @uncompiled
    def collecting(phase: str, info: dict[str, int]) -> None:
        if info["generation"] >= LEAST and not is_finalizing():  # Python collects at exit
            (push if phase == "start" else pop)()

    gc.callbacks.append(collecting)


_MODES = ("auto", "on", "off")
_INJECTED = ("NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH")
"""Set by nsys (profile and launch, where it traces NVTX) and ncu to the library that NVTX loads."""

_TOOL_HINTS = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "NV_NSIGHT_INJECTION_TRANSPORT_TYPE")
"""Set by tools that may receive NVTX in another way; in this case, nvtx decides."""


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

annotated: weakref.WeakKeyDictionary[object, Annotation] = weakref.WeakKeyDictionary()
"""Annotated objects with their annotations, which live as long as the object."""

was_annotated = False
"""Whether anything was annotated in this process, also if it is gone."""


def _switch(new: Backend | None) -> None:
    global backend  # noqa: PLW0603
    backend = ranges.backend = new
    _Live.SWITCH[:] = [] if new is None else [None]
    if new is not None:
        skip_compiling(new.pop)
    for annotation in list(annotated.values()):
        if new is None:
            annotation.disable()
        else:
            annotation.enable()


def _tool_backend() -> Backend | None:
    if mode == "off" or (mode == "auto" and not tool_attached(os.environ)):
        return None
    with_memory = os.environ.get("NVPROF_KIT_MEMORY", "").strip() not in ("", "0")
    return _with_memory(Nvtx(), read_cuda) if with_memory else Nvtx()


def _with_memory(tool: Backend, read: Read) -> Watch:
    return Watch(MemoryMarks(read, tool), tool)


def add_memory_marks(read: Read = read_cuda) -> None:
    """Add memory marks to layer ranges under an attached tool, until the process ends."""
    global _tool
    if _tool is None:
        return
    if isinstance(_tool, Watch) and isinstance(_tool._listener, MemoryMarks):  # each range has its marks once
        _tool._listener._read = read
        return
    before, _tool = _tool, _with_memory(_tool, read)
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
        owners = backend.thread.position.owners
        while owners:
            owners.pop()
            backend.pop()
        _switch(_tool)


def find_torch() -> bool:
    """Replacement of ``is_dynamo_compiling`` until torch is loaded; then installs torch's own functions."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "compiler"):
        return False
    if torch.compiler.is_dynamo_compiling():
        return True
    ranges.graph_task = torch._C._current_graph_task_id
    gate["__compiling"] = torch.compiler.is_dynamo_compiling
    while _waiting:
        _waiting.popitem()[0]()
    return False


_waiting: dict[Callable[[], object], None] = {}


def when_torch(then: Callable[[], object]) -> None:
    """Call a function at the first range after torch is loaded, or now if there has been one."""
    if ranges.graph_task is _find_graph_task:
        _waiting[then] = None
    else:
        then()


def _find_graph_task() -> int:
    find_torch()
    return -1 if ranges.graph_task is _find_graph_task else ranges.graph_task()


gate["__compiling"] = find_torch
ranges.graph_task = _find_graph_task
_tool = _tool_backend()
if _tool is not None:
    _tool.before_first = range_collections  # without ranges, the program is not changed
_switch(_tool)


def replace_in_notebook(owner: Any) -> None:
    """Remove an earlier annotation of the same object, in IPython only.

    In a notebook, a cell is rerun, possibly with other options, and the last run applies. In a program, a second
    annotation is an error, because two places would each rely on their own ranges.
    """
    earlier = annotated.get(owner)
    if earlier is not None and hasattr(builtins, "__IPYTHON__"):
        earlier.remove()


Self = TypeVar("Self", bound="Annotation")


class Annotation(ABC):
    """The handle of an annotated object; as a context manager, it removes the annotation at the end.

    Args:
        owner: The annotated object; held weakly.

    Raises:
        UsageError: The object is already annotated.
    """

    def __init__(self, owner: Any) -> None:
        global was_annotated  # noqa: PLW0603
        if owner in annotated:
            raise UsageError.of("annotated-model", kind=type(owner).__name__)

        def gone(_owner: object, exits: Callable[[], bool] = is_finalizing) -> None:
            if not exits():  # a global name may be cleared then, a default argument is not
                self.owner_gone()

        self._owner = weakref.ref(owner, gone)
        self._hooks: list[Removable] = []
        annotated[owner] = self
        was_annotated = True
        if backend is not None:
            try:
                self.enable()
            except BaseException:
                del annotated[owner]
                raise

    @abstractmethod
    def _install(self, owner: Any) -> Iterable[Removable]:
        """Install the hooks, and what they need; yields the handle of each."""

    def enable(self) -> None:
        """Install the hooks, unless installed, because ranges are now emitted."""
        owner = self._owner()
        if owner is None or mode == "off" or self._hooks:
            return
        try:
            for hook in self._install(owner):
                self._hooks.append(hook)
        except BaseException:
            self.disable()
            raise

    def disable(self) -> None:
        """Remove all hooks, because ranges are no longer emitted."""
        while self._hooks:
            self._hooks.pop().remove()

    def remove(self) -> None:
        """Remove the annotation; a second call does nothing. The object can be annotated again."""
        self.disable()
        owner = self._owner()
        if owner is not None and annotated.get(owner) is self:
            del annotated[owner]

    def owner_gone(self) -> None:
        """The annotated object was garbage-collected."""
        self.disable()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.remove()
