"""The data drawn by the page's scripts, as lists of numbers and texts: model tree, folds, steps and timelines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.layers.fold import FoldedTree, fold
from nvprof_kit._report.page import timeline
from nvprof_kit._report.page.data import MAX_ROWS, PHASES, Sheet, drawn_roofline, row_names
from nvprof_kit._report.page.tables import MAX_KERNELS, drawn_kernels, short_text
from nvprof_kit._report.page.timeline import Block, Texts, drawn_timeline
from nvprof_kit._report.text.layers import layers_by_step, time_name

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._report.page.data import Sheet


@dataclass(frozen=True)
class Fold:
    """Equal blocks folded into one row.

    Attributes:
        name: The combined path: ``layers.0-79``.
        rows: The rows of the blocks on the page.
        line: The row in the folded tree.
        each: Time of one block, as text.
    """

    name: str
    rows: tuple[int, ...]
    line: int
    each: str


@dataclass(frozen=True)
class Folds:
    """The rows of a page's table and its folds, in table order; a switch of the page shows the individual rows.

    Attributes:
        rows: The rows of the capture's tree on the page.
        tree: The folded tree, with the columns of the tree and of `nvprof_kit._analysis.layers.fold`.
        folds: The folds with several blocks.
        differences: For each row of the page, how it differs from its equals; '' if it does not.
    """

    rows: npt.NDArray[np.int64]
    tree: pd.DataFrame
    folds: tuple[Fold, ...]
    differences: tuple[str, ...]


def folds_of(sheet: Sheet, of: int = 1) -> Folds:
    """The rows on the page: the costliest of the tree and their ancestors, with equal blocks folded.

    Args:
        sheet: A capture.
        of: Number of captures on the page.
    """
    tree_rows = rows_on_page(sheet, of)
    folded: FoldedTree = fold(sheet.layers.tree.iloc[tree_rows].reset_index(drop=True))
    members: dict[int, list[int]] = {}
    for row, line in enumerate(folded.line.tolist()):
        members.setdefault(line, []).append(row)
    records = folded.tree.to_dict("records")
    folds = []
    for line, rows in members.items():
        if len(rows) > 1:
            median, shortest, longest = (records[line][name] / 1e6 for name in ("median_ns", "min_ns", "max_ns"))
            each = (
                f"each {median:,.3f} ms in all steps that are shown, {shortest:,.3f} to {longest:,.3f}, without "
                "communication"
            )
            folds.append(Fold(records[line]["layer"], tuple(rows), line, each))
    differing = tuple(records[line]["unlike"] for line in folded.line.tolist())
    return Folds(tree_rows, folded.tree, tuple(sorted(folds, key=lambda fold: fold.rows[0])), differing)


MAX_CELLS = 200_000
"""Maximum number of cells (layers times steps) on the page; the costliest layers are kept."""


def drawn(sheet: Sheet, folds: Folds, of: int = 1) -> dict[str, Any]:
    """The data for the page's scripts: tree, steps, timeline and kernels.

    Args:
        sheet: A capture.
        folds: Its rows on the page.
        of: Number of captures on the page.
    """
    block, texts = Block(), Texts()
    tree_rows = folds.rows
    view, kernels = sheet.timeline, sheet.kernels
    drawing = {
        "steps": max(sheet.layers.summary.steps, 1),
        "timeName": time_name(sheet.layers),
        "phases": PHASES,
        "tree": _drawn_tree(sheet.layers.tree, tree_rows),
        "folds": [{"name": short_text(fold.name), "rows": fold.rows} for fold in folds.folds],
        "memory": _drawn_memory(sheet, tree_rows),
        "bySteps": _drawn_steps(sheet, tree_rows, block, MAX_CELLS // of),
        "timeline": None if view is None else drawn_timeline(view, texts, block, timeline.MAX_ROWS // of),
        "roofline": drawn_roofline(sheet.flops),
        "kernels": None if kernels is None else drawn_kernels(kernels, texts, block, MAX_KERNELS // of),
    }
    return {**drawing, "texts": [short_text(text) for text in texts.numbers], "block": block.packed()}


def rows_on_page(sheet: Sheet, of: int = 1) -> npt.NDArray[np.int64]:
    """The rows of the tree on the page: the costliest rows and their ancestors."""
    tree, limit = sheet.layers.tree, MAX_ROWS // of
    if len(tree) <= limit:
        return np.arange(len(tree))
    index_of_row = {name: index for index, name in enumerate(row_names(tree))}
    parents = [index_of_row.get(parent, -1) for parent in tree["parent"].tolist()]
    chosen = set(np.argsort(-tree["total_ns"].to_numpy(), kind="stable")[:limit].tolist())
    for row in sorted(chosen, reverse=True):  # parents precede their children
        while (row := parents[row]) >= 0:
            chosen.add(row)
    return np.array(sorted(chosen), dtype=np.int64)


def _drawn_tree(tree: pd.DataFrame, tree_rows: npt.NDArray[np.int64]) -> dict[str, list[Any]]:
    tree = tree.iloc[tree_rows]
    names = row_names(tree)
    index_of_row = {name: index for index, name in enumerate(names)}
    times = {f"{phase}_ns": tree[f"{phase}_ns"].tolist() for phase in (*PHASES, "other", "total")}
    return {
        "name": [short_text(name) for name in names],
        "parent": [index_of_row.get(parent, -1) for parent in tree["parent"].tolist()],
        "depth": tree["depth"].tolist(),
        **{name.removesuffix("_ns"): values for name, values in times.items()},
    }


def measures(sheet: Sheet) -> dict[str, str]:
    """Measures for the widths in the model tree, with their labels."""
    measure_names = {"time": time_name(sheet.layers)}
    if sheet.memory is not None:
        names = {"kept": "memory kept by a forward", "cuda": "memory taken from CUDA"}
        measure_names |= {
            measure: name for measure, name in names.items() if (sheet.memory[f"{measure}_bytes"].fillna(0) > 0).any()
        }
    return measure_names


def _drawn_memory(sheet: Sheet, tree_rows: npt.NDArray[np.int64]) -> dict[str, Any] | None:
    """Memory of each row of the tree, and its drawn width: at least the sum of its children."""
    if sheet.memory is None:
        return None
    measures = {
        str(name).removesuffix("_bytes"): column.fillna(0).tolist()
        for name, column in sheet.memory.iloc[tree_rows].items()
    }
    tree = sheet.layers.tree.iloc[tree_rows]
    names = row_names(tree)
    index_of_row = {name: index for index, name in enumerate(names)}
    parents = [index_of_row.get(parent, -1) for parent in tree["parent"].tolist()]
    for measure in ("kept", "cuda"):
        in_children = [0] * len(names)
        width = in_children.copy()
        for row in range(len(names) - 1, -1, -1):  # children follow their parent
            width[row] = max(measures[measure][row], in_children[row])
            if parents[row] >= 0:
                in_children[parents[row]] += width[row]
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
    limit = max(cells // max(len(instances), 1), 1)
    costliest = np.sort(np.argsort(-by_layer.sum(axis=1), kind="stable")[:limit])
    return {
        "number": block.add(sheet.steps["step"]),
        "length": block.add(sheet.steps["wall_ns"]),
        "phases": {
            str(phase_name): block.add(by_phase.loc[phase_name])
            for phase_name in (*PHASES, "other")
            if phase_name in by_phase.index
        },
        "layers": costliest.tolist(),
        "cells": block.add(by_layer[costliest].ravel()),
    }
