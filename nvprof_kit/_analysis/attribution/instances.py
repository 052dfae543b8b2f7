"""Counts calls where several rows of the operations table are one call.

In a CPU-only capture an operator has one row for each interval of self time, between the operators that it calls.
Times are sums over rows; call counts and means per call count each operator instance once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import exact_sums
from nvprof_kit._analysis.attribution.nesting import Int64Array

if TYPE_CHECKING:
    import pandas as pd


def begins(ops: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Which rows are the first of their instance, shape ``(n,)``; all of them if each row is a call."""
    if "operator_call" not in ops:
        return np.ones(len(ops), dtype=bool)
    order = np.lexsort((ops["start_ns"].to_numpy(), instance := ops["operator_call"].to_numpy()))
    first = np.ones(len(order), dtype=bool)
    first[order[1:]] = np.diff(instance[order]) != 0
    return first


def whole_calls(ops: pd.DataFrame, rows: Int64Array, duration: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Merge selected rows of the operations table into calls.

    Args:
        ops: The operations.
        rows: The selected rows.
        duration: Duration of every operation, in ns, shape ``(n,)``.

    Returns:
        For each instance among the rows, its earliest row and the sum of its durations.
    """
    if "operator_call" not in ops:
        return rows, duration[rows]
    instance = ops["operator_call"].to_numpy()[rows]
    rows = rows[order := np.lexsort((ops["start_ns"].to_numpy()[rows], instance))]
    fresh = np.diff(instance[order], prepend=-1) != 0
    return rows[fresh], exact_sums(np.cumsum(fresh) - 1, duration[rows], int(np.count_nonzero(fresh)))
