"""What `MemoryProfiler` is told, and what it knows of the memory at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvprof_kit._instrument.memory.boundaries import Counts
from nvprof_kit._instrument.memory.tensors import KINDS, Held

ROUNDING = "rounding"
"""Kind of what the allocator's blocks hold more than was asked for."""


@dataclass(frozen=True)
class MemoryOptions:
    """Where to write, and what.

    Attributes:
        folder: Holds a folder for each rank, ``rank0_dp0_tp0_pp0``.
        mesh: The ``DeviceMesh`` with dimensions ``dp``, ``tp``, ``pp`` that names the rank's folder; found by itself
            where the model's parameters have one.
        layouts: Write every module's bytes into ``memory.log`` at each time point, not only the sums.
        parquet: Write ``memory.parquet`` beside ``memory.csv``.
        pages: Write the sunburst pages and the line chart at the end.
    """

    folder: str | Path = "memory_trace"
    mesh: Any = None
    layouts: bool = True
    parquet: bool = False
    pages: bool = True


@dataclass(frozen=True)
class TimePoint:
    """The memory at one moment.

    Attributes:
        number: Counted from 0.
        name: ``step 0 forward``, or what `MemoryProfiler.point` was given.
        seconds: Since the profiler began.
        device: Where the model computes: rows on other devices are offloaded.
        rows: Every byte accounted for; where there is an allocator, with `ROUNDING` and what `memory_blocks` tells
            apart, `UNEXPLAINED` last.
        allocator: Its counts, None without CUDA.
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
