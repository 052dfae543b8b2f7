"""Searches for state changes and open intervals on threads; used to cut idle gaps.

All lanes (threads or processes) are concatenated in one sorted array of keys, so that a million lookups are one
vectorized binary search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array, Line, peel, union
from nvprof_kit._trace.frames import few

Owners = npt.NDArray[np.integer[Any]]
"""The innermost interval from each change on, or `NONE`."""


@dataclass(frozen=True)
class Changes:
    """Times at which the state changes, by lane.

    Attributes:
        lanes: The lanes with changes, ascending.
        line: The line of lanes, each 2 ns longer than the time from the first to the last change.
        keys: The times as positions on the line, ascending.
    """

    lanes: Int64Array
    line: Line
    keys: Int64Array

    def key(self, lane: Int64Array, *moments: Int64Array) -> list[Int64Array]:
        """Keys of times on lanes; `NONE`, which sorts before all keys, on a lane without changes."""
        if not len(self.lanes):
            return [np.full(len(lane), NONE, dtype=np.int64) for _ in moments]
        lane_index = np.minimum(np.searchsorted(self.lanes, lane), len(self.lanes) - 1)
        unknown = np.flatnonzero(self.lanes[lane_index] != lane)
        keys = [self.line.at(lane_index, self.line.within(time, before=1)) for time in moments]
        for keys_of_time in keys:
            keys_of_time[unknown] = NONE
        return keys

    def inside(self, lane: Int64Array, start: Int64Array, end: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The changes strictly inside intervals: index of the interval, and time of the change."""
        if not self.near(start, end):
            nothing = np.zeros(0, dtype=np.int64)
            return nothing, nothing
        start_keys, ends = self.key(lane, start, end)
        low = np.searchsorted(self.keys, start_keys, side="right")
        counts = np.maximum(np.searchsorted(self.keys, ends, side="left") - low, 0)
        row = np.repeat(np.arange(len(lane)), counts)
        first = np.concatenate(([0], np.cumsum(counts)[:-1])) if len(counts) else counts
        keys = self.keys[np.arange(len(row)) + (low - first)[row]]
        return row, self.line.moment(keys)

    def before(self, lane: Int64Array, time: Int64Array) -> Int64Array:
        """Index of the last change at or before each time, on any lane, or `NONE`."""
        return np.searchsorted(self.keys, self.key(lane, time)[0], side="right") - 1

    def near(self, start: Int64Array, end: Int64Array) -> bool:
        """Whether a change on any lane can lie between the first start and the last end. Where changes are rare, most
        intervals need no search.
        """
        if not len(start) or not len(self.keys):
            return False
        return bool(start.min() <= self.line.origin + self.line.span and end.max() >= self.line.origin)


