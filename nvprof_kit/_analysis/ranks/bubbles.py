"""Pipeline bubbles: how long each stage computes nothing in a step, and its wait for each micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._result.column import Column, Columns
from nvprof_kit._trace.jobs.tables import JobTables

if TYPE_CHECKING:
    import pandas as pd

BUBBLE_COLUMNS: Columns = {
    "step": Column("step"),
    "stage": Column("pipeline stage"),
    "rank": Column("rank"),
    "step_ns": Column("duration of the step on the rank's device", "ns", kind="float"),
    "busy_ns": Column("the part spent computing or copying", "ns", kind="float"),
    "wait_ns": Column(
        "the part in exposed sends and receives: waiting for the other stage, and moving bytes", "ns", kind="float"
    ),
    "host_ns": Column(
        "the idle part: the host had not launched the next operation, was fetching data, …", "ns", kind="float"
    ),
    "other_ns": Column("the part in other exposed collectives", "ns", kind="float"),
    "bubble_ns": Column("the part that is not busy", "ns", kind="float"),
    "bubble_share": Column("`bubble_ns` divided by `step_ns`", kind="float"),
    "ideal_share": Column(
        "minimum for GPipe and 1F1B: (p - 1) / (m + p - 1) for p equal stages and m micro-batches", kind="float"
    ),
}
"""The columns of the table of bubbles."""

MICRO_BATCH_COLUMNS: Columns = {
    "step": Column("step"),
    "stage": Column("stage that waits"),
    "rank": Column("rank that waits"),
    "direction": Column("`forward`: waits for the previous stage; `backward`: for the next stage", kind="str"),
    "micro_batch": Column("index of the message in the step in this direction, from 0"),
    "from_rank": Column("rank that it waits for"),
    "wait_ns": Column("time from its arrival to that of the sender", "ns", kind="float"),
    "transfer_ns": Column("time from the arrival of the sender to the end", "ns", kind="float"),
    "bubble_ns": Column("the exposed part of `wait_ns`", "ns", kind="float"),
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
