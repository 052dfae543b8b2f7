"""The data on the page of a capture, without markup; all times are integers in nanoseconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution, Operations
from nvprof_kit._analysis.attribution.intervals import exact_sums
from nvprof_kit._analysis.attribution.nesting import Int64Array
from nvprof_kit._analysis.attribution.steps import ALL_STEPS, StepOptions
from nvprof_kit._analysis.attribution.windows import (
    instance_of,
    median_place,
    slowest_step,
    step_times,
    typical_step,
)
from nvprof_kit._analysis.kernels.classes import CLASSES, Rule
from nvprof_kit._analysis.layers.layers import layers
from nvprof_kit._analysis.layers.memory import has_memory, layer_memory, memory_tree
from nvprof_kit._analysis.timeline import StepWindows, idle_by_step, timeline
from nvprof_kit._findings import Finding
from nvprof_kit._report.page.tables import KernelTable, PageTable, breakdown_tables, kernel_table, short_text
from nvprof_kit._report.page.timeline import Moments, ShownStep, idle_sentence
from nvprof_kit._report.text.advise import saving
from nvprof_kit._report.text.layers import heading, time_name
from nvprof_kit._report.text.units import Milliseconds, percent
from nvprof_kit._trace.schema import Trace
from nvprof_kit.issues import Issue
from nvprof_kit.names import LAYER_CATEGORIES, NO_LAYER

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.advise.advise import Advice
    from nvprof_kit._analysis.breakdown.breakdown import Breakdown
    from nvprof_kit._analysis.flops.flops import Flops
    from nvprof_kit._analysis.layers.layers import Layers
    from nvprof_kit._trace.schema import Trace


@dataclass(frozen=True)
class ClassTimes:
    """Time by kernel class.

    Attributes:
        gpu_ns: GPU time in ns by class, the costliest first.
        warnings: A warning if some kernels match no rule.
    """

    gpu_ns: dict[str, int]
    warnings: tuple[Issue, ...] = ()


def class_times(operations: Operations, is_counted: npt.NDArray[np.bool_] | None = None) -> ClassTimes | None:
    """Time by kernel class; None if the capture has no kernels.

    Args:
        operations: The operations.
        is_counted: Which operations count; all by default.
    """
    trace = operations.trace
    if not trace.info.on_gpu:
        return None
    classes = operations.classes
    length = (trace.ops["end_ns"] - trace.ops["start_ns"]).to_numpy()
    length = length if is_counted is None else np.where(is_counted, length, 0)
    sums = exact_sums(classes.code.astype(np.int64), length, len(CLASSES)).tolist()
    times = [(name, ns) for name, ns in zip(CLASSES, sums, strict=True) if ns > 0]
    return ClassTimes(dict(sorted(times, key=lambda one: -one[1])), classes.warnings(sum(sums)))


def class_bars(times: ClassTimes | None, steps: int) -> list[dict[str, Any]]:
    """A row for each class: name, time per step, percent, and bar width in percent."""
    if times is None or not times.gpu_ns:
        return []
    total, longest = sum(times.gpu_ns.values()), max(times.gpu_ns.values())
    ms = Milliseconds.for_total(total, max(steps, 1))
    return [
        {"name": name, "time": ms(ns), "percent": percent(ns / total), "width": f"{100 * ns / longest:.2f}"}
        for name, ns in times.gpu_ns.items()
    ]


MAX_LIMIT_BARS = 16
"""Maximum number of kinds of layers with a bar of time over limit; those furthest above their limit have one."""

LEAST_DOT = 0.002
"""Kinds of layers have a dot in the roofline if their products take this share of their limit, and they of all time."""


def limit_bars(flops: Flops | None) -> list[dict[str, Any]]:
    """A row for each kind of layer and phase: its time, the least time of its work, and the bar's widths in percent."""
    kinds = None if flops is None else flops.kinds().head(MAX_LIMIT_BARS)
    if flops is None or kinds is None or kinds.empty:
        return []
    longest = kinds["gpu_busy_ns"].max()
    ms = Milliseconds.for_total(int(longest), max(flops.whole.steps, 1))
    return [
        {
            **{name: short_text(str(row[name])) for name in ("kind", "phase", "layer", "bound")},
            "count": row["layers"],
            "time": ms(row["gpu_busy_ns"]),
            "limit": ms(round(row["limit_ns"])),
            "of_limit": percent(row["limit_ns"] / row["gpu_busy_ns"]),
            "limit_width": f"{100 * min(row['limit_ns'], row['gpu_busy_ns']) / longest:.2f}",
            "excess_width": f"{100 * max(row['excess_ns'], 0) / longest:.2f}",
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
                "name": short_text(f"{row['kind']} {row['phase']}"),
                "phase": row["phase"] if row["phase"] in PHASES else "other",
                "layer": short_text(row["layer"]),
                "time": row["gpu_busy_ns"],
                "limit": row["limit_ns"],
                "intensity": row["flops"] / row["dram_bytes"],
                "rate": 1e9 * row["flops"] / row["gpu_busy_ns"],
            }
            for row in kinds.to_dict("records")
        ],
    }


