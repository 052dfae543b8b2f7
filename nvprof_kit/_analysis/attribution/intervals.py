"""Intervals of time, vectorized: which one encloses which, what they cover, and sums over them.

NVTX push/pop ranges nest on their thread, so at most one range is innermost at any time, and it changes only where a
range begins or ends. `Nesting` stores these changes as one sorted array over all threads, so a million lookups are one
vectorized binary search. `Line` puts lanes of time (devices, threads, windows) one behind the other on one line of
integers, so that one sort or search handles all of them.

In a CPU-only capture an operator has one row for each interval of self time, between the operators that it calls. Times
are sums over rows; call counts and means per call count each operator instance once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from nvprof_kit._trace.joins import distinct, distinct_rows, few

if TYPE_CHECKING:
    import pandas as pd

Int64Array = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Integers = Int64Array | npt.NDArray[np.int32]
Codes = npt.NDArray[np.integer[Any]]
_Values = TypeVar("_Values", Int64Array, npt.NDArray[np.int8])

NONE = -1
"""Index that stands for "no range"."""


@dataclass(frozen=True)
class Nesting:
    """The nesting of a set of ranges.

    Attributes:
        parent: For each range, the index of the innermost range that encloses it on its thread, or `NONE`.
        depth: For each range, the number of ranges that enclose it.
        threads: The threads that have ranges, ascending.
        change: Times at which the innermost range changes, as positions on `line`, ascending.
        owner: The innermost range from each of these times on, or `NONE`.
        line: The line of threads that the positions in `change` refer to.
        crossing: Whether some ranges cross, so that a range can outlast its parent; `cut` makes them nest.
    """

    parent: Int64Array
    depth: Int64Array
    threads: Int64Array
    change: Int64Array
    owner: Integers
    line: Line
    crossing: bool = False

    def innermost(self, tid: Int64Array, time: Int64Array) -> Int64Array:
        """The innermost range open on a thread at a time: start <= time < end.

        Args:
            tid: Thread keys, shape ``(n,)``.
            time: Times in ns, shape ``(n,)``.

        Returns:
            Indices of ranges, `NONE` if no range is open, shape ``(n,)``.
        """
        if not len(self.change):  # no range of nonzero length
            return np.full(len(tid), NONE, dtype=np.int64)
        thread = np.searchsorted(self.threads, tid)
        np.minimum(thread, len(self.threads) - 1, out=thread)
        has_ranges = self.threads[thread] == tid
        # nothing is open at the end of a lane: there is every time outside it, before it at the end of the lane before
        position = self.line.at(thread, self.line.clamp(time, before=1))
        owner = self.owner[np.searchsorted(self.change, position, side="right") - 1].astype(np.int64, copy=False)
        owner[~has_ranges] = NONE
        return owner

    def changes_on(self, line: Line, threads: Int64Array) -> Int64Array:
        """`change` as positions on another line, of these threads and others."""
        lane, zeros = np.searchsorted(threads, self.threads), np.arange(len(self.threads)) * self.line.span
        count = np.diff(np.searchsorted(self.change, zeros), append=len(self.change))
        return self.change + (line.at(lane, np.full(len(lane), self.line.origin)) - zeros).repeat(count)

    def changes(self) -> tuple[Int64Array, Int64Array]:
        """Threads and times at which the innermost range changes."""
        return self.threads[self.change // self.line.span], self.line.time_at(self.change)


def nest(start: Int64Array, end: Int64Array, tid: Int64Array, *, shorten: bool = False) -> Nesting:
    """Find the nesting of ranges.

    Push/pop ranges of one domain nest on their thread. Start/end ranges can cross others, and so can ranges of
    different domains: the innermost is then the open range that started last, and a range's parent is the innermost one
    open when it started.

    Args:
        start: Starts in ns, shape ``(n,)``.
        end: Ends in ns, shape ``(n,)``.
        tid: Thread keys, shape ``(n,)``.
        shorten: Whether to end a range with its parent if it outlasts it, as by rounded times, instead.
    """
    threads = few(tid)
    thread = np.searchsorted(threads, tid)
    line = Line.over((start,), (end,), beyond=2)
    starts, finishes = line.at(thread, start), line.at(thread, end)
    order = np.lexsort((-finishes, starts))
    peeled = peel(starts, finishes, order, shorten=shorten)
    if peeled is not None:
        change, owner = _changes(starts, finishes, peeled[0], order)
        return Nesting(*peeled, threads, change, owner, line)
    pieces = cut(start, end, tid)
    starts, finishes = (line.at(thread[pieces.range], piece_time) for piece_time in (pieces.start, pieces.end))
    order = np.lexsort((-finishes, starts))
    peeled = peel(starts, finishes, order)
    assert peeled is not None, "pieces nest"
    parent, depth = peeled
    change, owner = _changes(starts, finishes, parent, order)
    of_piece = np.append(pieces.range, NONE)
    first = np.empty(len(start), dtype=np.int64)
    first[pieces.range[pieces.first]] = np.flatnonzero(pieces.first)
    return Nesting(of_piece[parent[first]], depth[first], threads, change, of_piece[owner], line, crossing=True)


class Pieces(NamedTuple):
    """Crossing ranges cut into pieces that nest, shape ``(m,)`` each.

    Of two pieces with the same start and end, the outer one comes first, as `nest` expects.

    Attributes:
        range: The range that each piece is part of.
        start, end: Times of the piece, in ns.
        first: Whether it is the first piece of its range.
    """

    range: Int64Array
    start: Int64Array
    end: Int64Array
    first: Bools


def cut(start: Int64Array, end: Int64Array, tid: Int64Array) -> Pieces:
    """Cut each range where another range on its thread ends that was open at its start and ends before it.

    At any time the open pieces are those of the open ranges, a later start inside an earlier one.
    """
    first_end = end.copy()
    more: list[tuple[int, int, int]] = []
    lasting = [(int(start[row]), int(end[row]), int(row)) for row in np.flatnonzero(end > start)]
    events = sorted([(e, 0, 0, row) for _, e, row in lasting] + [(s, 1, -e, row) for s, e, row in lasting])
    open_on: dict[int, list[int]] = defaultdict(list)
    begun: dict[int, int] = {}
    for time, is_start, _, row in events:
        open_ranges = open_on[int(tid[row])]
        if is_start:
            open_ranges.append(row)
            begun[row] = time
            continue
        position = open_ranges.index(row)
        for above in open_ranges[position:]:
            if begun[above] == start[above]:
                first_end[above] = time
            elif time > begun[above]:
                more.append((above, begun[above], time))
            begun[above] = time
        del open_ranges[position]
    extra = np.array(more, dtype=np.int64).reshape(-1, 3).T
    ranges = np.arange(len(start))
    of, piece_start, finish = (np.concatenate(parts) for parts in zip((ranges, start, first_end), extra, strict=True))
    order = np.lexsort((piece_start, of, -end[of], start[of]))
    return Pieces(of[order], piece_start[order], finish[order], piece_start[order] == start[of[order]])


def peel(
    starts: Int64Array, finishes: Int64Array, order: Int64Array, *, shorten: bool = False
) -> tuple[Int64Array, Int64Array] | None:
    """Parent and depth, one level at a time: a range that starts before all earlier ones have ended has a parent.

    Args:
        starts: Start of each range, on one line over all threads, shape ``(n,)``.
        finishes: End of each.
        order: The ranges to process, by start, longer first.
        shorten: Whether to end a range with its parent if it outlasts it; modifies `finishes` in place.

    Returns:
        None if a range outlasts its parent: such ranges cross and can have as many levels as there are ranges.
    """
    parent, depth = np.full(len(starts), NONE, dtype=np.int64), np.zeros(len(starts), dtype=np.int64)
    left, above, level = order, np.broadcast_to(np.int64(NONE), len(order)), 0
    while len(left):
        latest_end = np.maximum.accumulate(finishes[left])
        outermost = np.concatenate(([True], starts[left][1:] >= latest_end[:-1]))
        if outermost.all():  # none encloses another
            parent[left], depth[left] = above, level
            break
        parent[left[outermost]], depth[left[outermost]] = above[outermost], level
        last = left[np.maximum.accumulate(np.where(outermost, np.arange(len(left), dtype=np.int32), 0))]
        if shorten:
            finishes[left] = np.minimum(finishes[left], finishes[last])
        elif (finishes[left] > finishes[last]).any():
            return None
        left, above, level = left[~outermost], last[~outermost], level + 1
    return parent, depth


def _changes(
    starts: Int64Array, finishes: Int64Array, parent: Int64Array, order: Int64Array
) -> tuple[Int64Array, npt.NDArray[np.int32]]:
    """Change times and owners: a start makes the range innermost, an end its parent; ranges by start, outer first."""
    outside_in = order[finishes[order] > starts[order]]  # a range of zero length is never innermost
    if (parent == NONE).all():  # one behind the other
        nothing = np.full(len(outside_in), NONE, dtype=np.int32)
        times = np.column_stack([starts[outside_in], finishes[outside_in]])
        return times.ravel(), np.column_stack([outside_in.astype(np.int32), nothing]).ravel()
    inside_out = outside_in[::-1]
    times = np.concatenate([finishes[inside_out], starts[outside_in]])
    owner = np.concatenate([parent[inside_out], outside_in], dtype=np.int32)  # half the memory
    by_time = np.argsort(times, kind="stable")  # ties: ends from the inside out, then starts from the outside in
    return times[by_time], owner[by_time]


def moments_of(positions: Int64Array, owners: Sequence[Integers]) -> tuple[Int64Array, list[Int64Array]]:
    """The distinct positions, ascending, and the innermost range of each nesting from each of them on, with `NONE`
    appended for what is before them.

    Args:
        positions: Positions on one line at which something changes, of the nestings first, each of them ascending.
        owners: The owners of each nesting from these on.
    """
    order = np.argsort(positions, kind="stable")  # of sorted columns one behind the other, quick
    change, (*edges, _) = positions[order], np.cumsum([0, *map(len, owners)])
    last = as_slice(np.flatnonzero(np.append(change[1:] != change[:-1], True)[: len(change)]))
    innermost = []
    for low, owner in zip(edges, owners, strict=True):
        rows = np.flatnonzero((order >= low) & (order < low + len(owner)))
        since = np.append(np.int64(NONE), owner).repeat(np.diff(rows, prepend=0, append=len(order)))
        innermost.append(np.append(since[last], NONE))
    return change[last], innermost


def inherit(own_values: _Values, nesting: Nesting) -> _Values:
    """For each range its own value, or that of the nearest enclosing range that has one.

    Args:
        own_values: A value for each range, `NONE` if it has none of its own, shape ``(n,)``.
        nesting: The nesting of the ranges.
    """
    values: Any = own_values.copy()
    for level in range(1, int(nesting.depth.max(initial=0)) + 1):
        here = np.flatnonzero((nesting.depth == level) & (own_values == NONE))
        values[here] = values[nesting.parent[here]]
    return cast(_Values, values)


def outer_layers(layer_range: Int64Array, nesting: Nesting) -> Int64Array:
    """For each range, the next enclosing layer range, with `NONE` appended, shape ``(n + 1,)``.

    Args:
        layer_range: For each range, the nearest layer range (itself or an enclosing one), or `NONE`, shape ``(n,)``.
        nesting: The nesting of the ranges.
    """
    return np.append(np.append(layer_range, NONE)[nesting.parent], NONE)


_FITS = 1 << 62


@dataclass(frozen=True)
class Line:
    """Lanes (devices, threads) put one after another on one axis, so that one sorted array serves all of them.

    Attributes:
        origin: The earliest time in ns, the zero of each lane.
        span: Length of a lane, longer than any time range in it.
    """

    origin: int
    span: int

    @classmethod
    def over(cls, starts: Iterable[Int64Array], ends: Iterable[Int64Array], beyond: int = 1) -> Line:
        """The line for some intervals.

        Args:
            starts: Starts in ns, arrays of any length.
            ends: Ends in ns, none before the first start.
            beyond: Padding of each lane after the last end, in ns.
        """
        origin = min((int(times.min()) for times in starts if len(times)), default=0)
        latest = max((int(times.max()) for times in ends if len(times)), default=origin)
        return cls(origin, latest - origin + beyond)

    def fits(self, lane: int) -> bool:
        """Whether positions in the lanes up to this one fit in int64, with room for sums and differences."""
        return lane * self.span <= _FITS

    def at(self, lane: Codes, time: Int64Array) -> Int64Array:
        """Positions on the line of times in lanes, shape ``(n,)`` each.

        Raises:
            OverflowError: There are too many lanes for this time span.
        """
        position = time - self.origin
        if last := int(lane.max(initial=0)):
            if not self.fits(last):
                raise OverflowError(f"{last + 1} lanes of {self.span} ns do not fit into 64 bits")
            position += np.multiply(lane, self.span, dtype=np.int64)
        return position

    def clamp(self, time: Int64Array, before: int = 0) -> Int64Array:
        """Times clamped to the lane, whose lower bound is `before` ns before its zero."""
        return np.clip(time, self.origin - before, self.origin + self.span - 1)

    def time_at(self, position: Int64Array) -> Int64Array:
        """The time in ns of a position on the line, in any lane."""
        in_first = int(position.max(initial=0)) < self.span  # to divide takes a while
        return (position if in_first else position % self.span) + self.origin


def union(starts: Int64Array, finishes: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The union of intervals as sorted starts and ends; adjacent intervals are merged.

    Args:
        starts: Positions on a line, shape ``(n,)``.
        finishes: Positions on the same line, shape ``(n,)``.
    """
    if not len(starts):
        return starts, finishes
    order = np.argsort(starts, kind="stable")
    starts, latest_end = starts[order], finishes[order]
    np.maximum.accumulate(latest_end, out=latest_end)
    first_of_run = np.flatnonzero(np.concatenate(([True], starts[1:] > latest_end[:-1])))
    return starts[first_of_run], latest_end[np.append(first_of_run[1:] - 1, len(order) - 1)]


