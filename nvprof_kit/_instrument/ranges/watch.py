"""A backend that notifies a listener of ranges and passes them on to the previous backend."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from nvprof_kit._instrument.ranges import state
from nvprof_kit._instrument.ranges.backends import Backend, Range


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
        self._before = state.backend
        if self._before is not None:
            self.thread = self._before.thread
        self._open = threading.local()
        self.pop = self._pop

    def attach(self) -> None:
        """Start notifying, and install all annotations, except under ``NVPROF_KIT=off``."""
        self.attached = True
        state.activate(self)

    def detach(self) -> None:
        """Stop notifying, and restore the previous backend."""
        self.attached = False
        state.restore(self, self._before)

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
