"""Which ranks form a communicator, where captures do not say: those whose collectives end together.

A capture without ids names a communicator by its stream. The streams of two tensor-parallel groups bear the same name,
and are told apart by their ends: within a group these differ by a constant, the clocks' offset, and between groups
they do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

LEAST_NS = 5_000
"""Ends that vary by less against one another are of one group."""

TIMES = 8
"""And those that vary by less than so many times the least of all pairs."""

MOST_SAMPLES = 300
"""Collectives that are compared at most."""


def groups_of(ends: pd.DataFrame) -> pd.DataFrame:
    """The groups of ranks behind communicators that are named by streams: comm, rank, part.

    Args:
        ends: Their ends: comm, s, k, rank, end_ns.
    """
    import pandas as pd

    rows: list[tuple[str, int, int]] = []
    for comm, mine in ends.groupby("comm"):
        wide = mine.pivot_table(index=["s", "k"], columns="rank", values="end_ns", aggfunc="first")
        ranks = [int(str(rank)) for rank in wide.columns]
        if len(ranks) < 3:
            continue
        origin = wide.min()  # floats hold differences of a capture's own times exactly enough
        values = (wide - origin).to_numpy(dtype=np.float64)[:: max(len(wide) // MOST_SAMPLES, 1)]
        apart = np.full((len(ranks), len(ranks)), np.inf)
        for one in range(len(ranks)):
            for other in range(one + 1, len(ranks)):
                difference = values[:, one] - values[:, other]
                difference = difference[~np.isnan(difference)]
                if len(difference) > 2:
                    apart[one, other] = np.median(np.abs(difference - np.median(difference)))
        limit = max(LEAST_NS, TIMES * float(apart.min()))
        part = list(range(len(ranks)))
        for one, other in np.argwhere(apart <= limit).tolist():
            joined, gone = part[one], part[other]
            part = [joined if place == gone else place for place in part]
        rows += [(str(comm), rank, which) for rank, which in zip(ranks, part, strict=True)]
    frame: pd.DataFrame = pd.DataFrame.from_records(rows, columns=["comm", "rank", "part"])
    made: pd.DataFrame = frame.astype({"rank": "int64", "part": "int64"})
    return made
