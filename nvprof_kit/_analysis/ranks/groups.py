"""Finds which ranks form a communicator if captures do not record it: those whose collectives end together.

A capture without communicator ids identifies a communicator by its stream. The streams of two tensor-parallel groups
have the same name; the ends of their collectives separate them. Within a group, ends differ by a constant (the clock
offset), and between groups they do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pandas as pd

LEAST_NS = 3_000
"""Two ranks are in one group if from one collective to the next, their ends move relative to each other by less than
this in most of them,"""

TIMES = 8
"""or by less than this multiple of the minimum over all pairs."""

MOST_OF_THEM = 0.75
"""Ranks of different groups can end together most of the time, because they wait for the same ranks in other groups."""

NEARLY_ALL = 0.9
"""A group is taken for several of equal size if in this share of the collectives, its ranks move"""

APART_NS, APART_TIMES = 200_000, 4
"""by more than this relative to those of the others, and by this multiple of what they move within their own. On a GPU
that ranks share, the ends of one collective move by 0.1 ms.
"""

MOST_SAMPLES = 300
"""Maximum number of collectives to compare."""


def groups_of(ends: pd.DataFrame) -> pd.DataFrame:
    """The groups of ranks of communicators identified by streams: comm, rank, part.

    Args:
        ends: The ends of their collectives: comm, s, k, rank, end_ns, size (ranks of the communicator, -1: unknown).
    """
    rows: list[tuple[str, int, int]] = []
    for comm, mine in ends.groupby("comm"):
        if mine["rank"].nunique() < 3:
            continue
        ranks, moved, rarely = movements(mine)
        limit = max(LEAST_NS, TIMES * float(moved.min()))
        size = mine.groupby("rank")["size"].max().reindex(ranks).to_numpy()
        parts = _joined(moved, limit, size)
        if (size <= 0).all():
            parts = _divided(rarely, parts)
        rows += [(str(comm), rank, which) for rank, which in zip(ranks, parts, strict=True)]
    return part_table(rows)


def part_table(rows: list[tuple[str, int, int]]) -> pd.DataFrame:
    """The part of a communicator to which a rank belongs: comm, rank, part."""
    import pandas as pd

    frame: pd.DataFrame = pd.DataFrame.from_records(rows, columns=["comm", "rank", "part"])
    made: pd.DataFrame = frame.astype({"rank": "int64", "part": "int64"})
    return made


def movements(mine: pd.DataFrame) -> tuple[list[int], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The ranks of a communicator, and how far the ends of two of them move relative to each other from one collective
    to the next: in `MOST_OF_THEM`, and in `NEARLY_ALL`. Infinite below the diagonal, and where they share too few.

    Args:
        mine: The ends of its collectives: s, k, rank, end_ns.
    """
    # where a rank lost collectives of a step, its others have wrong numbers
    count = mine.groupby(["s", "rank"])["end_ns"].transform("size")
    whole = mine[count == count.groupby(mine["s"]).transform("max")]
    wide = whole.pivot_table(index=["s", "k"], columns="rank", values="end_ns", aggfunc="first")
    wide = wide.reindex(columns=sorted(mine["rank"].unique()))
    moved, rarely = _moved((wide - wide.min()).to_numpy(dtype=np.float64))  # exact enough for differences
    return [int(str(rank)) for rank in wide.columns], moved, rarely


def _joined(moved: npt.NDArray[np.float64], limit: float, size: npt.NDArray[np.int64]) -> list[int]:
    """The part of each rank: the pairs that move least are joined first, up to the communicator's known size."""
    part = list(range(len(size)))
    room = np.where(size > 1, size, len(size))
    one, other = np.nonzero(moved <= limit)
    order = np.argsort(moved[one, other], kind="stable")
    for a, b in zip(one[order].tolist(), other[order].tolist(), strict=True):
        both = [place for place, of in enumerate(part) if of in (part[a], part[b])]
        if part[a] != part[b] and len(both) <= room[both].min():
            joined = part[a]
            for place in both:
                part[place] = joined
    return part


def _divided(moved: npt.NDArray[np.float64], part: list[int]) -> list[int]:
    """The parts; one that consists of groups of equal size, far from each other, is divided into these."""
    made = list(part)
    for which in sorted(set(part)):
        mine = [rank for rank, of in enumerate(part) if of == which]
        if len(mine) < 4:
            continue
        among = moved[np.ix_(mine, mine)]
        for rank, first in zip(mine, _equal_groups(among), strict=True):
            made[rank] = mine[first]
    return made


def _equal_groups(moved: npt.NDArray[np.float64]) -> list[int]:
    """The first rank of each rank's group; 0 for all if they are not clearly several groups of equal size."""
    part = np.arange(len(moved))
    known = np.triu(np.ones_like(moved, dtype=bool), 1)
    one, other = np.nonzero(known & np.isfinite(moved))
    for index in np.argsort(moved[one, other], kind="stable").tolist():
        a, b = part[one[index]], part[other[index]]
        if a == b:
            continue
        sizes = np.unique(part, return_counts=True)[1]
        if sizes.min() > 1 and sizes.min() == sizes.max():
            inside = part[:, None] == part[None, :]
            apart = max(APART_NS, APART_TIMES * float(moved[known & inside].max()))
            if float(moved[known & ~inside].min()) >= apart:
                return [int(first) for first in part]
        part[part == b] = a
    return [0] * len(part)


def _moved(ends: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """How far the ends of two ranks move relative to each other from one collective to the next: in `MOST_OF_THEM`, and
    in `NEARLY_ALL`. Infinite below the diagonal, and where they share too few. Neither offset nor drift of the clocks
    matters.

    Args:
        ends: By collective and rank, NaN where there is none.
    """
    ranks = ends.shape[1]
    steps = np.diff(ends, axis=0)
    steps = steps[:: max(len(steps) // MOST_SAMPLES, 1)]
    moved, rarely = (np.full((ranks, ranks), np.inf) for _ in range(2))
    for one in range(ranks - 1):
        apart = np.abs(steps[:, one + 1 :] - steps[:, one, None])
        enough = np.count_nonzero(~np.isnan(apart), axis=0) > 2
        if enough.any():
            found = np.nanquantile(apart[:, enough], (MOST_OF_THEM, NEARLY_ALL), axis=0)
            moved[one, one + 1 + np.flatnonzero(enough)], rarely[one, one + 1 + np.flatnonzero(enough)] = found
    return moved, rarely
