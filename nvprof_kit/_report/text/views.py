"""Text reports of many tables: the breakdown of steps, and the eight views of the summary."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._analysis.breakdown.host import CAUSES
from nvprof_kit._report.text.table import Column, Grid, below, capture_line, frame_table, ranked_notes
from nvprof_kit._report.text.texts import MS, TEXTS, is_missing, kernel_names, percent
from nvprof_kit.issues import plural

if TYPE_CHECKING:
    from nvprof_kit._analysis.breakdown.breakdown import Breakdown
    from nvprof_kit._analysis.summary.summary import Summary

_HEIGHTS = " ▁▂▃▄▅▆▇█"
_STATES = ("compute_ns", "exposed_comm_ns", "exposed_copy_ns", "idle_ns")
"""The time of each state of a device."""
OF_GPUS = ("idle", "copies", "launches", "queue")
"""Tables about what a host does with a GPU."""


def breakdown_report(result: Breakdown) -> list[RenderableType]:
    """The report: the capture, the breakdown of each step, and the detail tables, each with its first rows."""
    view, top, select, on_gpu = result.view, result.select.top or 10, result.select, result.info.on_gpu
    tables = result.printed()
    parts: list[RenderableType] = [capture_line(result.info, result.choice.count, len(result.choice.shown)), ""]
    if view in (None, "steps"):
        parts += [_steps(result, tables["steps"] if select.sort else None, top)]
        parts += [Text(f"Warm-up: {reason}; excluded from the figures below") for reason in result.choice.left_out]
        parts += [*(_causes(result.idle) if on_gpu else ()), ""]
    step = _step_name(result.steps.iloc[result.critical_window], outside_name(result))
    for name, title in TEXTS["breakdown"].items():
        if name in tables and (view or (len(tables[name]) and (on_gpu or name not in OF_GPUS))):
            rows = _queue(tables[name]) if name == "queue" and len(tables[name]) else tables[name]
            if not on_gpu:
                rows = rows.drop(columns="device", errors="ignore").rename(columns={"gpu_ns": "operators_ns"})
            table = frame_table(rows, top, result.columns[f"breakdown-{name}"])
            parts += [Text(title.format(step=step), "bold"), table, ""]
    note = f"Milliseconds; {parts_of_wall(on_gpu)} add up to wall."
    return [*parts, *below((note, *ranked_notes(tables.values())), result.warnings), ""]


def outside_name(result: Breakdown) -> str:
    """What the row of the time outside steps is called: a capture without steps is shown as a whole."""
    return "outside steps" if len(result.choice.shown) else "the whole capture"


def parts_of_wall(on_gpu: bool) -> str:
    """The parts of a step's time."""
    return f"{'compute, exposed communication, exposed copies' if on_gpu else 'operators'} and idle"