MAX_TITLES = 4
"""Maximum number of highlighted steps: the typical step, the slowest, and those with findings."""

MAX_STEPS = 2_000
"""Maximum number of selectable steps."""

MAX_ROWS = 2_000
"""Maximum number of rows of the model trees of all captures; the costliest are kept."""

PHASES = tuple(category.value for category in LAYER_CATEGORIES)
"""Phases of a layer in drawing order."""


@dataclass(frozen=True)
class Sheet:
    """The content of the page for one capture.

    Attributes:
        layers: The per-layer table by step.
        steps: Durations of the steps (`nvprof_kit._analysis.attribution.windows.step_times`).
        timeline: The timeline; None to omit it.
        idle: Idle time and total time of the devices in the step shown first; None if unknown.
        classes: Time by kernel class; None if there are no kernels.
        findings: The findings, the most severe first.
        memory: The memory of each row of the tree (`nvprof_kit._analysis.layers.memory.memory_tree`); None if the
        capture
            has no memory data.
        flops: FLOPs and utilization, if operators were counted; else None.
        kernels: The kernels by layer and phase; None if the operations have no names.
        tables: Tables of the analyses.
        left_out: One sentence for each omission, ending in the command that shows the data.
    """

    layers: Layers
    steps: pd.DataFrame
    timeline: Moments | None = None
    idle: tuple[int, int] | None = None
    classes: ClassTimes | None = None
    findings: Sequence[Linked] = ()
    memory: pd.DataFrame | None = None
    flops: Flops | None = None
    kernels: KernelTable | None = None
    tables: Sequence[PageTable] = ()
    left_out: Sequence[str] = ()


@dataclass(frozen=True)
class Linked:
    """A finding with its position on the page.

    Attributes:
        finding: The finding.
        saving: The maximum saving, as text.
        layer: The layer to link to; '' for none.
        window: The time range to link to, in ns since the start of the capture; None for none.
    """

    finding: Finding
    saving: str = ""
    layer: str = ""
    window: tuple[int, int] | None = None


@dataclass(frozen=True)
class Headline:
    """A number at the top of the page, with its label and details."""

    label: str
    value: str
    note: str = ""


