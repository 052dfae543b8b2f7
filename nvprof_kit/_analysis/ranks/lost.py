"""Steps in which ranks lost collectives: there order does not match them, and the moments at which they end do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pandas as pd

    Ends = npt.NDArray[np.int64]

TOGETHER_NS = 100_000
"""Ends that are further apart on the one clock are of two collectives, whatever their order says."""

TIMES = 10
"""And further than so many times what the clocks tell apart."""

LEAST_VOTES = 5
LEAST_SHARE = 0.3
"""An offset is taken where so many collectives, and such a share of the rank's, end together by it."""

MOST = 2_000
"""Collectives of a rank in a communicator up to which offsets are voted on."""


def shifted_steps(ends: pd.DataFrame, clocks: pd.DataFrame, floor_ns: int) -> pd.DataFrame:
    """Steps whose ranks have as many collectives, but not the same ones: c, s.

    There more collectives end together when they are taken by time than when they are by order.

    Args:
        ends: See `nvprof_kit._trace.jobs.tables.JobTables.ends`; all of them.
        clocks: The clocks as far as they are known, with `nvprof_kit._analysis.ranks.clocks.COLUMNS`.
        floor_ns: What they tell apart.
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
    """The ends of some ranks numbered anew: those that the most end together with of the communicator's first rank.

    Args:
        ends: As of `shifted_steps`; of ranks without such an offset they stay as they are.
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
            told = both.iloc[chosen].drop_duplicates(["s", "k"]).drop_duplicates(["s", "k_base"])
            parts.append(told.assign(k=told["k_base"])[list(ends)] if enough else own)
    made: pd.DataFrame = pd.concat(parts, ignore_index=True)
    return made


def _densest(apart: Ends) -> Ends:
    """The places of the most differences that lie within `TOGETHER_NS`."""
    order = np.argsort(apart, kind="stable")
    sorted_ = apart[order]
    until = np.searchsorted(sorted_, sorted_ + TOGETHER_NS, side="right")
    if not len(order):
        return order
    best = int((until - np.arange(len(order))).argmax())
    chosen: Ends = order[best : until[best]]
    return chosen