def _steps(result: Breakdown, in_order: pd.DataFrame | None, top: int) -> RenderableType:
    """A row per step and device (the longest if there are many), the median without warm-up, and sums.

    The sums are one row each for these steps, for warm-up, and for the time outside steps.
    """
    steps = result.steps
    several = steps[["process", "device"]].drop_duplicates().shape[0] > 1
    inside = steps[result.instances >= 0]
    on_gpu = result.info.on_gpu
    states = [name for name in _STATES if on_gpu or name in ("compute_ns", "idle_ns") or steps[name].any()]
    column = partial(Column.of, result.columns["breakdown-steps"])
    devices = {"device": Column("GPU" if on_gpu else "process", "left", 0)} if several else {}
    ranks = {"wall_ns": 0, "exposed_copy_ns": 2}
    times = {name: column(name, rank=ranks.get(name, 1)) for name in ("wall_ns", *states)}
    times |= {} if on_gpu else {"compute_ns": Column("operators")}
    grid = Grid({"step": column("step", "left"), **devices, **times})
    printed_steps = inside if len(inside) <= top else inside.nlargest(top, "wall_ns")
    if in_order is not None:
        printed_steps = in_order[in_order.index.isin(inside.index)].head(top)
    for row in printed_steps.to_dict("records"):
        device = f"{row['process']}:{row['device']}" if on_gpu else f"{row['process']}"
        grid.add({"step": _step_name(row), "device": device, **_parts(row, states)})
    grid.beyond = len(inside) - len(printed_steps)
    grid.add_section()
    steady = steps[np.append(result.choice.shown, False)[result.instances]]
    if result.choice.count > 1:
        median_row = np.argsort(steady["wall_ns"].to_numpy(), kind="stable")[(len(steady) - 1) // 2]
        median_step = steady.select_dtypes("number").iloc[[median_row]].sum()
        grid.add({"step": f"median of {result.choice.count}", **_parts(median_step, states)})
    warm_up = inside.drop(index=steady.index)
    steady_count, warm_up_count = (len(set(result.instances[rows.index].tolist())) for rows in (steady, warm_up))
    number = plural(steady_count, "steady step" if len(warm_up) else "step")
    for name, rows, style in (
        (number if len(warm_up) or steady_count == 1 else f"all {number}", steady, "bold"),
        (f"warm-up, {warm_up_count} more", warm_up, ""),
        (outside_name(result), steps[result.instances < 0], ""),
    ):
        if len(rows):
            grid.add({"step": name, **_parts(rows.select_dtypes("number").sum(), states)}, style=style)
    return grid


def _step_name(row: Any, outside: str = "") -> str:
    return outside if is_missing(row["step"]) else f"step {int(row['step'])}"


def _parts(row: Any, states: Iterable[str]) -> dict[str, str]:
    wall_ns = row["wall_ns"]
    ran = [name for name in states if row[name] and wall_ns]
    return {
        "wall_ns": MS(int(wall_ns)),
        **{name: f"{MS(int(row[name]))} {percent(row[name] / wall_ns):>7}" for name in ran},
    }


def _causes(idle: pd.DataFrame) -> list[RenderableType]:
    """The idle time, one line per cause."""
    idle_by_cause = idle.groupby("cause", sort=False)["idle_ns"].sum().sort_values(ascending=False, kind="stable")
    idle_ns = int(idle_by_cause.sum())
    causes = idle_by_cause[idle_by_cause > 0].items()
    lines = [Text(f"  {percent(ns / idle_ns):>7}  {cause}: {CAUSES[str(cause)]}") for cause, ns in causes]
    return ["", Text("Idle:", "bold"), *lines] if lines else []


def _queue(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each stream: its queue, and the queue depth over the step."""
    deepest, top = max(float(rows["queue_mean"].max()), 1e-9), len(_HEIGHTS) - 1

    def curve(depths: pd.Series[float]) -> str:
        heights = depths.groupby(np.arange(len(depths)) // 2).mean() / deepest * top
        return "".join(_HEIGHTS[min(math.ceil(height), top)] for height in heights)  # only zero is blank

    streams = rows.groupby(rows["stream"].astype(str).rename("stream"), sort=False)
    lines = streams.agg(queue_mean=("queue_mean", "mean"), queue_max=("queue_max", "max"))
    lines["during the step"] = streams["queue_mean"].agg(curve)
    return lines.reset_index().sort_values("queue_mean", ascending=False, kind="stable")


_DETAILS = ("cpu_p50_ns", "cpu_p95_ns")
_DETAILS_OF_KERNELS = ("gpu_min_ns", "gpu_p50_ns", "cpu_avg_ns", "cpu_max_ns", "cpu_min_ns", "cpu_ratio")
"""Columns that only csv has: of all views, and of views with a median."""


def summary_report(result: Summary) -> list[RenderableType]:
    """The views one below the other, each with its note and its first rows."""
    parts: list[RenderableType] = [capture_line(result.info, result.steps, result.all_steps), ""]
    on_gpu, top = result.info.on_gpu, result.select.top or 12
    for name, rows in result.views.items():
        title = "Kernel: operators by their own time" if name == "kernel" and not on_gpu else name.capitalize()
        parts.append(Text(title, "bold"))
        if len(rows):
            table = rows
            if on_gpu and "kernel_class" in table:
                table = table.assign(name=table["name"].map(kernel_names(table["name"].head(top).astype(str))))
            elif on_gpu and "operator" in table:  # kernels of an operator are indented below it
                operators = table["operator"].astype(str).str.replace("autograd::engine::evaluate_function:", "engine:")
                kernels = "  " + table["kernel"].map(kernel_names(table["kernel"].head(top).astype(str)))
                table = table.assign(operator=operators.where(table["kernel"] == "", kernels)).drop(columns="kernel")
            printed = table.head(top)
            zero = [name for name in printed if str(name).startswith(("cpu_", "gpu_")) and not printed[name].any()]
            details = (*_DETAILS, *(_DETAILS_OF_KERNELS if "gpu_p50_ns" in table else ()))
            table = table.drop(columns=[name for name in table if name in (*zero, *details)])
            if not on_gpu:
                names = {str(name): str(name).removeprefix("gpu_") for name in table} | {"gpu_ops": "operators"}
                table = table.rename(columns=names)
            parts.append(frame_table(table, top, result.columns[f"summary-{name}"]))
        parts += [Text(result.notes[name], "dim"), ""]
    return [*parts, *below(("Milliseconds.",), result.warnings), ""]
