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
from nvprof_kit._analysis.attribution.steps import (
    ALL_STEPS,
    StepOptions,
    instance_of,
    median_place,
    slowest_step,
    step_times,
    typical_step,
)
from nvprof_kit._analysis.kernels.classes import CLASSES, Rule
from nvprof_kit._analysis.layers.fold import fold_tree
from nvprof_kit._analysis.layers.layers import layers
from nvprof_kit._analysis.layers.memory import has_memory, layer_memory
from nvprof_kit._analysis.layers.sums import Cells
from nvprof_kit._analysis.layers.tree import ModelTree
from nvprof_kit._analysis.timeline import idle_by_step, timeline
from nvprof_kit._report.page import timeline as timelines
from nvprof_kit._report.page.tables import (
    MAX_KERNELS,
    PageTable,
    breakdown_tables,
    drawn_kernels,
    kernel_table,
    short_text,
)
from nvprof_kit._report.page.timeline import Block, Moments, ShownStep, Texts, drawn_timeline, idle_sentence
from nvprof_kit._report.text.advise import saving
from nvprof_kit._report.text.layers import heading, layers_by_step, time_name
from nvprof_kit._report.text.texts import Milliseconds, percent
from nvprof_kit.issues import Issue
from nvprof_kit.names import LAYER_CATEGORIES, NO_LAYER

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.advise.advise import Advice
    from nvprof_kit._analysis.breakdown.breakdown import Breakdown
    from nvprof_kit._analysis.flops.flops import Flops
    from nvprof_kit._analysis.layers.layers import Layers
    from nvprof_kit._trace.schema import Trace

MAX_LIMIT_BARS = 16
"""Maximum number of kinds of layers with a bar of time over limit; those furthest above their limit have one."""

LEAST_DOT = 0.002
"""Kinds of layers have a dot in the roofline if their products take this share of their limit, and they of all time."""

MAX_TITLES = 4
"""Maximum number of highlighted steps: the typical step, the slowest, and those with findings."""

MAX_STEPS = 2_000
"""Maximum number of selectable steps."""

MAX_ROWS = 2_000
"""Maximum number of rows of the model trees of all captures; the costliest are kept."""

MAX_CELLS = 200_000
"""Maximum number of cells (layers times steps) on the page; the costliest layers are kept."""

PHASES = tuple(category.value for category in LAYER_CATEGORIES)
"""Phases of a layer in drawing order."""


