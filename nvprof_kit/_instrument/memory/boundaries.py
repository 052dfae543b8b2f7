"""The allocator at each begin and end of a layer: what it leaves behind, and what it needs in between."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

import torch

from nvprof_kit._instrument.ranges.backends import Range
from nvprof_kit.names import LAYER_CATEGORIES, Category


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
        largest: Its largest allocation, or that of a layer in it; None where that is not known.
    """

    step: int
    layer: str
    phase: str
    seconds: float
    begin: int
    end: int
    peak: int
    reserved: int
    largest: int | None = None

    @property
    def retained(self) -> int:
        """What it left allocated; negative where it freed."""
        return self.end - self.begin

    @property
    def transient(self) -> int:
        """What it needed above that, for a while."""
        return self.peak - max(self.begin, self.end)


class Largest(Protocol):
    """What knows the largest allocation of a call (`memory_history.History`)."""

    def label(self, number: int | None) -> None:
        """What is allocated from now on belongs to the call of this number."""

    def take(self) -> dict[int, int] | None:
        """Largest allocation of each call since this was asked last; None where that is not known."""


class _Open:
    __slots__ = ("begin", "number", "peak")

    def __init__(self, number: int, begin: int) -> None:
        self.number = number
        self.begin = begin
        self.peak = begin


class Boundaries:
    """Listens to layers' ranges, and reads the allocator at each.

    A peak belongs to every call that is open, and to the time since `counts` was asked last.

    Args:
        allocator: What counts.
        history: What knows the largest allocations.

    Attributes:
        seen: The calls that have ended.
        step: The number that calls get.
    """

    def __init__(self, allocator: Allocator, history: Largest | None = None) -> None:
        self.seen: list[Boundary] = []
        self.step = 0
        self._allocator = allocator
        self._history = history
        self._numbers = count()
        self._ended: list[tuple[int, int | None]] = []  # number of each call seen, and of the call around it
        self._largest: dict[int, int] = {}
        self._settled = 0
        self._open: dict[int, list[_Open]] = {}
        self._peak = 0
        self._began = time.perf_counter()

    def entered(self, range_: Range) -> None:
        """A layer's call begins."""
        if range_.category in LAYER_CATEGORIES:
            counts = self._read()
            call = _Open(next(self._numbers), counts.allocated)
            self._open.setdefault(threading.get_ident(), []).append(call)
            self._label(call.number)

    def left(self, range_: Range) -> None:
        """A layer's call ends."""
        calls = self._open.get(threading.get_ident())
        if range_.category not in LAYER_CATEGORIES or not calls:
            return
        counts = self._read()
        call = calls.pop()
        around = calls[-1].number if calls else None
        self._label(around)
        self._ended.append((call.number, around))
        phase = range_.category.value
        layer = range_.text if range_.category is Category.FORWARD else range_.text.removesuffix(f" {phase}")
        seconds = time.perf_counter() - self._began
        self.seen.append(
            Boundary(self.step, layer, phase, seconds, call.begin, counts.allocated, call.peak, counts.reserved)
        )

    def settle(self) -> None:
        """Give the calls that have ended their largest allocations."""
        taken = None if self._history is None else self._history.take()
        if taken is None:
            return
        for number, size in taken.items():
            self._largest[number] = max(self._largest.get(number, 0), size)
        for place in range(self._settled, len(self.seen)):
            number, around = self._ended[place]
            largest = self._largest.pop(number, 0)
            if around is not None:  # ends later, or has no end yet
                self._largest[around] = max(self._largest.get(around, 0), largest)
            self.seen[place] = replace(self.seen[place], largest=largest)
        self._settled = len(self.seen)

    def counts(self) -> Counts:
        """The counts now, the peak being that since this was asked last."""
        self.settle()
        counts = self._read()
        peak, self._peak = self._peak, 0
        return replace(counts, peak=peak)

    def _label(self, number: int | None) -> None:
        if self._history is not None:
            self._history.label(number)

    def _read(self) -> Counts:
        counts = self._allocator.read()
        self._peak = max(self._peak, counts.peak)
        for calls in self._open.values():
            for call in calls:
                call.peak = max(call.peak, counts.peak)
        return counts
