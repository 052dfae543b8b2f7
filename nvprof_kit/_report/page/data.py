"""What the page of a capture shows, without markup; all times are integers in nanoseconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Operations, op_owners
from nvprof_kit._analysis.attribution.intervals import exact_sums
from nvprof_kit._analysis.attribution.steps import (
    StepOptions,
    instance_of,
    median_place,
    slowest_step,
    step_times,
    typical_step,
)
from nvprof_kit._analysis.kernels.classes import CLASSES
from nvprof_kit._analysis.layers.layers import layers
from nvprof_kit._analysis.layers.memory import has_memory, layer_memory
from nvprof_kit._analysis.layers.sums import Cells
from nvprof_kit._analysis.timeline import Timeline, idle_by_step, timeline
from nvprof_kit._report.page.timeline import Drawing, ShownStep
from nvprof_kit._report.text.layers import capitalized, row_names, time_name
from nvprof_kit._report.text.texts import Milliseconds, cell, filled, heading, is_missing, percent, saving
from nvprof_kit.issues import Issue
from nvprof_kit.names import LAYER_PHASES, NO_LAYER

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.advise.advise import Advice
    from nvprof_kit._analysis.breakdown.breakdown import Breakdown
    from nvprof_kit._analysis.flops.flops import Flops
    from nvprof_kit._analysis.layers.layers import Layers

MAX_LIMIT_BARS = 16
"""Maximum number of kinds of layers with a bar of time over limit; those furthest above their limit have one."""

LEAST_DOT = 0.002
"""Kinds of layers have a dot in the roofline if their products take this share of their limit, and they of all time."""

MAX_TITLES = 4
"""Maximum number of highlighted steps: the typical step, the slowest, and those with findings."""

MAX_STEPS = 2_000
"""Maximum number of selectable steps."""

MAX_TABLE_ROWS = 100
"""Maximum number of table rows on the page; a command next to the table shows all."""

MAX_KERNELS = 20_000
"""Maximum number of rows of kernels of all captures on a page; the costliest are kept."""

PageTable = dict[str, Any]
"""A table: ``name`` in links, ``title``, ``about``, ``heads`` (name, and whether it is numeric), ``rows`` of cells
(text and sort value), ``note`` about omitted rows, and the ``command`` that shows all."""


@dataclass(frozen=True)
class Sheet:
    """The content of the page for one capture.

    Attributes:
        layers: The per-layer table by step.
        steps: Durations of the steps (`nvprof_kit._analysis.attribution.steps.step_times`).
        timeline: The whole capture or one step in time.
        shown_steps: The steps to choose on the timeline, starting with the one shown first.
        idle: Idle time and total time of the devices in the step shown first.
        classes: Time by kernel class, the costliest first.
        unmatched: A warning if some kernels match no rule for classes.
        findings: The findings, the most severe first: the finding, what it could save, and its layer and time on the
            page.
        memory: The memory of each row of the tree; None if the capture has no memory data.
        flops: FLOPs and utilization, if operators were counted; else None.
        kernels: The kernels by layer and phase; None if the operations have no names.
        tables: Tables of the analyses.
        left_out: One sentence for each omission, ending in the command that shows the data.
    """

    layers: Layers
    steps: pd.DataFrame
    timeline: Timeline
    shown_steps: Sequence[ShownStep]
    idle: tuple[int, int]
    classes: Sequence[tuple[str, int]]
    unmatched: Sequence[Issue]
    findings: Sequence[dict[str, Any]]
    memory: pd.DataFrame | None
    flops: Flops | None
    kernels: pd.DataFrame | None
    tables: Sequence[PageTable]
    left_out: Sequence[str]


def sheet_of(
    operations: Operations,
    steps: StepOptions,
    step: int | None = None,
    *,
    flops: Flops | None = None,
    advice: Advice | None = None,
    broken_down: Breakdown | None = None,
    left_out: Sequence[str] = (),
) -> Sheet:
    """The content of the page for a capture.

    Args:
        operations: The operations, with the columns of `nvprof_kit._analysis.timeline.OPTIONAL`, and the tables of
            `nvprof_kit._trace.schema.MEMORY_TABLES` to show memory.
        steps: The steps that the figures per step cover.
        step: The only step on the timeline; None for all.
        flops: FLOPs and utilization; None if operators were not counted.
        advice: The findings; None if not computed.
        broken_down: The breakdown of each step; None if not computed.
        left_out: One sentence for each omitted analysis.

    Raises:
        UsageError: The capture has no such step.
    """
    trace, attribution = operations.trace, operations.attribution
    times = step_times(trace, attribution)
    result = layers(operations, steps=steps, by_step=True)
    cells = Cells.of(attribution.ranges, result.steps)
    memory = layer_memory(trace, attribution.ranges, cells).of_tree(cells, result.tree) if has_memory(trace) else None
    starts = [] if advice is None or step is not None else [finding.start_ns for finding in advice.findings]
    titled = _titled_steps(times, step, trace.info.path, starts, result.steps.shown)
    view, shown_steps, idle, unshown = _in_time(operations, times, titled, alone=step is not None)
    is_counted = result.steps.of_ops(attribution)
    classes: list[tuple[str, int]] = []
    if trace.info.on_gpu:
        lengths = np.where(is_counted, (trace.ops["end_ns"] - trace.ops["start_ns"]).to_numpy(), 0)
        sums = exact_sums(operations.classes.code.astype(np.int64), lengths, len(CLASSES)).tolist()
        classes = sorted(((name, ns) for name, ns in zip(CLASSES, sums, strict=True) if ns), key=lambda pair: -pair[1])
    findings: list[dict[str, Any]] = []
    names = set(row_names(result.tree))
    for finding in () if advice is None else advice.findings:
        layer = f"{NO_LAYER} {finding.phase}" if finding.layer == NO_LAYER else finding.layer
        seen = any(step.start_ns <= finding.start_ns and finding.end_ns <= step.end_ns for step in shown_steps)
        links = {
            "layer": layer if layer in names else "",
            "window": (finding.start_ns, finding.end_ns) if seen else None,
        }
        findings.append({"finding": finding, "saving": saving(finding, advice), **links})  # type: ignore[arg-type]
    return Sheet(
        layers=result,
        steps=times,
        timeline=view,
        shown_steps=shown_steps,
        idle=idle,
        classes=classes,
        unmatched=operations.classes.warnings(sum(ns for _, ns in classes)) if trace.info.on_gpu else (),
        findings=findings,
        memory=memory,
        flops=flops,
        kernels=_kernel_table(operations, is_counted) if "name" in trace.ops and len(trace.ops) else None,
        tables=[] if broken_down is None else _breakdown_tables(broken_down, trace.info.path),
        left_out=(*left_out, *unshown),
    )


def _titled_steps(
    times: pd.DataFrame, step: int | None, path: str, starts: Sequence[int], is_shown: npt.NDArray[np.bool_]
) -> dict[int | None, str]:
    """The titles of the highlighted step instances, those with findings by their start; None is the whole capture."""
    if step is not None:
        return {instance_of(times, step, path): f"step {step}"}
    typical, slowest = typical_step(times[is_shown]), slowest_step(times[is_shown])
    if typical is None or slowest is None:
        return {None: "the whole capture"}
    number = times["step"]
    titles: dict[int | None, str] = {typical: f"step {number[typical]}, a typical one"}
    titles.setdefault(slowest, f"step {number[slowest]}, the slowest")
    for start in starts:
        for instance in times.index[(times["start_ns"] <= start) & (start < times["end_ns"])][:1].tolist():
            if len(titles) < MAX_TITLES:
                titles.setdefault(instance, f"step {number[instance]}, of a finding")
    return titles


def _in_time(
    operations: Operations, times: pd.DataFrame, titled: dict[int | None, str], *, alone: bool
) -> tuple[Timeline, list[ShownStep], tuple[int, int], list[str]]:
    """The timeline, its steps, the idle and total time of the devices in the first, and what cannot be chosen."""
    trace, attribution = operations.trace, operations.attribution
    first, title = next(iter(titled.items()))
    if first is None or alone:
        drawn = timeline(trace, attribution, first)
        facts = {}
        for device in sorted({lane.device for lane in drawn.lanes}):
            gaps, (start, end) = drawn.idle_in_step(device), drawn.own_window(device)
            facts[device] = int(gaps.sum()), end - start, len(gaps)
        step = ShownStep(first, drawn.step, title, drawn.start_ns, drawn.end_ns, _idle_sentences(facts))
        return drawn, [step], _idle_and_total(facts), []
    drawn = timeline(trace, attribution, steps_idle=True)
    windows = idle_by_step(trace, attribution, drawn)

    def facts_of(instance: int) -> dict[int, tuple[int, int, int]]:
        """Idle time, duration and number of gaps of a step, for each device that ran it."""
        columns = (
            of[:, instance].tolist() for of in (windows.idle_ns, windows.end_ns - windows.start_ns, windows.gaps)
        )
        rows = zip(windows.devices, *columns, strict=True)
        return {device: (idle, length, gaps) for device, idle, length, gaps in rows if length > 0}

    steps = []
    for instance in [*titled, *(instance for instance in times.index if instance not in titled)][:MAX_STEPS]:
        number, start, end = times.loc[instance, ["step", "start_ns", "end_ns"]].tolist()
        sentences, title = _idle_sentences(facts_of(instance)), titled.get(instance, f"step {number}")
        steps.append(ShownStep(instance, number, title, start, end, sentences, instance in titled))
    unshown = len(times) - len(steps)
    left_out = [f"{unshown:,} steps cannot be chosen: nvprof-kit report {trace.info.path} --step N"] if unshown else []
    return drawn, steps, _idle_and_total(facts_of(first)), left_out


def _idle_sentences(facts: dict[int, tuple[int, int, int]]) -> dict[int, str]:
    return {
        device: f"GPU {device}: idle {percent(idle / max(length, 1))} of the time, in {gaps:,} gap{'s' * (gaps != 1)}"
        for device, (idle, length, gaps) in facts.items()
    }


def _idle_and_total(facts: dict[int, tuple[int, int, int]]) -> tuple[int, int]:
    return sum(idle for idle, _, _ in facts.values()), sum(length for _, length, _ in facts.values())


# ---------------------------------------------------------------- figures and bars


def headlines(sheet: Sheet) -> list[tuple[str, str, str]]:
    """The numbers at the top of the page: label, value, details."""
    result, summary, flops = sheet.layers, sheet.layers.summary, sheet.flops
    several = summary.steps > 1
    label = capitalized(time_name(result)) + (" per step" if several else "")
    total = Milliseconds.for_total(summary.total_ns, max(summary.steps, 1)).with_unit(summary.total_ns)
    lines = [(label, total, f"{summary.ops:,} operations" + (f" in {summary.steps} steps" if several else ""))]
    if len(sheet.steps):
        lengths = sheet.steps["wall_ns"].to_numpy()[result.steps.shown]
        ms = Milliseconds.for_total(int(lengths.max()))
        range_of_steps = f"{ms(int(lengths.min()))} to {ms.with_unit(int(lengths.max()))}"
        lines.append(("Median step", ms.with_unit(int(lengths[median_place(lengths)])), range_of_steps))
    if result.info.on_gpu:
        number, (idle_ns, window_ns) = sheet.shown_steps[0].number, sheet.idle
        where = f"of step {number}" if number is not None else "of the capture"
        devices = len({lane.device for lane in sheet.timeline.lanes})
        where += f", {devices} GPUs" if devices > 1 else ""
        lines.append(("GPU idle", percent(idle_ns / max(window_ns, 1)), where))
    if flops is not None and not math.isnan(flops.whole.mfu):
        rate = f"{flops.whole.flops / max(flops.whole.step_ns, 1) / 1000:,.1f} TFLOP/s"
        note = "above the peak: `nvprof-kit flops` says why" if flops.whole.above_the_peak else rate
        lines.append(("MFU", percent(flops.whole.mfu), f"{note}; {percent(flops.whole.busy_mfu)} while the GPU works"))
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
    return [
        {
            "phase": phase,
            "colour": phase if phase in LAYER_PHASES else "other",
            "ns": int(by_phase[phase]),
            "time": ms.with_unit(int(by_phase[phase])),
            "percent": percent(by_phase[phase] / total_ns),
        }
        for phase in dict.fromkeys((*(phase for phase in LAYER_PHASES if phase in by_phase), *by_phase.index))
    ]


def class_bars(sheet: Sheet) -> list[dict[str, Any]]:
    """A row for each kernel class: name, time per step, percent, and bar width in percent."""
    total = sum(ns for _, ns in sheet.classes)
    time = Milliseconds.for_total(total, max(sheet.layers.summary.steps, 1)).with_unit
    return [
        {"name": name, "time": time(ns), "percent": percent(ns / total), "width": 100 * ns / sheet.classes[0][1]}
        for name, ns in sheet.classes
    ]


def limit_bars(flops: Flops | None) -> list[dict[str, Any]]:
    """A row for each kind of layer and phase: its time, the least time of its work, and the bar's widths in percent."""
    if flops is None or (kinds := flops.kinds().head(MAX_LIMIT_BARS)).empty:
        return []
    longest = kinds["gpu_busy_ns"].max()
    ms = Milliseconds.for_total(int(longest), max(flops.whole.steps, 1))
    return [
        {
            **row,
            "time": ms(row["gpu_busy_ns"]),
            "limit": ms(round(row["limit_ns"])),
            "fused": ms(round(row["fused_limit_ns"])),
            "of_limit": percent(row["limit_ns"] / row["gpu_busy_ns"]),
            "limit_width": 100 * min(row["limit_ns"], row["gpu_busy_ns"]) / longest,
            "excess_width": 100 * max(row["excess_ns"], 0) / longest,
        }
        for row in kinds.to_dict("records")
    ]


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
    return {
        "gpu": flops.peaks.name,
        "measured": bool(flops.peaks.measured),
        "bandwidth": flops.peaks.bandwidth,
        "peaks": {dtype: flops.peaks.flops[dtype] for dtype in kinds["dtype"].unique()},
        "steps": max(flops.whole.steps, 1),
        "points": [
            {
                "name": f"{row['kind']} {row['phase']}",
                "phase": row["phase"] if row["phase"] in LAYER_PHASES else "other",
                "layer": row["layer"],
                "time": row["gpu_busy_ns"],
                "limit": row["limit_ns"],
                "intensity": row["flops"] / row["dram_bytes"],
                "rate": 1e9 * row["flops"] / row["gpu_busy_ns"],
            }
            for row in kinds.to_dict("records")
        ],
    }


