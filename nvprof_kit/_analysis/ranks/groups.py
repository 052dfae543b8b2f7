"""Finds which ranks form a communicator if captures do not record it: those whose collectives end together.

A capture without communicator ids identifies a communicator by its stream. The streams of two tensor-parallel groups
have the same name; the ends of their collectives separate them. Within a group, ends differ by a constant (the clock
offset), and between groups they do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

LEAST_NS = 5_000
"""Two ranks whose ends vary relative to each other by less than this are in one group,"""

TIMES = 8
"""or by less than this multiple of the minimum over all pairs."""

MOST_SAMPLES = 300
"""Maximum number of collectives to compare."""


def groups_of(ends: pd.DataFrame) -> pd.DataFrame:
    """The groups of ranks of communicators identified by streams: comm, rank, part.

    Args:
        ends: The ends of their collectives: comm, s, k, rank, end_ns.
    """
    import pandas as pd

    rows: list[tuple[str, int, int]] = []
    for comm, mine in ends.groupby("comm"):
        wide = mine.pivot_table(index=["s", "k"], columns="rank", values="end_ns", aggfunc="first")
        ranks = [int(str(rank)) for rank in wide.columns]
        if len(ranks) < 3:
            continue
        origin = wide.min()  # float64 is exact enough for differences within a capture
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
