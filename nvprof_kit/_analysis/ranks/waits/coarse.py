"""Causes of waiting in jobs with too many collectives to analyze one by one: analyzed per step instead.

In a step, a rank is a root if it spends clearly more time computing, copying or idle than its equals (ranks with the
same layers). Waiting for a root is charged to that root. Waiting for a rank that is late without spending more time is
a chain; it is charged to the step's roots in proportion to their excess.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._trace.jobs.tables import JobTables
from nvprof_kit.names import NO_LAYER, NO_PHASE

if TYPE_CHECKING:
    import pandas as pd

LEAST_NS = 20_000
LEAST_SHARE = 0.03
"""Minimum excess in a layer."""

ROOT = 0.25
"""Minimum excess of a root, as a share of the step's largest."""


def coarse_charges(tables: JobTables) -> pd.DataFrame:
    """All waiting by step, c (communicator), rank, cause, layer and phase: wait_ns, bare (its exposed share), and n,
    the communicator's ranks.
    """
    import pandas as pd

    waited = tables.by_late_rank().rename(columns={"late_rank": "rank"})
    waited["bare"] = waited["exposed_ns"] / waited["wait_ns"].clip(lower=1)
    shares = _shares(tables.excesses(LEAST_NS, LEAST_SHARE))
    roots = shares.groupby(["step", "rank"], sort=False)["weight"].sum().reset_index()
    own = waited.merge(roots[["step", "rank"]], on=["step", "rank"], how="left", indicator="root")
    # the profilers start in the first step, so a late rank there has no root to charge
    cold = own["step"] == own["step"].min()
    is_root = (own["root"] == "both").to_numpy() & ~cold.to_numpy()
    own = own.drop(columns="root")
    direct = own[is_root].merge(shares, on=["step", "rank"])
    direct["share"] = direct["weight"] / direct.groupby(["step", "c", "rank"])["weight"].transform("sum")
    rest = (
        own[~is_root & ~cold.to_numpy()]
        .groupby(["step", "c"], sort=False)
        .agg(wait_ns=("wait_ns", "sum"), n=("n", "max"), exposed_ns=("exposed_ns", "sum"))
        .reset_index()
    )
    rest["bare"] = rest["exposed_ns"] / rest["wait_ns"].clip(lower=1)
    chained = rest.merge(shares, on="step")
    chained["share"] = chained["weight"] / chained.groupby(["step", "c"])["weight"].transform("sum")
    lonely = own[~is_root & ~(own["step"].isin(shares["step"]) & ~cold).to_numpy()]
    cause = np.where(lonely["step"] == own["step"].min(), "start_up", "unresolved")
    unknown = lonely.assign(cause=cause, layer=NO_LAYER, phase=NO_PHASE)
    parts = [_whole(direct, ["step", "c", "rank"]), _whole(chained, ["step", "c"]), unknown]
    columns = ["step", "c", "n", "rank", "cause", "layer", "phase", "wait_ns", "bare"]
    made: pd.DataFrame = pd.concat([part[columns] for part in parts], ignore_index=True)
    return made


def _shares(more: pd.DataFrame) -> pd.DataFrame:
    """The roots of each step and their causes: step, rank, cause, layer, phase, weight (in ns)."""
    more = more.assign(whole=more.groupby(["step", "rank"])["excess_ns"].transform("sum"))
    more = more[more["whole"] >= ROOT * more.groupby("step")["whole"].transform("max")]
    compute = np.where(more["more_ops"], "more_kernels", "slower_kernels")
    made: pd.DataFrame = more.assign(cause=np.where(more["kind"] == "compute", compute, more["kind"]))
    named = made.rename(columns={"excess_ns": "weight"})
    table: pd.DataFrame = named[["step", "rank", "cause", "layer", "phase", "weight"]]
    return table


def _whole(shared: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """The shares in integer nanoseconds that add up to each wait."""
    shared = shared.sort_values([*keys, "share"], kind="stable", ignore_index=True)
    ns = np.floor(shared["share"].to_numpy() * shared["wait_ns"].to_numpy()).astype(np.int64)
    groups = shared.groupby(keys, sort=False)
    last = ~shared.duplicated(keys, keep="last").to_numpy()
    given = groups["wait_ns"].transform("first").to_numpy()
    total = shared.assign(ns=ns).groupby(keys, sort=False)["ns"].transform("sum").to_numpy()
    made: pd.DataFrame = shared.assign(wait_ns=ns + np.where(last, given - total, 0))
    return made
