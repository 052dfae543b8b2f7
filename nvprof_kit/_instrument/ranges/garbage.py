"""Ranges around Python's full garbage collections, while a tool listens, from the first other range on.

A collection stops the thread that it falls on, wherever the program is then, and a full one of a program with many
objects lasts long enough for the GPU to run dry. Nothing else in a capture by nsys tells of it.
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
"""The youngest generation of which collections are ranged: 2 are all objects. From Python 3.14 on these are collected
in parts, which are of generation 1. Younger collections come often and are short."""

Phase = Literal["start", "stop"]


class Collections:
    """Ranges ``gc`` on whatever thread collects.

    They are pushed past the backends, which know each thread's ranges: a collection may fall into the midst of opening
    one. What begins and ends inside a single allocation leaves the order of the thread's ranges as it was.
    """

    def __init__(self) -> None:
        backend = Nvtx()
        self._push: Callable[[], None] = backend.pusher(Range(GARBAGE, Category.USER))
        self._pop = backend.pop

    @uncompiled
    def __call__(self, phase: Phase, info: dict[str, int]) -> None:
        """What Python calls as it begins to collect and when it has."""
        if info["generation"] < LEAST or is_finalizing():  # Python collects as it ends
            return
        if phase == "start":
            self._push()
        else:
            self._pop()

    def begin(self) -> None:
        """Range collections from now on."""
        if self not in gc.callbacks:
            gc.callbacks.append(self)

    def end(self) -> None:
        """No longer; a second call does nothing."""
        if self in gc.callbacks:
            gc.callbacks.remove(self)
