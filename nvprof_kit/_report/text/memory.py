"""Reports of GPU memory by owner: tables for the terminal, a page, and plots."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._report.page.template import render, svg_of
from nvprof_kit._report.text.table import below, frame_table, ranked_notes
from nvprof_kit._report.text.texts import cell, filled, heading, memory_size, percent
from nvprof_kit._result.formats import title

if TYPE_CHECKING:
    from nvprof_kit._analysis.memory.memory import Memory

MOST_ROWS = 20
"""Maximum number of displayed rows per table; data formats contain all rows."""

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
    tables = result.printed()
    title_line, *header_lines = header(result)
    parts: list[RenderableType] = [Text(title_line, "bold"), *map(Text, header_lines), ""]
    for view, rows in tables.items():
        if len(rows):
            grid = frame_table(rows, result.select.top or MOST_ROWS, mib=True, bar="share")
            parts += [Text(VIEWS[view], "bold"), grid, ""]
    return [*parts, *below(("MiB of 1,048,576 bytes.", *ranked_notes(tables.values())), result.warnings)]


def memory_page(result: Memory) -> bytes:
    """A self-contained page with both plots and all tables."""
    timeline, segments = (svg_of(replace(result, view=view).figure()) for view in (None, "segment"))
    sections: list[dict[str, Any]] = [{"title": "Allocated memory over time", "svg": timeline, "heads": (), "rows": ()}]
    for view, view_title in VIEWS.items():
        rows = filled(result.table(view))
        cells = [[cell(str(name), value, mib=True) for name, value in row.items()] for row in rows.to_dict("records")]
        svg, heads = segments if view == "segment" else "", [heading(str(name), mib=True) for name in rows]
        sections += [{"title": view_title, "svg": svg, "heads": heads, "rows": cells}] if cells else []
    return render(
        "plain.html",
        (),
        ("plain.css",),
        title=f"GPU memory: {title(result.path)}",
        lines=header(result),
        sections=sections,
        warnings=result.warnings,
    )


def header(result: Memory) -> list[str]:
    """A summary of the device."""
    summary = result.summary
    peak = f"Peak: {memory_size(summary.peak_bytes)} allocated"
    if len(result.layer):
        peak += f", {percent(summary.labelled)} of it in a named layer"
    idle = int(result.segment["free_bytes"].sum())
    rounding = int(result.segment["rounding_bytes"].sum())
    return [
        f"{title(result.path)} · device {summary.device} · {summary.events:,} events",
        peak,
        f"At the end: {memory_size(summary.allocated_bytes)} allocated, "
        f"{memory_size(summary.reserved_bytes)} reserved; "
        f"{memory_size(idle)} idle in {len(result.segment):,} segments, {memory_size(rounding)} lost to rounding",
    ]
