"""Adds memory to layer ranges: a mark with the allocated bytes at the begin and end of each.

The payload of a layer range is the layer's index, so the bytes go into marks inside the range: category ``memory``,
texts in `names`. All versions of nsys record the payload of a mark, and no work is attributed to marks.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from nvprof_kit._instrument.ranges.backends import Nvtx, Range
from nvprof_kit.names import LAYER_CATEGORIES, MEMORY_BEGIN, MEMORY_END, MEMORY_PEAK, Category


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
    counted = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]
    return Level(counted["current"], counted["peak"])


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
        began = levels.pop() if levels else None
        level = self._read() if began is not None else None
        if began is not None and level is not None:
            if level.peak > began.peak:
                self._say(MEMORY_PEAK, level.peak)
            self._say(MEMORY_END, level.allocated)
        self._pop_range()

    def _say(self, text: str, count: int) -> None:
        self.mark(Range(text, Category.MEMORY, count))