@dataclass(frozen=True)
class Timeline:
    """The state of every thread over time: what is innermost at once in several lookups.

    Attributes:
        changes: The times at which anything changes.
        states: For each lookup, the innermost from each of these times on, with an entry for `NONE` appended.
    """

    changes: Changes
    states: tuple[Int64Array, ...]

    @classmethod
    def of(cls, lookups: Sequence[tuple[Changes, Owners]], changes_only: Sequence[Changes]) -> Timeline:
        """Merge changes.

        Args:
            lookups: Changes of what is innermost, and the innermost from each on.
            changes_only: Other changes.
        """
        changes = [*(interval for interval, _ in lookups), *changes_only]
        lanes = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *(interval.lanes for interval in changes)]))
        nonempty = [interval for interval in changes if len(interval.keys)]
        origin = min((interval.line.origin for interval in nonempty), default=0)
        line = Line(
            origin,
            max((interval.line.origin + interval.line.span for interval in nonempty), default=origin + 2) - origin,
        )
        parts = []
        for interval in changes:  # move them to the common line
            origin_ns = np.full(len(interval.lanes), interval.line.origin)
            origins = interval.line.at(np.arange(len(interval.lanes)), origin_ns)
            shift = line.at(np.searchsorted(lanes, interval.lanes), origin_ns) - origins
            changes_of_lane = np.diff(np.searchsorted(interval.keys, origins), append=len(interval.keys))
            is_one = len(np.unique(shift)) == 1  # as where one lane has all changes: without a column of these
            parts.append(interval.keys + (shift[0] if is_one else np.repeat(shift, changes_of_lane)))
        keys = np.concatenate(parts)
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        interval_part = np.repeat(np.arange(len(parts), dtype=np.int8), [len(part) for part in parts])[order]
        counts = [len(part) for part in parts]
        del parts, order  # each of these columns is as long as all changes
        last = np.append(keys[1:] > keys[:-1], True)[: len(keys)]  # of changes at the same time
        keys = keys[last]
        states = []
        for number, (_, owner) in enumerate(lookups):
            latest = np.cumsum(interval_part == number, dtype=np.int32)[last]
            state = np.full(len(keys) + 1, NONE, dtype=np.int64)
            state[:-1] = np.append(owner[: counts[number]], owner.dtype.type(NONE))[latest - 1]
            states.append(state)
        return cls(Changes(lanes, line, keys), tuple(states))

    def pieces(
        self, lane: Int64Array, start: Int64Array, end: Int64Array, first: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Cut intervals at the changes inside them: interval, start and state (an index into each of `states`) of each
        piece, by interval and time.

        Args:
            lane: The lane of each interval.
            start: Its start.
            end: Its end.
            first: Its first state, from ``changes.before(lane, start)``.
        """
        changes = self.changes
        (ends,) = changes.key(lane, end)
        counts = np.maximum(np.searchsorted(changes.keys, ends, side="left") - first, 1)
        row = np.repeat(np.arange(len(lane)), counts)
        first_piece = np.cumsum(counts) - counts
        state = np.arange(len(row)) + (first - first_piece)[row]
        piece_start = changes.line.moment(changes.keys[state]) if len(changes.keys) else start.copy()
        piece_start[first_piece] = start
        return row, piece_start, state


class IntervalUnion:
    """The union of intervals in each lane.

    Args:
        lane, start, end: Lane and times of each interval, shape ``(n,)`` each.
    """

    def __init__(self, lane: Int64Array, start: Int64Array, end: Int64Array) -> None:
        real = end > start
        lane, start, end = lane[real], start[real], end[real]
        line = Line.over((start,), (end,), beyond=2)
        lanes, lane_index = np.unique(lane, return_inverse=True)
        # starts and ends alternate: an even index is a start
        keys = np.stack(union(line.at(lane_index, start), line.at(lane_index, end)), axis=1).ravel()
        self.changes = Changes(lanes, line, keys)

    def covers(self, lane: Int64Array, time: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether an interval of the lane is open at a time, shape ``(n,)``."""
        if not self.changes.near(time, time):
            return np.zeros(len(time), dtype=bool)
        covered: npt.NDArray[np.bool_] = self.changes.before(lane, time) % 2 == 0
        return covered


@dataclass(frozen=True)
class Stack:
    """Finds the innermost interval on a thread at a given time.

    Intervals of one thread nest. If one does not, because of rounded times, it is cut at the end of the enclosing
    interval.

    Attributes:
        changes: The times at which the innermost interval changes.
        owner: The innermost interval from each of these times on, or `NONE`.
    """

    changes: Changes
    owner: Owners

    @classmethod
    def of(cls, lane: Int64Array, start: Int64Array, end: Int64Array) -> tuple[Stack, Int64Array, Int64Array]:
        """The stack; the innermost interval that encloses each, or `NONE`; and how many enclose it, shape ``(n,)``."""
        line = Line.over((start,), (end,), beyond=2)
        lanes = few(lane)
        lane_index = np.searchsorted(lanes, lane)
        starts, finishes = line.at(lane_index, start), line.at(lane_index, end)
        order = np.argsort(lane_index.astype(np.int16), kind="stable")  # by radix, in one pass
        if not (starts[order][1:] > starts[order][:-1]).all():  # calls of a thread are mostly in the file by start
            order = np.lexsort((-finishes, starts))
        order = order[finishes[order] > starts[order]]
        nesting = peel(starts, finishes, order, shorten=True)
        assert nesting is not None, "what is shortened nests"
        parent, depth = nesting
        start_keys, finish = starts[order], finishes[order]
        del starts, finishes, lane_index, nesting
        owner = np.full(2 * len(order) + 1, NONE, dtype=np.int32 if len(lane) < 1 << 31 else np.int64)
        keys = np.empty(2 * len(order), dtype=np.int64)
        if not depth.any():  # most calls follow one another
            keys[0::2], keys[1::2], owner[0:-1:2] = start_keys, finish, order
            return cls(Changes(lanes, line, keys), owner), parent, depth
        # ties: ends from the inside out, then starts from the outside in
        ends = len(order) - 1 - np.argsort(finish[::-1], kind="stable")
        finish = finish[ends]
        of_start = np.arange(len(order)) + np.searchsorted(finish, start_keys, side="right")
        keys[of_start], owner[of_start] = start_keys, order
        del of_start
        of_end = np.arange(len(order)) + np.searchsorted(start_keys, finish, side="left")
        keys[of_end], owner[of_end] = finish, parent[order[ends]]
        return cls(Changes(lanes, line, keys), owner), parent, depth

    def innermost(self, lane: Int64Array, time: Int64Array) -> Int64Array:
        """The innermost interval open on a lane at a time, or `NONE`, shape ``(n,)``."""
        owners: Int64Array = self.owner[self.changes.before(lane, time)].astype(np.int64)
        return owners
