"""Where ranges go: to NVTX under an attached tool, to Kineto under the embedded recorder.

A backend keeps the open ranges of each thread, innermost last. Closing a range closes everything opened inside it that
was left open, by an exception or an aborted backward pass, so push and pop always balance.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from ..names import DOMAIN, Category, kineto_name


class Range:
    """One name that a program can be in, built once and opened many times.

    Attributes:
        text: What the tool shows: a layer's path (and its phase), a phase, a step.
        category: The NVTX category.
        payload: The layer's index or the step's number, None where there is neither.
        backend: The backend for which `push` is made.
        push: Opens the range on the calling thread; made by `Backend.prepare`.
    """

    __slots__ = ("backend", "category", "payload", "push", "text")

    def __init__(self, text: str, category: Category, payload: int | None = None) -> None:
        self.text = text
        self.category = category
        self.payload = payload
        self.backend: Backend | None = None
        self.push: Callable[[], None] = self._unprepared

    def _unprepared(self) -> None:
        raise RuntimeError(f"{self!r} is pushed before a backend prepared it")

    def __repr__(self) -> str:
        return f"Range({self.text!r}, {self.category.value})"


class Here:
    """Where a thread is.

    Attributes:
        owners: Who opened the ranges that are open on the thread, innermost last.
        frame: The call of a layer that runs on the thread, as the backward pass will need it: a `frames.Frame`, or what
            one can be made of by `frames.frame_here` (the layer, the sequence number at its begin, the frame around).
        task: The backward pass that runs on the thread (`frames.Task`).
    """

    __slots__ = ("frame", "owners", "task")

    def __init__(self) -> None:
        self.owners: list[object] = []
        self.frame: Any = None
        self.task: Any = None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.here = Here()


class Backend:
    """Base of the backends: balances push and pop per thread, whatever is thrown in between.

    Attributes:
        thread: Holds ``here``, where the calling thread is.
        pop: Closes the innermost range of the calling thread.
    """

    pop: Callable[[], None]

    def __init__(self) -> None:
        self.thread = _Thread()

    def open(self, range_: Range, owner: object) -> None:
        """Open a range on this thread; its owner, whatever that is, closes it."""
        if range_.backend is not self:
            self.prepare(range_)
        range_.push()
        self.thread.here.owners.append(owner)

    def close(self, owner: object) -> None:
        """Close the owner's innermost range on this thread and all that is open inside it; without one do nothing."""
        owners = self.thread.here.owners
        if owners and owners[-1] is owner:
            owners.pop()
            self.pop()
        elif owner in owners:
            while owners.pop() is not owner:
                self.pop()
            self.pop()

    def close_all(self) -> None:
        """Close every range open on this thread."""
        owners = self.thread.here.owners
        while owners:
            owners.pop()
            self.pop()

    def prepare(self, range_: Range) -> None:
        """Make the range's `push`."""
        range_.push = self.pusher(range_)
        range_.backend = self

    def pusher(self, range_: Range) -> Callable[[], None]:
        """What tells the tool that a range opens on the calling thread."""
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