@dataclass(frozen=True)
class Sheet:
    """The content of the page for one capture.

    Attributes:
        layers: The per-layer table by step.
        steps: Durations of the steps (`nvprof_kit._analysis.attribution.steps.step_times`).
        timeline: The timeline; None to omit it.
        idle: Idle time and total time of the devices in the step shown first; None if unknown.
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
    timeline: Moments | None = None
    idle: tuple[int, int] | None = None
    classes: Sequence[tuple[str, int]] = ()
    unmatched: Sequence[Issue] = ()
    findings: Sequence[dict[str, Any]] = ()
    memory: pd.DataFrame | None = None
    flops: Flops | None = None
    kernels: pd.DataFrame | None = None
    tables: Sequence[PageTable] = ()
    left_out: Sequence[str] = ()


def sheet_of(
    trace: Trace,
    step: int | None = None,
    advice: Advice | None = None,
    own_rules: tuple[Rule, ...] = (),
    *,
    steps: StepOptions = ALL_STEPS,
    attributed: Operations | None = None,
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
        attributed: The same operations with layers and classes, if already computed.
        broken_down: The breakdown of each step; None if not computed.
        left_out: One sentence for each omitted analysis.

    Raises:
        UsageError: The capture has no such step.
    """
    operations = Operations(trace, own_rules, attributed)
    attribution = operations.attribution
    times = step_times(trace, attribution)
    result = layers(operations, steps=steps, by_step=True)
    cells = Cells.of(attribution.ranges, result.steps)
    memory = layer_memory(trace, attribution.ranges, cells) if has_memory(trace) else None
    starts = [] if advice is None or step is not None else [finding.start_ns for finding in advice.findings]
    titled = _titled_steps(times, step, trace.info.path, starts, result.steps.shown)
    view, idle, unshown = _moments(trace, attribution, times, titled, alone=step is not None)
    is_counted = result.steps.of_ops(attribution)
    class_times: list[tuple[str, int]] = []
    if trace.info.on_gpu:
        lengths = np.where(is_counted, (trace.ops["end_ns"] - trace.ops["start_ns"]).to_numpy(), 0)
        sums = exact_sums(operations.classes.code.astype(np.int64), lengths, len(CLASSES)).tolist()
        class_times = sorted(
            ((name, ns) for name, ns in zip(CLASSES, sums, strict=True) if ns > 0), key=lambda pair: -pair[1]
        )
    findings: list[dict[str, Any]] = []
    if advice is not None:
        names = set(row_names(result.tree))
        for finding in advice.findings:
            layer = f"{NO_LAYER} {finding.phase}" if finding.layer == NO_LAYER else finding.layer
            seen = any(step.start_ns <= finding.start_ns and finding.end_ns <= step.end_ns for step in view.steps)
            links = {
                "layer": layer if layer in names else "",
                "window": (finding.start_ns, finding.end_ns) if seen else None,
            }
            findings.append({"finding": finding, "saving": saving(finding, advice), **links})
    return Sheet(
        layers=result,
        steps=times,
        timeline=view,
        idle=idle,
        classes=class_times,
        unmatched=operations.classes.warnings(sum(ns for _, ns in class_times)) if trace.info.on_gpu else (),
        findings=findings,
        memory=None if memory is None else memory.of_tree(cells, result.tree),
        kernels=kernel_table(operations, is_counted) if "name" in trace.ops and len(trace.ops) else None,
        tables=[] if broken_down is None else breakdown_tables(broken_down, trace.info.path),
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


def _moments(
    trace: Trace, attribution: Attribution, times: pd.DataFrame, titled: dict[int | None, str], *, alone: bool
) -> tuple[Moments, tuple[int, int], list[str]]:
    """The timeline, the idle time of the devices in the first step, and the steps that cannot be shown."""
    first, title = next(iter(titled.items()))
    if first is None or alone:
        drawn = timeline(trace, attribution, first)
        idle = {}
        for device in sorted({lane.device for lane in drawn.lanes}):
            gaps, (start, end) = drawn.idle_in_step(device), drawn.own_window(device)
            idle[device] = int(gaps.sum()), end - start, len(gaps)
        step = ShownStep(first, drawn.step, title, drawn.start_ns, drawn.end_ns, _idle_sentences(idle))
        return Moments(drawn, [step]), _idle_sum(idle), []
    drawn = timeline(trace, attribution, steps_idle=True)
    windows = idle_by_step(trace, attribution, drawn)
    facts = (windows.idle_ns, windows.end_ns - windows.start_ns, windows.gaps)

    def idle_of(instance: int) -> dict[int, tuple[int, int, int]]:
        """Idle time, duration and number of gaps of a step, for each device that ran it."""
        rows = zip(windows.devices, *(fact[:, instance].tolist() for fact in facts), strict=True)
        return {device: (idle, length, gaps) for device, idle, length, gaps in rows if length > 0}

    rows = times[["step", "start_ns", "end_ns"]].to_dict("index")
    instances = [*titled, *(instance for instance in rows if instance not in titled)][:MAX_STEPS]
    steps = []
    for instance in instances:
        if instance is not None:
            number, start, end = rows[instance].values()
            sentences = _idle_sentences(idle_of(instance))
            steps.append(ShownStep(instance, number, titled.get(instance, f"step {number}"), start, end, sentences))
    unshown = len(times) - len(instances)
    left_out = [f"{unshown:,} steps cannot be chosen: nvprof-kit report {trace.info.path} --step N"] if unshown else []
    unmerged = [instance for instance in titled if instance is not None]
    return Moments(drawn, steps, unmerged), _idle_sum(idle_of(first)), left_out


def _idle_sentences(idle: dict[int, tuple[int, int, int]]) -> dict[int, str]:
    return {device: idle_sentence(device, *facts) for device, facts in idle.items()}


def _idle_sum(idle: dict[int, tuple[int, int, int]]) -> tuple[int, int]:
    return sum(facts[0] for facts in idle.values()), sum(facts[1] for facts in idle.values())


# ---------------------------------------------------------------- figures and bars


def headlines(sheet: Sheet) -> list[tuple[str, str, str]]:
    """The numbers at the top of the page: label, value, details."""
    result, summary, flops = sheet.layers, sheet.layers.summary, sheet.flops
    ms = Milliseconds.for_total(summary.total_ns, max(summary.steps, 1))
    several = summary.steps > 1
    operations = f"{summary.ops:,} operations" + (f" in {summary.steps} steps" if several else "")
    label = heading(time_name(result)) + (" per step" if several else "")
    lines = [(label, f"{ms(summary.total_ns) or '0'} ms", operations)]
    if len(sheet.steps):
        lengths = sheet.steps["wall_ns"].to_numpy()[result.steps.shown]
        ms = Milliseconds.for_total(int(lengths.max()))
        median, shortest, longest = (
            ms(int(ns)) for ns in (lengths[median_place(lengths)], lengths.min(), lengths.max())
        )
        lines.append(("Median step", f"{median} ms", f"{shortest} to {longest} ms"))
    if sheet.timeline is not None and sheet.idle is not None and result.info.on_gpu:
        number, (idle_ns, window_ns) = sheet.timeline.steps[0].number, sheet.idle
        where = f"of step {number}" if number is not None else "of the capture"
        devices = len({lane.device for lane in sheet.timeline.timeline.lanes})
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
        lines.append(("Costliest layer by its own work", short_text(str(self_ns.idxmax())), share))
    return lines


def phase_split(result: Layers) -> list[dict[str, Any]]:
    """The total time by phase of the loop, without empty phases."""
    by_phase = result.rows.groupby("phase")["gpu_self_ns"].sum().sort_values(ascending=False, kind="stable")
    by_phase = by_phase[by_phase > 0]
    summary = result.summary
    ms = Milliseconds.for_total(summary.total_ns, max(summary.steps, 1))
    return [
        {
            "phase": short_text(str(phase)),
            "colour": phase if phase in PHASES else "other",
            "ns": int(by_phase[phase]),
            "time": ms(int(by_phase[phase])),
            "percent": percent(by_phase[phase] / max(summary.total_ns, 1)),
        }
        for phase in dict.fromkeys((*(phase for phase in PHASES if phase in by_phase), *by_phase.index))
    ]


def class_bars(sheet: Sheet) -> list[dict[str, Any]]:
    """A row for each kernel class: name, time per step, percent, and bar width in percent."""
    total = sum(ns for _, ns in sheet.classes)
    ms = Milliseconds.for_total(total, max(sheet.layers.summary.steps, 1))
    return [
        {"name": name, "time": ms(ns), "percent": percent(ns / total), "width": f"{100 * ns / sheet.classes[0][1]:.2f}"}
        for name, ns in sheet.classes
    ]


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
            "fused": ms(round(row["fused_limit_ns"])),
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


# ---------------------------------------------------------------- rows of the table, and what scripts draw


def row_names(tree: pd.DataFrame) -> list[str]:
    """Names of the rows of a tree: a layer's path, or ``(none) optimizer``."""
    names: list[str] = tree["layer"].where(tree["layer"] != NO_LAYER, NO_LAYER + " " + tree["phase"]).tolist()
    return names


@dataclass(frozen=True)
class Fold:
    """Equal blocks folded into one row.

    Attributes:
        name: The combined path: ``layers.0-79``.
        rows: The rows of the blocks on the page.
        line: The row in the folded tree.
        each: Time of one block, as text.
    """

    name: str
    rows: tuple[int, ...]
    line: int
    each: str


@dataclass(frozen=True)
class Folds:
    """The rows of a page's table and its folds, in table order; a switch of the page shows the individual rows.

    Attributes:
        rows: The rows of the capture's tree on the page.
        tree: The folded tree, with the columns of the tree and of `nvprof_kit._analysis.layers.fold`.
        folds: The folds with several blocks.
        differences: For each row of the page, how it differs from its equals; '' if it does not.
    """

    rows: npt.NDArray[np.int64]
    tree: pd.DataFrame
    folds: tuple[Fold, ...]
    differences: tuple[str, ...]


def folds_of(sheet: Sheet, of: int = 1) -> Folds:
    """The rows on the page: the costliest of the tree and their ancestors, with equal blocks folded.

    Args:
        sheet: A capture.
        of: Number of captures on the page.
    """
    tree, limit = sheet.layers.tree, MAX_ROWS // of
    tree_rows = np.arange(len(tree))
    if len(tree) > limit:
        costliest = np.argsort(-tree["total_ns"].to_numpy(), kind="stable")[:limit]
        parents = ModelTree(tuple(row_names(tree)), tuple(tree["parent"])).parent.tolist()
        chosen = set(costliest.tolist())
        for row in sorted(chosen, reverse=True):  # parents precede their children
            while (row := parents[row]) >= 0:
                chosen.add(row)
        tree_rows = np.array(sorted(chosen), dtype=np.int64)
    folded, groups = fold_tree(tree.iloc[tree_rows].reset_index(drop=True))
    records = folded.to_dict("records")
    folds, differences = [], [""] * len(tree_rows)
    for line, group in enumerate(groups):
        for row in group.rows:
            differences[row] = group.difference
        if group.count > 1:
            median, shortest, longest = (records[line][name] / 1e6 for name in ("median_ns", "min_ns", "max_ns"))
            each = (
                f"each {median:,.3f} ms in all steps that are shown, {shortest:,.3f} to {longest:,.3f}, without "
                "communication"
            )
            folds.append(Fold(group.label, tuple(group.rows), line, each))
    return Folds(tree_rows, folded, tuple(sorted(folds, key=lambda fold: fold.rows[0])), tuple(differences))


def drawn(sheet: Sheet, folds: Folds, of: int = 1) -> dict[str, Any]:
    """The data for the page's scripts: tree, steps, timeline and kernels.

    Args:
        sheet: A capture.
        folds: Its rows on the page.
        of: Number of captures on the page.
    """
    block, texts = Block(), Texts()
    tree = sheet.layers.tree.iloc[folds.rows]
    view, kernels = sheet.timeline, sheet.kernels
    drawing = {
        "steps": max(sheet.layers.summary.steps, 1),
        "timeName": time_name(sheet.layers),
        "phases": PHASES,
        "tree": {
            "name": [short_text(name) for name in row_names(tree)],
            "parent": _parents(tree),
            "depth": tree["depth"].tolist(),
            **{phase: tree[f"{phase}_ns"].tolist() for phase in (*PHASES, "other", "total")},
        },
        "folds": [{"name": short_text(fold.name), "rows": fold.rows} for fold in folds.folds],
        "memory": None if sheet.memory is None else _drawn_memory(sheet.memory.iloc[folds.rows], tree),
        "bySteps": _drawn_steps(sheet, folds.rows, block, MAX_CELLS // of),
        "timeline": None if view is None else drawn_timeline(view, texts, block, timelines.MAX_ROWS // of),
        "roofline": drawn_roofline(sheet.flops),
        "kernels": None if kernels is None else drawn_kernels(kernels, texts, block, MAX_KERNELS // of),
    }
    return {**drawing, "texts": [short_text(text) for text in texts.numbers], "block": block.packed()}


def _parents(tree: pd.DataFrame) -> list[int]:
    parents: list[int] = ModelTree(tuple(row_names(tree)), tuple(tree["parent"])).parent.tolist()
    return parents


def measures(sheet: Sheet) -> dict[str, str]:
    """Measures for the widths in the model tree, with their labels."""
    measure_names = {"time": time_name(sheet.layers)}
    if sheet.memory is not None:
        names = {"kept": "memory kept by a forward", "cuda": "memory taken from CUDA"}
        measure_names |= {
            measure: name for measure, name in names.items() if (sheet.memory[f"{measure}_bytes"].fillna(0) > 0).any()
        }
    return measure_names


def _drawn_memory(memory: pd.DataFrame, tree: pd.DataFrame) -> dict[str, Any]:
    """Memory of each row of the tree, and its drawn width: at least the sum of its children."""
    drawn = {str(name).removesuffix("_bytes"): column.fillna(0).tolist() for name, column in memory.items()}
    parents = _parents(tree)
    for measure in ("kept", "cuda"):
        in_children = [0] * len(parents)
        width = in_children.copy()
        for row in range(len(parents) - 1, -1, -1):  # children follow their parent
            width[row] = max(drawn[measure][row], in_children[row])
            if parents[row] >= 0:
                in_children[parents[row]] += width[row]
        drawn[f"{measure}_width"] = width
    return drawn


def _drawn_steps(sheet: Sheet, tree_rows: npt.NDArray[np.int64], block: Block, cells: int) -> dict[str, Any] | None:
    """Time of each step by phase, and of each row of the tree by step."""
    rows = sheet.layers.rows
    if "step" not in rows or not len(sheet.steps):
        return None
    inside = rows[rows["step"].notna()]
    phase = inside["phase"].where(inside["phase"].isin(PHASES), "other")
    instances = sheet.steps.index.tolist()
    by_phase = inside.groupby([phase, inside["instance"].astype("int64")])["gpu_self_ns"].sum().unstack(fill_value=0)
    by_phase = by_phase.reindex(columns=instances, fill_value=0)
    by_layer = layers_by_step(sheet.layers).iloc[:-1].reindex(columns=instances, fill_value=0).to_numpy()[tree_rows]
    limit = max(cells // max(len(instances), 1), 1)
    costliest = np.sort(np.argsort(-by_layer.sum(axis=1), kind="stable")[:limit])
    return {
        "number": block.add(sheet.steps["step"]),
        "length": block.add(sheet.steps["wall_ns"]),
        "phases": {
            str(phase_name): block.add(by_phase.loc[phase_name])
            for phase_name in (*PHASES, "other")
            if phase_name in by_phase.index
        },
        "layers": costliest.tolist(),
        "cells": block.add(by_layer[costliest].ravel()),
    }
