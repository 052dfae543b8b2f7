"""Calls counted where a row of the operations is no call.

In a capture without a GPU an operator has a row for every stretch in which it runs itself, between the operators that
it calls. Times are sums over rows; whatever counts calls, or takes the mean of them, counts each instance once.
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
    """Which rows are the first of their instance, shape ``(n,)``: all of them where each row is a call."""
    if "operator_call" not in ops:
        return np.ones(len(ops), dtype=bool)
    order = np.lexsort((ops["start_ns"].to_numpy(), instance := ops["operator_call"].to_numpy()))
    first = np.ones(len(order), dtype=bool)
    first[order[1:]] = np.diff(instance[order]) != 0
    return first


def whole_calls(ops: pd.DataFrame, rows: Int64Array, duration: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Some rows of the operations as calls.

    Args:
        ops: The operations.
        rows: Which of them.
        duration: Of every operation, in ns, shape ``(n,)``.

    Returns:
        For each instance among the rows the earliest of them, and the sum of their durations.
    """
    if "operator_call" not in ops:
        return rows, duration[rows]
    instance = ops["operator_call"].to_numpy()[rows]
    rows = rows[order := np.lexsort((ops["start_ns"].to_numpy()[rows], instance))]
    fresh = np.diff(instance[order], prepend=-1) != 0
    return rows[fresh], exact_sums(np.cumsum(fresh) - 1, duration[rows], int(np.count_nonzero(fresh)))
