"""Allocator counters at the begin and end of each layer call, and its largest allocation."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

import torch

from nvprof_kit._instrument.ranges.ranges import Range
from nvprof_kit.names import LAYER_CATEGORIES, Category

_PREFIX = "nvprof_kit:call:"
_EVENTS = 200_000
"""Maximum number of allocator events kept between two readings."""


@dataclass(frozen=True)
class Counts:
    """Counters of the CUDA caching allocator, in bytes.

    Attributes:
        allocated: Size of the blocks in use.
        requested: Requested bytes in these blocks.
        reserved: Memory reserved from CUDA.
        peak: Maximum of `allocated` since the last reading.
    """

    allocated: int
    requested: int
    reserved: int
    peak: int


class Allocator(Protocol):
    """A memory allocator with counters."""

    def read(self) -> Counts:
        """Read the counters and reset the peak."""


class CudaAllocator:
    """PyTorch's allocator of one CUDA device.

    Each reading resets ``max_memory_allocated``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device.index if device.index is not None else torch.cuda.current_device()

    def read(self) -> Counts:
        """Read the counters and reset the peak."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        allocated = stats["allocated_bytes"]["all"]
        requested = stats.get("requested_bytes", stats["allocated_bytes"])["all"]["current"]
        torch.cuda.reset_peak_memory_stats(self._device)
        return Counts(allocated["current"], requested, stats["reserved_bytes"]["all"]["current"], allocated["peak"])


@dataclass(frozen=True)
class Boundary:
    """One call of a layer in one phase; sizes in bytes.

    Attributes:
        step: Number of the step.
        layer: Path of the layer.
        phase: ``forward``, ``backward`` or ``recompute``.
        seconds: End of the call, in seconds since the profiler was created.
        start: Bytes allocated at the begin.
        end: Bytes allocated at the end.
        peak: Maximum of the allocated bytes during the call.
        reserved: Bytes reserved from CUDA at the end.
        largest: Largest allocation in the call, including nested layers; None if unknown.
    """

    step: int
    layer: str
    phase: str
    seconds: float
    start: int
    end: int
    peak: int
    reserved: int
    largest: int | None = None

    @property
    def retained(self) -> int:
        """Bytes that the call left allocated; negative if it freed more."""
        return self.end - self.start

    @property
    def transient(self) -> int:
        """Bytes that the call needed temporarily, above the larger of `begin` and `end`."""
        return self.peak - max(self.start, self.end)


class History:
    """The allocator history of one CUDA device, recorded without stacks; events are labeled with the number of a call.

    PyTorch records one history at a time. If another recording is active, or before PyTorch 2.9, which added labels,
    this class records nothing.

    Args:
        device: Device ordinal.
        memory: The module ``torch.cuda.memory``.
    """

    def __init__(self, device: int, memory: Any = torch.cuda.memory) -> None:
        self._device = device
        self._memory = memory
        self._recording = False

    def start(self) -> None:
        """Start recording."""
        is_enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
        by_others = _snapshot_runs() or bool(is_enabled and torch.cuda.is_available() and is_enabled())
        if hasattr(self._memory, "_set_memory_metadata") and not by_others:
            self._record()
            self._recording = True

    def stop(self) -> None:
        """Stop recording."""
        recording, self._recording = self._recording, False
        if recording:
            self.label(None)
            if not _snapshot_runs():
                self._memory._record_memory_history(enabled=None)

    def label(self, number: int | None) -> None:
        """Label later allocations with the number of a call."""
        if self._recording:
            self._memory._set_memory_metadata("" if number is None else f"{_PREFIX}{number}")

    def take(self) -> dict[int, int] | None:
        """Largest allocation of each call since the last reading, in bytes; None if not recording."""
        if not self._recording or _snapshot_runs():
            return None
        largest: dict[int, int] = {}
        for event in self._memory._snapshot()["device_traces"][self._device]:
            label = event.get("user_metadata") or ""
            if event["action"] == "alloc" and label.startswith(_PREFIX):
                number = int(label.removeprefix(_PREFIX))
                largest[number] = max(largest.get(number, 0), event["size"])
        self._record()
        return largest

    def _record(self) -> None:
        try:
            self._memory._record_memory_history(
                enabled="all", context=None, stacks="python", max_entries=_EVENTS, clear_history=True
            )
        except TypeError:  # older PyTorch cannot clear the history; reading events twice does not change a maximum
            self._memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=_EVENTS)


def _snapshot_runs() -> bool:
    from nvprof_kit._instrument.memory import snapshot

    return snapshot._running is not None


class _Open:
    __slots__ = ("number", "peak", "start")

    def __init__(self, number: int, allocated: int) -> None:
        self.number = number
        self.start = allocated
        self.peak = allocated


class Boundaries:
    """Reads the allocator at the begin and end of each layer range.

    A peak counts for every open call, and for the time since the last call of `counts`.

    Args:
        allocator: The allocator.
        history: Reports the largest allocations.

    Attributes:
        seen: The completed calls.
        step: Step number to record with calls.
    """

    def __init__(self, allocator: Allocator, history: History | None = None) -> None:
        self.seen: list[Boundary] = []
        self.step = 0
        self._allocator = allocator
        self._history = history
        self._numbers = count()
        self._ended: list[tuple[int, int | None]] = []  # numbers of each completed call and of its caller
        self._largest: dict[int, int] = {}
        self._settled = 0
        self._open: dict[int, list[_Open]] = {}
        self._peak = 0
        self._began = time.perf_counter()

    def entered(self, range_: Range) -> None:
        """A range has opened."""
        if range_.category in LAYER_CATEGORIES:
            counts = self._read()
            call = _Open(next(self._numbers), counts.allocated)
            self._open.setdefault(threading.get_ident(), []).append(call)
            self._label(call.number)

    def left(self, range_: Range) -> None:
        """A range has closed."""
        calls = self._open.get(threading.get_ident())
        if range_.category not in LAYER_CATEGORIES or not calls:
            return
        counts = self._read()
        call = calls.pop()
        outer = calls[-1].number if calls else None
        self._label(outer)
        self._ended.append((call.number, outer))
        phase = range_.category.value
        layer = range_.text if range_.category is Category.FORWARD else range_.text.removesuffix(f" {phase}")
        seconds = time.perf_counter() - self._began
        self.seen.append(
            Boundary(self.step, layer, phase, seconds, call.start, counts.allocated, call.peak, counts.reserved)
        )

    def settle(self) -> None:
        """Set the largest allocations of the completed calls."""
        taken = None if self._history is None else self._history.take()
        if taken is None:
            return
        for number, size in taken.items():
            self._largest[number] = max(self._largest.get(number, 0), size)
        for index in range(self._settled, len(self.seen)):
            number, outer = self._ended[index]
            largest = self._largest.pop(number, 0)
            if outer is not None:  # the caller ends later, or has not ended
                self._largest[outer] = max(self._largest.get(outer, 0), largest)
            self.seen[index] = replace(self.seen[index], largest=largest)
        self._settled = len(self.seen)

    def counts(self) -> Counts:
        """The counters now, with the peak since the last call of `counts`."""
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
