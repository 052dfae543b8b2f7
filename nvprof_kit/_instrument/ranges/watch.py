"""A backend that tells a listener where the program is, and passes every range on to whoever listened before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from nvprof_kit._instrument.ranges import state
from nvprof_kit._instrument.ranges.backends import Backend, Range


class Listener(Protocol):
    """What is told where the program is."""

    def entered(self, range_: Range) -> None:
        """A range has opened on the calling thread."""

    def left(self, range_: Range) -> None:
        """It has closed."""


class Watch(Backend):
    """Ranges for a listener, and for the backend that had them before.

    It shares that backend's threads, so a range may be open when watching begins or ends.

    Args:
        listener: What is told.

    Attributes:
        attached: Whether it is to be told.
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
        """Begin: annotated models come alive, except under ``NVPROF_KIT=off``."""
        self.attached = True
        state.activate(self)

    def detach(self) -> None:
        """Give the ranges back to whoever had them."""
        self.attached = False
        state.restore(self, self._before)

    def pusher(self, range_: Range) -> Callable[[], None]:
        """A push that the backend before sees too."""
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
        """Start a range; only the backend before is told."""
        return None if self._before is None else self._before.start(range_)

    def end(self, started: Any) -> None:
        """End it."""
        if self._before is not None:
            self._before.end(started)

    def mark(self, range_: Range) -> None:
        """Set a mark; only the backend before is told."""
        if self._before is not None:
            self._before.mark(range_)
