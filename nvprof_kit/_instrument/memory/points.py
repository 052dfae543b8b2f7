"""The memory at one time point."""

from __future__ import annotations

from dataclasses import dataclass, field

from nvprof_kit._instrument.memory.boundaries import Counts
from nvprof_kit._instrument.memory.tensors import KINDS, Held

ROUNDING = "rounding"
"""Kind of the bytes that allocator blocks have beyond the requested size."""


@dataclass(frozen=True)
class TimePoint:
    """The memory at one moment.

    Attributes:
        number: Counted from 0.
        name: ``step 0 forward``, or the name passed to `MemoryProfiler.point`.
        seconds: Time since the profiler started.
        device: The device on which the model computes; rows on other devices are offloaded.
        rows: The bytes by kind and module; with CUDA also `ROUNDING`, and `UNEXPLAINED` last.
        allocator: Counters of the CUDA caching allocator; None without CUDA.
    """

    number: int
    name: str
    seconds: float
    device: str
    rows: tuple[Held, ...] = field(repr=False)
    allocator: Counts | None = None

    def sum_of(self, kind: str) -> int:
        """Bytes of a kind on the device."""
        return sum(row.bytes for row in self.rows if row.kind == kind and row.device == self.device)

    @property
    def offloaded(self) -> int:
        """Bytes of the five kinds on other devices."""
        return sum(row.bytes for row in self.rows if row.kind in KINDS and row.device != self.device)

    @property
    def total(self) -> int:
        """Bytes of the five kinds on the device."""
        return sum(self.sum_of(kind) for kind in KINDS)