_BLOCK = 1 << 18
"""Intervals processed at a time, to limit memory."""


def union_lengths(start: Int64Array, end: Int64Array, lane: Codes, group: Codes, groups: int) -> Int64Array:
    """For each group, the length of the union of its intervals, summed over lanes.

    Args:
        start: Starts, shape ``(n,)``.
        end: Ends, shape ``(n,)``.
        lane: Lane (device) of each interval, shape ``(n,)``; intervals of different lanes never overlap.
        group: Group of each interval, shape ``(n,)``.
        groups: Number of groups; every group index is below it.

    Returns:
        Lengths in the unit of the intervals, shape ``(groups,)``.
    """
    lanes = int(lane.max(initial=0)) + 1
    line, lane = Line.over((start,), (end,)), group.astype(np.int64) * lanes + lane if groups > 1 else lane
    if not line.fits(int(lane.max(initial=0))):
        lane = np.unique(lane, return_inverse=True)[1]  # number only the lanes that occur
    starts = line.at(lane, start)
    order = np.argsort(starts, kind="stable")
    starts = starts[order]  # and only then the other
    finishes = line.at(lane, end)[order]
    # in place, to limit memory: from where the intervals before reach, to the end
    np.maximum(starts[1:], np.maximum.accumulate(finishes)[:-1], out=starts[1:])
    finishes -= starts
    np.maximum(finishes, 0, out=finishes)
    if groups == 1:
        return np.array([finishes.sum()], dtype=np.int64)
    return exact_sums(group[order], finishes, groups)


