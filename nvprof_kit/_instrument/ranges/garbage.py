"""Ranges around Python's full garbage collections while a tool is attached, starting with the first other range.

A collection stops the thread that triggers it. In a program with many objects, a full one can take long enough to
drain the GPU's launch queue. Nothing else in an nsys capture shows it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from sys import is_finalizing
from typing import Literal

from nvprof_kit._instrument.compile.uncompiled import uncompiled
from nvprof_kit._instrument.ranges.backends import Nvtx, Range
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
