"""What the scripts of the page draw: the model's tree, the steps and the timelines, as lists of numbers and texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from nvprof_kit._report.page.data import PHASES, Sheet, row_names, short_text
from nvprof_kit._report.page.timeline import drawn_timeline
from nvprof_kit._report.text.layers import time_name
from nvprof_kit._report.text.layers_by_step import layers_by_step

if TYPE_CHECKING:
    import pandas as pd

MAX_CELLS = 200_000
"""Most layers times steps whose times the page holds; of a larger table the costliest layers."""


def drawn(sheet: Sheet) -> dict[str, Any]:
    """What the page's scripts draw: the tree, the steps and the timelines, as lists of numbers and texts."""
    return {
        "steps": max(sheet.layers.summary.steps, 1),
        "timeName": time_name(sheet.layers),
        "tree": _drawn_tree(sheet.layers.tree),
        "memory": _drawn_memory(sheet),
        "bySteps": _drawn_steps(sheet),
        "timelines": [{"title": title, **drawn_timeline(shown)} for title, shown in sheet.timelines],
    }


def _drawn_tree(tree: pd.DataFrame) -> dict[str, list[Any]]:
    names = row_names(tree)
    place = {name: index for index, name in enumerate(names)}
    times = {f"{phase}_ns": tree[f"{phase}_ns"].tolist() for phase in (*PHASES, "other", "total")}
    return {
        "name": [short_text(name) for name in names],
        "parent": [place.get(parent, -1) for parent in tree["parent"].tolist()],
        "depth": tree["depth"].tolist(),
        **{name.removesuffix("_ns"): values for name, values in times.items()},
    }


def measures(sheet: Sheet) -> dict[str, str]:
    """What the model's tree can be drawn by, and how that is called."""
    found = {"time": time_name(sheet.layers)}
    if sheet.memory is not None:
        names = {"kept": "memory kept by a forward", "cuda": "memory taken from CUDA"}
        found |= {one: name for one, name in names.items() if (sheet.memory[f"{one}_bytes"].fillna(0) > 0).any()}
    return found


def _drawn_memory(sheet: Sheet) -> dict[str, Any] | None:
    """Bytes of every row of the tree, and how wide it is drawn by them: at least as wide as what it holds."""
    if sheet.memory is None:
        return None
    told = {str(name).removesuffix("_bytes"): column.fillna(0).tolist() for name, column in sheet.memory.items()}
    names = row_names(sheet.layers.tree)
    place = {name: index for index, name in enumerate(names)}
    parents = [place.get(parent, -1) for parent in sheet.layers.tree["parent"].tolist()]
    for measure in ("kept", "cuda"):
        held = [0] * len(names)
        width = held.copy()
        for row in range(len(names) - 1, -1, -1):  # children come behind their parent
            width[row] = max(told[measure][row], held[row])
            if parents[row] >= 0:
                held[parents[row]] += width[row]
        told[f"{measure}_width"] = width
    return told


def _drawn_steps(sheet: Sheet) -> Mapping[str, Any] | None:
    """Time of every step by phase, and of every row of the tree by step."""
    rows = sheet.layers.rows
    if "step" not in rows or not len(sheet.steps):
        return None
    inside = rows[rows["step"].notna()]
    phase = inside["phase"].where(inside["phase"].isin(PHASES), "other")
    instances = sheet.steps.index.tolist()
    by_phase = inside.groupby([phase, inside["instance"].astype("int64")])["gpu_self_ns"].sum().unstack(fill_value=0)
    by_phase = by_phase.reindex(columns=instances, fill_value=0)
    by_layer = layers_by_step(sheet.layers).iloc[:-1].reindex(columns=instances, fill_value=0).to_numpy()
    kept = np.sort(np.argsort(-by_layer.sum(axis=1), kind="stable")[: max(MAX_CELLS // max(len(instances), 1), 1)])
    return {
        "number": sheet.steps["step"].tolist(),
        "length": sheet.steps["wall_ns"].tolist(),
        "phases": {str(one): by_phase.loc[one].tolist() for one in (*PHASES, "other") if one in by_phase.index},
        "layers": {str(row): by_layer[row].tolist() for row in kept},
    }
