"""The data drawn by the page's scripts: model tree, steps and timelines, as lists of numbers and texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._report.page import timeline
from nvprof_kit._report.page.data import MAX_ROWS, PHASES, Sheet, row_names
from nvprof_kit._report.page.folding import folds_of
from nvprof_kit._report.page.kernels import MAX_KERNELS, drawn_kernels
from nvprof_kit._report.page.packing import Block
from nvprof_kit._report.page.tables import short_text
from nvprof_kit._report.page.timeline import Texts, drawn_timeline
from nvprof_kit._report.text.layers import time_name
from nvprof_kit._report.text.layers_by_step import layers_by_step

if TYPE_CHECKING:
    import pandas as pd

MAX_CELLS = 200_000
"""Maximum number of cells (layers times steps) on the page; the costliest layers are kept."""


def drawn(sheet: Sheet, of: int = 1) -> dict[str, Any]:
    """The data for the page's scripts: tree, steps, timeline and kernels.

    Args:
        sheet: A capture.
        of: Number of captures on the page.
    """
    block, texts = Block(), Texts()
    kept = rows_on_page(sheet, of)
    moments, kernels = sheet.moments, sheet.kernels
    shown = {
        "steps": max(sheet.layers.summary.steps, 1),
        "timeName": time_name(sheet.layers),
        "phases": PHASES,
        "tree": _drawn_tree(sheet.layers.tree, kept),
        "folds": [
            {"name": short_text(one.name), "rows": one.rows} for one in folds_of(sheet, tuple(kept.tolist())).folds
        ],
        "memory": _drawn_memory(sheet, kept),
        "bySteps": _drawn_steps(sheet, kept, block, MAX_CELLS // of),
        "timeline": None if moments is None else drawn_timeline(moments, texts, block, timeline.MAX_ROWS // of),
        "kernels": None if kernels is None else drawn_kernels(kernels, texts, block, MAX_KERNELS // of),
    }
    return {**shown, "texts": [short_text(text) for text in texts.numbers], "block": block.packed()}


def rows_on_page(sheet: Sheet, of: int = 1) -> npt.NDArray[np.int64]:
    """The rows of the tree on the page: the costliest rows and their ancestors."""
    tree, limit = sheet.layers.tree, MAX_ROWS // of
    if len(tree) <= limit:
        return np.arange(len(tree))
    place = {name: index for index, name in enumerate(row_names(tree))}
    parents = [place.get(parent, -1) for parent in tree["parent"].tolist()]
    kept = set(np.argsort(-tree["total_ns"].to_numpy(), kind="stable")[:limit].tolist())
    for row in sorted(kept, reverse=True):  # parents precede their children
        while (row := parents[row]) >= 0:
            kept.add(row)
    return np.array(sorted(kept), dtype=np.int64)


def _drawn_tree(tree: pd.DataFrame, kept: npt.NDArray[np.int64]) -> dict[str, list[Any]]:
    tree = tree.iloc[kept]
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
    """Measures for the widths in the model tree, with their labels."""
    found = {"time": time_name(sheet.layers)}
    if sheet.memory is not None:
        names = {"kept": "memory kept by a forward", "cuda": "memory taken from CUDA"}
        found |= {one: name for one, name in names.items() if (sheet.memory[f"{one}_bytes"].fillna(0) > 0).any()}
    return found


def _drawn_memory(sheet: Sheet, kept: npt.NDArray[np.int64]) -> dict[str, Any] | None:
    """Memory of each row of the tree, and its drawn width: at least the sum of its children."""
    if sheet.memory is None:
        return None
    measures = {
        str(name).removesuffix("_bytes"): column.fillna(0).tolist() for name, column in sheet.memory.iloc[kept].items()
    }
    tree = sheet.layers.tree.iloc[kept]
    names = row_names(tree)
    place = {name: index for index, name in enumerate(names)}
    parents = [place.get(parent, -1) for parent in tree["parent"].tolist()]
    for measure in ("kept", "cuda"):
        held = [0] * len(names)
        width = held.copy()
        for row in range(len(names) - 1, -1, -1):  # children follow their parent
            width[row] = max(measures[measure][row], held[row])
            if parents[row] >= 0:
                held[parents[row]] += width[row]
        measures[f"{measure}_width"] = width
    return measures


def _drawn_steps(sheet: Sheet, rows_kept: npt.NDArray[np.int64], block: Block, cells: int) -> Mapping[str, Any] | None:
    """Time of each step by phase, and of each row of the tree by step."""
    rows = sheet.layers.rows
    if "step" not in rows or not len(sheet.steps):
        return None
    inside = rows[rows["step"].notna()]
    phase = inside["phase"].where(inside["phase"].isin(PHASES), "other")
    instances = sheet.steps.index.tolist()
    by_phase = inside.groupby([phase, inside["instance"].astype("int64")])["gpu_self_ns"].sum().unstack(fill_value=0)
    by_phase = by_phase.reindex(columns=instances, fill_value=0)
    by_layer = layers_by_step(sheet.layers).iloc[:-1].reindex(columns=instances, fill_value=0).to_numpy()[rows_kept]
    most = max(cells // max(len(instances), 1), 1)
    kept = np.sort(np.argsort(-by_layer.sum(axis=1), kind="stable")[:most])
    return {
        "number": block.add(sheet.steps["step"]),
        "length": block.add(sheet.steps["wall_ns"]),
        "phases": {str(one): block.add(by_phase.loc[one]) for one in (*PHASES, "other") if one in by_phase.index},
        "layers": kept.tolist(),
        "cells": block.add(by_layer[kept].ravel()),
    }
