"""Text report of GPU metrics by layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._analysis.metrics import COLUMNS
from nvprof_kit._report.text.table import (
    KINDS,
    RANKS,
    capture_line,
    fold_cells,
    fold_columns,
    fold_notes,
    path_label,
    table,
    warning_lines,
)
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
    rows = result.printed()
    ms = Cells.for_total(max(int(rows["busy_ns"].max() if len(rows) else 1), 1))
    folds = [fold_cells(row, ms) for row in rows.to_dict("records")]
    folded = fold_columns(folds)
    lines = table([("layer", "path"), ("phase", "left"), ("busy ms", "right"), ("samples", "right")]
                  + [(column.heading, "right") for column in figures.values()]
                  + [(name, KINDS.get(name, "right")) for name in folded], _RANKS | RANKS)  # fmt: skip
    lines.choose(result.select)
    for row, fold in zip(rows.to_dict("records"), folds, strict=True):
        cells = [
            path_label(row),
            row["phase"],
            ms(row["busy_ns"]),
            f"{row['samples']:,.0f}",
        ]
        if row["enough"]:
            cells += ["" if math.isnan(row[name]) else f"{row[name]:.0f} %" for name in figures]
        else:
            cells += [TOO_FEW, *[""] * (len(figures) - 1)] if figures else []
        lines.add_row(*cells, *(fold.get(name, "") for name in folded), cost=float(row["busy_ns"]))
    overall = ", ".join(f"{column.heading} {result.overall[name]:.0f} %" for name, column in figures.items())
    interval = f"{result.interval_ns / 1000:g} µs"
    note = (
        f"Means over the time in which the layer's operations ran, in percent of the peak. {TOO_FEW}: fewer than "
        f"{result.floor:g} samples."
    )
    return [
        capture_line(result.info, result.steps),
        Text(f"{result.samples:,} samples, one every {interval}; mean over all busy time: {overall}"),
        "",
        lines,
        "",
        Text(note, "dim"),
        *fold_notes(folded, "those of all of them", "busy ms of one of them"),
        *warning_lines(result.info.warnings),
    ]
