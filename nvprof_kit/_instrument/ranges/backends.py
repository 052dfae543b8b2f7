"""Where ranges go: to NVTX under an attached tool, to Kineto under the embedded recorder.

A backend keeps the open ranges of each thread, innermost last. Closing a range closes everything opened inside it that
was left open, by an exception or an aborted backward pass, so push and pop always balance.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from nvprof_kit._instrument.compile.uncompiled import leave_to_python, uncompiled
from nvprof_kit._instrument.ranges.ranges import Here, Range
from nvprof_kit.names import DOMAIN, kineto_name

__all__ = ["Backend", "Kineto", "Nvtx", "Range", "nvtx_domain"]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.here = Here()


class Backend(ABC):
    """Base of the backends: balances push and pop per thread, whatever is thrown in between.

    Attributes:
        thread: Holds ``here``, where the calling thread is.
        pop: Closes the innermost range of the calling thread.
        before_first: Called once, before the first range is opened.
    """

    pop: Callable[[], None]
    before_first: Callable[[], None] | None = None

    def __init__(self) -> None:
        self.thread = _Thread()

    @uncompiled
    def open(self, range_: Range, owner: object) -> None:
        """Open a range on this thread; its owner, whatever that is, closes it."""
        if range_.backend is not self:
            self.prepare(range_)
        range_.push()
        self.thread.here.add(owner)

    @uncompiled
    def close(self, owner: object) -> None:
        """Close the owner's innermost range on this thread and all that is open inside it; without one do nothing."""
        self.thread.here.close(owner, self.pop)

    def close_all(self) -> None:
        """Close every range open on this thread."""
        self.thread.here.close_all(self.pop)

    @uncompiled
    def prepare(self, range_: Range) -> None:
        """Make the range's `push`."""
        if self.before_first is not None:
            before, self.before_first = self.before_first, None
            before()
        range_.push = self.pusher(range_)
        range_.backend = self
        leave_to_python(range_.push)

    @abstractmethod
    def pusher(self, range_: Range) -> Callable[[], None]:
        """What tells the tool that a range opens on the calling thread."""

    @abstractmethod
    def start(self, range_: Range) -> object:
        """Tell the tool that a range starts which any thread may end; return what `end` needs."""

    @abstractmethod
    def end(self, started: Any) -> None:
        """Tell the tool that a started range ends."""

    @abstractmethod
    def mark(self, range_: Range) -> None:
        """Tell the tool that something happens now."""


@lru_cache(maxsize=1)
def nvtx_domain() -> Any:
    """Our NVTX domain, real even where nvtx takes an attached tool for an absent one.

    nvtx from 0.2.12 on asks the tool whether it listens to a domain and hands out a dummy otherwise; Nsight Systems up
    to 2024.2 answers no although it records. So the domain is put together as nvtx does it for a tool that answers yes.
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
        """A push of the range's attributes, which are built here and then only handed over."""
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
        """Set an NVTX mark."""
        self._lib.mark(self._attributes(range_), self._handle)


class Kineto(Backend):
    """Ranges as events of PyTorch's profiler, named by `names.kineto_name`."""

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
        """Begin an event that lies outside the thread's stack."""
        event = self._event(kineto_name(range_.text, range_.category))
        event.__enter__()
        return event

    def end(self, started: Any) -> None:
        """End an event."""
        started.__exit__(None, None, None)

    def mark(self, range_: Range) -> None:
        """Record an event of no length."""
        self.end(self.start(range_))
