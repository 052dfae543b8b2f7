"""Pipeline stages: which ranks have which layers, and which ranks are a rank's equals.

Ranks with the same layers are in one stage, and are equals. If a stage has only one rank, its layers are compared with
those of the same role in all such stages: ``layers.3.mlp`` with every ``layers.N.mlp``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit.names import NO_LAYER

if TYPE_CHECKING:
    import pandas as pd

ALIKE = 0.5
"""Minimum share of common layers for ranks of one stage."""

_NUMBER = re.compile(r"\d+")


def stages_of(medians: pd.DataFrame) -> dict[int, int]:
    """The stage of each rank, ordered by the number of its first layer; 0 for all if all ranks have the same layers.

    Args:
        medians: See `nvprof_kit._trace.jobs.tables.JobTables.layer_medians`.
    """
    named = medians[(medians["layer"] != NO_LAYER) & (medians["median_ns"] > 0)]
    layers = {int(str(rank)): frozenset(mine["layer"]) for rank, mine in named.groupby("rank", sort=True)}
    kinds: list[frozenset[str]] = []
    kind_of: dict[frozenset[str], int] = {}
    for one in layers.values():
        if one not in kind_of:
            alike = (place for place, other in enumerate(kinds) if len(one & other) >= ALIKE * len(one | other))
            kind_of[one] = next(alike, len(kinds))
            if kind_of[one] == len(kinds):
                kinds.append(one)
    order = sorted(range(len(kinds)), key=lambda place: (_first_number(kinds[place]), place))
    number = {place: stage for stage, place in enumerate(order)}
    stages = {rank: number[kind_of[one]] for rank, one in layers.items()}
    return {int(rank): stages.get(int(rank), 0) for rank in medians["rank"].unique()}


def _first_number(layers: frozenset[str]) -> float:
    found = [int(number) for layer in layers for number in _NUMBER.findall(layer)[:1]]
    return float(np.median(found)) if found else -1.0


def spans_of(medians: pd.DataFrame) -> dict[int, tuple[int, int]]:
    """First and last number of each rank's layers if they are contiguous; empty if any rank's are not."""
    named = medians[(medians["layer"] != NO_LAYER) & (medians["median_ns"] > 0)]
    spans = {}
    for rank, mine in named.groupby("rank", sort=True):
        numbers = {int(part) for layer in mine["layer"].unique() for part in str(layer).split(".") if part.isdecimal()}
        if not numbers or max(numbers) - min(numbers) >= len(numbers):
            return {}
        spans[int(str(rank))] = (min(numbers), max(numbers))
    return spans


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
    made: pd.DataFrame = table.astype({"peers_ns": "int64", "peers_idle_ns": "int64"})
    return made
