"""The figures of a capture on a page: headlines, bars of phases, classes and limits, roofline, memory, kernels.

All times of what the page draws are integers in nanoseconds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nvprof_kit._analysis.attribution.attribution import Operations
from nvprof_kit._analysis.attribution.steps import median_place
from nvprof_kit._analysis.kernels.classes import CLASSES
from nvprof_kit._analysis.layers.layers import Layers
from nvprof_kit._report.page.timeline import Drawing, ShownStep
from nvprof_kit._report.text.layers import capitalized, time_name
from nvprof_kit._report.text.texts import Milliseconds, percent
from nvprof_kit.names import LAYER_PHASES, NO_LAYER

if TYPE_CHECKING:
    from nvprof_kit._analysis.flops.flops import Flops

MAX_LIMIT_BARS = 16
"""Maximum number of kinds of layers with a bar of time over limit; those furthest above their limit have one."""

LEAST_DOT = 0.002
"""Kinds of layers have a dot in the roofline if their products take this share of their limit, and they of all time."""


def headlines(
    result: Layers, times: pd.DataFrame, first: ShownStep, idle: pd.DataFrame, flops: Flops | None
) -> list[tuple[str, str, str]]:
    """The numbers at the top of the page: label, value, details. Idle is the time of the step that is shown first."""
    summary = result.summary
    several = summary.steps > 1
    label = capitalized(time_name(result)) + (" per step" if several else "")
    total = Milliseconds.for_total(summary.total_ns, max(summary.steps, 1)).with_unit(summary.total_ns)
    lines = [(label, total, f"{summary.ops:,} operations" + (f" in {summary.steps} steps" if several else ""))]
    if len(times):
        lengths = times["wall_ns"].to_numpy()[result.steps.shown]
        ms = Milliseconds.for_total(int(lengths.max()))
        range_of_steps = f"{ms(int(lengths.min()))} to {ms.with_unit(int(lengths.max()))}"
        lines.append(("Median step", ms.with_unit(int(lengths[median_place(lengths)])), range_of_steps))
    if result.info.on_gpu:
        share = percent(idle["idle_ns"].sum() / max((idle["end_ns"] - idle["start_ns"]).sum(), 1))
        where = f"of step {first.number}" if first.number is not None else "of the capture"
        lines.append(("GPU idle", share, where + (f", {len(idle)} GPUs" if len(idle) > 1 else "")))
    if flops is not None and not math.isnan(flops.totals.mfu):
        rate = f"{flops.totals.flops / max(flops.totals.step_ns, 1) / 1000:,.1f} TFLOP/s"
        note = "above the peak: `nvprof-kit flops` says why" if flops.totals.above_the_peak else rate
        busy = percent(flops.totals.busy_mfu)
        lines.append(("MFU", percent(flops.totals.mfu), f"{note}; {busy} while the GPU works"))
    of_loop = f"{percent(summary.loop_layer_share)} of forward and backward"
    lines.append(("In a named layer", percent(summary.layer_ns / max(summary.work_ns, 1)), of_loop))
    rows = result.rows
    self_ns = rows[rows["layer"] != NO_LAYER].groupby("layer", sort=False)["gpu_self_ns"].sum()
    if len(self_ns):
        share = percent(self_ns.max() / max(summary.total_ns, 1))
        lines.append(("Costliest layer by its own work", str(self_ns.idxmax()), share))
    return lines


def phase_split(result: Layers) -> list[dict[str, Any]]:
    """The total time by phase of the loop, without empty phases."""
    by_phase = result.rows.groupby("phase")["gpu_self_ns"].sum().sort_values(ascending=False, kind="stable")
    by_phase = by_phase[by_phase > 0]
    total_ns = max(result.summary.total_ns, 1)
    ms = Milliseconds.for_total(total_ns, max(result.summary.steps, 1))
    parts = []
    for phase in dict.fromkeys((*(phase for phase in LAYER_PHASES if phase in by_phase), *by_phase.index)):
        ns, colour = int(by_phase[phase]), phase if phase in LAYER_PHASES else "other"
        texts = {"time": ms.with_unit(ns), "percent": percent(ns / total_ns)}
        parts.append({"phase": phase, "colour": colour, "ns": ns, **texts})
    return parts


def class_bars(kernels: pd.DataFrame, steps: int) -> list[dict[str, Any]]:
    """A row for each kernel class: name, time per step, percent, and bar width in percent."""
    times = kernels.groupby("kernel_class", observed=True)["total_ns"].sum()
    times = times[times > 0].sort_values(ascending=False, kind="stable")
    total, longest = int(times.sum()), int(times.max()) if len(times) else 0
    time = Milliseconds.for_total(total, max(steps, 1)).with_unit
    return [
        {"name": name, "time": time(ns), "percent": percent(ns / total), "width": 100 * ns / longest}
        for name, ns in times.items()
    ]


def limit_bars(flops: Flops | None) -> list[dict[str, Any]]:
    """A row for each kind of layer and phase: its time, the least time of its work, and the bar's widths in percent."""
    if flops is None or (kinds := flops.kinds().head(MAX_LIMIT_BARS)).empty:
        return []
    ms = Milliseconds.for_total(int(kinds["gpu_busy_ns"].max()), max(flops.totals.steps, 1))
    width = 100 / kinds["gpu_busy_ns"].max()
    bars = kinds.assign(
        time=kinds["gpu_busy_ns"].map(ms),
        limit=kinds["limit_ns"].map(round).map(ms),
        fused=kinds["fused_limit_ns"].map(round).map(ms),
        of_limit=(kinds["limit_ns"] / kinds["gpu_busy_ns"]).map(percent),
        limit_width=width * kinds[["limit_ns", "gpu_busy_ns"]].min(axis=1),
        excess_width=width * kinds["excess_ns"].clip(lower=0),
    )
    rows: list[dict[Any, Any]] = bars.to_dict("records")
    return rows


