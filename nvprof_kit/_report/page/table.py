"""Tables of pages: the layers of a capture as a tree, captures beside each other, and tables of an analysis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nvprof_kit._analysis.attribution.intervals import Int64Array
from nvprof_kit._analysis.diff.effects import is_within
from nvprof_kit._analysis.layers.fold import Group, fold_tree
from nvprof_kit._analysis.layers.tree import ModelTree
from nvprof_kit._report.text.layers import COLUMNS, MEMORY_COLUMNS, Line, in_phase, row_names, total_line, tree_lines
from nvprof_kit._report.text.texts import MS, cell, filled, heading, is_missing, mib_cell, percent
from nvprof_kit._result.column import Columns
from nvprof_kit._result.result import UNFOLDED
from nvprof_kit.names import LAYER_PHASES, NO_LAYER

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.flops.flops import Flops
    from nvprof_kit._analysis.layers.layers import Layers

MAX_COMPARED = 20_000
"""Maximum number of rows of the comparison; those of the most time are kept."""

MAX_TABLE_ROWS = 100
"""Maximum number of table rows on the page; a command next to the table shows all."""

Cell = dict[str, Any]
"""Text, sort value, length of the bar (0 to 1), and CSS class."""

PageTable = dict[str, Any]
"""A table: ``name`` in links, ``title``, ``about``, ``heads`` (name, and whether it is numeric), ``rows`` of cells
(text and sort value), ``note`` about omitted rows, and the ``command`` that shows all."""


def _cell(text: str, value: float | None, bar: float | None = None, mark: str = "") -> Cell:
    bar_text = None if bar is None else f"{bar:.4f}"
    return {"text": text, "value": "" if value is None else value, "bar": bar_text, "mark": mark}


def _named(name: str, parent: str, depth: int) -> dict[str, Any]:
    """A row by path, split into the parent's path and its own name."""
    prefix = f"{parent}." if parent and name.startswith(f"{parent}.") else ""
    return {"path": name, "prefix": prefix, "name": name.removeprefix(prefix), "depth": depth}


# ---------------------------------------------------------------- layers


@dataclass(frozen=True)
class PageRows:
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
    def of(cls, tree: pd.DataFrame, limit: int) -> PageRows:
        """The costliest rows of a tree and their ancestors."""
        chosen = set(np.argsort(-tree["total_ns"].to_numpy(), kind="stable")[:limit].tolist())
        parents = parents_of(tree)
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


def parents_of(tree: pd.DataFrame) -> list[int]:
    """The row of each row's parent, -1 at the top."""
    parents: list[int] = ModelTree(tuple(row_names(tree)), tuple(tree["parent"])).parent.tolist()
    return parents


