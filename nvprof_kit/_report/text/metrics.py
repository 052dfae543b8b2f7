"""Text report of GPU metrics by layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._analysis.metrics import COLUMNS
from nvprof_kit._report.text.table import capture_line, fold_notes, layer_table, warning_lines
from nvprof_kit._report.text.units import Cells

if TYPE_CHECKING:
    from nvprof_kit._analysis.metrics import Metrics

TOO_FEW = "too few"
_RANKS = {"phase": 0, "busy ms": 0, "SM active": 0, "samples": 3}


def metrics_report(result: Metrics) -> list[RenderableType]:
    """The report: what was sampled, the table, and warnings."""
    figures = {
        name: column for name, column in COLUMNS.items() if column.heading and not math.isnan(result.overall[name])
    }
    rows = result.printed().to_dict("records")
    ms = Cells.for_total(max([1, *(int(row["busy_ns"]) for row in rows)]))
    lines = []
    for row in rows:
        line = {"busy ms": ms(row["busy_ns"]), "samples": f"{row['samples']:,.0f}"}
        if row["enough"]:
            line |= {column.heading: _percent(row[name]) for name, column in figures.items()}
        elif figures:
            line[next(iter(figures.values())).heading] = TOO_FEW
        lines.append(line)
    columns = dict.fromkeys(("busy ms", "samples", *(column.heading for column in figures.values())), "right")
    grid, names = layer_table(result, columns, lines, _RANKS, ms)
    overall = ", ".join(f"{column.heading} {_percent(result.overall[name])}" for name, column in figures.items())
    interval = f"{result.interval_ns / 1000:g} µs"
    note = (
        f"Means over the time in which the layer's operations ran, in percent of the peak. {TOO_FEW}: fewer than "
        f"{result.floor:g} samples."
    )
    return [
        capture_line(result.info, result.steps),
        Text(f"{result.samples:,} samples, one every {interval}; mean over all busy time: {overall}"),
        "",
        grid,
        "",
        Text(note, "dim"),
        *fold_notes(names, "those of all of them", "busy ms of one of them"),
        *warning_lines(result.info.warnings),
    ]


def _percent(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.0f} %"
