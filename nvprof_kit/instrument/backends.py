"""Where ranges go: to NVTX under an attached tool, to Kineto under the embedded recorder.

A backend keeps the open ranges of each thread, innermost last. Closing a range closes everything opened inside it that
was left open, by an exception or an aborted backward pass, so push and pop always balance.
"""

from __future__ import annotations

import threading
from functools import lru_cache, partial
from typing import Any

from ..names import DOMAIN, Category, kineto_name


class Range:
    """One name that a program can be in, built once and opened many times.

    Attributes:
        text: What the tool shows: a layer's path (and its phase), a phase, a step.
        category: The NVTX category.
        payload: The layer's index or the step's number, None where there is neither.
        attributes: NVTX event attributes, made by the NVTX backend when it first meets the range.
    """

    __slots__ = ("attributes", "category", "payload", "text")

    def __init__(self, text: str, category: Category, payload: int | None = None) -> None:
        self.text = text
        self.category = category
        self.payload = payload
        self.attributes: Any = None

    def __repr__(self) -> str:
        return f"Range({self.text!r}, {self.category.value})"


class _OpenRanges(threading.local):
    """The open ranges of the calling thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Range] = []


class Backend:
    """Base of the backends: balances push and pop per thread, whatever is thrown in between."""

    def __init__(self) -> None:
        self.open_ranges = _OpenRanges()

    def open(self, range_: Range) -> None:
        """Open a range on this thread."""
        self.push(range_)
        self.open_ranges.stack.append(range_)

    def close(self, range_: Range) -> None:
        """Close a range of this thread with all that is open inside it; do nothing if it is not open."""
        stack = self.open_ranges.stack
        if range_ not in stack:
            return
        while stack.pop() is not range_:
            self.pop()
        self.pop()

    def close_all(self) -> None:
        """Close every range open on this thread."""
        stack = self.open_ranges.stack
        while stack:
            stack.pop()
            self.pop()

    def push(self, range_: Range) -> None:
        """Tell the tool that a range opens on this thread."""
        raise NotImplementedError

    def pop(self) -> None:
        """Tell the tool that this thread's innermost range closes."""
        raise NotImplementedError

    def start(self, range_: Range) -> object:
        """Tell the tool that a range starts which any thread may end; return what `end` needs."""
        raise NotImplementedError

    def end(self, started: Any) -> None:
        """Tell the tool that a started range ends."""
        raise NotImplementedError

    def mark(self, range_: Range) -> None:
        """Tell the tool that something happens now."""
        raise NotImplementedError


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
        self._push = lib.push_range
        self._pop = partial(lib.pop_range, self._handle)

    def _attributes(self, range_: Range) -> Any:
        if range_.attributes is None:
            range_.attributes = self._domain.get_event_attributes(
                message=range_.text, color=None, category=range_.category.value, payload=range_.payload
            )
        return range_.attributes

    def open(self, range_: Range) -> None:
        """Open a range on this thread; `Backend.open`, written out since every range passes here."""
        self._push(range_.attributes or self._attributes(range_), self._handle)
        self.open_ranges.stack.append(range_)

    def close(self, range_: Range) -> None:
        """Close a range of this thread; the usual case, in which it is the innermost, comes first."""
        stack = self.open_ranges.stack
        if stack and stack[-1] is range_:
            stack.pop()
            self._pop()
        else:
            super().close(range_)

    def push(self, range_: Range) -> None:
        """Push a range on this thread's NVTX stack."""
        self._push(self._attributes(range_), self._handle)

    def pop(self) -> None:
        """Pop this thread's innermost range."""
        self._pop()

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

    def push(self, range_: Range) -> None:
        """Begin an event on this thread."""
        event = self.start(range_)
        try:
            self._events.stack.append(event)
        except AttributeError:
            self._events.stack = [event]

    def pop(self) -> None:
        """End this thread's innermost event."""
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
