"""Pipeline bubbles: how long each stage computes nothing in a step, and its wait for each micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._trace.jobs.tables import JobTables

if TYPE_CHECKING:
    import pandas as pd

BUBBLE_COLUMNS = {
    "step": "step",
    "stage": "pipeline stage",
    "rank": "rank",
    "step_ns": "duration of the step on the rank's device",
    "busy_ns": "the part spent computing or copying",
    "wait_ns": "the part in exposed sends and receives: waiting for the other stage, and moving bytes",
    "host_ns": "the idle part: the host had not launched the next operation, was fetching data, …",
    "other_ns": "the part in other exposed collectives",
    "bubble_ns": "the part that is not busy",
    "bubble_share": "`bubble_ns` divided by `step_ns`",
    "ideal_share": "minimum for GPipe and 1F1B: (p - 1) / (m + p - 1) for p equal stages and m micro-batches",
}
"""The columns of the table of bubbles."""

MICRO_BATCH_COLUMNS = {
    "step": "step",
    "stage": "stage that waits",
    "rank": "rank that waits",
    "direction": "`forward`: waits for the previous stage; `backward`: for the next stage",
    "micro_batch": "index of the message in the step in this direction, from 0",
    "from_rank": "rank that it waits for",
    "wait_ns": "time from its arrival to that of the sender",
    "transfer_ns": "time from the arrival of the sender to the end",
    "bubble_ns": "the exposed part of `wait_ns`",
}
"""The columns of the table of micro-batches."""

_BUSY = ("compute", "copy")


def micro_batches(tables: JobTables, stages: Mapping[int, int]) -> pd.DataFrame:
    """How long each stage waits for each micro-batch, with `MICRO_BATCH_COLUMNS`; empty without a pipeline."""
    ends = tables.passed_on()
    both = ends.merge(ends, on=["c", "s", "k"], suffixes=("", "_from"))
    both = both[both["rank"] != both["rank_from"]]
    stage, other = (both[name].map(stages).fillna(0).astype("int64") for name in ("rank", "rank_from"))
    both = both.assign(stage=stage, apart=other - stage)
    # if the capture does not distinguish sends and receives, the side that waits receives
    receives = (both["kind"] == "Recv") | ((both["kind"] == "SendRecv") & (both["a"] < both["a_from"]))
    got = both[receives & (both["apart"] != 0)].sort_values(["rank", "step", "a"], kind="stable")
    first = got["apart"].abs() == 1
    direction = np.where((got["apart"] < 0) == first, "forward", "backward")  # a ring wraps from the last to the first
    got = got.assign(direction=direction, from_rank=got["rank_from"])
    got["micro_batch"] = got.groupby(["step", "rank", "direction"]).cumcount()
    got["wait_ns"] = (got["a_from"] - got["a"]).clip(lower=0).clip(upper=(got["e"] - got["a"]).clip(lower=0))
    got["transfer_ns"] = (got["e"] - got[["a", "a_from"]].max(axis=1)).clip(lower=0)
    got["bubble_ns"] = got[["wait_ns", "alone"]].min(axis=1)
    made: pd.DataFrame = got[list(MICRO_BATCH_COLUMNS)].reset_index(drop=True)
    return made


def bubbles(tables: JobTables, stages: Mapping[int, int], batches: pd.DataFrame) -> pd.DataFrame:
    """The bubble of each stage in each step, with `BUBBLE_COLUMNS`; empty without a pipeline.

    Args:
        tables: The job's maps.
        stages: The pipeline stage of each rank.
        batches: See `micro_batches`.
    """
    import pandas as pd

    if not len(batches):
        nothing: pd.DataFrame = pd.DataFrame({name: [] for name in BUBBLE_COLUMNS})
        return nothing
    spent = tables.step_times()
    sort = np.select(
        [spent["doing"].isin(_BUSY), spent["passes_on"], spent["doing"] == "communication"],
        ["busy_ns", "wait_ns", "other_ns"],
        "host_ns",
    )
    names = ["busy_ns", "wait_ns", "host_ns", "other_ns"]
    wide = spent.assign(sort=sort).pivot_table(
        index=["step", "rank"], columns="sort", values="ns", aggfunc="sum", fill_value=0
    )
    table = wide.reindex(columns=names, fill_value=0).astype("int64").reset_index()
    table["stage"] = table["rank"].map(stages).fillna(0).astype("int64")
    table["step_ns"] = table[names].sum(axis=1)
    table["bubble_ns"] = table["step_ns"] - table["busy_ns"]
    table["bubble_share"] = table["bubble_ns"] / table["step_ns"].clip(lower=1)
    number, many = table["stage"].nunique(), batches.groupby("step")["micro_batch"].max() + 1
    of_step = table["step"].map(many).fillna(1)
    table["ideal_share"] = (number - 1) / (of_step + number - 1)
    made: pd.DataFrame = table[list(BUBBLE_COLUMNS)].sort_values(["step", "stage", "rank"], ignore_index=True)
    return made
