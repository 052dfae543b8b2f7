"""Device activity over time as pieces, each with its state and its operation or gap."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.nesting import NONE, Int64Array
from nvprof_kit._analysis.breakdown.activity import COMM, COMPUTE, COPY, IDLE


class Lane(NamedTuple):
    """The device's time without gaps or overlaps, shape ``(p,)`` each.

    Attributes:
        start, end: In ns.
        state: `COMPUTE`, else `COMM`, else `COPY`, else `IDLE`.
        op: The operation, an index into the input arrays; `NONE` if idle.
    """

    start: Int64Array
    end: Int64Array
    state: npt.NDArray[np.int8]
    op: Int64Array


def lane_of(start: Int64Array, end: Int64Array, sort: npt.NDArray[np.int8], cuts: Int64Array) -> Lane:
    """Cut a device's time into pieces.

    Args:
        start: Starts of its operations in ns, shape ``(n,)``.
        end: Their ends.
        sort: `COMPUTE`, `COMM` or `COPY` of each.
        cuts: Additional times at which to cut, within the time of the operations.
    """
    # np.unique is slower for millions; a stable sort merges what is nearly sorted already
    moments = np.sort(np.concatenate((start, end, cuts)), kind="stable")
    moments = moments[np.append(True, moments[1:] > moments[:-1])[: len(moments)]]
    if len(moments) < 2:
        nothing = np.zeros(0, dtype=np.int64)
        return Lane(nothing, nothing, nothing.astype(np.int8), nothing)
    begin = moments[:-1]
    state = np.full(len(begin), IDLE, dtype=np.int8)
    op = np.full(len(begin), NONE, dtype=np.int64)
    for kind in (COPY, COMM, COMPUTE):  # later ones take precedence
        found = _running(start, end, np.flatnonzero(sort == kind), begin)
        here = found != NONE
        state[here], op[here] = kind, found[here]
    return Lane(begin, moments[1:], state, op)


def latest(marks: Int64Array, moments: Int64Array) -> Int64Array:
    """The last mark at or before each moment, `NONE` before the first; both are sorted.

    Same as `np.searchsorted` with side ``right``, minus one, but faster if there are fewer marks than moments.
    """
    first = np.searchsorted(moments, marks, side="left")
    found: Int64Array = np.cumsum(np.bincount(first, minlength=len(moments) + 1)[: len(moments)]) - 1
    return found


def _running(start: Int64Array, end: Int64Array, rows: Int64Array, moment: Int64Array) -> Int64Array:
    """The operation that runs at each moment, the first to begin if there are several; else `NONE`."""
    rows = rows[end[rows] > start[rows]]
    if not len(rows):
        return np.full(len(moment), NONE, dtype=np.int64)
    rows = rows[np.lexsort((end[rows], start[rows]))]
    reach = np.maximum.accumulate(end[rows])
    # an operation that ends inside an earlier one is hidden by it
    before = np.concatenate((start[rows][:1], reach[:-1]))
    shown = rows[end[rows] > before]
    begins = np.maximum(start[shown], before[end[rows] > before])
    place = latest(begins, moment)
    found = shown[np.maximum(place, 0)]
    return np.where((place >= 0) & (end[found] > moment), found, NONE)