def headlines(sheet: Sheet) -> list[Headline]:
    """The numbers at the top of the page."""
    result, summary = sheet.layers, sheet.layers.summary
    steps = max(summary.steps, 1)
    ms = Milliseconds.for_total(summary.total_ns, steps)
    per_step = " per step" if summary.steps > 1 else ""
    operations = f"{summary.ops:,} operations" + (f" in {summary.steps} steps" if summary.steps > 1 else "")
    lines = [Headline(heading(time_name(result)) + per_step, f"{ms(summary.total_ns) or '0'} ms", operations)]
    if len(sheet.steps):
        lengths = sheet.steps["wall_ns"].to_numpy()[result.steps.shown]
        shortest, longest = (Milliseconds.for_total(int(lengths.max()))(int(value)) for value in _ends(lengths))
        median_text = Milliseconds.for_total(int(lengths.max()))(int(lengths[median_place(lengths)]))
        lines.append(Headline("Median step", f"{median_text} ms", f"{shortest} to {longest} ms"))
    if sheet.timeline is not None and sheet.idle is not None and result.info.on_gpu:
        lines.append(_idle_headline(sheet.timeline, *sheet.idle))
    if sheet.flops is not None and not math.isnan(sheet.flops.whole.mfu):
        lines.append(_flops_headline(sheet.flops))
    of_loop = f"{percent(summary.loop_layer_share)} of forward and backward"
    lines.append(Headline("In a named layer", percent(summary.layer_ns / max(summary.work_ns, 1)), of_loop))
    rows = result.rows
    self_ns = rows[rows["layer"] != NO_LAYER].groupby("layer", sort=False)["gpu_self_ns"].sum()
    if len(self_ns):
        share = percent(self_ns.max() / max(summary.total_ns, 1))
        lines.append(Headline("Costliest layer by its own work", short_text(str(self_ns.idxmax())), share))
    return lines


def _ends(lengths: Int64Array) -> tuple[int, int]:
    return int(lengths.min()), int(lengths.max())


def _flops_headline(flops: Flops) -> Headline:
    total = flops.whole
    rate = f"{total.flops / max(total.step_ns, 1) / 1000:,.1f} TFLOP/s"
    note = "above the peak: `nvprof-kit flops` says why" if total.above_the_peak else rate
    return Headline("MFU", percent(total.mfu), f"{note}; {percent(total.busy_mfu)} while the GPU works")


def _idle_headline(view: Moments, idle: int, window: int) -> Headline:
    number = view.steps[0].number
    where = f"of step {number}" if number is not None else "of the capture"
    devices = len({lane.device for lane in view.timeline.lanes})
    return Headline("GPU idle", percent(idle / max(window, 1)), f"{where}{f', {devices} GPUs' if devices > 1 else ''}")


def phase_split(result: Layers) -> list[tuple[str, int]]:
    """The total time by phase of the loop, in ns, without empty phases."""
    by_phase = result.rows.groupby("phase")["gpu_self_ns"].sum()
    loop_phases = [phase for phase in PHASES if phase in by_phase]
    by_time = by_phase.sort_values(ascending=False, kind="stable").index
    other_phases = [str(phase) for phase in by_time if phase not in PHASES]
    return [(phase, int(by_phase[phase])) for phase in (*loop_phases, *other_phases) if by_phase[phase] > 0]


@dataclass(frozen=True)
class Change:
    """A row of the comparison: time per step in each capture; None where the row does not exist.

    Attributes:
        layer: Name of the row, a path or ``(none) optimizer``.
        parent: Parent layer; '' for none.
        depth: Depth in the tree.
        times: Time in ns per step, one number per capture.
    """

    layer: str
    parent: str
    depth: int
    times: tuple[float | None, ...]

    @property
    def change(self) -> float | None:
        """Difference between the last and first captures; None if one is missing."""
        first, last = self.times[0], self.times[-1]
        return None if first is None or last is None else last - first


def changes(compared: Sequence[Layers]) -> list[Change]:
    """All rows of the trees of several captures, as one tree. Each row has the parent that it has in the first capture
    with it; below a parent, those of the first capture come in its order, then those of later captures only.
    """
    parents: dict[str, str] = {}
    by_sheet: list[dict[str, float]] = []
    for capture in compared:
        steps = max(capture.summary.steps, 1)
        rows = capture.tree
        names = row_names(rows)
        work = (rows["total_ns"] - rows["comm_ns"]).tolist()
        by_sheet.append({name: ns / steps for name, ns in zip(names, work, strict=True)})
        for name, parent in zip(names, rows["parent"].tolist(), strict=True):
            parents.setdefault(name, parent)
    children: dict[str, list[str]] = {}
    for name, parent in parents.items():
        children.setdefault(parent, []).append(name)
    result = []
    waiting = [(name, 0) for name in reversed(children.get("", []))]
    while waiting:
        name, depth = waiting.pop()
        result.append(Change(name, parents[name], depth, tuple(times.get(name) for times in by_sheet)))
        waiting += [(child, depth + 1) for child in reversed(children.get(name, []))]
    return result


