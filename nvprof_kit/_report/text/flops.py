"""Text report of FLOPs and utilization by layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._analysis.flops.flops import NOTES_APART
from nvprof_kit._report.text.table import capture_line, fold_notes, layer_table, warning_lines
from nvprof_kit._report.text.units import Cells, Milliseconds, count_per_step

if TYPE_CHECKING:
    from nvprof_kit._analysis.flops.flops import Flops

_TERA = 1e12
_RANKS = {"phase": 0, "busy ms": 0, "MFU": 0, "of limit": 0, "fused ms": 1, "bound": 1, "type": 2, "": 2, "calls": 3}

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
    grid, names = layer_table(result, columns, lines, _RANKS, ms)
    return [
        capture_line(result.info, result.whole.steps),
        *_header(result, recomputes),
        "",
        grid,
        "",
        *(Text(f"[{mark}] {note}", "dim") for note, mark in notes.items()),
        Text(_what(result, recomputes), "dim"),
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


def _what(result: Flops, recomputes: bool) -> str:
    unit = "a step" if result.whole.steps else "the capture"
    text = f"Of {unit}, including nested layers; operations counted in {result.counts}."
    if result.peaks is None:
        return text
    text += " MFU: the time its operations take at the peak of their type, over the busy time"
    return f"{text}, without what is computed again; HFU: with it." if recomputes else f"{text}."


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
