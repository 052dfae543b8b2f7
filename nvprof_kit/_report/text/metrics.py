"""Text report of GPU metrics by layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._report.text.table.folded import KINDS, RANKS, fold_cells, fold_columns, fold_notes, path_label
from nvprof_kit._report.text.table.terminal import capture_line, table, warning_lines
from nvprof_kit._report.text.table.units import Cells, Milliseconds
from nvprof_kit._result.selection import EVERYTHING, Selection

if TYPE_CHECKING:
    from nvprof_kit._analysis.metrics import MetricsResult

_TITLES = {
    "sm_active_pct": "SM active",
    "sm_issue_pct": "SM issue",
    "tensor_active_pct": "tensor",
    "warps_pct": "warps",
    "dram_read_pct": "DRAM read",
    "dram_write_pct": "DRAM write",
    "nvlink_rx_pct": "NVLink in",
    "nvlink_tx_pct": "NVLink out",
    "pcie_rx_pct": "PCIe in",
    "pcie_tx_pct": "PCIe out",
}
TOO_FEW = "too few"
_RANKS = {"phase": 0, "busy ms": 0, "SM active": 0, "samples": 3}


def metrics_report(result: MetricsResult, select: Selection = EVERYTHING) -> list[RenderableType]:
    """The report: what was sampled, the table, and warnings."""
    columns = [name for name in _TITLES if not math.isnan(result.whole[name])]
    ms = _milliseconds(result)
    rows = result.rows.to_dict("records")
    folds = [fold_cells(row, ms) for row in rows]
    more = fold_columns(folds)
    made = table([("layer", "path"), ("phase", "left"), ("busy ms", "right"), ("samples", "right")]
                 + [(_TITLES[name], "right") for name in columns]
                 + [(name, KINDS.get(name, "right")) for name in more], _RANKS | RANKS)  # fmt: skip
    made.choose(select)
    for row, cells, fold in zip(rows, metrics_lines(result, columns), folds, strict=True):
        made.add_row(*cells, *(fold.get(name, "") for name in more), cost=float(row["busy_ns"]))
    every = f"{result.interval_ns / 1000:g} µs"
    lines = [
        capture_line(result.info, result.steps),
        Text(f"{result.samples:,} samples, one every {every}; mean over all busy time: {_overall(result, columns)}"),
    ]
    note = (
        f"Means over the time in which the layer's operations ran, in percent of the peak. {TOO_FEW}: fewer than "
        f"{result.options.floor:g} samples."
    )
    folded = fold_notes(more, "those of all of them", "busy ms of one of them")
    return [*lines, "", made, "", Text(note, "dim"), *folded, *warning_lines(result.info.warnings)]


def metrics_lines(result: MetricsResult, columns: list[str]) -> list[list[str]]:
    """The table's cells."""
    ms = _milliseconds(result)
    return [
        [path_label(row), row["phase"], ms(row["busy_ns"]), f"{row['samples']:,.0f}", *_figures(row, columns)]
        for row in result.rows.to_dict("records")
    ]


def _milliseconds(result: MetricsResult) -> Milliseconds:
    return Cells.for_total(max(int(result.rows["busy_ns"].max() if len(result.rows) else 1), 1))


def _figures(row: dict[Any, Any], columns: list[str]) -> list[str]:
    if not row["enough"]:
        return [TOO_FEW, *[""] * (len(columns) - 1)] if columns else []
    return ["" if math.isnan(row[name]) else f"{row[name]:.0f} %" for name in columns]


def _overall(result: MetricsResult, columns: list[str]) -> str:
    return ", ".join(f"{_TITLES[name]} {result.whole[name]:.0f} %" for name in columns)
