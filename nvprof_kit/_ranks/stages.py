"""Pipeline stages: which ranks have which layers, and which ranks are a rank's equals.

Ranks with the same layers are in one stage, and are equals. If a stage has only one rank, its layers are compared with
those of the same role in all such stages: ``layers.3.mlp`` with every ``layers.N.mlp``.

`layer_table` compares each rank's median over steps with its equals'. `bubbles` tells how long each stage computes
nothing in a step, and `micro_batches` its wait for each micro-batch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pandas as pd

from nvprof_kit._ranks.columns import COLUMNS
from nvprof_kit._trace.jobs.tables import JobTables
from nvprof_kit.names import NO_LAYER

ALIKE = 0.5
"""Minimum share of common layers for ranks of one stage."""

_NUMBER = re.compile(r"\d+")


def stages_of(medians: pd.DataFrame) -> dict[int, int]:
    """The stage of each rank, ordered by the number of its first layer; 0 for all if all ranks have the same layers.

    Args:
        medians: See `nvprof_kit._trace.jobs.tables.JobTables.layer_medians`.
    """
    named = medians[(medians["layer"] != NO_LAYER) & (medians["median_ns"] > 0)]
    layers = {int(str(rank)): frozenset(rank_layers["layer"]) for rank, rank_layers in named.groupby("rank", sort=True)}
    kinds: list[frozenset[str]] = []
    kind_of: dict[frozenset[str], int] = {}
    for names in layers.values():
        if names not in kind_of:
            similar = (index for index, other in enumerate(kinds) if len(names & other) >= ALIKE * len(names | other))
            kind_of[names] = next(similar, len(kinds))
            if kind_of[names] == len(kinds):
                kinds.append(names)
    numbers = [[int(number) for layer in kind for number in _NUMBER.findall(layer)[:1]] for kind in kinds]
    order = sorted(range(len(kinds)), key=lambda index: (np.median(numbers[index]) if numbers[index] else -1.0, index))
    number = {index: stage for stage, index in enumerate(order)}
    stages = {rank: number[kind_of[names]] for rank, names in layers.items()}
    return {int(rank): stages.get(int(rank), 0) for rank in medians["rank"].unique()}


def with_equals(medians: pd.DataFrame) -> pd.DataFrame:
    """Add stage, group (an id for each set of equals), equals (its size), and peers_ns and peers_idle_ns (the group's
    medians of compute and idle time) to the medians.
    """
    stages = stages_of(medians)
    table = medians.assign(stage=medians["rank"].map(stages))
    keys = ["layer", "phase", "stage"]
    table["equals"] = table.groupby(keys, sort=False)["rank"].transform("size")
    groups = table.groupby(keys, sort=False)
    table["group"] = groups.ngroup()
    table["peers_ns"], table["peers_idle_ns"] = (groups[name].transform("median") for name in ("median_ns", "idle_ns"))
    alone = (table["equals"] == 1).to_numpy() if len(set(stages.values())) > 1 else np.zeros(len(table), dtype=bool)
    if alone.any():
        role = table["layer"].where(table["layer"] != NO_LAYER, table["layer"] + table["stage"].astype(str))
        role = role.str.replace(_NUMBER, "*", regex=True).where(table["layer"] != NO_LAYER, role)
        roles = table[alone].groupby([role[alone], table["phase"][alone]], sort=False)
        table.loc[alone, "group"] = roles.ngroup() + len(table)
        table.loc[alone, "equals"] = roles["rank"].transform("size")
        for name, of in (("peers_ns", "median_ns"), ("peers_idle_ns", "idle_ns")):
            table.loc[alone, name] = roles[of].transform(lambda values: values.quantile(0.5, interpolation="lower"))
    return table.astype({"peers_ns": "int64", "peers_idle_ns": "int64"})


def layer_table(medians: pd.DataFrame) -> pd.DataFrame:
    """The table, with the columns `layers`; see `nvprof_kit._ranks.stages` for the definition of equals.

    Args:
        medians: See `nvprof_kit._trace.jobs.tables.JobTables.layer_medians`.
    """
    medians = with_equals(medians)
    peers = medians["peers_ns"]
    excess = medians["median_ns"] - peers
    spread = 1.4826 * excess.abs().groupby(medians["group"], sort=False).transform("median")
    scored = medians.assign(
        excess_ns=excess.astype("int64"),
        score=np.round(excess / np.maximum(spread, np.maximum(peers * 0.01, 1000.0)), 2),
    )
    several = scored["equals"] > 2
    scored["unlike"] = several & (scored["score"] > 5) & (excess > 0.05 * peers) & (excess > 10_000)
    ordered = scored.sort_values(["layer", "phase", "rank"], kind="stable", ignore_index=True)
    return ordered[list(COLUMNS["layers"])]


_BUSY = ("compute", "copy")


def micro_batches(tables: JobTables, stages: Mapping[int, int]) -> pd.DataFrame:
    """How long each stage waits for each micro-batch, with the columns `micro-batches`; empty without a pipeline."""
    ends = tables.frame("passed_on")
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
    return got[list(COLUMNS["micro-batches"])].reset_index(drop=True)


def bubbles(tables: JobTables, stages: Mapping[int, int], batches: pd.DataFrame) -> pd.DataFrame:
    """The bubble of each stage in each step, with the columns `bubbles`; empty without a pipeline.

    Args:
        tables: The job's maps.
        stages: The pipeline stage of each rank.
        batches: See `micro_batches`.
    """
    if not len(batches):
        return pd.DataFrame({name: [] for name in COLUMNS["bubbles"]})
    step_times = tables.frame("step_times")
    sort = np.select(
        [step_times["doing"].isin(_BUSY), step_times["passes_on"], step_times["doing"] == "communication"],
        ["busy_ns", "wait_ns", "other_ns"],
        "host_ns",
    )
    names = ["busy_ns", "wait_ns", "host_ns", "other_ns"]
    wide = step_times.groupby(["step", "rank", sort])["ns"].sum().unstack(fill_value=0)
    table = wide.reindex(columns=names, fill_value=0).astype("int64").reset_index()
    table["stage"] = table["rank"].map(stages).fillna(0).astype("int64")
    table["step_ns"] = table[names].sum(axis=1)
    table["bubble_ns"] = table["step_ns"] - table["busy_ns"]
    table["bubble_share"] = table["bubble_ns"] / table["step_ns"].clip(lower=1)
    stage_count, batch_counts = table["stage"].nunique(), batches.groupby("step")["micro_batch"].max() + 1
    batches_of_row = table["step"].map(batch_counts).fillna(1)
    table["ideal_share"] = (stage_count - 1) / (batches_of_row + stage_count - 1)
    return table[list(COLUMNS["bubbles"])].sort_values(["step", "stage", "rank"], ignore_index=True)