def layer_table(
    result: Layers, page_rows: PageRows, memory: pd.DataFrame | None, flops: Flops | None
) -> tuple[list[str], list[dict[str, Any]], list[str]]:
    """Header, rows and total of the per-layer table.

    Args:
        result: The per-layer table.
        page_rows: Its rows on the page.
        memory: The memory of each row of the tree.
        flops: FLOPs and utilization.
    """
    result, folded = replace(result, select=UNFOLDED), page_rows.folded
    tree, total_ns, last = result.tree, max(result.summary.total_ns, 1), total_line(result)
    phases = [phase for phase in LAYER_PHASES if phase != "recompute" or last[phase]]
    names = ["calls", *phases, "total_ns", *(["comm_ns"] if result.summary.comm_ns else []), "total_share", "cpu_ns"]
    on_page = page_rows.rows.tolist()
    groups = [[row] for row in on_page] + [[on_page[row] for row in group.rows] for group in page_rows.folds.values()]
    more = _more_cells(tree, memory, flops, groups)

    def page_row(line: Line, name: str, group: int, **links: Any) -> dict[str, Any]:
        """A row of the table: of one layer, or of equal blocks; `group` is its place among the groups."""
        row, texts = line
        values = {**row, **{phase: in_phase(row, phase) for phase in phases}, "total_share": row["total_ns"]}
        cells = [_cell(texts.get(name, ""), values.get(name)) for name in names]
        cells[names.index("total_share")]["bar"] = f"{row['total_ns'] / total_ns:.4f}"
        cells += [column[group] for column in more.values()]
        outside = row["layer"] == NO_LAYER
        return {**_named(name, row["parent"], row["depth"]), "cells": cells, "outside": outside, "row": group, **links}

    lines, paths = tree_lines(result), row_names(tree).tolist()
    lines_of_folds = tree_lines(replace(result, tree=folded[list(tree.columns)])) if page_rows.folds else []
    rows: list[tuple[int, dict[str, Any]]] = []
    links: dict[str, Any]
    for position, (line, group) in enumerate(page_rows.folds.items(), len(on_page)):
        median, shortest, longest = (folded[f"{name}_ns"][line] / 1e6 for name in ("median", "min", "max"))
        each = f"each {median:,.3f} ms in all steps that are shown, {shortest:,.3f} to {longest:,.3f}, without "
        links = {"count": group.count, "each": each + "communication", "inside": False, "unlike": ""}
        rows.append((group.rows[0], page_row(lines_of_folds[line], group.label, position, **links)))
    for group in page_rows.groups:
        links = {"count": 1, "inside": group.count > 1, "unlike": group.difference}
        rows += [(row, page_row(lines[on_page[row]], paths[on_page[row]], row, **links)) for row in group.rows]
    rows.sort(key=lambda row: row[0])  # a fold is above its first row
    heads = [*(COLUMNS[name].name for name in ("layer", *names)), *more]
    return heads, [row for _, row in rows], [*(last.get(name, "") for name in names), *("" for _ in more)]


def _more_cells(
    tree: pd.DataFrame, memory: pd.DataFrame | None, flops: Flops | None, groups: Sequence[list[int]]
) -> dict[str, list[Cell]]:
    """The columns of memory, and of MFU and the limit if operators were counted and the GPU's peak is known, by header,
    without empty ones, with a cell for each group of rows of the tree.
    """
    columns: dict[str, list[Cell]] = {}
    if memory is not None:
        for name in MEMORY_COLUMNS:
            join = max if name == "peak_bytes" else sum
            of_row = memory[name].fillna(0).tolist()
            counts = [join(of_row[row] for row in group) for group in groups]
            columns[COLUMNS[name].name] = [_cell(mib_cell(count) if count else "", count or None) for count in counts]
    if flops is not None and flops.peaks:
        for title, name in (("MFU", "mfu"), ("of limit", "of_limit")):
            for phase in ("forward", "backward"):
                rows = flops.rows[flops.rows["phase"] == phase].set_index("layer")[["gpu_busy_ns", name]]
                rows = rows.reindex(tree["layer"].where(tree["phase"].isin(["", phase]), "")).fillna(0.0)
                busy_ns = rows["gpu_busy_ns"].to_numpy()
                at_limit_ns = rows[name].to_numpy() * busy_ns
                shares = [float(at_limit_ns[group].sum() / (busy_ns[group].sum() or 1.0)) for group in groups]
                texts = [percent(share) + " (above the peak)" * (share > 1) if share else "" for share in shares]
                bars = [min(share, 1.0) if name == "of_limit" else None for share in shares]
                cells = zip(texts, shares, bars, strict=True)
                columns[f"{title} {phase}"] = [_cell(text, share or None, bar) for text, share, bar in cells]
    return {title: cells for title, cells in columns.items() if any(cell["text"] for cell in cells)}


# ---------------------------------------------------------------- captures beside each other


