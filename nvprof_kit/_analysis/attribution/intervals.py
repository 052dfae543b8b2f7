"""Interval arithmetic, vectorized: how much of each interval is covered, sums by group, and calls of several rows.

In a CPU-only capture an operator has one row for each interval of self time, between the operators that it calls. Times
are sums over rows; call counts and means per call count each operator instance once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.nesting import Int64Array, Integers, Line, union

if TYPE_CHECKING:
    import pandas as pd

_DENSE = 4
"""Sums are looked up by key if there are at most this many possible keys per row."""

_BLOCK = 1 << 18
"""Intervals processed at a time, to limit memory."""


def alone(start: Int64Array, end: Int64Array, lane: Int64Array) -> npt.NDArray[np.bool_]:
    """Which intervals overlap no other interval of their lane, shape ``(n,)`` each."""
    order, starts, finishes = _in_lanes(start, end, lane)
    latest_end = np.maximum.accumulate(finishes)
    free = np.ones(len(order), dtype=bool)
    free[1:] &= starts[1:] >= latest_end[:-1]
    free[:-1] &= starts[1:] >= finishes[:-1]
    result = np.empty(len(order), dtype=bool)
    result[order] = free
    return result


def union_lengths(start: Int64Array, end: Int64Array, lane: Int64Array, group: Int64Array, groups: int) -> Int64Array:
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
    order, starts, finishes = _in_lanes(start, end, group * lanes + lane if groups > 1 else lane)
    # in place, to limit memory: from where the intervals before reach, to the end
    np.maximum(starts[1:], np.maximum.accumulate(finishes)[:-1], out=starts[1:])
    finishes -= starts
    np.maximum(finishes, 0, out=finishes)
    if groups == 1:
        return np.array([finishes.sum()], dtype=np.int64)
    return exact_sums(group[order], finishes, groups)


def exact_sums(group: Integers, values: Int64Array, groups: int) -> Int64Array:
    """Sums of integers by group, exact up to 2**53 per group (104 days in ns)."""
    return np.bincount(group, weights=values, minlength=groups).astype(np.int64)


def sums_by(keys: Sequence[Int64Array], values: Iterable[Int64Array]) -> tuple[list[Int64Array], list[Int64Array]]:
    """Sums of integers by several keys: the key combinations that occur, sorted, and the sums.

    Same result as pandas `groupby`, which is several times slower for a million rows.

    Args:
        keys: Integers, shape ``(n,)`` each.
        values: Integers, shape ``(n,)`` each.
    """
    code = joined(keys)
    codes_count = 0 if code is None else int(code.max(initial=-1)) + 1
    if code is not None and codes_count <= _DENSE * len(code):  # without a sort, which takes several times as long
        present = np.flatnonzero(np.bincount(code, minlength=codes_count))
        row = np.empty(codes_count, dtype=np.int64)
        row[code] = np.arange(len(code))
        return [key[row[present]] for key in keys], [exact_sums(code, value, codes_count)[present] for value in values]
    order = np.lexsort(keys[::-1]) if code is None else np.argsort(code, kind="stable")
    sorted_keys = [key[order] for key in (keys if code is None else [code])]
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = np.any([key[1:] != key[:-1] for key in sorted_keys], axis=0)
    first = np.flatnonzero(is_first)
    sums = [np.add.reduceat(value[order], first) if len(first) else value[:0] for value in values]
    return [key[order[first]] for key in keys], sums


def joined(keys: Sequence[Integers]) -> Int64Array | None:
    """One integer per row that sorts like the keys; None if it would overflow."""
    lows = [int(key.min(initial=0)) for key in keys]
    sizes = [int(key.max(initial=0)) - low + 1 for key, low in zip(keys, lows, strict=True)]
    if math.prod(sizes) > np.iinfo(np.int64).max:
        return None
    code = np.zeros(len(keys[0]), dtype=np.int64)
    for key, low, size in zip(keys, lows, sizes, strict=True):
        code *= size
        code += key - low
    return code


def _in_lanes(start: Int64Array, end: Int64Array, lane: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The order by lane and start, and the starts and ends in that order, on one line."""
    line = Line.over((start,), (end,))
    if not line.fits(lane):
        lane = np.unique(lane, return_inverse=True)[1]  # number only the lanes that occur
    starts = line.at(lane, start)
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    return order, starts, line.at(lane, end)[order]


def touches(intervals: tuple[Int64Array, Int64Array], start: Int64Array, end: Int64Array) -> npt.NDArray[np.bool_]:
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
        self._lanes, lane_number = np.unique(lane, return_inverse=True)
        self._line = Line.over((start,), (end,))
        self._begins, self._ends = union(self._line.at(lane_number, start), self._line.at(lane_number, end))
        self._before = np.concatenate(([0], np.cumsum(self._ends - self._begins)))

    def inside(self, lane: Int64Array, start: Int64Array, end: Int64Array) -> Int64Array:
        """How much of each queried interval is covered in its lane, in ns, shape ``(m,)`` each."""
        return self._until(lane, end) - self._until(lane, start)

    def _until(self, lane: Int64Array, time: Int64Array) -> Int64Array:
        """Covered time before a moment, relative to an arbitrary zero of the lane."""
        if not len(self._begins):
            return np.zeros(len(lane), dtype=np.int64)
        lane_number = np.minimum(np.searchsorted(self._lanes, lane), len(self._lanes) - 1)
        key = self._line.at(lane_number, self._line.within(time))
        index = np.searchsorted(self._begins, key, side="right") - 1
        here = np.maximum(index, 0)
        within = np.minimum(key, self._ends[here]) - self._begins[here]
        covered = np.where(index < 0, 0, self._before[here] + within)
        return np.where(self._lanes[lane_number] == lane, covered, 0)


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
    is_first = np.diff(instance[order], prepend=-1) != 0
    return rows[is_first], exact_sums(np.cumsum(is_first) - 1, duration[rows], int(np.count_nonzero(is_first)))
