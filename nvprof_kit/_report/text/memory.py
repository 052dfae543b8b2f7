"""Reports of GPU memory by owner: tables for the terminal, a page, and plots."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._analysis.layers.fold import EACH, fold_ranked
from nvprof_kit._analysis.memory.memory import ALIKE, COLUMNS, COSTS
from nvprof_kit._report.page.template import render, svg_of
from nvprof_kit._report.text.table import Bar, frame_table, ranked_notes, warning_lines
from nvprof_kit._report.text.texts import cell, memory_size, mib_cell, percent
from nvprof_kit._result.formats import title

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.memory.memory import Memory

MOST_ROWS = 20
"""Maximum number of displayed rows per table; data formats contain all rows."""

_RANKS = {"MiB": 0, "peak": 0, "allocated": 0, "total": 0, "step": 0, "phase": 0, "largest": 2, "blocks": 2}
_RANKS |= dict.fromkeys(EACH, 3)

_WRITERS = {**dict.fromkeys(("bytes", "bytes_per_step"), mib_cell), "address": hex}

VIEWS = {
    "layer": "At the peak, by layer",
    "stack": "At the peak, by stack",
    "size": "At the peak, by size",
    "allocation": "Allocated over the whole history, by layer",
    "step": "From step to step",
    "segment": "Segments, the most idle memory first",
    "leak": "Left behind by step after step",
}
"""The views with their headings."""


def memory_report(result: Memory) -> list[RenderableType]:
    """The report: a summary of the device, the requested tables, and warnings."""
    views, select = (result.by,) if result.by else tuple(VIEWS), result.select
    title_line, *header_lines = header(result)
    parts: list[RenderableType] = [Text(title_line, "bold"), *map(Text, header_lines), ""]
    tables = select.changed(sort="").each({view: result.table(view) for view in views})
    tables = {
        view: fold_ranked(rows, COLUMNS[view], COSTS[view], select.fold, ALIKE[view]) if view in COSTS else rows
        for view, rows in tables.items()
    }
    for view, rows in select.each(tables).items():
        if len(rows):
            parts += [Text(VIEWS[view], "bold"), _table(rows, select.top or MOST_ROWS, view), ""]
    notes = [Text("MiB of 1,048,576 bytes.", "dim"), *ranked_notes(tables.values())]
    return [*parts, *notes, *warning_lines(result.warnings)]


def memory_page(result: Memory) -> bytes:
    """A self-contained page with both plots and all tables."""
    timeline, segments = (svg_of(replace(result, by=by).figure()) for by in (None, "segment"))
    tables: dict[str, dict[str, Any]] = {
        view: {"title": heading, "svg": "", "table": _plain(result.table(view))} for view, heading in VIEWS.items()
    }
    last = [{"title": "Segments", "svg": segments, "table": None}, tables.pop("segment")]
    sections = [{"title": "Allocated memory over time", "svg": timeline, "table": None}, *tables.values(), *last]
    return render(
        "plain.html",
        (),
        ("plain.css",),
        title=f"GPU memory: {title(result.path)}",
        lines=header(result),
        sections=[section for section in sections if section["svg"] or section["table"][1]],
        warnings=result.warnings,
    )


def header(result: Memory) -> list[str]:
    """A summary of the device."""
    summary = result.summary
    peak = f"Peak: {memory_size(summary.peak_bytes)} allocated"
    if len(result.by_layer):
        peak += f", {percent(summary.labelled)} of it in a named layer"
    idle = int(result.segments["free_bytes"].sum())
    rounding = int(result.segments["rounding_bytes"].sum())
    return [
        f"{title(result.path)} · device {summary.device} · {summary.events:,} events",
        peak,
        f"At the end: {memory_size(summary.allocated_bytes)} allocated, "
        f"{memory_size(summary.reserved_bytes)} reserved; "
        f"{memory_size(idle)} idle in {len(result.segments):,} segments, {memory_size(rounding)} lost to rounding",
    ]


def _table(rows: pd.DataFrame, limit: int, name: str) -> RenderableType:
    rows = rows.loc[:, rows.notna().any() & (rows.astype(str) != "").any()]
    way = f"{{}} more; --top shows them, --by {name} -o FILE.csv has all"
    headings = {str(column): _heading(str(column)) for column in rows.columns}
    grid = frame_table(
        rows.head(limit),
        len(rows) - limit,
        headings=headings,
        writers=_WRITERS,
        ranks=_RANKS,
        kinds={"address": "left"},
        way=way,
    )
    if "share" in rows:
        longest = max(rows["share"], default=0.0) or 1.0
        grid.add_column("", "bar", [Bar(share / longest) for share in rows["share"].head(limit)])
    return grid


def _heading(name: str) -> str:
    return "MiB" if name == "bytes" else name.removesuffix("_bytes")


def _plain(rows: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a table as text: bytes in MiB, fractions in percent."""
    cells = [[cell(str(name), value, _WRITERS) for name, value in row.items()] for row in rows.to_dict("records")]
    return [_heading(str(name)) for name in rows.columns], cells
