"""Device activity over time as pieces, each with its state and its operation or gap.

The time is processed in parts of some ten thousand operations, whose arrays stay in the CPU cache.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.nesting import NONE, Int64Array
from nvprof_kit._analysis.breakdown.activity import COMM, COMPUTE, COPY, IDLE

_BLOCK = 1 << 15
"""Operations in a part, at least; a part ends at a cut."""

THREADS = 2
"""Threads that share the parts: NumPy's sorts and searches, which take most of the time, do not hold the GIL."""


class Lane(NamedTuple):
    """A device's time, or a part of it, without gaps or overlaps, shape ``(p,)`` each.

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


class _Part(NamedTuple):
    """A part of the time: its operations by start, the cuts from its first to its last moment, the number of cuts
    before, and these moments.
    """

    rows: Int64Array
    cuts: Int64Array
    before: int
    first: int
    last: int


def lanes_of(start: Int64Array, end: Int64Array, sort: npt.NDArray[np.int8], cuts: Int64Array) -> list[Lane]:
    """Cut a device's time into pieces, in parts by time.

    Args:
        start: Starts of its operations in ns, shape ``(n,)``; not empty.
        end: Their ends.
        sort: `COMPUTE`, `COMM` or `COPY` of each.
        cuts: Additional times at which to cut, ascending, within the time of the operations.
    """
    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        return list(pool.map(lambda part: _lane(start, end, sort, part), _parts(start, end, cuts)))


def _parts(start: Int64Array, end: Int64Array, cuts: Int64Array) -> list[_Part]:
    """Divide the time at some of the cuts. An operation that runs in several parts belongs to each."""
    order = np.argsort(start, kind="stable")
    first, last = int(start[order[0]]), int(end.max())
    at = np.searchsorted(cuts, start[order[_BLOCK::_BLOCK]], side="right") - 1
    inner = np.unique(cuts[at[at >= 0]])
    bounds = np.concatenate(([first], inner[(inner > first) & (inner < last)], [last]))
    lows = np.searchsorted(start, bounds[:-1], sorter=order)
    part_of_op = np.repeat(np.arange(len(lows)), np.diff(lows, append=len(order)))
    crossing = np.flatnonzero(end[order] > bounds[1:][part_of_op])
    beyond = np.searchsorted(bounds, end[order[crossing]]) - 1
    parts = []
    for number, (low, high) in enumerate(zip(lows.tolist(), [*lows[1:].tolist(), len(order)], strict=True)):
        earlier = order[crossing[(part_of_op[crossing] < number) & (beyond >= number)]]
        part_start, finish = int(bounds[number]), int(bounds[number + 1])
        before, behind = np.searchsorted(cuts, (part_start, finish + 1)).tolist()
        rows = np.concatenate((earlier, order[low:high]))
        parts.append(_Part(rows, cuts[before:behind], before, part_start, finish))
    return parts


def _lane(start: Int64Array, end: Int64Array, sort: npt.NDArray[np.int8], interval: _Part) -> Lane:
    """The pieces of a part."""
    start, end, sort = start[interval.rows], end[interval.rows], sort[interval.rows]
    # a stable sort merges what is nearly sorted already; np.unique is slower
    bounds = np.sort(np.clip(np.concatenate((start, end, interval.cuts)), interval.first, interval.last), kind="stable")
    bounds = bounds[np.append(True, bounds[1:] > bounds[:-1])]
    starts = bounds[:-1]
    state = np.full(len(starts), IDLE, dtype=np.int8)
    op = np.full(len(starts), NONE, dtype=np.int64)
    for kind in (COPY, COMM, COMPUTE):  # later ones take precedence
        kind_rows = np.flatnonzero(sort == kind)
        if len(kind_rows):
            running = _running(start, end, kind_rows, starts)
            here = np.flatnonzero(running != NONE)
            state[here], op[here] = kind, interval.rows[running[here]]
    return Lane(starts, bounds[1:], state, op, latest(interval.cuts, starts) + 1 + interval.before)


class IdleGaps(NamedTuple):
    """The idle gaps of a device in ns, ascending."""

    start: Int64Array
    end: Int64Array

    def of_pieces(self, lane: Lane) -> Int64Array:
        """The gap of each idle piece of a part of the device's time."""
        starts: Int64Array = lane.start[lane.state == IDLE]
        if not len(starts):
            return starts
        low, high = np.searchsorted(self.start, (starts[0], starts[-1]), side="right").tolist()
        gaps: Int64Array = latest(self.start[low - 1 : high], starts) + (low - 1)
        return gaps


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
        rows: Those to look at, ascending.
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