def comparison(base: Layers, new: Layers, noise: float) -> tuple[list[dict[str, Any]], list[Cell], str]:
    """The rows of the comparison, the total, and a sentence about omissions: all rows of both trees, as one tree. A row
    has the parent that it has in the first capture with it; below a parent, those of BASE come in its order, then those
    of NEW only. Changes that are more than the noise of a run have a color.
    """
    (base_ns, parents), (new_ns, new_parents) = (_times(layers) for layers in (base, new))
    parents |= {name: parent for name, parent in new_parents.items() if name not in parents}
    children: dict[str, list[str]] = {}
    for name, parent in parents.items():
        children.setdefault(parent, []).append(name)
    rows, note = [], ""
    stack = [(name, 0) for name in reversed(children.get("", []))]
    while stack:
        name, depth = stack.pop()
        rows.append((_named(name, parents[name], depth), base_ns.get(name), new_ns.get(name)))
        stack += [(child, depth + 1) for child in reversed(children.get(name, []))]
    if len(rows) > MAX_COMPARED:
        command = f"nvprof-kit diff {base.info.path} {new.info.path} --format csv"
        note = f"{len(rows) - MAX_COMPARED:,} rows of little time are left out: {command}"
        largest = sorted(range(len(rows)), key=lambda row: -max(rows[row][1] or 0, rows[row][2] or 0))[:MAX_COMPARED]
        rows = [rows[index] for index in sorted(largest)]
    total = _change_cells(noise, *(layers.summary.work_ns / max(layers.summary.steps, 1) for layers in (base, new)))
    return [{**row, "cells": _change_cells(noise, *times)} for row, *times in rows], total, note


def _times(layers: Layers) -> tuple[dict[str, float], dict[str, str]]:
    """The time per step without communication of each row of a tree, and its parent."""
    tree = layers.tree.set_index(row_names(layers.tree))
    work: Any = (tree["total_ns"] - tree["comm_ns"]) / max(layers.summary.steps, 1)
    parents: Any = tree["parent"].to_dict()
    return work.to_dict(), parents


def short_path(path: str) -> str:
    """A path's last part, without its middle if it is long."""
    name = path.replace("\\", "/").rsplit("/", 1)[-1]
    return name if len(name) <= 24 else f"{name[:10]}…{name[-12:]}"


def _change_cells(noise: float, base_ns: float | None, new_ns: float | None) -> list[Cell]:
    """The time per step in each capture, None where it has no such row, then the change."""
    cells = [_cell("" if ns is None else MS(round(ns)) or "0.000", ns) for ns in (base_ns, new_ns)]
    if base_ns is None or new_ns is None:
        return [*cells, _cell("new" if base_ns is None else "gone", None), _cell("", None)]
    relative = (new_ns - base_ns) / base_ns if base_ns else None
    is_marked = base_ns and not is_within(noise, new_ns / base_ns)
    mark = "" if not is_marked else "worse" if new_ns > base_ns else "better"
    change = f"{'+' if new_ns >= base_ns else ''}{MS(round(new_ns - base_ns)) or '0.000'}"
    percentage = "" if relative is None else f"{100 * relative:+.1f} %"
    return [*cells, _cell(change, new_ns - base_ns, mark=mark), _cell(percentage, relative, mark=mark)]


# ---------------------------------------------------------------- analyses


def page_table(frame: pd.DataFrame, columns: Columns, name: str, title: str, about: str, *, command: str) -> PageTable:
    """A table of an analysis; empty columns are left out.

    Args:
        frame: The rows, the most important first.
        columns: The columns of the answer, for their headings.
        name: Name in links.
        title: The heading.
        about: A description.
        command: The command that shows the whole table.
    """
    printed = filled(frame.iloc[:MAX_TABLE_ROWS])
    zeros = [name for name in printed if str(name).endswith("_ns") and not printed[name].fillna(0).any()]
    printed = printed.drop(columns=zeros)
    more = len(frame) - len(printed)
    heads = [(heading(str(name), columns), printed[name].dtype.kind in "iufb") for name in printed]
    rows = []
    for row in printed.to_dict("records"):
        sort_values = ("" if isinstance(value, str) or is_missing(value) else value for value in row.values())
        rows.append(list(zip((cell(str(name), value) for name, value in row.items()), sort_values, strict=True)))
    note = f"{more:,} more rows are not on the page" if more else ""
    texts = {"name": name, "title": title, "about": about, "note": note, "command": command}
    return {**texts, "heads": heads, "rows": rows}
