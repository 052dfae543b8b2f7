"""Refines causes: a host that is late because of data loading or garbage collection, and the part of a pipeline stage's
time that is regular work and not a fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._analysis.ranks.stages import with_equals
from nvprof_kit._trace.jobs.tables import JobTables
from nvprof_kit.names import NO_LAYER

if TYPE_CHECKING:
    import pandas as pd

LEAST_NS = 300_000
"""Minimum excess of a host's time over the median of the ranks."""

EXPLAINS = 0.5
"""A host's lateness in a step is attributed to an earlier activity that took at least this share of it."""

_WORK = ("more_kernels", "slower_kernels")


def host_reasons(causes: pd.DataFrame, tables: JobTables) -> pd.DataFrame:
    """Rename rows of the cause ``host`` if the host spent more time than others loading data or collecting garbage in
    that step: it lost its lead then, and the device idled later.

    Args:
        causes: step, rank, cause, layer, phase, and cost (how long a waiting rank waits).
        tables: The job's maps.

    Returns:
        The rows, in the same order, with updated cause, layer and phase.
    """
    made = causes.copy()
    for spent, cause in (("gc_ns", "garbage_collection"), ("loading_ns", "data_loading")):
        more = tables.host_excesses(spent, LEAST_NS)
        if not len(more):
            continue
        sums = made.assign(host=made["cost"].where(made["cause"] == "host", 0.0))
        sums["direct"] = made["cost"].where(made["cause"] == cause, 0.0)
        found = sums.groupby(["step", "rank"])[["host", "direct"]].sum().reset_index().merge(more, on=["step", "rank"])
        found = found[found["excess_ns"] - found["direct"] >= EXPLAINS * found["host"]]
        merged = made[["step", "rank"]].merge(found[["step", "rank"]], on=["step", "rank"], how="left", indicator="is")
        renamed = (merged["is"] == "both").to_numpy() & (made["cause"] == "host").to_numpy()
        made.loc[renamed, "cause"] = cause
        if cause == "data_loading":
            made.loc[renamed, ["layer", "phase"]] = [NO_LAYER, "data"]
    named: pd.DataFrame = made
    return named


def stage_work(shares: pd.DataFrame, passed_on: np.ndarray, tables: JobTables) -> pd.DataFrame:
    """Split shares of sends and receives between stages: time that the late stage's equals also spend is regular work.

    Args:
        shares: instance, late_rank, cause, layer, phase, share.
        passed_on: Which instances are sends and receives, shape ``(m,)``.
        tables: The job's maps.
    """
    import pandas as pd

    table = with_equals(tables.layer_medians())
    if table["stage"].nunique() < 2:
        return shares
    over = {
        "work": 1 - table["peers_ns"] / table["median_ns"].clip(lower=1),
        "host": 1 - table["peers_idle_ns"] / table["idle_ns"].clip(lower=1),
    }
    kinds = [
        table[["rank", "layer", "phase"]].assign(kind=kind, over=value.clip(lower=0)) for kind, value in over.items()
    ]
    keys = ["rank", "layer", "phase", "kind"]
    kind = np.where(shares["cause"].isin(_WORK), "work", shares["cause"])
    wanted = shares.assign(rank=shares["late_rank"], kind=kind)[keys]
    fault = wanted.merge(pd.concat(kinds), on=keys, how="left")["over"].to_numpy()
    # work outside layers, such as the loss, is specific to a stage
    fault = np.where(np.isnan(fault) | ((shares["layer"] == NO_LAYER) & (kind == "work")).to_numpy(), 0.0, fault)
    split = passed_on[shares["instance"].to_numpy()] & np.isin(kind, list(over))
    own = shares[split].assign(cause="pipeline", share=shares["share"][split] * (1 - fault[split]))
    rest = shares.assign(share=np.where(split, shares["share"] * fault, shares["share"]))
    both = pd.concat([rest, own], ignore_index=True)
    made: pd.DataFrame = both[both["share"] > 0].reset_index(drop=True)
    return made
