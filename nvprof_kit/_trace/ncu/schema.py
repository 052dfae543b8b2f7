"""What ncu measured, as tables: a row per measured kernel, a column per metric, all in base units.

Nanoseconds, bytes, hertz, and percentages of 100; whatever unit and whatever locale the report was printed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from nvprof_kit._trace.schema import Column

if TYPE_CHECKING:
    import pandas as pd

KERNELS: Mapping[str, Column] = MappingProxyType(
    {
        "id": Column("int64", "ncu's number of the result, counted from 0 in each report"),
        "pid": Column("int64", "process id, -1 if unknown"),
        "tid": Column("int64", "thread that launched it, -1 where the report has no NVTX state"),
        "kernel": Column("object", "the kernel's name, without a prefix of `--print-nvtx-rename`"),
        "grid": Column("object", "blocks of the launch as `(64, 1, 1)`, '' if unknown"),
        "block": Column("object", "threads of a block, the same"),
        "device": Column("int64", "device ordinal, -1 if unknown"),
        "cc": Column("object", "compute capability: `9.0`, '' if unknown"),
        "stack": Column("object", "tuple of the texts of the domain's ranges open on that thread, outermost first"),
    }
)
"""The measured kernels."""


@dataclass(frozen=True)
class NcuReport:
    """What ncu measured.

    Attributes:
        path: The file the user named.
        kernels: A row per result, the columns of `KERNELS`.
        metrics: A float64 column per metric by its full name, a row per result; missing is NaN.
        texts: The metrics whose values are words, the same shape.
        units: Base unit of each metric: ``ns``, ``byte``, ``hz``, ``%``, ``inst``, ``''``.
        warnings: Sentences on what may be missing or misread.
        invocations: Which launches of each name, grid, block and shared memory were measured, from 1, where the script
            of a plan says so; else empty.
    """

    path: str
    kernels: pd.DataFrame
    metrics: pd.DataFrame
    texts: pd.DataFrame
    units: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    invocations: tuple[int, ...] = ()
