"""Steps in which the capture lost collectives of some ranks: match these by end time instead of order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pandas as pd

    Ends = npt.NDArray[np.int64]

TOGETHER_NS = 100_000
"""Ends on the aligned clock that are further apart belong to different collectives, whatever their order,"""

TIMES = 10
"""unless the distance is within this multiple of the clock resolution."""

LEAST_VOTES = 5
LEAST_SHARE = 0.3
"""An offset is accepted if at least this many collectives, and this share of the rank's, end together with it."""

MOST = 2_000
"""Maximum number of a rank's collectives in a communicator for voting on offsets."""


def shifted_steps(ends: pd.DataFrame, clocks: pd.DataFrame, floor_ns: int) -> pd.DataFrame:
    """Steps in which ranks have equally many collectives, but not the same ones: c, s.

    In such a step, more collectives end together when matched by time than when matched by order.

    Args:
        ends: See `nvprof_kit._trace.jobs.tables.JobTables.ends`; all of them.
        clocks: The clocks as far as known, with `nvprof_kit._analysis.ranks.clocks.COLUMNS`.
        floor_ns: The resolution of the clocks.
    """
    mine = ends[(ends["s"] != -2) & ends["symmetric"]].merge(clocks[clocks["offset_ns"].notna()], on="rank")
    drift = mine["drift_ppm"] / 1e6 * (mine["end_ns"] - mine["at_ns"])
    mine["e"] = mine["end_ns"] + mine["offset_ns"].astype("int64") + drift.round().astype("int64")
    limit = max(TIMES * floor_ns, TOGETHER_NS)
    groups = mine.groupby(["c", "s", "k"])["e"]
    mine["by_order"] = (groups.transform("max") - groups.transform("min") <= limit) & (groups.transform("size") > 1)
    mine = mine.sort_values(["c", "s", "e"], kind="stable", ignore_index=True)
    fresh = (mine["e"].diff() > limit) | (mine["c"] != mine["c"].shift()) | (mine["s"] != mine["s"].shift())
    mine["moment"] = fresh.cumsum()
    twice = mine.duplicated(["moment", "rank"], keep=False)
    mine["by_time"] = (mine.groupby("moment")["e"].transform("size") > 1) & ~twice
    sums = mine.groupby(["c", "s"])[["by_order", "by_time"]].sum().reset_index()
    found: pd.DataFrame = sums[sums["by_time"] > sums["by_order"]][["c", "s"]]
    return found


def voted(ends: pd.DataFrame, ranks: list[int]) -> pd.DataFrame:
    """Renumber the ends of ranks by the clock offset with which the most end together with the communicator's first
    rank.

    Args:
        ends: As for `shifted_steps`; ranks without such an offset are unchanged.
        ranks: The ranks.
    """
    import pandas as pd

    parts = [ends[~ends["rank"].isin(ranks)]]
    for _, mine in ends[ends["s"] != -2].groupby("c"):
        first = int(mine["rank"].min())
        base = mine[mine["rank"] == first]
        for rank, own in mine[mine["rank"].isin(ranks)].groupby("rank"):
            if rank == first or max(len(own), len(base)) > MOST:
                parts.append(own)
                continue
            both = own.merge(base[["s", "k", "end_ns"]], on="s", suffixes=("", "_base"))
            apart = (both["end_ns_base"] - both["end_ns"]).to_numpy()
            chosen = _densest(apart)
            enough = len(chosen) >= max(LEAST_VOTES, LEAST_SHARE * min(len(own), len(base)))
            agreed = both.iloc[chosen].drop_duplicates(["s", "k"]).drop_duplicates(["s", "k_base"])
            parts.append(agreed.assign(k=agreed["k_base"])[list(ends)] if enough else own)
    made: pd.DataFrame = pd.concat(parts, ignore_index=True)
    return made


def _densest(apart: Ends) -> Ends:
    """The indices of the largest set of differences within `TOGETHER_NS`."""
    order = np.argsort(apart, kind="stable")
    sorted_ = apart[order]
    until = np.searchsorted(sorted_, sorted_ + TOGETHER_NS, side="right")
    if not len(order):
        return order
    best = int((until - np.arange(len(order))).argmax())
    chosen: Ends = order[best : until[best]]
    return chosen
