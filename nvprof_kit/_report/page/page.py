"""One page about one or several captures: a single file that loads nothing from the network.

The page has a size budget, which the first captures share. If the page is still too large, the last of them only
appear in the comparison. The page lists all omissions, with the command that shows the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nvprof_kit._analysis.attribution.intervals import Int64Array
from nvprof_kit._analysis.layers.fold import MANY, Group, fold_tree
from nvprof_kit._analysis.layers.tree import ModelTree
from nvprof_kit._report.page import timeline
from nvprof_kit._report.page.data import (
    MAX_KERNELS,
    Sheet,
    class_bars,
    drawn_kernels,
    drawn_roofline,
    headlines,
    limit_bars,
    phase_split,
)
from nvprof_kit._report.page.template import render, short_text
from nvprof_kit._report.page.timeline import Drawing, drawn_timeline
from nvprof_kit._report.text.layers import (
    COLUMNS,
    MEMORY_COLUMNS,
    in_phase,
    layers_by_step,
    left_out_lines,
    row_names,
    time_name,
    total_line,
    tree_lines,
)
from nvprof_kit._report.text.table import capture_facts
from nvprof_kit._report.text.texts import MS, mib_cell, percent
from nvprof_kit._result.result import UNFOLDED
from nvprof_kit.issues import printed
from nvprof_kit.names import LAYER_PHASES, NO_LAYER

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.layers.layers import Layers

MARKED_CHANGE = 0.02
"""Minimum relative change shown in color."""

BUDGET = 8_000_000
"""Maximum size of a page in bytes."""

MAX_WHOLE = 8
"""Maximum number of captures with full content; others only appear in the comparison."""

MAX_COMPARED = 64
"""Maximum number of compared captures."""

MAX_COMPARED_CELLS = 40_000
"""Maximum number of cells of the comparison; the rows with the largest changes are kept."""

MAX_ROWS = 2_000
"""Maximum number of rows of the model trees of all captures; the costliest are kept."""

MAX_CELLS = 200_000
"""Maximum number of cells (layers times steps) on the page; the costliest layers are kept."""

_SCRIPTS = (
    "core.js", "state.js", "table.js", "icicle.js", "timeline.js", "steps.js", "roofline.js", "kernels.js", "main.js"
)  # fmt: skip


def report_page(sheets: Sequence[Sheet], compared: Sequence[Layers] = (), left_out: Sequence[str] = ()) -> bytes:
    """The page as UTF-8, with at most `BUDGET` bytes.

    Args:
        sheets: Captures with full content.
        compared: All captures, those with full content first; if there are several, each is compared with the first.
        left_out: Captures that are not on the page.
    """
    compared = compared or [sheet.layers for sheet in sheets]
    rows, note = _comparison(compared) if len(compared) > 1 else ([], "")
    pages = [_capture(sheet, len(sheets)) for sheet in sheets]
    html = render(
        "page.html",
        scripts=_SCRIPTS,
        styles=("page.css",),
        loading=True,
        title=f"{', '.join(capture.info.path for capture in compared[:3])}{', …' * (len(compared) > 3)} · nvprof-kit",
        sheets=[variables for variables, _ in pages],
        compared=[{"path": capture.info.path, "short_path": _short_path(capture.info.path)} for capture in compared],
        changes=rows,
        changes_note=note,
        without_comm=any(capture.summary.comm_ns for capture in compared),
        change_total=_change_cells([layers.summary.work_ns / max(layers.summary.steps, 1) for layers in compared]),
        only_compared=[capture.info.path for capture in compared[len(sheets) :]],
        absent=list(left_out),
        data=[data for _, data in pages],
    )
    if len(html) > BUDGET and len(sheets) > 1:
        return report_page(sheets[: max(len(sheets) // 2, 1)], compared, left_out)
    return html


def _comparison(compared: Sequence[Layers]) -> tuple[list[dict[str, Any]], str]:
    """The rows of the comparison, and a sentence about omissions: all rows of the trees, as one tree. Each row has the
    parent that it has in the first capture with it; below a parent, those of the first capture come in its order, then
    those of later captures only.
    """
    parents: dict[str, str] = {}
    by_capture: list[dict[str, float]] = []
    for capture in compared:
        tree, steps = capture.tree, max(capture.summary.steps, 1)
        work = (tree["total_ns"] - tree["comm_ns"]) / steps
        by_capture.append(dict(zip(row_names(tree), work, strict=True)))
        parents = dict(zip(row_names(tree), tree["parent"], strict=True)) | parents
    children: dict[str, list[str]] = {}
    for name, parent in parents.items():
        children.setdefault(parent, []).append(name)
    rows = []
    stack = [(name, 0) for name in reversed(children.get("", []))]
    while stack:
        name, depth = stack.pop()
        rows.append((_named(name, parents[name], depth), [times.get(name) for times in by_capture]))
        stack += [(child, depth + 1) for child in reversed(children.get(name, []))]
    limit, note = max(MAX_COMPARED_CELLS // len(compared), 1), ""
    if len(rows) > limit:
        sizes = [max(times[0] or 0, times[-1] or 0) for _, times in rows]
        largest = sorted(sorted(range(len(rows)), key=lambda row: -sizes[row])[:limit])
        first, last = compared[0].info.path, compared[-1].info.path
        note = f"{len(rows) - limit:,} rows of little time are left out: nvprof-kit diff {first} {last} --format csv"
        rows = [rows[index] for index in largest]
    return [{**name, "cells": _change_cells(times)} for name, times in rows], note


@dataclass(frozen=True)
class _PageRows:
    """The rows of a capture's table; a switch of the page shows equal blocks as one row or as their own.

    Attributes:
        rows: The rows of the capture's tree on the page.
        folded: The same rows with equal blocks folded.
        groups: The rows on the page of each row of the folded tree.
    """

    rows: Int64Array
    folded: pd.DataFrame
    groups: list[Group]

    @classmethod
    def of(cls, tree: pd.DataFrame, limit: int) -> _PageRows:
        """The costliest rows of a tree and their ancestors."""
        chosen = set(np.argsort(-tree["total_ns"].to_numpy(), kind="stable")[:limit].tolist())
        parents = _parents(tree)
        for row in sorted(chosen, reverse=True):  # parents precede their children
            while (row := parents[row]) >= 0:
                chosen.add(row)
        rows = np.array(sorted(chosen), dtype=np.int64)
        return cls(rows, *fold_tree(tree.iloc[rows].reset_index(drop=True)))

    @property
    def folds(self) -> dict[int, Group]:
        """The groups of several rows, by their row in the folded tree, in the order of their first row on the page."""
        several = {line: group for line, group in enumerate(self.groups) if group.count > 1}
        return dict(sorted(several.items(), key=lambda item: item[1].rows[0]))


def _parents(tree: pd.DataFrame) -> list[int]:
    parents: list[int] = ModelTree(tuple(row_names(tree)), tuple(tree["parent"])).parent.tolist()
    return parents


def _capture(sheet: Sheet, of: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The template variables of a capture, and the data for the page's scripts.

    Args:
        sheet: The capture.
        of: Number of captures on the page.
    """
    result, steps = sheet.layers, sheet.layers.summary.steps
    page_rows = _PageRows.of(result.tree, MAX_ROWS // of)
    columns, rows, total = _table(sheet, page_rows)
    gone = len(result.tree) - len(page_rows.rows)
    left_out = [f"{gone:,} layers of little time: nvprof-kit layers {result.info.path} --format csv"] if gone else []
    measures = {"time": time_name(result)}
    for measure, name in (("kept", "memory kept by a forward"), ("cuda", "memory taken from CUDA")):
        if sheet.memory is not None and (sheet.memory[f"{measure}_bytes"].fillna(0) > 0).any():
            measures[measure] = name
    variables = {
        "path": result.info.path,
        "short_path": _short_path(result.info.path),
        "facts": capture_facts(result.info, result.summary.all_steps, steps),
        "headlines": headlines(sheet),
        "split": phase_split(result),
        "warnings": (*left_out_lines(result), *printed(result.warnings)),
        "findings": sheet.findings,
        "unit": "Milliseconds per step" if steps > 1 else "Milliseconds",
        "time_name": time_name(result),
        "measures": measures,
        "columns": columns,
        "rows": rows,
        "folds": len(page_rows.folds),
        "folded": any(group.count >= MANY for group in page_rows.groups),
        "total": total,
        "levels": int(result.tree["depth"].max()) + 1 if len(result.tree) else 1,
        "timelines": [step.title for step in sheet.shown_steps],
        "timeline_title": "One step in time" if steps else "The capture in time",
        "has_kernels": sheet.kernels is not None,
        "tables": sheet.tables,
        "left_out": [*left_out, *sheet.left_out],
        "has_steps": steps > 0,
        "limits": limit_bars(sheet.flops),
        "classes": class_bars(sheet),
        "unmatched": sheet.unmatched,
    }
    drawing, tree = Drawing(), result.tree.iloc[page_rows.rows]
    data = {
        "steps": max(steps, 1),
        "timeName": time_name(result),
        "phases": LAYER_PHASES,
        "tree": {
            "name": [short_text(name) for name in row_names(tree)],
            "parent": _parents(tree),
            "depth": tree["depth"].tolist(),
            **{phase: tree[f"{phase}_ns"].tolist() for phase in (*LAYER_PHASES, "other", "total")},
        },
        "folds": [{"name": short_text(group.label), "rows": group.rows} for group in page_rows.folds.values()],
        "memory": None if sheet.memory is None else _drawn_memory(sheet.memory.iloc[page_rows.rows], _parents(tree)),
        "bySteps": _drawn_steps(sheet, page_rows.rows, drawing, MAX_CELLS // of),
        "timeline": drawn_timeline(sheet.timeline, sheet.shown_steps, drawing, timeline.MAX_ROWS // of),
        "roofline": drawn_roofline(sheet.flops),
        "kernels": None if sheet.kernels is None else drawn_kernels(sheet.kernels, drawing, MAX_KERNELS // of),
    }
    return variables, {**data, "texts": list(map(short_text, drawing.texts)), "block": drawing.packed()}


def _short_path(path: str) -> str:
    name = path.replace("\\", "/").rsplit("/", 1)[-1]
    return name if len(name) <= 24 else f"{name[:10]}…{name[-12:]}"


def _table(sheet: Sheet, page_rows: _PageRows) -> tuple[list[str], list[dict[str, Any]], list[str]]:
    """Header, rows and total of the per-layer table."""
    result, folded = replace(sheet.layers, select=UNFOLDED), page_rows.folded
    tree, total_ns, last = result.tree, max(result.summary.total_ns, 1), total_line(result)
    phases = [phase for phase in LAYER_PHASES if phase != "recompute" or last[phase]]
    names = ["calls", *phases, "total_ns", *(["comm_ns"] if result.summary.comm_ns else []), "total_share", "cpu_ns"]
    on_page = page_rows.rows.tolist()
    groups = [[row] for row in on_page] + [[on_page[row] for row in group.rows] for group in page_rows.folds.values()]
    more = _more_cells(sheet, groups)

    def page_row(row: dict[Any, Any], name: str, line: dict[str, str], group: int, **links: Any) -> dict[str, Any]:
        """A row of the table: of one layer, or of equal blocks; `group` is its place among the groups."""
        values = {**row, **{phase: in_phase(row, phase) for phase in phases}, "total_share": row["total_ns"]}
        cells = [_cell(line.get(name, ""), values.get(name)) for name in names]
        cells[names.index("total_share")]["bar"] = f"{row['total_ns'] / total_ns:.4f}"
        cells += [column[group] for column in more.values()]
        outside = row["layer"] == NO_LAYER
        return {**_named(name, row["parent"], row["depth"]), "cells": cells, "outside": outside, "row": group, **links}

    lines = tree_lines(result)
    lines_of_folds = tree_lines(replace(result, tree=folded[list(tree.columns)])) if page_rows.folds else []
    rows: list[tuple[int, dict[str, Any]]] = []
    for position, (line, group) in enumerate(page_rows.folds.items(), len(on_page)):
        median, shortest, longest = (folded[f"{name}_ns"][line] / 1e6 for name in ("median", "min", "max"))
        each = (
            f"each {median:,.3f} ms in all steps that are shown, {shortest:,.3f} to {longest:,.3f}, without "
            "communication"
        )
        links = {"count": group.count, "each": each, "inside": False, "unlike": ""}
        rows.append(
            (group.rows[0], page_row(lines_of_folds[line][0], group.label, lines_of_folds[line][1], position, **links))
        )
    group_of_row = {row: group for group in page_rows.groups for row in group.rows}
    paths = row_names(tree).tolist()
    for position, number in enumerate(on_page):
        group = group_of_row[position]
        links = {"count": 1, "inside": group.count > 1, "unlike": group.difference}
        rows.append((position, page_row(lines[number][0], paths[number], lines[number][1], position, **links)))
    rows.sort(key=lambda row: row[0])  # a fold is above its first row
    heads = [*(COLUMNS[name].name for name in ("layer", *names)), *more]
    return heads, [row for _, row in rows], [*(last.get(name, "") for name in names), *("" for _ in more)]


def _more_cells(sheet: Sheet, groups: Sequence[list[int]]) -> dict[str, list[dict[str, Any]]]:
    """The columns of memory, and of MFU and the limit if operators were counted and the GPU's peak is known, by header,
    without empty ones, with a cell for each group of rows of the tree.
    """
    columns: dict[str, list[dict[str, Any]]] = {}
    for name in MEMORY_COLUMNS if sheet.memory is not None else ():
        join = max if name == "peak_bytes" else sum
        of_row = sheet.memory[name].fillna(0).tolist()  # type: ignore[index]
        counts = [join(of_row[row] for row in group) for group in groups]
        if any(counts):
            columns[COLUMNS[name].name] = [_cell(mib_cell(count) if count else "", count) for count in counts]
    if sheet.flops is None or sheet.flops.peaks is None:
        return columns
    tree, flop_rows = sheet.layers.tree, sheet.flops.rows
    for heading, name in (("MFU", "mfu"), ("of limit", "of_limit")):
        for phase in ("forward", "backward"):
            rows = flop_rows[flop_rows["phase"] == phase].set_index("layer")[["gpu_busy_ns", name]]
            rows = rows.reindex(tree["layer"].where(tree["phase"].isin(["", phase]), "")).fillna(0.0)
            busy_ns = rows["gpu_busy_ns"].to_numpy()
            at_limit_ns = rows[name].to_numpy() * busy_ns
            shares = [float(at_limit_ns[group].sum() / (busy_ns[group].sum() or 1.0)) for group in groups]
            texts = [percent(share) + " (above the peak)" * (share > 1) if share else "" for share in shares]
            bars = [min(share, 1.0) if name == "of_limit" else None for share in shares]
            if any(shares):
                cells = zip(texts, shares, bars, strict=True)
                columns[f"{heading} {phase}"] = [_cell(text, share or None, bar) for text, share, bar in cells]
    return columns


def _named(name: str, parent: str, depth: int) -> dict[str, Any]:
    """A row by path, split into the parent's path and its own name."""
    prefix = f"{parent}." if parent and name.startswith(f"{parent}.") else ""
    return {"path": name, "prefix": prefix, "name": name.removeprefix(prefix), "depth": depth}


def _cell(text: str, value: float | None, bar: float | None = None, mark: str = "") -> dict[str, Any]:
    """A cell: text, sort value, bar length (0 to 1), and CSS class."""
    bar_text = None if bar is None else f"{bar:.4f}"
    return {"text": text, "value": "" if value is None else value, "bar": bar_text, "mark": mark}


def _change_cells(times: Sequence[float | None]) -> list[dict[str, Any]]:
    """The time per step in each capture, None where it has no such row, then the change from first to last."""
    first, last = times[0], times[-1]
    cells = [_cell("" if ns is None else MS(round(ns)) or "0.000", ns) for ns in times]
    if first is None or last is None:
        return [*cells, _cell("new" if first is None else "gone", None), _cell("", None)]
    relative = (last - first) / first if first else None
    mark = "" if relative is None or abs(relative) < MARKED_CHANGE else "worse" if relative > 0 else "better"
    change = f"{'+' if last >= first else ''}{MS(round(last - first)) or '0.000'}"
    percentage = "" if relative is None else f"{100 * relative:+.1f} %"
    return [*cells, _cell(change, last - first, mark=mark), _cell(percentage, relative, mark=mark)]


def _drawn_memory(memory: pd.DataFrame, parents: list[int]) -> dict[str, Any]:
    """Memory of each row of the tree, and its drawn width: at least the sum of its children."""
    drawn = {str(name).removesuffix("_bytes"): column.fillna(0).tolist() for name, column in memory.items()}
    for measure in ("kept", "cuda"):
        in_children = [0] * len(parents)
        width = in_children.copy()
        for row in range(len(parents) - 1, -1, -1):  # children follow their parent
            width[row] = max(drawn[measure][row], in_children[row])
            if parents[row] >= 0:
                in_children[parents[row]] += width[row]
        drawn[f"{measure}_width"] = width
    return drawn


def _drawn_steps(sheet: Sheet, tree_rows: Int64Array, drawing: Drawing, cells: int) -> dict[str, Any] | None:
    """Time of each step by phase, and of each row of the tree by step."""
    rows = sheet.layers.rows
    if not len(sheet.steps):
        return None
    inside = rows[rows["step"].notna()]
    phase = inside["phase"].where(inside["phase"].isin(LAYER_PHASES), "other")
    instances = sheet.steps.index
    by_phase = inside.groupby([phase, inside["instance"].astype("int64")])["gpu_self_ns"].sum().unstack(fill_value=0)
    by_phase = by_phase.reindex(columns=instances, fill_value=0)
    by_layer = layers_by_step(sheet.layers).iloc[:-1].reindex(columns=instances, fill_value=0).to_numpy()[tree_rows]
    limit = max(cells // len(instances), 1)
    costliest = np.sort(np.argsort(-by_layer.sum(axis=1), kind="stable")[:limit])
    return {
        "number": drawing.add(sheet.steps["step"]),
        "length": drawing.add(sheet.steps["wall_ns"]),
        "phases": {
            name: drawing.add(by_phase.loc[name]) for name in (*LAYER_PHASES, "other") if name in by_phase.index
        },
        "layers": costliest.tolist(),
        "cells": drawing.add(by_layer[costliest].ravel()),
    }