# ---------------------------------------------------------------- tables


def page_table(frame: pd.DataFrame, name: str, title: str, about: str, command: str) -> PageTable:
    """A table of an analysis; empty columns are left out.

    Args:
        frame: The rows, the most important first.
        name: Name in links.
        title: The heading.
        about: A description.
        command: The command that shows the whole table.
    """
    printed = filled(frame.iloc[:MAX_TABLE_ROWS])
    zeros = [name for name in printed if str(name).endswith("_ns") and not printed[name].fillna(0).any()]
    printed = printed.drop(columns=zeros)
    more = len(frame) - len(printed)
    return {
        "name": name,
        "title": title,
        "about": about,
        "heads": [(heading(str(name), mib=True), printed[name].dtype.kind in "iufb") for name in printed],
        "rows": [
            [
                (cell(str(name), value, mib=True), "" if isinstance(value, str) or is_missing(value) else value)
                for name, value in row.items()
            ]
            for row in printed.to_dict("records")
        ],
        "note": f"{more:,} more rows are not on the page" if more else "",
        "command": command,
    }


_TITLES = {
    "idle": ("Idle time by its cause", "why the GPU was idle, and where the host was"),
    "communication": ("Communication", "collectives by layer, and their exposed part"),
    "copies": ("Copies", "copies and memsets by layer"),
    "launches": ("Launches", "where the host cannot launch as fast as the GPU works"),
    "critical-path": ("Critical path", "what determines the length of the median step"),
}


