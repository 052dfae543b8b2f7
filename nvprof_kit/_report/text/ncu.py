"""Text reports of ncu: the plan with its coverage and duration, and the measured layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._analysis.ncu.plan import predicted_seconds
from nvprof_kit._report.text.table.folded import KINDS, RANKS, fold_cells, fold_columns, fold_notes, path_label
from nvprof_kit._report.text.table.terminal import table, warning_lines
from nvprof_kit._report.text.table.units import Cells, Milliseconds, percent, short_kernel
from nvprof_kit._result.plain import title
from nvprof_kit._result.selection import EVERYTHING, Selection

if TYPE_CHECKING:
    from nvprof_kit._analysis.ncu.layers import NcuLayersResult
    from nvprof_kit._analysis.ncu.plan import Plan


_PERCENTAGES = {
    "compute": "compute_pct",
    "memory": "memory_pct",
    "DRAM": "dram_pct",
    "L2": "l2_pct",
    "tensor": "tensor_pct",
    "occup.": "occupancy_pct",
    "L2 hit": "l2_hit_pct",
}
_RANKS = {"phase": 0, "ms": 0, "bound": 0, "why": 3, "stall": 2}
_PREFIXES = ("", "k", "M", "G", "T", "P")


@dataclass(frozen=True)
class Line:
    """One line of the table, as data.

    Attributes:
        label: The layer.
        phase: The phase.
        cells: The other cells by column; '' if not measured.
        cost: GPU time in ns.
    """

    label: str
    phase: str
    cells: dict[str, str]
    cost: float = field(default=0.0, compare=False)


def ncu_layers_report(result: NcuLayersResult, select: Selection = EVERYTHING) -> list[RenderableType]:
    """The report: what was measured and its coverage, the table, and warnings."""
    lines = ncu_layers_lines(result)
    columns = [name for name in lines[0].cells if any(line.cells.get(name) for line in lines)] if lines else []
    columns += fold_columns(line.cells for line in lines)
    kinds = {"bound": "left", "why": "left", "stall": "left", **KINDS}
    made = table(
        [("layer", "path"), ("phase", "left"), *((name, kinds.get(name, "right")) for name in columns)], _RANKS | RANKS
    )
    made.choose(select)
    for line in lines:
        made.add_row(line.label, line.phase, *(line.cells.get(name, "") for name in columns), cost=line.cost)
    notes = [*_notes(), *fold_notes(columns, "those of all of them", "ms of one of them")]
    return [*(Text(line) for line in header(result)), "", made, "", *notes, *warning_lines(result.warnings)]


def header(result: NcuLayersResult) -> list[str]:
    """What was measured, and its share of the GPU time."""
    ms = Milliseconds.for_total(max(result.gpu_ns, 1))
    lines = [f"{title(result.path)}: {result.measured:,} measured kernels"]
    if result.capture:
        lines.append(
            f"spread over {result.capture}: they stand for {percent(result.covered)} of its {ms(result.gpu_ns)} ms of "
            "GPU time"
        )
        if result.unused:
            lines.append(f"{result.unused:,} of them are like no launch of the capture")
    return lines


def ncu_layers_lines(result: NcuLayersResult) -> list[Line]:
    """The table's lines."""
    ms = Cells.for_total(max(result.gpu_ns, 1))
    return [
        Line(
            path_label(row),
            row["phase"],
            _cells(row, ms, bool(result.capture)) | fold_cells(row, ms),
            float(row["gpu_ns"]),
        )
        for row in result.rows.to_dict("records")
    ]


def _cells(row: dict[Any, Any], ms: Milliseconds, spread: bool) -> dict[str, str]:
    cells = {"ms": ms(row["gpu_ns"]), "covered": percent(row["covered"]) if spread else ""}
    cells |= {name: _whole(row[column]) for name, column in _PERCENTAGES.items()}
    cells["DRAM bytes"] = scaled(row["dram_bytes"])
    cells["NVLink out"] = scaled(row["nvlink_sent_bytes"])
    cells["NVLink in"] = scaled(row["nvlink_received_bytes"])
    cells["op/byte"] = "" if math.isnan(row["intensity"]) else f"{row['intensity']:.1f}"
    cells["stall"] = row["stall"] if isinstance(row["stall"], str) else ""
    cells["bound"] = row["bound"]
    cells["why"] = row["reason"]
    return cells


def _whole(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.0f} %"


def scaled(value: float) -> str:
    """A quantity with three digits and a prefix, such as ``1.23 G``; '' if not measured."""
    if math.isnan(value):
        return ""
    step = min(int(math.log10(value) // 3), len(_PREFIXES) - 1) if value >= 1 else 0
    return f"{value / 1000**step:.3g} {_PREFIXES[step]}".strip()


def _notes() -> list[RenderableType]:
    what = "Percentages are of the GPU's peak, means over GPU time, including nested layers."
    return [Text(what, "dim")]


def plan_report(plan: Plan, section_set: str, memory_gb: float, select: Selection = EVERYTHING) -> list[RenderableType]:
    """The report: the plan's coverage, its rows, and the next command."""
    made = table([(name, "left" if name == "kernel" else "right") for name in _COLUMNS])
    ms = Cells.for_total(plan.gpu_ns)
    made.choose(select)
    for row in plan.rows.to_dict("records"):
        made.add_row(
            short_kernel(row["kernel"]), row["grid"], row["block"], f"{row['launches']:,}", ms(row["gpu_ns"]),
            percent(row["share"]), percent(row["covered"]),
        )  # fmt: skip
    lines = (Text(line) for line in plan_lines(plan, section_set, memory_gb))
    return [*lines, "", made, *warning_lines(plan.info.warnings)]


_COLUMNS = ("kernel", "grid", "block", "launches", "ms", "share", "covered")


def plan_lines(plan: Plan, section_set: str, memory_gb: float) -> list[str]:
    """The plan in a few sentences."""
    of_what = " ".join(part for part in (plan.options.layer, plan.options.phase) if part)
    lines = [
        f"{plan.measurements} launches represent {percent(plan.covered)} of the GPU time"
        f"{f' of {of_what}' if of_what else ''} in {title(plan.info.path)}, which has {plan.launches:,} launches"
    ]
    if plan.collectives_ns:
        left_out = percent(plan.collectives_ns / (plan.gpu_ns + plan.collectives_ns))
        lines.append(
            f"collectives are left out ({left_out} of the GPU time): much of it is waiting, and ncu cannot replay them "
            "on one rank; recipes/ncu/kernels.sh -s communication --rank N measures them"
        )
    if plan.options.every_layer:
        block, share = plan.least_covered
        lines.append(f"and for at least {percent(share)} of every block's; least in {block}")
    seconds = predicted_seconds(plan, section_set, memory_gb)
    if seconds:
        lines.append(
            f"ncu --set {section_set} takes about {seconds[0]:,.0f} s, instead of {seconds[1]:,.0f} s for all "
            f"launches, including program start, if the program uses {memory_gb:g} GB of GPU memory"
        )
    return lines
