"""How much of a stretch of time is covered by some intervals, a million stretches at once."""

from __future__ import annotations

import numpy as np

from nvprof_kit.analysis.nesting import Int64Array


class Cover:
    """The union of intervals, lane by lane.

    Args:
        lane: Lane of each interval; intervals of different lanes do not meet, shape ``(n,)``.
        start: Starts in ns, shape ``(n,)``.
        end: Ends in ns, shape ``(n,)``.
    """

    def __init__(self, lane: Int64Array, start: Int64Array, end: Int64Array) -> None:
        self._lanes, place = np.unique(lane, return_inverse=True)
        self._origin = int(start.min(initial=0))
        self._span = int(end.max(initial=0)) - self._origin + 1
        begins, finishes = (place * self._span + (moment - self._origin) for moment in (start, end))
        order = np.argsort(begins, kind="stable")
        begins, reach = begins[order], np.maximum.accumulate(finishes[order]) if len(order) else finishes
        fresh = np.concatenate(([True], begins[1:] > reach[:-1])) if len(order) else np.zeros(0, dtype=bool)
        self._begins = begins[fresh]
        self._ends = reach[np.append(np.flatnonzero(fresh)[1:] - 1, len(order) - 1)] if len(order) else reach
        self._before = np.concatenate(([0], np.cumsum(self._ends - self._begins)))

    def inside(self, lane: Int64Array, start: Int64Array, end: Int64Array) -> Int64Array:
        """How much of each stretch the lane's intervals cover, in ns, shape ``(m,)`` each."""
        return self._until(lane, end) - self._until(lane, start)

    def _until(self, lane: Int64Array, moment: Int64Array) -> Int64Array:
        """Covered time before a moment, counted from an arbitrary zero of the lane."""
        if not len(self._begins):
            return np.zeros(len(lane), dtype=np.int64)
        place = np.minimum(np.searchsorted(self._lanes, lane), len(self._lanes) - 1)
        key = place * self._span + np.clip(moment - self._origin, 0, self._span - 1)
        index = np.searchsorted(self._begins, key, side="right") - 1
        here = np.maximum(index, 0)
        within = np.minimum(key, self._ends[here]) - self._begins[here]
        found = np.where(index < 0, 0, self._before[here] + within)
        return np.where(self._lanes[place] == lane, found, 0)
