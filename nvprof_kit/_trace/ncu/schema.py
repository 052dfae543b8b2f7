"""Tables of ncu results: one row per measured kernel, one column per metric, in base units.

Base units are nanoseconds, bytes, hertz and percent, regardless of the report's units and locale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvprof_kit._trace.schema import Column
from nvprof_kit.issues import Issue

if TYPE_CHECKING:
    import pandas as pd

KERNELS: Mapping[str, Column] = {
    "id": Column("int64", "ncu's id of the result, from 0 in each report"),
    "pid": Column("int64", "process id, -1 if unknown"),
    "tid": Column("int64", "thread that launched it, -1 if the report has no NVTX state"),
    "kernel": Column("object", "name of the kernel, without a prefix of `--print-nvtx-rename`"),
    "grid": Column("object", "grid size in blocks, as `(64, 1, 1)`; '' if unknown"),
    "block": Column("object", "block size in threads, in the same form"),
    "device": Column("int64", "device ordinal, -1 if unknown"),
    "cc": Column("object", "compute capability: `9.0`, '' if unknown"),
    "stack": Column("object", "texts of the domain's ranges open on that thread, outermost first (tuple)"),
}
"""The measured kernels."""


@dataclass(frozen=True)
class NcuReport:
    """The results of ncu.

    Attributes:
        path: The file as given by the user.
        kernels: One row per measured kernel; columns `KERNELS`.
        metrics: One float64 column per metric by full name, one row per result; missing values are NaN.
        texts: The metrics with text values, in the same layout.
        units: Base unit of each metric: ``ns``, ``byte``, ``hz``, ``%``, ``inst``, ``''``.
        warnings: Sentences about missing or ambiguous data.
        invocations: The measured launches, from 1, for each name, grid, block and shared memory, if a plan's script
            wrote them; else empty.
    """

    path: str
    kernels: pd.DataFrame
    metrics: pd.DataFrame
    texts: pd.DataFrame
    units: Mapping[str, str]
    warnings: tuple[Issue, ...] = ()
    invocations: tuple[int, ...] = ()