def exact_sums(group: Codes, values: Int64Array, groups: int) -> Int64Array:
    """Sums of integers by group, exact up to 2**53 per group (104 days in ns); groups from `groups` on are left out."""
    sums = np.zeros(groups, dtype=np.int64)
    size = max(1 << 16, groups)  # NumPy copies what it sums: a block's copy stays in the CPU cache
    for block in (slice(low, low + size) for low in range(0, len(group), size)):
        sums += np.bincount(group[block], weights=values[block], minlength=groups)[:groups].astype(np.int64)
    return sums


def median(values: npt.NDArray[Any]) -> float:
    """The median of one number or more, whose order changes, as from `numpy.median`, which takes several times as long
    for many.
    """
    values.partition(middle := len(values) // 2)
    above = float(values[middle])
    return above if len(values) % 2 else (float(values[:middle].max()) + above) / 2


def sums_by(keys: Sequence[Integers], values: Iterable[Int64Array]) -> tuple[list[Int64Array], list[Int64Array]]:
    """Sums of integers by several keys: the key combinations that occur, sorted, and the sums.

    Same result as pandas `groupby`, which is several times slower for a million rows.

    Args:
        keys: Integers, shape ``(n,)`` each.
        values: Integers, shape ``(n,)`` each.
    """
    rows, group = distinct_rows(*(key.astype(np.int64) for key in keys))
    return rows, [exact_sums(group, value, len(rows[0])) for value in values]


def joined(keys: Sequence[Codes]) -> Int64Array | None:
    """One integer per row that sorts like the keys; None if it would overflow."""
    lows = [int(key.min(initial=0)) for key in keys]
    sizes = [int(key.max(initial=0)) - low + 1 for key, low in zip(keys, lows, strict=True)]
    if math.prod(sizes) > np.iinfo(np.int64).max:
        return None
    code = np.zeros(len(keys[0]), dtype=np.int64)
    for key, low, size in zip(keys, lows, sizes, strict=True):
        if size > 1:
            code *= size
            code += key
            code -= low
    return code


def touches(intervals: tuple[Int64Array, Int64Array], start: Int64Array, end: Int64Array) -> Bools:
    """Which intervals overlap one of some others, whatever lane they are on, shape ``(n,)``.

    Args:
        intervals: Starts and ends of the others, in ns.
        start: Start of each interval, in ns.
        end: Its end.
    """
    starts, ends = union(*intervals)
    starts = np.append(starts, np.iinfo(np.int64).max)
    touched = np.zeros(len(start), dtype=bool)
    for low in range(0, len(start), _BLOCK):
        block = slice(low, low + _BLOCK)
        after = np.searchsorted(ends, start[block], side="right")
        touched[block] = starts[after] < end[block]
    return touched


class Cover:
    """The union of intervals in each lane.

    Args:
        lane: Lane of each interval, shape ``(n,)``; intervals of different lanes never overlap.
        start: Starts in ns, shape ``(n,)``.
        end: Ends in ns, shape ``(n,)``.
    """

    def __init__(self, lane: Int64Array, start: Int64Array, end: Int64Array) -> None:
        self._lanes, lane_number = distinct(lane)
        self._line = Line.over((start,), (end,))
        starts = self._line.at(lane_number, start)
        self._order = np.argsort(starts, kind="stable")
        self._begins = starts[self._order]
        del starts  # to limit memory, as what is done in place
        self._ends = self._line.at(lane_number, end)[self._order]  # how far an interval and those before it reach
        np.maximum.accumulate(self._ends, out=self._ends)
        # covered by those before each interval; each adds what is behind where they reach
        self._before = np.zeros(len(start) + 1, dtype=np.int64)
        self._before[1:2] = self._begins[:1]
        np.maximum(self._begins[1:], self._ends[:-1], out=self._before[2:])
        np.subtract(self._ends, self._before[1:], out=self._before[1:])
        np.cumsum(self._before, out=self._before)

    def alone(self) -> Bools:
        """Which of the intervals overlap no other of their lane, shape ``(n,)``."""
        is_behind = self._begins[1:] >= self._ends[:-1]
        is_alone = np.empty(len(self._order), dtype=bool)
        is_alone[self._order] = (np.append(True, is_behind) & np.append(is_behind, True))[: len(is_alone)]
        return is_alone

    def inside(self, lane: Int64Array, start: Int64Array, end: Int64Array) -> Int64Array:
        """How much of each queried interval is covered in its lane, in ns, shape ``(m,)`` each."""
        return self._until(lane, end) - self._until(lane, start)

    def contains(self, lane: Int64Array, time: Int64Array) -> Bools:
        """Whether each moment is covered in its lane, shape ``(m,)`` each."""
        is_covered, (starts, ends) = np.zeros(len(time), dtype=bool), self.covered
        low = np.searchsorted(ends, time.min(initial=np.iinfo(np.int64).max), side="right")
        high = np.searchsorted(starts, time.max(initial=np.iinfo(np.int64).min), side="right")
        if low < high:  # often all are elsewhere, as of what loads code
            starts = np.append(starts[low:high], np.iinfo(np.int64).max)
            rows = np.flatnonzero(starts[np.searchsorted(ends[low:high], time, side="right")] <= time)
            lane_number = np.minimum(np.searchsorted(self._lanes, lane[rows]), len(self._lanes) - 1)
            position = self._line.at(lane_number, time[rows])
            index = np.searchsorted(self._begins, position, side="right") - 1
            is_in_lane = self._lanes[lane_number] == lane[rows]
            is_covered[rows] = is_in_lane & (index >= 0) & (position < self._ends[index])
        return is_covered

    @cached_property
    def covered(self) -> tuple[Int64Array, Int64Array]:
        """Starts and ends of the times at which something is covered in any lane."""
        return union(*(edges % self._line.span + self._line.origin for edges in (self._begins, self._ends)))

    def _until(self, lane: Int64Array, time: Int64Array) -> Int64Array:
        """Covered time before a moment, relative to an arbitrary zero of the lane."""
        if not len(self._begins):
            return np.zeros(len(lane), dtype=np.int64)
        lane_number = np.minimum(np.searchsorted(self._lanes, lane), len(self._lanes) - 1)
        position = self._line.at(lane_number, self._line.clamp(time))
        index = np.searchsorted(self._begins, position, side="right") - 1
        covered = self._before[index + 1] - np.where(index < 0, 0, np.maximum(self._ends[index] - position, 0))
        return np.where(self._lanes[lane_number] == lane, covered, 0)


def as_slice(rows: Integers) -> Integers | slice:
    """Some rows, each once, as a slice if they follow each other, of which a column needs no copy."""
    if not len(rows) or rows[-1] - rows[0] + 1 != len(rows) or (rows[1:] < rows[:-1]).any():
        return rows
    return slice(int(rows[0]), int(rows[-1]) + 1)


def begins(ops: pd.DataFrame) -> Bools:
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
    is_first = np.diff(instance[order], prepend=-1) != 0
    return rows[is_first], exact_sums(np.cumsum(is_first) - 1, duration[rows], int(np.count_nonzero(is_first)))