def drawn_roofline(flops: Flops | None) -> dict[str, Any] | None:
    """The roofline of the kinds of layers that multiply matrices; None without one."""
    if flops is None or flops.peaks is None:
        return None
    kinds = flops.kinds()
    kinds["dtype"] = [dtype.partition("+")[0] for dtype in kinds["dtype"]]
    at_peak_ns = 1e9 * kinds["flops"] / kinds["dtype"].map(flops.peaks.flops)
    is_drawn = (at_peak_ns > LEAST_DOT * kinds["limit_ns"]) & (kinds["dram_bytes"] > 0)
    kinds = kinds[is_drawn & (kinds["gpu_busy_ns"] > LEAST_DOT * kinds["gpu_busy_ns"].sum())]
    if kinds.empty:
        return None
    points = kinds.assign(
        name=kinds["kind"] + " " + kinds["phase"],
        phase=kinds["phase"].where(kinds["phase"].isin(LAYER_PHASES), "other"),
        intensity=kinds["flops"] / kinds["dram_bytes"],
        rate=1e9 * kinds["flops"] / kinds["gpu_busy_ns"],
    ).rename(columns={"gpu_busy_ns": "time", "limit_ns": "limit"})
    names = ["name", "phase", "layer", "time", "limit", "intensity", "rate"]
    gpu = {"gpu": flops.peaks.name, "measured": bool(flops.peaks.measured), "bandwidth": flops.peaks.bandwidth}
    peaks = {dtype: flops.peaks.flops[dtype] for dtype in kinds["dtype"].unique()}
    steps = max(flops.totals.steps, 1)
    return {**gpu, "peaks": peaks, "steps": steps, "points": points[names].to_dict("records")}


def drawn_memory(memory: pd.DataFrame, parents: list[int]) -> dict[str, Any]:
    """Memory of each row of the tree, and its drawn width: at least the sum of its children."""
    drawn = {str(name).removesuffix("_bytes"): column.fillna(0).tolist() for name, column in memory.items()}
    for measure in ("kept", "cuda"):
        in_children = [0] * len(parents)
        width = in_children.copy()
        for row in range(len(parents) - 1, -1, -1):  # children follow their parent
            width[row] = max(drawn[measure][row], in_children[row])
            if parents[row] >= 0:
                in_children[parents[row]] += width[row]
        drawn[f"{measure}_width"] = width
    return drawn


def kernel_table(operations: Operations, is_counted: npt.NDArray[np.bool_]) -> pd.DataFrame:
    """The operations that count by name, layer and phase.

    Returns:
        name, kernel_class, layer, phase, calls, total_ns, min_ns, max_ns; the costliest first.
    """
    ops = operations.trace.ops
    layer, phase = operations.attribution.owners
    classes = pd.Categorical.from_codes(operations.classes.code, pd.Index(list(CLASSES)))
    columns = {"name": ops["name"].array, "kernel_class": classes, "layer": layer, "phase": phase}
    frame = pd.DataFrame({**columns, "ns": (ops["end_ns"] - ops["start_ns"]).to_numpy()})[is_counted]
    amounts = {"calls": ("ns", "size"), "total_ns": ("ns", "sum"), "min_ns": ("ns", "min"), "max_ns": ("ns", "max")}
    rows = frame.groupby(list(columns), sort=False, observed=True, as_index=False).agg(**amounts)
    return rows.sort_values("total_ns", ascending=False, kind="stable", ignore_index=True)


def drawn_kernels(table: pd.DataFrame, drawing: Drawing, limit: int) -> dict[str, Any]:
    """The table of kernels as columns of a drawing, and a sentence about omissions."""
    rows, omitted, total_ns = table.iloc[:limit], table.iloc[limit:], int(table["total_ns"].sum())
    share = 100 * omitted["total_ns"].sum() / max(total_ns, 1)
    return {
        **{name: drawing.add_texts(rows[name]) for name in ("name", "kernel_class", "layer", "phase")},
        **{name: drawing.add(rows[f"{name}_ns"]) for name in ("total", "min", "max")},
        "calls": drawing.add(rows["calls"]),
        "whole": total_ns,
        "note": f"{len(omitted):,} more rows, {share:.2f} % of the time, are not on the page" if len(omitted) else "",
    }
