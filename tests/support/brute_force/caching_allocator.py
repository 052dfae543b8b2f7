"""Replays PyTorch's caching allocator from a snapshot's events, to find the block size of each tensor.

Reference for `nvprof_kit._analysis.memory.memory` on real snapshots. The rules are those of
``c10/cuda/CUDACachingAllocator.cpp`` for the default settings: sizes are rounded up to 512 bytes; a request takes the
front of a free block, and the rest of that stays free if it is worth it, at least 512 bytes in the pool of small
blocks (up to 1 MiB) and more than 1 MiB in that of large ones. What is not worth it belongs to the tensor's block.
"""

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from typing import Any

ROUND = 512
SMALL = 1 << 20


class Replay:
    """The allocator of one device, empty at first.

    Attributes:
        asked, allocated: Most that tensors asked for, and most that was in their blocks.
    """

    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        self.asked = self.allocated = 0
        self._segments: list[tuple[int, int]] = []  # begin and end, ascending
        self._live: list[int] = []
        asked = allocated = 0
        blocks: dict[int, tuple[int, int]] = {}
        for event in events:
            addr, size = event["addr"], event["size"]
            if event["action"] == "segment_alloc":
                insort(self._segments, (addr, addr + size))
            elif event["action"] == "alloc":
                blocks[addr] = size, self._block(addr, size)
                insort(self._live, addr)
                asked, allocated = asked + size, allocated + blocks[addr][1]
                self.asked, self.allocated = max(self.asked, asked), max(self.allocated, allocated)
            elif event["action"] == "free_completed":
                size, block = blocks.pop(addr)
                self._live.remove(addr)
                asked, allocated = asked - size, allocated - block

    def _block(self, addr: int, size: int) -> int:
        rounded = max(-(-size // ROUND), 1) * ROUND
        _, end = self._segments[bisect_right(self._segments, (addr, 1 << 63)) - 1]
        place = bisect_right(self._live, addr)
        end = min(end, self._live[place]) if place < len(self._live) else end
        rest = end - addr - rounded
        worth_it = rest >= ROUND if rounded <= SMALL else rest > SMALL
        return rounded if worth_it else rounded + rest
