"""Which range is the innermost on a thread at a moment, and which range encloses which.

NVTX push/pop ranges nest on their thread, so at every moment one range is the innermost; it changes only where a
range begins or ends. `Nesting` holds these changes as one sorted array over all threads, and a million questions
are one binary search.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Integers = npt.NDArray[np.int64] | npt.NDArray[np.int32]

NONE = -1
"""Index that stands for "no range"."""


@dataclass(frozen=True)
class Nesting:
    """The nesting of a set of ranges.

    Attributes:
        parent: For each range the index of the innermost range that encloses it on its thread, or `NONE`.
        depth: For each range the number of ranges that enclose it.
        threads: The threads that have a range, ascending.
        change: Moments at which the innermost range changes, as `_keys`, ascending.
        owner: The innermost range from each of these moments on, or `NONE`.
        origin: The earliest start, the zero of the keys.
        span: Distance of two threads in the keys, longer than the capture.
    """

    parent: Int64Array
    depth: Int64Array
    threads: Int64Array
    change: Int64Array
    owner: Int64Array
    origin: int
    span: int

    def innermost(self, tid: Int64Array, time: Int64Array) -> Int64Array:
        """The innermost range that is open on a thread at a moment: started at or before it, ended after it.

        Args:
            tid: Thread keys, shape ``(n,)``.
            time: Moments in nanoseconds, shape ``(n,)``.

        Returns:
            Indices of ranges, `NONE` where no range is open, shape ``(n,)``.
        """
        if not len(self.threads):
            return np.full(len(tid), NONE, dtype=np.int64)
        thread = np.searchsorted(self.threads, tid)
        known = self.threads[np.minimum(thread, len(self.threads) - 1)] == tid
        # a moment before the first range or after the last belongs to no range of this thread, nor may it reach
        # into the next one's keys
        inside = known & (time >= self.origin) & (time < self.origin + self.span)
        found = np.searchsorted(self.change, thread * self.span + (time - self.origin), side="right") - 1
        return np.where(inside & (found >= 0), self.owner[np.maximum(found, 0)], NONE)


def nest(start: Int64Array, end: Int64Array, tid: Int64Array, nested: npt.NDArray[np.bool_]) -> Nesting:
    """Find the nesting of ranges.

    Push/pop ranges of one domain nest on their thread. On a thread whose ranges cross, since it has start/end ranges
    too or ranges of several domains, the innermost is the open one that started last.

    Args:
        start: Starts in nanoseconds, shape ``(n,)``.
        end: Ends in nanoseconds, shape ``(n,)``.
        tid: Thread keys, shape ``(n,)``.
        nested: True for a push/pop range, shape ``(n,)``.
    """
    threads, thread = np.unique(tid, return_inverse=True)
    origin = int(start.min()) if len(start) else 0
    span = int(end.max()) - origin + 2 if len(end) else 1
    begins, finishes = thread * span + (start - origin), thread * span + (end - origin)
    crossing = np.isin(thread, np.unique(thread[~nested]))
    parent, depth = np.full(len(start), NONE, dtype=np.int64), np.zeros(len(start), dtype=np.int64)
    straight = np.flatnonzero(~crossing)
    _peel(begins, finishes, straight, parent, depth)
    torn = straight[finishes[straight] > np.append(finishes, np.iinfo(np.int64).max)[parent[straight]]]
    if len(torn):
        crossing |= np.isin(thread, np.unique(thread[torn]))
        straight = np.flatnonzero(~crossing)
        parent[crossing], depth[crossing] = NONE, 0
    changes = [_changes_of_nested(begins, finishes, straight, parent, depth)]
    for one in np.unique(thread[crossing]):
        changes.append(_sweep(begins, finishes, np.flatnonzero(thread == one), parent, depth))
    change, owner = (np.concatenate(parts) for parts in zip(*changes, strict=True))
    order = np.argsort(change, kind="stable")
    return Nesting(parent, depth, threads, change[order], owner[order], origin, span)


def _peel(begins: Int64Array, finishes: Int64Array, ranges: Int64Array, parent: Int64Array, depth: Int64Array) -> None:
    """Fill in parent and depth level by level: what starts before everything earlier has ended is inside something
    earlier.
    """
    left = ranges[np.lexsort((-finishes[ranges], begins[ranges]))]
    above = np.full(len(left), NONE, dtype=np.int64)
    level = 0
    while len(left):
        reach = np.maximum.accumulate(finishes[left])
        outermost = np.concatenate(([True], begins[left][1:] >= reach[:-1]))
        parent[left[outermost]], depth[left[outermost]] = above[outermost], level
        last = np.maximum.accumulate(np.where(outermost, np.arange(len(left)), 0))
        left, above = left[~outermost], left[last[~outermost]]
        level += 1


def _changes_of_nested(
    begins: Int64Array, finishes: Int64Array, ranges: Int64Array, parent: Int64Array, depth: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Moments and owners of properly nested ranges: a start hands over to the range, an end back to its parent."""
    lasting = ranges[finishes[ranges] > begins[ranges]]  # a range without length can hold nothing
    moment = np.concatenate([finishes[lasting], begins[lasting]])
    owner = np.concatenate([parent[lasting], lasting])
    is_start = np.repeat([0, 1], len(lasting))
    rank = np.concatenate(
        [-depth[lasting], depth[lasting]]
    )  # at one moment: ends from the inside out, then starts from the outside in
    order = np.lexsort((rank, is_start, moment))
    return moment[order], owner[order]


def _sweep(
    begins: Int64Array, finishes: Int64Array, ranges: Int64Array, parent: Int64Array, depth: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """The same for one thread whose ranges may cross, event by event: the innermost is the open range that started
    last.
    """
    lasting = ranges[finishes[ranges] > begins[ranges]]
    events = sorted(
        [(int(finishes[i]), 0, 0, int(i)) for i in lasting]
        + [(int(begins[i]), 1, -int(finishes[i]), int(i)) for i in lasting]
    )
    open_ranges: list[int] = []
    moments, owners = [], []
    for moment, is_start, _, index in events:
        if is_start:
            parent[index] = open_ranges[-1] if open_ranges else NONE
            depth[index] = depth[parent[index]] + 1 if open_ranges else 0
            open_ranges.append(index)
        else:
            open_ranges.remove(index)
        moments.append(moment)
        owners.append(open_ranges[-1] if open_ranges else NONE)
    return np.array(moments, dtype=np.int64), np.array(owners, dtype=np.int64)


def inherit(own: Int64Array, nesting: Nesting) -> Int64Array:
    """For each range its own value, or else that of the nearest range around it that has one.

    Args:
        own: A value for each range, `NONE` where it has none of its own, shape ``(n,)``.
        nesting: The nesting of the ranges.
    """
    values: Int64Array = own.copy()
    for level in range(1, int(nesting.depth.max(initial=0)) + 1):
        here = np.flatnonzero((nesting.depth == level) & (own == NONE))
        values[here] = values[nesting.parent[here]]
    return values
