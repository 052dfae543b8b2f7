"""One page about a capture, or about two that it compares: a single file that loads nothing from the network.

Two captures share the limits of the page. It lists all omissions, with the command that shows the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nvprof_kit._analysis.advise.advise import Advice, advise
from nvprof_kit._analysis.attribution.attribution import Operations
from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array
from nvprof_kit._analysis.attribution.steps import StepOptions, slowest_step, step_times, typical_step
from nvprof_kit._analysis.breakdown.breakdown import breakdown
from nvprof_kit._analysis.diff.effects import Noise, within
from nvprof_kit._analysis.layers.fold import MANY
from nvprof_kit._analysis.layers.layers import Layers, layers
from nvprof_kit._analysis.layers.memory import has_memory, layer_memory
from nvprof_kit._analysis.layers.sums import Cells
from nvprof_kit._analysis.timeline import Timeline, timeline
from nvprof_kit._report.page import figures, table
from nvprof_kit._report.page.template import render, short_text
from nvprof_kit._report.page.timeline import MAX_BOXES, Drawing, ShownStep, drawn_timeline
from nvprof_kit._report.text.layers import layers_by_step, left_out_lines, row_names, time_name
from nvprof_kit._report.text.table import capture_facts
from nvprof_kit._report.text.texts import is_missing, percent, saving
from nvprof_kit._report.text.views import OF_GPUS, outside_name, parts_of_wall
from nvprof_kit._toml import read_toml
from nvprof_kit.issues import printed
from nvprof_kit.names import LAYER_PHASES, NO_LAYER

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.flops.flops import Flops

MAX_ROWS = 2_000
"""Maximum number of rows of the model trees of all captures; the costliest are kept."""

MAX_CELLS = 200_000
"""Maximum number of cells (layers times steps) on the page; the costliest layers are kept."""

TITLES = read_toml("nvprof_kit._report.page", "titles.toml")
"""Titles of tables, and what a page says."""

MAX_TITLES = 4
"""Maximum number of highlighted steps: the typical step, the slowest, and those with findings."""

MAX_STEPS = 2_000
"""Maximum number of selectable steps."""

MAX_KERNELS = 20_000
"""Maximum number of rows of kernels of all captures on a page; the costliest are kept."""

_SCRIPTS = (
    "core.js", "state.js", "table.js", "icicle.js", "timeline.js", "steps.js", "roofline.js", "kernels.js", "main.js"
)  # fmt: skip


class Sheet(NamedTuple):
    """A capture on the page.

    Attributes:
        layers: The per-layer table by step.
        variables: What the template shows.
        data: What the scripts draw.
    """

    layers: Layers
    variables: dict[str, Any]
    data: dict[str, Any]


def report_page(sheets: Sequence[Sheet]) -> bytes:
    """The page as UTF-8, of one capture or of two, the second of which is compared with the first."""
    compared = [sheet.layers for sheet in sheets]
    noise = Noise.between(1, 0.0, compared[0].info.on_gpu, None).operations
    changes, change_total, note = (
        table.comparison(compared[0], compared[1], noise) if len(compared) > 1 else ([], [], "")
    )
    return render(
        "page.html",
        scripts=_SCRIPTS,
        styles=("page.css",),
        loading=True,
        title=f"{', '.join(capture.info.path for capture in compared)} · nvprof-kit",
        sheets=[sheet.variables for sheet in sheets],
        compared=[(capture.info.path, table.short_path(capture.info.path)) for capture in compared],
        changes=changes,
        changes_note=note,
        noise=within(noise),
        without_comm=any(capture.summary.comm_ns for capture in compared),
        change_total=change_total,
        data=[sheet.data for sheet in sheets],
    )


def sheet_of(operations: Operations, steps: StepOptions, *, flops: Flops | None, with_findings: bool, of: int) -> Sheet:
    """A capture on the page.

    Args:
        operations: The operations, with what a page reads, and with findings what `advise` reads.
        steps: The steps that the figures per step cover; if they are selected, the timeline has no others.
        flops: FLOPs and utilization; None if operators were not counted.
        with_findings: Whether to look for findings, and to break the steps down.
        of: Number of captures, which share the limits of the page.
    """
    trace, attribution = operations.trace, operations.attribution
    path, on_gpu = trace.info.path, trace.info.on_gpu
    times = step_times(trace, attribution)
    result = layers(operations, steps=steps, by_step=True)
    summary, cells = result.summary, Cells.of(attribution.ranges, result.steps)
    memory = layer_memory(trace, attribution.ranges, cells).of_tree(cells, result.tree) if has_memory(trace) else None
    advice, tables = _findings(operations, steps, flops) if with_findings and len(trace.ops) else (None, [])
    starts = [] if advice is None else [finding.start_ns for finding in advice.findings]
    selected = result.steps.shown if steps.selects else None
    drawn = timeline(trace, attribution, selected)
    selectable = times if selected is None else times[selected]
    shown_steps, idle = _steps_in_time(drawn, selectable, starts, times[result.steps.shown])
    page_rows = table.PageRows.of(result.tree, MAX_ROWS // of)
    columns, rows, total = table.layer_table(result, page_rows, memory, flops)
    is_counted = result.steps.of_ops(attribution)
    kernels = figures.kernel_table(operations, is_counted)
    measures = {"time": time_name(result)}
    for measure, name in (("kept", "memory kept by a forward"), ("cuda", "memory taken from CUDA")):
        if memory is not None and (memory[f"{measure}_bytes"].fillna(0) > 0).any():
            measures[measure] = name
    more_rows, more_steps = len(result.tree) - len(page_rows.rows), len(selectable) - len(shown_steps)
    left_out = [
        *([f"{more_rows:,} layers of little time: nvprof-kit layers {path} --format csv"] if more_rows else []),
        *([] if with_findings else [text.format(path=path) for text in TITLES["without_findings"].values()]),
        *([f"{more_steps:,} steps cannot be chosen: nvprof-kit report {path} --steps N"] if more_steps > 0 else []),
    ]
    variables = {
        "path": path,
        "facts": capture_facts(result.info, summary.steps, summary.all_steps),
        "headlines": figures.headlines(result, times, shown_steps[0], idle, flops),
        "split": figures.phase_split(result),
        "warnings": (*left_out_lines(result), *printed(result.warnings)),
        "findings": [] if advice is None else _linked(advice, result, shown_steps),
        "unit": "Milliseconds per step" if summary.steps > 1 else "Milliseconds",
        "time_name": time_name(result),
        "measures": measures,
        "columns": columns,
        "rows": rows,
        "folded": any(group.count >= MANY for group in page_rows.groups),
        "total": total,
        "levels": int(result.tree["depth"].max()) + 1 if len(result.tree) else 1,
        "tables": tables,
        "left_out": left_out,
        "steps": summary.steps,
        "limits": figures.limit_bars(flops),
        "classes": figures.class_bars(kernels, summary.steps) if on_gpu else [],
        "unmatched": operations.classes.warnings() if on_gpu else (),
    }
    drawing, tree = Drawing(), result.tree.iloc[page_rows.rows]
    parents = table.parents_of(tree)
    data = {
        "steps": max(summary.steps, 1),
        "timeName": time_name(result),
        "phases": LAYER_PHASES,
        "tree": {
            "name": [short_text(name) for name in row_names(tree)],
            "parent": parents,
            "depth": tree["depth"].tolist(),
            **{phase: tree[f"{phase}_ns"].tolist() for phase in (*LAYER_PHASES, "other", "total")},
        },
        "folds": [{"name": short_text(group.label), "rows": group.rows} for group in page_rows.folds.values()],
        "memory": None if memory is None else figures.drawn_memory(memory.iloc[page_rows.rows], parents),
        "bySteps": _drawn_steps(result, selectable, page_rows.rows, drawing, MAX_CELLS // of) if len(times) else None,
        "timeline": drawn_timeline(drawn, shown_steps, drawing, MAX_BOXES // of),
        "roofline": figures.drawn_roofline(flops),
        "kernels": figures.drawn_kernels(kernels, drawing, MAX_KERNELS // of) if len(trace.ops) else None,
    }
    return Sheet(result, variables, {**data, "texts": list(map(short_text, drawing.texts)), "block": drawing.packed()})


# ---------------------------------------------------------------- findings


def _findings(
    operations: Operations, options: StepOptions, flops: Flops | None
) -> tuple[Advice | None, list[table.PageTable]]:
    """The findings, None without a GPU, and the tables of the breakdown that are not empty."""
    result, path, on_gpu = breakdown(operations, options), operations.trace.info.path, operations.trace.info.on_gpu
    steps, columns, command = result.steps, result.columns, f"nvprof-kit breakdown {path}"
    names = {} if on_gpu else {"compute_ns": "operators_ns", "gpu_ns": "operators_ns"}
    times = [name for name in steps.columns if str(name).endswith("_ns") and name != "start_ns"]
    times = [name for name in times if on_gpu or not name.startswith("idle_") or name == "idle_ns"]
    several = [name for name in ("process", "device") if steps[name].nunique() > 1]
    about = f"milliseconds; {parts_of_wall(on_gpu)} add up to the wall time"
    title = "Breakdown: where each step's time goes"
    rows, csv = steps[["step", *several, *times]].rename(columns=names), f"{command} --format csv"
    rows = rows.assign(step=rows["step"].astype(object).where(rows["step"].notna(), outside_name(result)))
    tables = [table.page_table(rows, columns["breakdown-steps"], "breakdown", title, about, command=csv)]
    step = steps["step"].iloc[result.critical_window] if len(steps) else None
    for view, (title, about) in TITLES["breakdown"].items():
        rows = result.table(view).rename(columns=names)
        if len(rows) and (on_gpu or view not in OF_GPUS):
            of_step = f" of step {step}" if view == "critical-path" and not is_missing(step) else ""
            over = about if of_step else f"{about}; milliseconds over all steps that are shown"
            csv, columns_of_view = f"{command} --view {view} --format csv", columns[f"breakdown-{view}"]
            tables.append(table.page_table(rows, columns_of_view, view, title + of_step, over, command=csv))
    if not on_gpu:
        return None, tables
    return advise(operations, options, times=result, limits=flops), tables


def _linked(advice: Advice, result: Layers, shown_steps: Sequence[ShownStep]) -> list[dict[str, Any]]:
    """Each finding, what it could save, and its layer and time, if the page has them."""
    names, findings = set(row_names(result.tree)), []
    for finding in advice.findings:
        layer = f"{NO_LAYER} {finding.phase}" if finding.layer == NO_LAYER else finding.layer
        seen = any(step.start_ns <= finding.start_ns and finding.end_ns <= step.end_ns for step in shown_steps)
        window = (finding.start_ns, finding.end_ns) if seen else None
        links = {"layer": layer if layer in names else "", "window": window}
        findings.append({"finding": finding, "saving": saving(finding, advice), **links})
    return findings


# ---------------------------------------------------------------- steps and time


def _steps_in_time(
    drawn: Timeline, times: pd.DataFrame, starts: Sequence[int], counted_steps: pd.DataFrame
) -> tuple[list[ShownStep], pd.DataFrame]:
    """The steps to choose on the timeline, and the idle time of the first.

    Args:
        drawn: The timeline.
        times: The steps on it.
        starts: When findings begin.
        counted_steps: The steps that the figures cover. A typical one of them comes first, then the slowest and those
            with findings.
    """
    idle, number = drawn.idle_times(), times["step"]
    sentences: dict[int, dict[int, str]] = {}
    for row in idle.to_dict("records"):
        share = percent(row["idle_ns"] / max(row["end_ns"] - row["start_ns"], 1))
        sentence = f"GPU {row['device']}: idle {share} of the time, in {row['gaps']:,} gap{'s' * (row['gaps'] != 1)}"
        sentences.setdefault(row["instance"], {})[row["device"]] = sentence
    typical, slowest = typical_step(counted_steps), slowest_step(counted_steps)
    if typical is None or slowest is None:
        capture = ShownStep(None, None, "the whole capture", drawn.start_ns, drawn.end_ns, sentences.get(NONE, {}))
        return [capture], idle
    titles = {typical: f"step {number[typical]}, a typical one"}
    titles.setdefault(slowest, f"step {number[slowest]}, the slowest")
    for start in starts:
        for instance in times.index[(times["start_ns"] <= start) & (start < times["end_ns"])][:1].tolist():
            if len(titles) < MAX_TITLES:
                titles.setdefault(instance, f"step {number[instance]}, of a finding")
    steps = []
    for instance in [*titles, *(instance for instance in times.index if instance not in titles)][:MAX_STEPS]:
        title = titles.get(instance, f"step {number[instance]}")
        start, end = times.loc[instance, ["start_ns", "end_ns"]].tolist()
        idle_sentences, is_titled = sentences.get(instance, {}), instance in titles
        steps.append(ShownStep(instance, int(number[instance]), title, start, end, idle_sentences, is_titled))
    return steps, idle[idle["instance"] == typical]


def _drawn_steps(
    result: Layers, times: pd.DataFrame, tree_rows: Int64Array, drawing: Drawing, cells: int
) -> dict[str, Any]:
    """Time of each step by phase, and of each row of the tree by step."""
    inside = result.rows[result.rows["step"].notna()]
    phase = inside["phase"].where(inside["phase"].isin(LAYER_PHASES), "other")
    by_phase = inside.groupby([phase, inside["instance"].astype("int64")])["gpu_self_ns"].sum().unstack(fill_value=0)
    by_phase = by_phase.reindex(columns=times.index, fill_value=0)
    by_layer = layers_by_step(result).iloc[:-1].reindex(columns=times.index, fill_value=0).to_numpy()[tree_rows]
    limit = max(cells // len(times), 1)
    costliest = np.sort(np.argsort(-by_layer.sum(axis=1), kind="stable")[:limit])
    numbers = {"number": drawing.add(times["step"]), "length": drawing.add(times["wall_ns"])}
    phases = {name: drawing.add(by_phase.loc[name]) for name in (*LAYER_PHASES, "other") if name in by_phase.index}
    drawn = drawing.add(by_layer[costliest].ravel())
    return {**numbers, "phases": phases, "layers": costliest.tolist(), "cells": drawn}
