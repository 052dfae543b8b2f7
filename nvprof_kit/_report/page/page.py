"""One page about one or several captures: a single file that loads nothing from the network.

The page has a size budget, which the first captures share. If the page is still too large, the last of them only
appear in the comparison. The page lists all omissions, with the command that shows the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nvprof_kit._analysis.layers.fold import MANY
from nvprof_kit._report.page.data import (
    PHASES,
    Folds,
    Sheet,
    class_bars,
    drawn,
    folds_of,
    headlines,
    limit_bars,
    measures,
    phase_split,
    row_names,
)
from nvprof_kit._report.page.tables import short_text
from nvprof_kit._report.page.template import render
from nvprof_kit._report.text.layers import (
    COLUMNS,
    MEMORY_COLUMNS,
    in_phase,
    left_out_lines,
    time_name,
    total_line,
    tree_lines,
)
from nvprof_kit._report.text.table import capture_facts
from nvprof_kit._report.text.texts import Cells, mib_cell, percent
from nvprof_kit._result.selection import UNFOLDED
from nvprof_kit.issues import printed
from nvprof_kit.names import NO_LAYER

if TYPE_CHECKING:
    from nvprof_kit._analysis.layers.layers import Layers

MARKED_CHANGE = 0.02
"""Minimum relative change shown in color."""

BUDGET = 8_000_000
"""Maximum size of a page in bytes."""

MAX_WHOLE = 8
"""Maximum number of captures with full content; others only appear in the comparison."""

MAX_COMPARED = 64
"""Maximum number of compared captures."""

MAX_CELLS = 40_000
"""Maximum number of cells of the comparison; the rows with the largest changes are kept."""

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
    html = _page(sheets, compared, left_out)
    while len(html) > BUDGET and len(sheets) > 1:
        sheets = sheets[: max(len(sheets) // 2, 1)]
        html = _page(sheets, compared, left_out)
    return html


def _page(sheets: Sequence[Sheet], compared: Sequence[Layers], left_out: Sequence[str]) -> bytes:
    several = len(compared) > 1
    rows, note = _comparison(compared) if several else ([], "")
    folds = [folds_of(sheet, len(sheets)) for sheet in sheets]
    return render(
        "page.html",
        scripts=_SCRIPTS,
        styles=("page.css",),
        loading=True,
        title=f"{', '.join(capture.info.path for capture in compared[:3])}{', …' * (len(compared) > 3)} · nvprof-kit",
        sheets=[_variables(sheet, folded) for sheet, folded in zip(sheets, folds, strict=True)],
        compared=[{"path": capture.info.path, "short_path": _short_path(capture.info.path)} for capture in compared],
        changes=rows,
        changes_note=note,
        without_comm=any(capture.summary.comm_ns for capture in compared),
        change_total=_change_cells([layers.summary.work_ns / max(layers.summary.steps, 1) for layers in compared]),
        only_compared=[capture.info.path for capture in compared[len(sheets) :]],
        absent=list(left_out),
        data=[drawn(sheet, folded, len(sheets)) for sheet, folded in zip(sheets, folds, strict=True)],
    )


def _comparison(compared: Sequence[Layers]) -> tuple[list[dict[str, Any]], str]:
    """The rows of the comparison, and a sentence about omissions: all rows of the trees, as one tree. Each row has the
    parent that it has in the first capture with it; below a parent, those of the first capture come in its order, then
    those of later captures only.
    """
    parents: dict[str, str] = {}
    by_capture: list[dict[str, float]] = []
    for capture in compared:
        tree, steps = capture.tree, max(capture.summary.steps, 1)
        names = row_names(tree)
        work = ((tree["total_ns"] - tree["comm_ns"]) / steps).tolist()
        by_capture.append(dict(zip(names, work, strict=True)))
        for name, parent in zip(names, tree["parent"].tolist(), strict=True):
            parents.setdefault(name, parent)
    children: dict[str, list[str]] = {}
    for name, parent in parents.items():
        children.setdefault(parent, []).append(name)
    rows = []
    waiting = [(name, 0) for name in reversed(children.get("", []))]
    while waiting:
        name, depth = waiting.pop()
        times = [times.get(name) for times in by_capture]
        rows.append((_named(name, parents[name], depth), times))
        waiting += [(child, depth + 1) for child in reversed(children.get(name, []))]
    limit, note = max(MAX_CELLS // len(compared), 1), ""
    if len(rows) > limit:
        sizes = [max(times[0] or 0, times[-1] or 0) for _, times in rows]
        largest = sorted(sorted(range(len(rows)), key=lambda row: -sizes[row])[:limit])
        first, last = compared[0].info.path, compared[-1].info.path
        note = f"{len(rows) - limit:,} rows of little time are left out: nvprof-kit diff {first} {last} --format csv"
        rows = [rows[index] for index in largest]
    return [{**name, "layer": name["path"], "cells": _change_cells(times)} for name, times in rows], note


def _variables(sheet: Sheet, folded: Folds) -> dict[str, Any]:
    """The template variables of a capture."""
    result = sheet.layers
    steps = result.summary.steps
    columns, rows, total = _table(sheet, folded)
    folds = [row["row"] for row in rows if row["count"] > 1]
    gone = len(result.tree) - len(rows) + len(folds)
    left_out = [f"{gone:,} layers of little time: nvprof-kit layers {result.info.path} --format csv"] if gone else []
    return {
        "path": result.info.path,
        "short_path": _short_path(result.info.path),
        "facts": capture_facts(result.info, result.summary.all_steps, result.summary.steps),
        "headlines": headlines(sheet),
        "split": phase_split(result),
        "warnings": (*left_out_lines(result), *printed(result.warnings)),
        "findings": sheet.findings,
        "unit": "Milliseconds per step" if steps > 1 else "Milliseconds",
        "time_name": time_name(result),
        "measures": measures(sheet),
        "columns": columns,
        "rows": rows,
        "folds": len(folds),
        "folded": any(row["count"] >= MANY for row in rows),
        "total": total,
        "levels": int(result.tree["depth"].max()) + 1 if len(result.tree) else 1,
        "timelines": [] if sheet.timeline is None else [step.title for step in sheet.timeline.steps],
        "timeline_title": "One step in time" if steps else "The capture in time",
        "has_timeline": sheet.timeline is not None,
        "has_kernels": sheet.kernels is not None,
        "tables": sheet.tables,
        "left_out": [*left_out, *sheet.left_out],
        "has_steps": steps > 0,
        "limits": limit_bars(sheet.flops),
        "classes": class_bars(sheet),
        "unmatched": sheet.unmatched,
    }


def _short_path(path: str) -> str:
    name = path.replace("\\", "/").rsplit("/", 1)[-1]
    return name if len(name) <= 24 else f"{name[:10]}…{name[-12:]}"


def _table(sheet: Sheet, folded: Folds) -> tuple[list[str], list[dict[str, Any]], list[str]]:
    """Header, rows and total of the per-layer table."""
    result = replace(sheet.layers, select=UNFOLDED)
    tree, total_ns, last = result.tree, max(result.summary.total_ns, 1), total_line(result)
    phases = [phase for phase in PHASES if phase != "recompute" or last[phase]]
    on_page = folded.rows.tolist()
    groups = [[row] for row in on_page] + [[on_page[row] for row in fold.rows] for fold in folded.folds]
    more = _memory_cells(sheet, groups) | _flops_cells(sheet, groups)
    names = ["calls", *phases, "total_ns", *(["comm_ns"] if result.summary.comm_ns else []), "total_share", "cpu_ns"]

    def page_row(row: dict[Any, Any], name: str, line: dict[str, str]) -> dict[str, Any]:
        values = {**row, **{phase: in_phase(row, phase) for phase in phases}}
        cells = [_cell(line.get(name, ""), values.get(name)) for name in names]
        cells[names.index("total_share")] = _cell(line["total_share"], row["total_ns"], row["total_ns"] / total_ns)
        outside = row["layer"] == NO_LAYER
        return {**_named(name, str(row["parent"]), row["depth"]), "cells": cells, "outside": outside}

    lines = tree_lines(result)
    joined = tree_lines(replace(result, tree=folded.tree[list(tree.columns)])) if folded.folds else []
    fold_at_row = {fold.rows[0]: number for number, fold in enumerate(folded.folds)}
    inside = {row for fold in folded.folds for row in fold.rows}
    row_paths = row_names(tree)
    rows = []
    for position, number in enumerate(on_page):
        if position in fold_at_row:
            fold = folded.folds[fold_at_row[position]]
            fold_row = page_row(joined[fold.line][0], fold.name, joined[fold.line][1])
            group = len(on_page) + fold_at_row[position]
            fold_row["cells"] += [column[group] for column in more.values()]
            links = {"row": group, "count": len(fold.rows), "each": fold.each, "inside": False, "unlike": ""}
            rows.append({**fold_row, **links})
        page_line = page_row(lines[number][0], row_paths[number], lines[number][1])
        page_line["cells"] += [column[position] for column in more.values()]
        links = {"row": position, "count": 1, "inside": position in inside, "unlike": folded.differences[position]}
        rows.append({**page_line, **links})
    return (
        [*(COLUMNS[name].name for name in ("layer", *names)), *more],
        rows,
        [*(last.get(name, "") for name in names), *("" for _ in more)],
    )


def _memory_cells(sheet: Sheet, groups: Sequence[Sequence[int]]) -> dict[str, list[dict[str, Any]]]:
    """The memory columns by header, without empty ones, with a cell for each group of rows of the tree."""
    columns: dict[str, list[dict[str, Any]]] = {}
    if sheet.memory is None:
        return columns
    for name in MEMORY_COLUMNS:
        of_row = sheet.memory[name].fillna(0).tolist()
        join = max if name == "peak_bytes" else sum
        counts = [join(of_row[row] for row in group) for group in groups]
        if any(counts):
            columns[COLUMNS[name].name] = [_cell(mib_cell(count) if count else "", count) for count in counts]
    return columns


def _flops_cells(sheet: Sheet, groups: Sequence[Sequence[int]]) -> dict[str, list[dict[str, Any]]]:
    """The columns of MFU and of the limit by header, if operators were counted and the GPU's peak is known, with a cell
    for each group of rows of the tree.
    """
    if sheet.flops is None or sheet.flops.peaks is None:
        return {}
    tree = sheet.layers.tree
    columns = {}
    for heading, name in (("MFU", "mfu"), ("of limit", "of_limit")):
        for phase in ("forward", "backward"):
            rows = sheet.flops.rows[sheet.flops.rows["phase"] == phase].set_index("layer")[["gpu_busy_ns", name]]
            rows = rows.reindex(tree["layer"].where(tree["phase"].isin(["", phase]), "")).fillna(0.0)
            busy_ns = rows["gpu_busy_ns"].to_numpy()
            at_limit_ns = rows[name].to_numpy() * busy_ns
            values = [float(at_limit_ns[group].sum() / (busy_ns[group].sum() or 1.0)) for group in map(list, groups)]
            if any(values):
                bars = [None if name == "mfu" else min(value, 1.0) for value in values]
                cells = zip(values, bars, strict=True)
                columns[f"{heading} {phase}"] = [_cell(mfu_text(value), value or None, bar) for value, bar in cells]
    return columns


def mfu_text(mfu: float) -> str:
    """A utilization; '' for none, and a word if it is impossible; `nvprof-kit flops` gives the reasons."""
    return (percent(mfu) + (" (above the peak)" if mfu > 1 else "")) if mfu else ""


def _named(name: str, parent: str, depth: int) -> dict[str, Any]:
    """A row by path, split into the parent's path and its own name."""
    prefix = f"{parent}." if parent and name.startswith(f"{parent}.") else ""
    short_name = name.removeprefix(prefix)
    return {"path": short_text(name), "prefix": short_text(prefix), "name": short_text(short_name), "depth": depth}


def _cell(text: str, value: float | None, bar: float | None = None, mark: str = "") -> dict[str, Any]:
    """A cell: text, sort value, bar length (0 to 1), and CSS class."""
    bar_text = None if bar is None else f"{bar:.4f}"
    return {"text": text, "value": "" if value is None else value, "bar": bar_text, "mark": mark}


def _change_cells(times: Sequence[float | None]) -> list[dict[str, Any]]:
    """The time per step in each capture, None where it has no such row, then the change from first to last."""
    first, last = times[0], times[-1]
    ms = Cells(1, 3)
    cells = [_cell("" if ns is None else ms(round(ns)) or "0.000", ns) for ns in times]
    if first is None or last is None:
        return [*cells, _cell("new" if first is None else "gone", None), _cell("", None)]
    relative = (last - first) / first if first else None
    mark = "" if relative is None or abs(relative) < MARKED_CHANGE else "worse" if relative > 0 else "better"
    sign = "+" if last >= first else ""
    cells.append(_cell(f"{sign}{ms(round(last - first)) or '0.000'}", last - first, mark=mark))
    return [*cells, _cell("" if relative is None else f"{100 * relative:+.1f} %", relative, mark=mark)]
