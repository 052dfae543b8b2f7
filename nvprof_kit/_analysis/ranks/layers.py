"""Layer x phase x rank: each rank's median over steps, and the ranks that differ from their equals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._analysis.ranks.stages import with_equals
from nvprof_kit._result.column import Column, Columns

if TYPE_CHECKING:
    import pandas as pd

COLUMNS: Columns = {
    "layer": Column("module path, or `(none)`", kind="str"),
    "phase": Column("phase of the layer or of the loop", kind="str"),
    "rank": Column("rank"),
    "median_ns": Column("time in its own compute kernels, median over the rank's steps", "ns", kind="float"),
    "idle_ns": Column("time in which the device was idle in this layer, median over steps", "ns", kind="float"),
    "comm_ns": Column("time in its communication kernels, including waiting, median over steps", "ns", kind="float"),
    "ops": Column("number of its compute kernels, median over steps", kind="float"),
    "steps": Column("number of steps that contain it"),
    "stage": Column("pipeline stage of the rank, in the order of layers; 0 if all ranks have the same layers"),
    "peers_ns": Column(
        "median of `median_ns` over its peers: the ranks of its stage with this layer and phase; if there are "
        "none, the corresponding layers of all stages",
        "ns",
        kind="float",
    ),
    "peers_idle_ns": Column("median of `idle_ns` over its peers", "ns", kind="float"),
    "excess_ns": Column("`median_ns` minus `peers_ns`", "ns", kind="float"),
    "score": Column("`excess_ns` divided by the scaled median absolute deviation of the peers", kind="float"),
    "unlike": Column(
        "True if the rank differs from its peers: score above 5, and excess above 5 % and 10 µs", kind="bool"
    ),
}
"""The columns of the table of layers."""


def layer_table(medians: pd.DataFrame) -> pd.DataFrame:
    """The table, with `COLUMNS`; see `nvprof_kit._analysis.ranks.stages` for the definition of equals.

    Args:
        medians: See `nvprof_kit._trace.jobs.tables.JobTables.layer_medians`.
    """
    medians = with_equals(medians)
    peers = medians["peers_ns"]
    excess = medians["median_ns"] - peers
    spread = 1.4826 * excess.abs().groupby(medians["group"], sort=False).transform("median")
    made = medians.assign(
        excess_ns=excess.astype("int64"),
        score=np.round(excess / np.maximum(spread, np.maximum(peers * 0.01, 1000.0)), 2),
    )
    several = made["equals"] > 2
    made["unlike"] = several & (made["score"] > 5) & (excess > 0.05 * peers) & (excess > 10_000)
    ordered = made.sort_values(["layer", "phase", "rank"], kind="stable", ignore_index=True)
    table: pd.DataFrame = ordered[list(COLUMNS)]
    return table
