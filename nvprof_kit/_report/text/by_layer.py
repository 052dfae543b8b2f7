"""Text reports by layer and phase: FLOPs and utilization, GPU metrics, and the kernels that ncu measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._analysis.flops.flops import NOTES_APART, Flops
from nvprof_kit._analysis.metrics import MIN_SAMPLES, Metrics
from nvprof_kit._report.text.table import FOLD_COLUMNS, Column, Grid, below, capture_line, fold_cells, fold_notes
from nvprof_kit._report.text.texts import TEXTS, Milliseconds, count_per_step, is_missing, percent
from nvprof_kit._result.formats import title

if TYPE_CHECKING:
    from nvprof_kit._analysis.layers.fold import ByLayer
    from nvprof_kit._analysis.ncu.layers import NcuLayers

_RANKS = {
    **dict.fromkeys(("gpu_ns", "gpu_busy_ns", "busy_ns", "mfu", "of_limit", "bound", "sm_active_pct"), 0),
    **dict.fromkeys(("dtype", "stall"), 2),
    **dict.fromkeys(("calls", "samples", "reason"), 3),
}
"""Rank of a `table.Column` by the answer's column; 1 for others."""


def layer_table(
    result: ByLayer,
    names: Sequence[str],
    ms: Milliseconds,
    writers: Mapping[str, Callable[[Any], str]] = MappingProxyType({}),
    marks: Callable[[dict[Any, Any]], Mapping[str, str]] = lambda _: {},
) -> Grid:
    """The table of an answer by layer and phase, as it is selected and folded.

    Args:
        result: The answer.
        names: The columns to print, of which those without a figure are left out.
        ms: How its times are written; counts are divided as they are.
        writers: How columns are written that have a way of their own.
        marks: Cells of a row that replace others, by column; ``marks`` is the last one.
    """
    write: dict[str, Callable[[Any], str]] = {
        "ns": lambda ns: ms(round(ns)),
        "share": lambda share: percent(share) if share else "",
        "percent": "{:.0f} %".format,
        "bytes": scaled,
        "flop": lambda flops: _number(flops / ms.divisor / 1e9),
        "tflops_per_s": _number,
        "": lambda value: value if isinstance(value, str) else count_per_step(value, ms.divisor),
    }
    schema = result.columns[result.schema]
    columns = {name: schema[name] for name in names}
    printed = {
        name: Column.of(schema, name, "left" if column.kind == "str" else "right", _RANKS.get(name, 1), True)
        for name, column in columns.items()
    }
    labels = {"layer": Column.of(schema, "layer", "path"), "phase": Column.of(schema, "phase", "left", 0)}
    grid = Grid(labels | printed | FOLD_COLUMNS | {"marks": Column("", rank=2, is_optional=True)}, result.select)
    for row in result.printed().to_dict("records"):
        cells = {
            name: "" if is_missing(row[name]) else writers.get(name, write[column.unit])(row[name])
            for name, column in columns.items()
        }
        label = f"{row['layer']} x{row['count']}" if row["count"] > 1 else row["layer"]
        cells = {"layer": label, "phase": row["phase"], **cells, **marks(row), **fold_cells(row, ms)}
        grid.add(cells, cost=row[result.time])
    return grid


