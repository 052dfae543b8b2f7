"""Delay signals during a file write."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals from a user, a scheduler or a closed terminal that end a program."""


@contextmanager
def waiting_signals() -> Iterator[None]:
    """Delay SIGINT, SIGTERM and SIGHUP until the end of the block; they then take their normal effect.

    Has no effect outside the main thread, where Python cannot set handlers, and for ignored signals.
    """
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            handler = signal.getsignal(number)
            if handler is not None and handler is not signal.SIG_IGN:
                before[number] = handler
                signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(ValueError, OSError):
                signal.signal(number, handler)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)
