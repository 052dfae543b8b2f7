"""Tables of ncu results: one row per measured kernel, one column per metric, in base units.

Base units are nanoseconds, bytes, hertz and percent, regardless of the report's units and locale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvprof_kit._trace.schema import read_tables
from nvprof_kit.issues import Issue

if TYPE_CHECKING:
    import pandas as pd

KERNELS = read_tables("nvprof_kit._trace.ncu")["kernels"]
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
