"""GPU metrics of each layer as a person reads them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._analysis.layers.order import with_holders
from nvprof_kit._report.text.table.terminal import capture_line, table, warning_lines
from nvprof_kit._report.text.table.units import Cells

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


def metrics_report(result: MetricsResult, depth: int | None = None, most: int | None = None) -> list[RenderableType]:
    """The whole report: what was sampled, the table, and every warning."""
    columns = [name for name in _TITLES if not math.isnan(result.whole[name])]
    made = table([("layer", "path"), ("phase", "left"), ("busy ms", "right"), ("samples", "right")]
                 + [(_TITLES[name], "right") for name in columns], _RANKS)  # fmt: skip
    made.most, made.way = most, "--top N or -o FILE.csv shows them"
    for cells, cost in zip(metrics_lines(result, columns, depth), _costs(result, depth), strict=True):
        made.add_row(*cells, cost=cost)
    every = f"{result.interval_ns / 1000:g} µs"
    lines = [
        capture_line(result.info, result.steps),
        Text(f"{result.samples:,} samples, one every {every}; of all busy time: {_overall(result, columns)}"),
    ]
    note = (
        f"Means over the time in which the layer's operations ran, in percent of the peak. {TOO_FEW}: fewer than "
        f"{result.options.floor:g} samples."
    )
    return [*lines, "", made, "", Text(note, "dim"), *warning_lines(result.info.warnings)]


def metrics_lines(result: MetricsResult, columns: list[str], depth: int | None = None) -> list[list[str]]:
    """The table's cells, of the first levels of the model only where a depth is given."""
    ms = Cells.for_total(max(int(result.rows["busy_ns"].max() if len(result.rows) else 1), 1))
    lines = []
    for row in _shown(result, depth):
        lines.append(
            [row["layer"], row["phase"], ms(row["busy_ns"]), f"{row['samples']:,.0f}", *_figures(row, columns)]
        )
    return lines


def _shown(result: MetricsResult, depth: int | None) -> list[dict[Any, Any]]:
    rows = result.rows.to_dict("records")
    return [row for row in rows if depth is None or len(with_holders(row["layer"], result.parents)) <= depth]


def _costs(result: MetricsResult, depth: int | None) -> list[float]:
    return [float(row["busy_ns"]) for row in _shown(result, depth)]


def _figures(row: dict[Any, Any], columns: list[str]) -> list[str]:
    if not row["enough"]:
        return [TOO_FEW, *[""] * (len(columns) - 1)] if columns else []
    return ["" if math.isnan(row[name]) else f"{row[name]:.0f} %" for name in columns]


def _overall(result: MetricsResult, columns: list[str]) -> str:
    return ", ".join(f"{_TITLES[name]} {result.whole[name]:.0f} %" for name in columns)
