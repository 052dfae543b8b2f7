"""Layer x phase x rank: each rank's median over steps, and the ranks that differ from their equals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._analysis.ranks.stages import with_equals

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {
    "layer": "module path, or `(none)`",
    "phase": "phase of the layer or of the loop",
    "rank": "rank",
    "median_ns": "time in its own compute kernels, median over the rank's steps",
    "idle_ns": "time in which the device was idle in this layer, median over steps",
    "comm_ns": "time in its communication kernels, including waiting, median over steps",
    "ops": "number of its compute kernels, median over steps",
    "steps": "number of steps that contain it",
    "stage": "pipeline stage of the rank, in the order of layers; 0 if all ranks have the same layers",
    "peers_ns": "median of `median_ns` over its peers: the ranks of its stage with this layer and phase; if there are "
    "none, the corresponding layers of all stages",
    "peers_idle_ns": "median of `idle_ns` over its peers",
    "excess_ns": "`median_ns` minus `peers_ns`",
    "score": "`excess_ns` divided by the scaled median absolute deviation of the peers",
    "unlike": "True if the rank differs from its peers: score above 5, and excess above 5 % and 10 µs",
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
