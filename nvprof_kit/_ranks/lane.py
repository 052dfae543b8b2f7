"""Device activity over time as pieces, each with its state and its operation or gap."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array
from nvprof_kit._analysis.breakdown.activity import COMM, COMPUTE, COPY, IDLE


class Lane(NamedTuple):
    """A device's time without gaps or overlaps, shape ``(p,)`` each.

    Attributes:
        start, end: In ns.
        state: `COMPUTE`, else `COMM`, else `COPY`, else `IDLE`.
        op: The operation, an index into the input arrays; `NONE` if idle.
        segment: The number of cuts at or before its start.
    """

    start: Int64Array
    end: Int64Array
    state: npt.NDArray[np.int8]
    op: Int64Array
    segment: Int64Array


def lane_of(start: Int64Array, end: Int64Array, sort: npt.NDArray[np.int8], cuts: Int64Array) -> Lane:
    """Cut a device's time into pieces.

    Args:
        start: Starts of its operations in ns, shape ``(n,)``; not empty.
        end: Their ends.
        sort: `COMPUTE`, `COMM` or `COPY` of each.
        cuts: Additional times at which to cut, ascending, within the time of the operations.
    """
    order = np.argsort(start, kind="stable")
    # a stable sort merges what is nearly sorted already; np.unique is slower
    bounds = np.sort(np.concatenate((start[order], end[order], cuts)), kind="stable")
    bounds = bounds[np.append(True, bounds[1:] > bounds[:-1])]
    starts = bounds[:-1]
    state = np.full(len(starts), IDLE, dtype=np.int8)
    op = np.full(len(starts), NONE, dtype=np.int64)
    for kind in (COPY, COMM, COMPUTE):  # later ones take precedence
        rows = order[sort[order] == kind]
        if len(rows):
            running = _running(start, end, rows, starts)
            here = np.flatnonzero(running != NONE)
            state[here], op[here] = kind, running[here]
    return Lane(starts, bounds[1:], state, op, latest(cuts, starts) + 1)


class IdleGaps(NamedTuple):
    """The idle gaps of a device in ns, ascending."""

    start: Int64Array
    end: Int64Array


def idle_gaps(start: Int64Array, end: Int64Array, bounds: Int64Array) -> IdleGaps:
    """The idle gaps between operations.

    Args:
        start: Starts of the device's operations in ns, shape ``(n,)``; not empty.
        end: Their ends.
        bounds: Times at which a gap ends and the next begins, ascending. Those before the first and after the last
            operation bound gaps there.
    """
    order = np.argsort(start, kind="stable")
    starts, latest_end = start[order], np.maximum.accumulate(end[order])
    free = np.flatnonzero(starts[1:] > latest_end[:-1])
    before, after = (
        np.append(bounds[bounds < starts[0]], starts[0]),
        np.append(latest_end[-1], bounds[bounds > latest_end[-1]]),
    )
    gaps = IdleGaps(
        np.concatenate((before[:-1], latest_end[free], after[:-1])),
        np.concatenate((before[1:], starts[free + 1], after[1:])),
    )
    if not len(gaps.start):
        return gaps
    gap_of_bound = np.searchsorted(gaps.start, bounds, side="right") - 1
    inside = (gap_of_bound >= 0) & (bounds > gaps.start[gap_of_bound]) & (bounds < gaps.end[gap_of_bound])
    gap_of_bound, bounds = gap_of_bound[inside], bounds[inside]
    return IdleGaps(np.insert(gaps.start, gap_of_bound + 1, bounds), np.insert(gaps.end, gap_of_bound, bounds))


def latest(marks: Int64Array, times: Int64Array) -> Int64Array:
    """The last mark at or before each moment, `NONE` before the first; both are sorted.

    Same as `np.searchsorted` with side ``right``, minus one, but faster if there are fewer marks than moments.
    """
    first = np.searchsorted(times, marks, side="left")
    index: Int64Array = np.cumsum(np.bincount(first, minlength=len(times) + 1)[: len(times)]) - 1
    return index


def _running(start: Int64Array, end: Int64Array, rows: Int64Array, times: Int64Array) -> Int64Array:
    """The operation that runs at each moment, the first to begin if there are several; else `NONE`.

    Args:
        start: Starts of the operations, ascending.
        end: Their ends.
        rows: Those to look at, by start.
        times: The moments, ascending.
    """
    rows = rows[end[rows] > start[rows]]
    if not len(rows):
        return np.full(len(times), NONE, dtype=np.int64)
    if (start[rows[1:]] == start[rows[:-1]]).any():
        rows = rows[np.lexsort((end[rows], start[rows]))]
    latest_end = np.maximum.accumulate(end[rows])
    # an operation that ends inside an earlier one is hidden by it
    before = np.concatenate((start[rows][:1], latest_end[:-1]))
    visible = rows[end[rows] > before]
    starts = np.maximum(start[visible], before[end[rows] > before])
    index = latest(starts, times)
    candidate = visible[np.maximum(index, 0)]
    return np.where((index >= 0) & (end[candidate] > times), candidate, NONE)
