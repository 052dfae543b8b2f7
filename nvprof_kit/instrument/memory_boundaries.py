"""The allocator at each begin and end of a layer: what it leaves behind, and what it needs in between."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ..names import LAYER_CATEGORIES, Category
from .backends import Range


@dataclass(frozen=True)
class Counts:
    """The CUDA allocator's own counts, in bytes.

    Attributes:
        allocated: In blocks in use.
        requested: What was asked for in them.
        reserved: Taken from CUDA.
        peak: Most that was allocated since the counts before.
    """

    allocated: int
    requested: int
    reserved: int
    peak: int


class Allocator(Protocol):
    """What counts the memory."""

    def read(self) -> Counts:
        """The counts now; the peak starts anew."""


class CudaAllocator:
    """PyTorch's allocator of one CUDA device.

    Its ``max_memory_allocated`` starts anew at each reading.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device.index if device.index is not None else torch.cuda.current_device()

    def read(self) -> Counts:
        """The counts now; the peak starts anew."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        allocated = stats["allocated_bytes"]["all"]
        requested = stats.get("requested_bytes", stats["allocated_bytes"])["all"]["current"]
        torch.cuda.reset_peak_memory_stats(self._device)
        return Counts(allocated["current"], requested, stats["reserved_bytes"]["all"]["current"], allocated["peak"])


@dataclass(frozen=True)
class Boundary:
    """The end of one call of a layer in one phase; sizes in bytes.

    Attributes:
        step: Number of the step.
        layer: The layer's path.
        phase: ``forward``, ``backward`` or ``recompute``.
        seconds: When it ended, since the profiler was made.
        begin: Allocated when it began.
        end: Allocated when it ended.
        peak: Most that was allocated in between.
        reserved: Reserved from CUDA when it ended.
    """

    step: int
    layer: str
    phase: str
    seconds: float
    begin: int
    end: int
    peak: int
    reserved: int

    @property
    def retained(self) -> int:
        """What it left allocated; negative where it freed."""
        return self.end - self.begin

    @property
    def transient(self) -> int:
        """What it needed above that, for a while."""
        return self.peak - max(self.begin, self.end)


class _Open:
    __slots__ = ("begin", "peak")

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.peak = begin


class Boundaries:
    """Listens to layers' ranges, and reads the allocator at each.

    A peak belongs to every call that is open, and to the time since `counts` was asked last.

    Args:
        allocator: What counts.

    Attributes:
        seen: The calls that have ended.
        step: The number that calls get.
    """

    def __init__(self, allocator: Allocator) -> None:
        self.seen: list[Boundary] = []
        self.step = 0
        self._allocator = allocator
        self._open: dict[int, list[_Open]] = {}
        self._peak = 0
        self._began = time.perf_counter()

    def entered(self, range_: Range) -> None:
        """A layer's call begins."""
        if range_.category in LAYER_CATEGORIES:
            counts = self._read()
            self._open.setdefault(threading.get_ident(), []).append(_Open(counts.allocated))

    def left(self, range_: Range) -> None:
        """A layer's call ends."""
        calls = self._open.get(threading.get_ident())
        if range_.category not in LAYER_CATEGORIES or not calls:
            return
        counts = self._read()
        call = calls.pop()
        phase = range_.category.value
        layer = range_.text if range_.category is Category.FORWARD else range_.text.removesuffix(f" {phase}")
        seconds = time.perf_counter() - self._began
        self.seen.append(
            Boundary(self.step, layer, phase, seconds, call.begin, counts.allocated, call.peak, counts.reserved)
        )

    def counts(self) -> Counts:
        """The counts now, the peak being that since this was asked last."""
        counts = self._read()
        peak, self._peak = self._peak, 0
        return replace(counts, peak=peak)

    def _read(self) -> Counts:
        counts = self._allocator.read()
        self._peak = max(self._peak, counts.peak)
        for calls in self._open.values():
            for call in calls:
                call.peak = max(call.peak, counts.peak)
        return counts