def scaled(value: float) -> str:
    """A quantity with three digits and a prefix, such as ``1.23 G``."""
    step = min(int(math.log10(value) // 3), 5) if value >= 1 else 0
    return f"{value / 1000**step:.3g} {'kMGTP'[step - 1] if step else ''}".strip()


def _number(value: float) -> str:
    """A number with one decimal, or one digit if it is small; '' for zero."""
    text = f"{value:,.1f}"
    return text if text.strip("0.,") else f"{value:.1g}" if value else ""


def flops_report(result: Flops) -> list[RenderableType]:
    """The report: the step total, the table, its footnotes, and warnings."""
    totals, recomputes = result.totals, result.totals.model_flops < result.totals.flops
    names = ["calls", "gpu_busy_ns", "flops", "tflops_per_s", "mfu", *(["hfu"] if recomputes else [])]
    names += ["limit_ns", "fused_limit_ns", "of_limit", "bound", "dtype"]
    longest_ns = max([1, *result.printed()["gpu_busy_ns"].astype(int)])
    notes: dict[str, str] = {}

    def marks(row: dict[Any, Any]) -> dict[str, str]:
        sentences = [note for note in str(row["note"]).split(NOTES_APART) if note]
        return {"marks": " ".join(notes.setdefault(note, f"[{len(notes) + 1}]") for note in sentences)}

    ms = Milliseconds.for_total(longest_ns, max(totals.steps, 1))
    grid = layer_table(result, names, ms, marks=marks)
    unit = "a step" if totals.steps else "the capture"
    about = f"Of {unit}, including nested layers; operations counted in {result.counts}."
    if result.peaks is not None:
        about += " MFU: the time its operations take at the peak of their type, over the busy time"
        about += ", without what is computed again; HFU: with it." if recomputes else "."
    limits = [TEXTS["notes"]["limits"]] if result.rows["limit_ns"].notna().any() else []
    footnotes = [f"{mark} {note}" for note, mark in notes.items()]
    folded = fold_notes(grid, "their sums and rates", "busy ms of one of them")
    header = [capture_line(result.info, totals.steps, result.all_steps), *_header(result, recomputes)]
    return [*header, "", grid, "", *below((*footnotes, about, *limits, *folded), result.warnings)]


def _header(result: Flops, recomputes: bool) -> list[RenderableType]:
    totals, peaks = result.totals, result.peaks
    devices = f"{totals.devices} GPU{'s' * (totals.devices > 1)}" if result.info.on_gpu else "the CPU"
    lasted, busy = (Milliseconds.for_total(int(ns) or 1).with_unit(int(ns)) for ns in (totals.step_ns, totals.busy_ns))
    bound = "at least " if result.uncounted else ""
    model = f", {_amount(totals.model_flops)} without what is computed again" if recomputes else ""
    rate = _number(totals.flops / max(totals.step_ns, 1) / 1000) or "0"
    scope = "A step" if totals.steps else "The capture"
    lines = [Text(f"{scope}: {bound}{_amount(totals.flops)}{model}, in {lasted} on {devices}: {rate} TFLOP/s")]
    if peaks is not None:
        in_step, in_busy = (
            ", ".join(
                f"{name} {bound}{percent(share) if share and not math.isnan(share) else '?'}"
                for name, share in zip(("MFU", "HFU")[: 1 + recomputes], shares, strict=False)
            )
            for shares in ((totals.mfu, totals.hfu), (totals.busy_mfu, totals.busy_hfu))
        )
        of_types = ", ".join(f"{dtype} {flops / 1e12:,.4g}" for dtype, flops in peaks.flops.items())
        lines.append(Text(f"{in_step}; of the {busy} in which the GPU works: {in_busy}", "bold"))
        lines.append(Text(f"Peak of {peaks.name}, dense, in TFLOP/s: {of_types}"))
        lines += [Text(f"Peaks measured on this machine: {', '.join(peaks.measured)}")] if peaks.measured else []
    return list(lines)


def _amount(flops: float) -> str:
    return f"{flops / 1e12:,.3f} TFLOP" if flops >= 1e12 or not flops else f"{flops / 1e9:,.3g} GFLOP"


TOO_FEW = "too few"


def metrics_report(result: Metrics) -> list[RenderableType]:
    """The report: what was sampled, the table, and warnings."""
    figures = {
        name: column.heading
        for name, column in result.columns[result.schema].items()
        if column.unit == "percent" and not math.isnan(result.overall[name])
    }
    ms = Milliseconds.for_total(max([1, *result.printed()["busy_ns"].astype(int)]))
    names, first = ["busy_ns", "samples", *figures], next(iter(figures), "")
    writers = {"samples": "{:,.0f}".format}
    grid = layer_table(result, names, ms, writers, lambda row: {} if row["enough"] else {first: TOO_FEW})
    overall = ", ".join(f"{heading} {result.overall[name]:.0f} %" for name, heading in figures.items())
    interval = f"{result.interval_ns / 1000:g} µs"
    sampled = Text(f"{result.samples:,} samples, one every {interval}; mean over all busy time: {overall}")
    note = "Means over the time in which the layer's operations ran, in percent of the peak."
    notes = [f"{note} {TOO_FEW}: fewer than {MIN_SAMPLES} samples."]
    notes += fold_notes(grid, "those of all of them", "busy ms of one of them")
    header = capture_line(result.info, result.steps, result.all_steps)
    return [header, sampled, "", grid, "", *below(notes, result.warnings)]


def ncu_layers_report(result: NcuLayers) -> list[RenderableType]:
    """The report: what was measured and its coverage, the table, and warnings."""
    gpu_ns = max(result.gpu_ns, 1)
    columns = {name: column for name, column in result.columns[result.schema].items() if column.heading}
    names = [name for name in columns if name != "covered" or result.capture]
    writers = {"covered": percent, "intensity": "{:.1f}".format}
    grid = layer_table(result, names, Milliseconds.for_total(gpu_ns), writers)
    lines = [f"{title(result.path)}: {result.measured:,} measured kernels"]
    if result.capture:
        gpu_time = Milliseconds.for_total(gpu_ns).with_unit(result.gpu_ns)
        share = f"they stand for {percent(result.covered)} of its {gpu_time} of GPU time"
        lines.append(f"spread over {result.capture}: {share}")
        if result.unused:
            lines.append(f"{result.unused:,} of them are like no launch of the capture")
    note = "Percentages are of the GPU's peak, means over GPU time, including nested layers."
    notes = [note, *fold_notes(grid, "those of all of them", "ms of one of them")]
    return [*map(Text, lines), "", grid, "", *below(notes, result.warnings)]
