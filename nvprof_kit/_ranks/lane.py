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
    own = np.repeat(np.arange(len(lows)), np.diff(lows, append=len(order)))
    crossing = np.flatnonzero(end[order] > bounds[1:][own])
    beyond = np.searchsorted(bounds, end[order[crossing]]) - 1
    parts = []
    for number, (low, high) in enumerate(zip(lows.tolist(), [*lows[1:].tolist(), len(order)], strict=True)):
        earlier = order[crossing[(own[crossing] < number) & (beyond >= number)]]
        begin, finish = int(bounds[number]), int(bounds[number + 1])
        before, behind = np.searchsorted(cuts, (begin, finish + 1)).tolist()
        rows = np.concatenate((earlier, order[low:high]))
        parts.append(_Part(rows, cuts[before:behind], before, begin, finish))
    return parts


def _lane(start: Int64Array, end: Int64Array, sort: npt.NDArray[np.int8], part: _Part) -> Lane:
    """The pieces of a part."""
    start, end, sort = start[part.rows], end[part.rows], sort[part.rows]
    # a stable sort merges what is nearly sorted already; np.unique is slower
    moments = np.sort(np.clip(np.concatenate((start, end, part.cuts)), part.first, part.last), kind="stable")
    moments = moments[np.append(True, moments[1:] > moments[:-1])]
    begin = moments[:-1]
    state = np.full(len(begin), IDLE, dtype=np.int8)
    op = np.full(len(begin), NONE, dtype=np.int64)
    for kind in (COPY, COMM, COMPUTE):  # later ones take precedence
        mine = np.flatnonzero(sort == kind)
        if len(mine):
            found = _running(start, end, mine, begin)
            here = np.flatnonzero(found != NONE)
            state[here], op[here] = kind, part.rows[found[here]]
    return Lane(begin, moments[1:], state, op, latest(part.cuts, begin) + 1 + part.before)


class IdleGaps(NamedTuple):
    """The idle gaps of a device in ns, ascending."""

    start: Int64Array
    end: Int64Array

    def of_pieces(self, lane: Lane) -> Int64Array:
        """The gap of each idle piece of a part of the device's time."""
        moments: Int64Array = lane.start[lane.state == IDLE]
        if not len(moments):
            return moments
        low, high = np.searchsorted(self.start, (moments[0], moments[-1]), side="right").tolist()
        found: Int64Array = latest(self.start[low - 1 : high], moments) + (low - 1)
        return found


def idle_gaps(start: Int64Array, end: Int64Array, bounds: Int64Array) -> IdleGaps:
    """The idle gaps between operations.

    Args:
        start: Starts of the device's operations in ns, shape ``(n,)``; not empty.
        end: Their ends.
        bounds: Times at which a gap ends and the next begins, ascending. Those before the first and after the last
            operation bound gaps there.
    """
    order = np.argsort(start, kind="stable")
    begins, reach = start[order], np.maximum.accumulate(end[order])
    free = np.flatnonzero(begins[1:] > reach[:-1])
    before, after = np.append(bounds[bounds < begins[0]], begins[0]), np.append(reach[-1], bounds[bounds > reach[-1]])
    gaps = IdleGaps(
        np.concatenate((before[:-1], reach[free], after[:-1])),
        np.concatenate((before[1:], begins[free + 1], after[1:])),
    )
    if not len(gaps.start):
        return gaps
    place = np.searchsorted(gaps.start, bounds, side="right") - 1
    inside = (place >= 0) & (bounds > gaps.start[place]) & (bounds < gaps.end[place])
    place, bounds = place[inside], bounds[inside]
    return IdleGaps(np.insert(gaps.start, place + 1, bounds), np.insert(gaps.end, place, bounds))


def latest(marks: Int64Array, moments: Int64Array) -> Int64Array:
    """The last mark at or before each moment, `NONE` before the first; both are sorted.

    Same as `np.searchsorted` with side ``right``, minus one, but faster if there are fewer marks than moments.
    """
    first = np.searchsorted(moments, marks, side="left")
    found: Int64Array = np.cumsum(np.bincount(first, minlength=len(moments) + 1)[: len(moments)]) - 1
    return found


def _running(start: Int64Array, end: Int64Array, rows: Int64Array, moment: Int64Array) -> Int64Array:
    """The operation that runs at each moment, the first to begin if there are several; else `NONE`.

    Args:
        start: Starts of the operations, ascending.
        end: Their ends.
        rows: Those to look at, ascending.
        moment: The moments, ascending.
    """
    rows = rows[end[rows] > start[rows]]
    if not len(rows):
        return np.full(len(moment), NONE, dtype=np.int64)
    if (start[rows[1:]] == start[rows[:-1]]).any():
        rows = rows[np.lexsort((end[rows], start[rows]))]
    reach = np.maximum.accumulate(end[rows])
    # an operation that ends inside an earlier one is hidden by it
    before = np.concatenate((start[rows][:1], reach[:-1]))
    shown = rows[end[rows] > before]
    begins = np.maximum(start[shown], before[end[rows] > before])
    place = latest(begins, moment)
    found = shown[np.maximum(place, 0)]
    return np.where((place >= 0) & (end[found] > moment), found, NONE)
