"""Layers' ranges that carry the memory: at each begin and end a mark with the bytes that are allocated.

A layer's range keeps its payload, the layer's index, so the bytes travel in marks of their own inside it: category
``memory``, texts and meaning in `names`. Every nsys records the payload of a mark, and marks own no work.
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
    """Memory at one moment, in bytes: what is allocated, and the most that has been since its count began."""

    allocated: int
    peak: int


Read = Callable[[], Level | None]
"""Reads the memory now; None where there is nothing to read."""


_UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ
"""Then PyTorch asks CUDA for each tensor, and its allocator counts nothing."""


def read_cuda() -> Level | None:
    """PyTorch's CUDA allocator on the calling thread's device; None without CUDA, which no reading starts."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or _UNCACHED:
        return None
    counted = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]
    return Level(counted["current"], counted["peak"])


class NvtxWithMemory(Nvtx):
    """NVTX ranges with the memory at both ends of each layer's.

    Where the process's peak rises inside a range, the range's end bears it too: then it is the peak of that stretch.

    Args:
        read: Reads the memory.
        before: The backend it takes the place of, which may have ranges open.
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
        """A push that reads the memory after it, if the range is a layer's."""
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
