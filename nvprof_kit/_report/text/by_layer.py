"""Text reports of FLOPs and utilization, and of GPU metrics, by layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._analysis.flops.flops import NOTES_APART
from nvprof_kit._analysis.metrics import COLUMNS
from nvprof_kit._report.text.table import capture_line, fold_notes, layer_table, warning_lines
from nvprof_kit._report.text.texts import Cells, Milliseconds, count_per_step

if TYPE_CHECKING:
    from nvprof_kit._analysis.flops.flops import Flops
    from nvprof_kit._analysis.metrics import Metrics

_TERA = 1e12
_RANKS = dict.fromkeys(("phase", "busy ms", "MFU", "of limit", "SM active"), 0)
_RANKS |= {"type": 2, "": 2, "calls": 3, "samples": 3}

_LIMITS = (
    "limit ms: the least time that this GPU needs for these operators, each limited by its operations at the peak or "
    "by its memory traffic at the bandwidth; fused: the same as one kernel; of limit: limit ms over the busy time."
)


def flops_report(result: Flops) -> list[RenderableType]:
    """The report: the step total, the table, its footnotes, and warnings."""
    recomputes = result.whole.model_flops < result.whole.flops
    has_limits, has_fused = (bool(result.rows[name].notna().any()) for name in ("limit_ns", "fused_limit_ns"))
    headings = ["calls", "busy ms", "GFLOP", "TFLOP/s"]
    headings += (["MFU", "HFU"] if recomputes else ["MFU"]) if result.peaks else []
    headings += ["limit ms", *(["fused ms"] if has_fused else []), "of limit", "bound"] if has_limits else []
    columns = {name: "left" if name in ("type", "bound") else "right" for name in (*headings, "type", "")}
    steps, rows = max(result.whole.steps, 1), result.printed()
    ms = Cells.for_total(max([1, *rows["gpu_busy_ns"].astype(int)]), steps)
    notes: dict[str, str] = {}
    lines = []
    for row in rows.to_dict("records"):
        sentences = [note for note in str(row["note"]).split(NOTES_APART) if note]
        marks = [notes.setdefault(note, str(len(notes) + 1)) for note in sentences]
        lines.append(
            {
                "calls": count_per_step(row["calls"], steps),
                "busy ms": ms(row["gpu_busy_ns"]),
                "GFLOP": _number(row["flops"] / steps / 1e9, 1),
                "TFLOP/s": _number(row["tflops_per_s"], 1),
                "MFU": _share(row["mfu"]),
                "HFU": _share(row["hfu"]),
                **{
                    f"{name} ms": "" if math.isnan(row[column]) else ms(round(row[column]))
                    for name, column in (("limit", "limit_ns"), ("fused", "fused_limit_ns"))
                },
                "of limit": _share(row["of_limit"]),
                "bound": row["bound"],
                "type": row["dtype"],
                "": " ".join(f"[{mark}]" for mark in marks),
            }
        )
    unit = "a step" if result.whole.steps else "the capture"
    about = f"Of {unit}, including nested layers; operations counted in {result.counts}."
    if result.peaks is not None:
        about += " MFU: the time its operations take at the peak of their type, over the busy time"
        about += ", without what is computed again; HFU: with it." if recomputes else "."
    grid, names = layer_table(result, columns, lines, _RANKS, ms)
    return [
        capture_line(result.info, result.whole.steps),
        *_header(result, recomputes),
        "",
        grid,
        "",
        *(Text(f"[{mark}] {note}", "dim") for note, mark in notes.items()),
        Text(about, "dim"),
        *([Text(_LIMITS, "dim")] if has_limits else []),
        *fold_notes(names, "their sums and rates", "busy ms of one of them"),
        *warning_lines(result.warnings),
    ]


def _header(result: Flops, recomputes: bool) -> list[RenderableType]:
    totals = result.whole
    devices = f"{totals.devices} GPU{'s' * (totals.devices > 1)}" if result.info.on_gpu else "the CPU"
    lasted, busy = (Milliseconds.for_total(int(ns) or 1)(int(ns)) or "0" for ns in (totals.step_ns, totals.busy_ns))
    scope = "A step" if totals.steps else "The capture"
    model = f", {_amount(totals.model_flops)} without what is computed again" if recomputes else ""
    rate = _number(totals.flops / max(totals.step_ns, 1) / 1000, 1) or "0"
    bound = "at least " if result.uncounted else ""
    lines = [
        Text(f"{scope}: {bound}{_amount(totals.flops)}{model}, in {lasted} ms on {devices}: {rate} TFLOP/s"),
    ]
    if result.peaks is not None:
        peaks = ", ".join(f"{dtype} {flops / _TERA:,.4g}" for dtype, flops in result.peaks.flops.items())
        lines += [
            Text(
                f"{_both(totals.mfu, totals.hfu, recomputes, bound)}; of the {busy} ms in which the GPU works: "
                f"{_both(totals.busy_mfu, totals.busy_hfu, recomputes, bound)}",
                "bold",
            ),
            Text(f"Peak of {result.peaks.name}, dense, in TFLOP/s: {peaks}"),
            *(
                [Text(f"Peaks measured on this machine: {', '.join(result.peaks.measured)}")]
                if result.peaks.measured
                else []
            ),
        ]
    return list(lines)


def _both(mfu: float, hfu: float, recomputes: bool, bound: str) -> str:
    """MFU and HFU; one number if nothing is recomputed."""
    return f"MFU {bound}{_share(mfu, '?')}" + (f", HFU {bound}{_share(hfu, '?')}" if recomputes else "")


def _amount(flops: float) -> str:
    return f"{flops / _TERA:,.3f} TFLOP" if flops >= _TERA or not flops else f"{flops / 1e9:,.3g} GFLOP"


def _number(value: float, digits: int) -> str:
    if math.isnan(value) or not value:
        return ""
    text = f"{value:,.{digits}f}"
    return text if text.strip("0.,") else f"{value:.1g}"


def _share(value: float, missing: str = "") -> str:
    if math.isnan(value):
        return missing
    return f"{100 * value:.1f} %" if value else missing


TOO_FEW = "too few"


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
