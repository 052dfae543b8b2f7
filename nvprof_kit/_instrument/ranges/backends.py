"""Receivers of ranges: NVTX under an attached tool, Kineto under the embedded recorder.

A backend tracks the open ranges of each thread, innermost last. Closing a range also closes ranges inside it that an
exception or an aborted backward pass left open, so push and pop always balance.
"""

from __future__ import annotations

import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

from nvprof_kit._instrument.ranges.ranges import Position, Range
from nvprof_kit._instrument.torch_compat import skip_compiling, uncompiled
from nvprof_kit.names import DOMAIN, LAYER_CATEGORIES, MEMORY_BEGIN, MEMORY_END, MEMORY_PEAK, Category, kineto_name

__all__ = ["Backend", "Kineto", "Nvtx", "Range", "nvtx_domain"]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.position = Position()


class Backend(ABC):
    """Base of the backends; balances push and pop per thread, also after exceptions.

    Attributes:
        thread: Thread-local; its ``position`` is the state of the calling thread.
        pop: Closes the innermost range of the calling thread.
        before_first: Called once, before the first range is opened.
    """

    pop: Callable[[], None]
    before_first: Callable[[], None] | None = None

    def __init__(self) -> None:
        self.thread = _Thread()

    @uncompiled
    def open(self, range_: Range, owner: object) -> None:
        """Open a range on this thread. The owner, any object, identifies it for `close`."""
        if range_.backend is not self:
            self.prepare(range_)
        range_.push()
        self.thread.position.add(owner)

    @uncompiled
    def close(self, owner: object) -> None:
        """Close the owner's innermost range on this thread and all ranges inside it; does nothing if there is none."""
        self.thread.position.close(owner, self.pop)

    def close_all(self) -> None:
        """Close all open ranges of this thread."""
        self.thread.position.close_all(self.pop)

    @uncompiled
    def prepare(self, range_: Range) -> None:
        """Set the range's `push`."""
        if self.before_first is not None:
            before, self.before_first = self.before_first, None
            before()
        range_.push = self.pusher(range_)
        range_.backend = self
        skip_compiling(range_.push)

    @abstractmethod
    def pusher(self, range_: Range) -> Callable[[], None]:
        """A function that opens the range in the tool on the calling thread."""

    @abstractmethod
    def start(self, range_: Range) -> object:
        """Start a range in the tool that any thread may end; returns the argument of `end`."""

    @abstractmethod
    def end(self, started: Any) -> None:
        """End a started range in the tool."""

    @abstractmethod
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
        self._events = threading.local()
        self.pop = self._pop

    def pusher(self, range_: Range) -> Callable[[], None]:
        """A push of a new event with the range's name."""
        return partial(self._push, range_)

    def _push(self, range_: Range) -> None:
        event = self.start(range_)
        try:
            self._events.stack.append(event)
        except AttributeError:
            self._events.stack = [event]

    def _pop(self) -> None:
        self.end(self._events.stack.pop())

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


class NvtxWithMemory(Nvtx):
    """NVTX ranges with the memory at the begin and end of each layer range.

    If the process's peak rises inside a range, a mark with the peak precedes the range's end.

    Args:
        read: Reads the memory.
        before: The backend to replace, which may have open ranges.
    """

    def __init__(self, read: Read, before: Nvtx | None = None) -> None:
        super().__init__()
        if before is not None:
            self.thread = before.thread
        self._read = read
        self._open = threading.local()
        self._pop_range = self.pop
        self.pop = self._pop

    def pusher(self, range_: Range) -> Callable[[], None]:
        """A push that also emits the memory, if the range belongs to a layer."""
        return partial(self._push, super().pusher(range_), range_.category in LAYER_CATEGORIES)

    def _push(self, push: Callable[[], None], layer: bool) -> None:
        push()
        level = self._read() if layer else None
        try:
            self._open.levels.append(level)
        except AttributeError:
            self._open.levels = [level]
        if level is not None:
            self._say(MEMORY_BEGIN, level.allocated)

    def _pop(self) -> None:
        levels = getattr(self._open, "levels", None)
        level_at_begin = levels.pop() if levels else None
        level = self._read() if level_at_begin is not None else None
        if level_at_begin is not None and level is not None:
            if level.peak > level_at_begin.peak:
                self._say(MEMORY_PEAK, level.peak)
            self._say(MEMORY_END, level.allocated)
        self._pop_range()

    def _say(self, text: str, count: int) -> None:
        self.mark(Range(text, Category.MEMORY, count))
