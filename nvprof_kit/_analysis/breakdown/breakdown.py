"""Time breakdown of a step by device: compute, exposed communication, exposed copies, idle, and the causes of idle.

The four add up to the wall time exactly, and the causes add up to the idle time. Every run checks both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.attribution import Attribution, Operations, join_warnings
from nvprof_kit._analysis.attribution.intervals import Bools, Int64Array, as_slice, exact_sums, joined
from nvprof_kit._analysis.attribution.steps import (
    ALL_STEPS,
    StepChoice,
    StepOptions,
    Windows,
    choose_steps,
    step_windows,
)
from nvprof_kit._analysis.breakdown.columns import COLUMNS
from nvprof_kit._analysis.breakdown.critical_path import critical_path, median_window
from nvprof_kit._analysis.breakdown.devices import PLACE, STATES, Activity, Idle, activity, exposed, idle, longest_of
from nvprof_kit._analysis.breakdown.host import CAUSES, HostCalls, host_of
from nvprof_kit._analysis.breakdown.launches import launch_table, queue_by_window, queue_over_time
from nvprof_kit._analysis.breakdown.transfers import comm_table, copy_table, first_collective
from nvprof_kit._analysis.kernels.classes import KernelClasses
from nvprof_kit._analysis.layers.fold import Views
from nvprof_kit._trace.joins import distinct
from nvprof_kit._trace.schema import CaptureInfo, Trace
from nvprof_kit.issues import Issue

_BARS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "steps": (("compute_ns", "exposed_comm_ns", "exposed_copy_ns", "idle_ns"), ("step", "process", "device")),
    "idle": (("idle_ns",), ("cause", "layer", "phase", "call")),
    "communication": (("exposed_ns",), ("collective", "layer", "phase")),
    "copies": (("gpu_ns",), ("copy", "memory", "layer", "phase")),
    "launches": (("idle_ns",), ("layer", "phase")),
    "critical-path": (("gpu_ns", "host_ns", "wait_ns"), ("layer", "phase")),
}
"""Plotted columns and labels by table; the queue is drawn by `nvprof_kit._report.plots.queue`."""


@dataclass(frozen=True, repr=False, eq=False)
class Breakdown(Views):
    """Time breakdown of each step; `columns` has those of its tables.

    Attributes:
        steps: One row per step and device, sorted by process, device and time.
        instances: The step instance of each row of `steps`, -1 outside steps, shape ``(rows,)``.
        choice: Which steps are warm-up or were selected.
        idle: Idle time by cause and place, the longest first.
        communication, copies, launches: Communication, memory copies, and kernel launches.
        queue: Number of queued operations during the median step.
        critical_path: The critical path of the median step.
        critical_window: The row of the median step in `steps`.
        gaps: One row per idle gap: window (row of `steps`, -1 outside them), start_ns, idle_ns; cause, layer, phase,
            operator and call of its largest part.
        waits: One row per gap that began while the host waited for the device: gap (row of `gaps`); layer, phase and
            call of the wait; lost_ns, by how much the wait delayed the host; row, its row in the table of calls.
        warnings: What may be missing or distorted; each sentence says what to do about it.
        info: Recording tool, GPUs and processes of the capture.
    """

    steps: pd.DataFrame
    instances: Int64Array
    choice: StepChoice
    idle: pd.DataFrame
    communication: pd.DataFrame
    copies: pd.DataFrame
    launches: pd.DataFrame
    queue: pd.DataFrame
    critical_path: pd.DataFrame
    critical_window: int
    gaps: pd.DataFrame
    waits: pd.DataFrame
    warnings: tuple[Issue, ...]
    info: CaptureInfo

    columns: ClassVar = {f"breakdown-{view}": columns for view, columns in COLUMNS.items()}
    bars: ClassVar = {f"breakdown-{view}": drawn for view, drawn in _BARS.items()}
    ranked: ClassVar = {
        "idle": ("idle_ns", ()),
        "communication": ("exposed_ns", ()),
        "copies": ("gpu_ns", ()),
        "launches": ("idle_ns", ("idle_ns", "gpu_ns")),
        "critical-path": ("path_ns", ("gpu_ns", "host_ns", "wait_ns")),
    }


def breakdown(operations: Operations, options: StepOptions = ALL_STEPS) -> Breakdown:
    """Compute the time breakdown of each step.

    Args:
        operations: The operations of a capture.
        options: The steps to analyze, by default all but warm-up. By default `steps` also lists the other steps and
            the time outside steps. Tables of a single step show the step of median duration.

    Raises:
        UsageError: None of the selected steps is in the capture.
        AssertionError: The parts do not add up to the whole: a bug in this package.
    """
    trace, attribution = operations.trace, operations.attribution
    choice = choose_steps(trace, attribution, options)
    result = breakdown_of(trace, attribution, operations.classes, choice, host_of(operations))
    if result.communication["bytes"].notna().all():
        return result
    return replace(result, warnings=(*result.warnings, Issue.of("collective-bytes")))


def breakdown_of(
    trace: Trace,
    attribution: Attribution,
    classes: KernelClasses,
    choice: StepChoice,
    host: HostCalls,
    *,
    is_full: bool = True,
) -> Breakdown:
    """Compute the time breakdown of a capture with known attribution and classes.

    Args:
        trace: The capture.
        attribution: The owner of each operation.
        classes: The class of each operation.
        choice: The steps included in the tables of idle time, communication, copies and launches; the whole capture if
            it has no steps. The tables also include waiting for data between steps, unless the user selected steps; in
            that case `steps` lists only the selected ones.
        host: Its calls.
        is_full: Whether to compute the launches, the queue and the critical path, which are empty otherwise.
    """
    windows = step_windows(trace, attribution)
    launches, queue, path = (
        pd.DataFrame(columns=list(COLUMNS[view])) for view in ("launches", "queue", "critical-path")
    )
    median_index = median_window(windows, choice.shown)
    if is_full:  # first, to limit memory
        queued = queue_by_window(trace, windows, host)
        queue = queue_over_time(trace, windows, host, median_index)
        path = critical_path(trace, attribution, windows, host, median_index)
    active = activity(trace, classes, windows)
    idling = idle(trace, attribution, windows, active.gaps, host)
    steps = _steps(windows, active, idling)
    if is_full:
        steps = steps.join(queued)[list(COLUMNS["steps"])]
    bare = exposed(trace, windows, active)
    _check(steps)
    instances, is_listed, gaps = windows.instance, np.ones(len(steps), dtype=bool), idling.gaps
    if choice.asked and not choice.everything:
        is_listed = np.append(choice.shown, False)[instances]
        steps, instances = steps[is_listed].reset_index(drop=True), instances[is_listed]
        gaps = gaps.assign(window=np.where(is_listed, np.cumsum(is_listed) - 1, -1)[gaps["window"]])
    all_ops, of_parts = np.ones(len(trace.ops), dtype=bool), np.ones(len(idling.parts), dtype=bool)
    if windows.in_step.any():
        all_ops = choice.of_ops(attribution)
        if not choice.everything:
            of_part = windows.instance[idling.parts["window"].to_numpy()]
            of_parts = np.append(choice.shown, False)[of_part]
            if not choice.asked:  # outside steps, the host's fetching of data counts
                of_parts |= (of_part < 0) & (idling.parts["cause"] == "dataloader").to_numpy()
        of_wait = windows.instance[idling.gaps["window"].to_numpy()[idling.waits["gap"].to_numpy()]]
        idling = replace(idling, waits=idling.waits[np.append(choice.shown, choice.everything)[of_wait]])
    if is_full:
        launches = launch_table(trace, attribution, host, idling.parts, is_counted=all_ops, of_parts=of_parts)
    shown_as = int(np.count_nonzero(is_listed[:median_index]))
    return Breakdown(
        steps=steps,
        instances=instances,
        choice=choice,
        idle=_idle_table(idling.parts, of_parts),
        communication=comm_table(trace, attribution, active, bare, is_counted=all_ops),
        copies=copy_table(trace, attribution, active, bare, host, is_counted=all_ops),
        launches=launches,
        queue=queue,
        critical_path=path,
        critical_window=shown_as,
        gaps=gaps,
        waits=idling.waits,
        warnings=(
            *trace.info.warnings,
            *classes.warnings(),
            *join_warnings(trace, attribution.ranges),
            *_warnings(trace, steps),
            *first_collective(trace, classes, all_ops),
        ),
        info=trace.info,
    )


def _steps(windows: Windows, active: Activity, idling: Idle) -> pd.DataFrame:
    count = len(windows.start)
    device = [windows.devices[lane] for lane in windows.device.tolist()]
    window, cause = idling.parts["window"].to_numpy(), idling.parts["cause"].cat.codes.to_numpy()
    idle_ns = exact_sums(window * len(CAUSES) + cause, idling.parts["idle_ns"].to_numpy(), count * len(CAUSES))
    causes = dict(zip((f"idle_{name}_ns" for name in CAUSES), idle_ns.reshape(count, len(CAUSES)).T, strict=True))
    columns = {
        "step": pd.arrays.IntegerArray(windows.step, ~windows.in_step),
        "process": np.array([lane.process for lane in device], dtype=np.int64),
        "device": np.array([lane.device for lane in device], dtype=np.int64),
        "wall_ns": windows.end - windows.start,
        **{f"{state}_ns": active.state_ns[:, column] for column, state in enumerate(STATES)},
        "comm_ns": active.comm,
        "copy_ns": active.copy,
        **causes,
        "start_ns": windows.start,
    }
    return pd.DataFrame({name: columns[name] for name in COLUMNS["steps"] if name in columns})


def _check(steps: pd.DataFrame) -> None:
    parts = steps[[f"{state}_ns" for state in STATES]].sum(axis=1)
    causes = steps[[f"idle_{cause}_ns" for cause in CAUSES]].sum(axis=1)
    if not (parts == steps["wall_ns"]).all() or not (causes == steps["idle_ns"]).all():
        raise AssertionError("the parts of a step do not add up to its wall time: please report this")


def _idle_table(parts: pd.DataFrame, is_counted: Bools) -> pd.DataFrame:
    """Idle time of the `counted` parts by cause, layer, phase, operator and call, the longest first."""
    keys = ["cause", *PLACE]
    place_code = joined([parts[name].cat.codes.to_numpy() for name in keys])
    assert place_code is not None, "a program has few names"
    rows = as_slice(np.flatnonzero(is_counted))
    parts, (codes, place) = parts.iloc[rows], distinct(place_code[rows])
    first = longest_of(place, parts["longest_ns"].to_numpy(), len(codes))
    sums = {name: exact_sums(place, parts[name].to_numpy(), len(codes)) for name in ("gaps", "idle_ns")}
    ranks = {name: parts[name].to_numpy()[first] for name in ("longest_ns", "rank")}
    table = pd.DataFrame({**sums, **ranks, "first": first})
    order = ["idle_ns", "longest_ns", "rank"]
    table = table.sort_values(order, ascending=[False, False, True], ignore_index=True)
    longest = parts.iloc[table["first"].to_numpy()]
    table["longest_at_ns"] = longest["start_ns"].to_numpy()
    for name in keys:
        table[name] = longest[name].astype(object).fillna("").astype(str).to_numpy()
    return table[list(COLUMNS["idle"])]


def _warnings(trace: Trace, steps: pd.DataFrame) -> list[Issue]:
    issues = []
    if trace.calls is None or not len(trace.calls):
        issues.append(Issue.of("no-api-calls"))
    if not steps["step"].notna().any():
        issues.append(Issue.of("no-steps"))
    return issues