def total_change(compared: Sequence[Layers]) -> Change:
    """The totals of the captures as a row of the comparison."""
    totals = (capture.summary.work_ns / max(capture.summary.steps, 1) for capture in compared)
    return Change("total", "", 0, tuple(totals))


def row_names(tree: pd.DataFrame) -> list[str]:
    """Names of the rows of a tree: a layer's path, or ``(none) optimizer``."""
    names: list[str] = tree["layer"].where(tree["layer"] != NO_LAYER, NO_LAYER + " " + tree["phase"]).tolist()
    return names


def sheet_of(
    trace: Trace,
    step: int | None = None,
    advice: Advice | None = None,
    own_rules: tuple[Rule, ...] = (),
    *,
    steps: StepOptions = ALL_STEPS,
    known: Operations | None = None,
    broken_down: Breakdown | None = None,
    left_out: Sequence[str] = (),
) -> Sheet:
    """The content of the page for a capture.

    Args:
        trace: The capture, with the columns of `nvprof_kit._analysis.timeline.OPTIONAL`, and the tables of
            `nvprof_kit._trace.schema.MEMORY_TABLES` to show memory.
        step: The only step on the timeline; None for all.
        advice: The findings; None if not computed.
        own_rules: Rules for kernel classes, which take precedence over the package's rules.
        steps: The steps that the figures per step cover; all but warm-up by default.
        known: The same operations with layers and classes, if already computed.
        broken_down: The breakdown of each step; None if not computed.
        left_out: One sentence for each omitted analysis.

    Raises:
        UsageError: The capture has no such step.
    """
    operations = Operations(trace, own_rules, known)
    attribution = operations.attribution
    times = step_times(trace, attribution)
    result = layers(operations, steps=steps, by_step=True)
    pointed = [] if advice is None or step is not None else _steps_of(advice, times)
    instances = _listed_steps(times, step, trace.info.path, pointed, result.steps.shown)
    view, idle, unshown = _moments(trace, attribution, times, instances, alone=step is not None)
    is_counted = result.steps.of_ops(attribution)
    tables = [] if broken_down is None else breakdown_tables(broken_down, trace.info.path)
    return Sheet(
        layers=result,
        steps=times,
        timeline=view,
        idle=idle,
        classes=class_times(operations, is_counted),
        findings=[] if advice is None else _findings(advice, result, view),
        memory=memory_tree(layer_memory(trace, attribution), result.tree) if has_memory(trace) else None,
        kernels=kernel_table(operations, is_counted) if "name" in trace.ops and len(trace.ops) else None,
        tables=tables,
        left_out=(*left_out, *unshown),
    )


def _steps_of(advice: Advice, times: pd.DataFrame) -> list[int]:
    """Step instances with findings, the most severe first."""
    chosen: list[int] = []
    for finding in advice.findings:
        here = (times["start_ns"] <= finding.start_ns) & (finding.start_ns < times["end_ns"])
        chosen += times.index[here][:1].tolist()
    return list(dict.fromkeys(chosen))


