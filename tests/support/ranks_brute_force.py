"""Who came last in each collective of two ranks and for how long, computed in another way: plain SQL and Python.

Kernels of NCCL are paired by their order alone. The clocks' offset is the one at which most pairs end together: the
middle of the densest stretch of differences, and no median of the package's.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import NamedTuple


class Pair(NamedTuple):
    """One collective: who came last, and how long the other waited, in ns."""

    late_rank: int
    wait_ns: int


def kernels(path: Path) -> list[tuple[int, int]]:
    """Start and end of NCCL's kernels, in order."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        return db.execute(
            'SELECT k.start, k."end" FROM CUPTI_ACTIVITY_KIND_KERNEL AS k '
            "JOIN StringIds AS s ON s.id = k.demangledName WHERE s.value LIKE 'ncclDevKernel%' ORDER BY k.start"
        ).fetchall()


def offset(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> int:
    """What is added to the second's times: the middle of the shortest stretch that holds half of the differences."""
    apart = sorted(one[1] - other[1] for one, other in zip(first, second, strict=True))
    half = len(apart) // 2
    width, begin = min((apart[place + half] - apart[place], place) for place in range(len(apart) - half))
    return apart[begin] + width // 2


def late(first: Path, second: Path) -> list[Pair]:
    """Every collective of two ranks, in order."""
    a, b = kernels(first), kernels(second)
    shift = offset(a, b)
    found = []
    for (one, one_end), (other, other_end) in zip(a, [(start + shift, end + shift) for start, end in b], strict=True):
        last = max(one, other)
        # the root of a broadcast may be done before the other rank comes: it does not wait for it
        until = min(last, one_end if one < other else other_end)
        found.append(Pair(int(other > one), until - min(one, other)))
    return found