def _breakdown_tables(breakdown: Breakdown, path: str) -> list[PageTable]:
    """The tables of a breakdown that are not empty."""
    steps, command = breakdown.steps, f"nvprof-kit breakdown {path}"
    times = [name for name in steps.columns if str(name).endswith("_ns") and name != "start_ns"]
    several = [name for name in ("process", "device") if steps[name].nunique() > 1]
    about = "milliseconds; compute, exposed communication, exposed copies and idle add up to the wall time"
    title = "Breakdown: where each step's time goes"
    tables = [page_table(steps[["step", *several, *times]], "breakdown", title, about, f"{command} --format csv")]
    step = steps["step"].iloc[breakdown.critical_window] if len(steps) else None
    for view, (title, about) in _TITLES.items():
        rows = breakdown.table(view)
        if len(rows):
            of_step = f" of step {step}" if view == "critical-path" and not is_missing(step) else ""
            over = about if of_step else f"{about}; milliseconds over all steps that are shown"
            tables.append(page_table(rows, view, title + of_step, over, f"{command} --view {view} --format csv"))
    return tables


def _kernel_table(operations: Operations, is_counted: npt.NDArray[np.bool_]) -> pd.DataFrame:
    """The operations that count by name, layer and phase.

    Returns:
        name, kernel_class, layer, phase, calls, total_ns, min_ns, max_ns; the costliest first.
    """
    import pandas as pd

    ops = operations.trace.ops
    layer, phase = op_owners(operations.attribution)
    classes = pd.Categorical.from_codes(operations.classes.code, pd.Index(list(CLASSES)))
    columns = {"name": ops["name"].array, "kernel_class": classes, "layer": layer, "phase": phase}
    frame = pd.DataFrame({**columns, "ns": (ops["end_ns"] - ops["start_ns"]).to_numpy()})[is_counted]
    amounts = {"calls": ("ns", "size"), "total_ns": ("ns", "sum"), "min_ns": ("ns", "min"), "max_ns": ("ns", "max")}
    rows = frame.groupby(list(columns), sort=False, observed=True, as_index=False).agg(**amounts)
    kernels: pd.DataFrame = rows.sort_values("total_ns", ascending=False, kind="stable", ignore_index=True)
    return kernels


def drawn_kernels(table: pd.DataFrame, drawing: Drawing, limit: int = MAX_KERNELS) -> dict[str, Any]:
    """The table of kernels as columns of a drawing, and a sentence about omissions."""
    rows, omitted, total_ns = table.iloc[:limit], table.iloc[limit:], int(table["total_ns"].sum())
    gone = 100 * omitted["total_ns"].sum() / max(total_ns, 1)
    return {
        **{name: drawing.add_texts(rows[name]) for name in ("name", "kernel_class", "layer", "phase")},
        **{name: drawing.add(rows[f"{name}_ns"]) for name in ("total", "min", "max")},
        "calls": drawing.add(rows["calls"]),
        "whole": total_ns,
        "note": f"{len(omitted):,} more rows, {gone:.2f} % of the time, are not on the page" if len(omitted) else "",
    }
