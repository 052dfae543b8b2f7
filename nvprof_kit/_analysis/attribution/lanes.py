"""Concatenates lanes of time (devices, threads, windows) on one integer line, so that one sort or binary search
handles all lanes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[np.int64]

_FITS = 1 << 62


@dataclass(frozen=True)
class Line:
    """A line of lanes.

    Attributes:
        origin: The earliest time in ns, the zero of each lane.
        span: Length of a lane, longer than any time range in it.
    """

    origin: int
    span: int

    @classmethod
    def over(cls, starts: Iterable[_Array], ends: Iterable[_Array], beyond: int = 1) -> Line:
        """The line for some intervals.

        Args:
            starts: Starts in ns, arrays of any length.
            ends: Ends in ns, none before the first start.
            beyond: Padding of each lane after the last end, in ns.
        """
        origin = min((int(one.min()) for one in starts if len(one)), default=0)
        latest = max((int(one.max()) for one in ends if len(one)), default=origin)
        return cls(origin, latest - origin + beyond)

    def fits(self, lane: _Array) -> bool:
        """Whether positions in all of these lanes fit in int64, with room for sums and differences."""
        return int(lane.max(initial=0)) * self.span <= _FITS

    def at(self, lane: _Array, moment: _Array) -> _Array:
        """Positions on the line of times in lanes, shape ``(n,)`` each.

        Raises:
            OverflowError: There are too many lanes for this time span.
        """
        if not self.fits(lane):
            raise OverflowError(f"{int(lane.max()) + 1} lanes of {self.span} ns do not fit into 64 bits")
        if not lane.any():
            return moment - self.origin
        return lane * self.span + (moment - self.origin)

    def within(self, moment: _Array, before: int = 0) -> _Array:
        """Times clamped to the lane, whose lower bound is `before` ns before its zero."""
        return np.clip(moment, self.origin - before, self.origin + self.span - 1)

    def moment(self, place: _Array) -> _Array:
        """The time in ns of a position on the line, in any lane."""
        return place % self.span + self.origin


def union(begins: _Array, finishes: _Array) -> tuple[_Array, _Array]:
    """The union of intervals as sorted starts and ends; adjacent intervals are merged.

    Args:
        begins: Positions on a line, shape ``(n,)``.
        finishes: Positions on the same line, shape ``(n,)``.
    """
    if not len(begins):
        return begins, finishes
    order = np.argsort(begins, kind="stable")
    begins, reach = begins[order], np.maximum.accumulate(finishes[order])
    fresh = np.flatnonzero(np.concatenate(([True], begins[1:] > reach[:-1])))
    return begins[fresh], reach[np.append(fresh[1:] - 1, len(order) - 1)]