def _moments(
    trace: Trace,
    attribution: Attribution,
    times: pd.DataFrame,
    titled: Sequence[tuple[str, int | None]],
    *,
    alone: bool,
) -> tuple[Moments, tuple[int, int], list[str]]:
    """The timeline, the idle time of the devices in the first step, and the steps that cannot be shown."""
    first = titled[0][1]
    if first is None or alone:
        drawn = timeline(trace, attribution, first)
        idle = {}
        for device in sorted({lane.device for lane in drawn.lanes}):
            gaps, (start, end) = drawn.idle_in_step(device), drawn.own_window(device)
            idle[device] = int(gaps.sum()), end - start, len(gaps)
        step = ShownStep(first, drawn.step, titled[0][0], drawn.start_ns, drawn.end_ns, _idle_sentences(idle))
        return Moments(drawn, [step]), _idle_sum(idle), []
    drawn = timeline(trace, attribution, steps_idle=True)
    windows = idle_by_step(trace, attribution, drawn)
    names = ("step", "start_ns", "end_ns")
    plain = {name: dict(zip(times.index.tolist(), times[name].tolist(), strict=True)) for name in names}
    titled_set = {instance for _, instance in titled}
    other_steps = [
        (f"step {number}", instance) for instance, number in plain["step"].items() if instance not in titled_set
    ]
    chosen = [*titled, *other_steps][:MAX_STEPS]
    steps = []
    for title, instance in chosen:
        if instance is not None:
            number, start, end = (plain[name][instance] for name in names)
            steps.append(ShownStep(instance, number, title, start, end, _idle_sentences(_idle_of(windows, instance))))
    unshown = len(times) - len(chosen)
    left_out = [f"{unshown:,} steps cannot be chosen: nvprof-kit report {trace.info.path} --step N"] if unshown else []
    titled_instances = [instance for _, instance in titled if instance is not None]
    return Moments(drawn, steps, titled_instances), _idle_sum(_idle_of(windows, first)), left_out


def _idle_of(windows: StepWindows, instance: int) -> dict[int, tuple[int, int, int]]:
    """Idle time, duration and number of gaps of a step, for each device that ran it."""
    columns = (windows.idle_ns, windows.end_ns - windows.start_ns, windows.gaps)
    rows = zip(windows.devices, *(column[:, instance].tolist() for column in columns), strict=True)
    return {device: (idle, length, gaps) for device, idle, length, gaps in rows if length > 0}


def _idle_sentences(idle: dict[int, tuple[int, int, int]]) -> dict[int, str]:
    return {device: idle_sentence(device, *facts) for device, facts in idle.items()}


def _idle_sum(idle: dict[int, tuple[int, int, int]]) -> tuple[int, int]:
    return sum(device_idle[0] for device_idle in idle.values()), sum(device_idle[1] for device_idle in idle.values())


def _findings(advice: Advice, result: Layers, view: Moments) -> list[Linked]:
    """The findings, each with a link to its position on the page."""
    rows = set(row_names(result.tree))
    linked = []
    for finding in advice.findings:
        layer = f"{NO_LAYER} {finding.phase}" if finding.layer == NO_LAYER else finding.layer
        seen = any(step.start_ns <= finding.start_ns and finding.end_ns <= step.end_ns for step in view.steps)
        linked.append(
            Linked(
                finding,
                saving=saving(finding, advice),
                layer=layer if layer in rows else "",
                window=(finding.start_ns, finding.end_ns) if seen else None,
            )
        )
    return linked


def _listed_steps(
    times: pd.DataFrame, step: int | None, path: str, pointed: Sequence[int], is_shown: npt.NDArray[np.bool_]
) -> list[tuple[str, int | None]]:
    """The highlighted step instances with titles; None for the whole capture."""
    if step is not None:
        return [(f"step {step}", instance_of(times, step, path))]
    typical, slowest = typical_step(times[is_shown]), slowest_step(times[is_shown])
    if typical is None or slowest is None:
        return [("the whole capture", None)]
    number = times["step"]
    titles = {typical: f"step {number[typical]}, a typical one"}
    titles.setdefault(slowest, f"step {number[slowest]}, the slowest")
    for instance in pointed:
        if len(titles) < MAX_TITLES:
            titles.setdefault(instance, f"step {number[instance]}, of a finding")
    return [(title, instance) for instance, title in titles.items()]
