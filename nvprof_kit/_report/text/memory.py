"""Reports of GPU memory by owner: tables for the terminal, a page, and plots."""

from __future__ import annotations

from dataclasses import replace

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._analysis.memory.memory import Memory
from nvprof_kit._report.page.template import result_page
from nvprof_kit._report.text.table import below, frame_table, html_of, ranked_notes
from nvprof_kit._report.text.texts import TEXTS, memory_size, percent
from nvprof_kit._result.formats import title

MOST_ROWS = 20
"""Maximum number of displayed rows per table; data formats contain all rows."""


def memory_report(result: Memory) -> list[RenderableType]:
    """The report: a summary of the device, the requested tables, and warnings."""
    tables = result.printed()
    title_line, *header_lines = header(result)
    parts: list[RenderableType] = [Text(title_line, "bold"), *map(Text, header_lines), ""]
    for view, rows in tables.items():
        if len(rows) or result.view:
            top, columns = result.select.top or MOST_ROWS, result.columns[f"memory-{view}"]
            grid = frame_table(rows, top, columns, mib=True, bar="share") if len(rows) else "none"
            parts += [Text(TEXTS["memory"][view], "bold"), grid, ""]
    return [*parts, *below(("MiB of 1,048,576 bytes.", *ranked_notes(tables.values())), result.warnings)]


def memory_page(result: Memory) -> bytes:
    """A self-contained page with both plots and all rows of all tables."""
    figures = [replace(result, view=view).figure() for view in (None, "segment")]
    everything = replace(result, view=None, select=replace(result.select, top=sum(map(len, result.tables.values()))))
    return result_page(f"GPU memory: {title(result.path)}", html_of(memory_report(everything)), figures)


def header(result: Memory) -> list[str]:
    """A summary of the device."""
    summary = result.summary
    peak = f"Peak: {memory_size(summary.peak_bytes)} allocated"
    if len(result.layer):
        peak += f", {percent(summary.labelled)} of it in a named layer"
    idle = int(result.segment["free_bytes"].sum())
    rounding = int(result.segment["rounding_bytes"].sum())
    capture = f"{title(result.path)} · device {summary.device} · {summary.events:,} events"
    amounts = f"{memory_size(summary.allocated_bytes)} allocated, {memory_size(summary.reserved_bytes)} reserved"
    idle_segments = f"{memory_size(idle)} idle in {len(result.segment):,} segments"
    return [capture, peak, f"At the end: {amounts}; {idle_segments}, {memory_size(rounding)} lost to rounding"]
