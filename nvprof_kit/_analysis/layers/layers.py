"""The per-layer table: time of each layer by phase, and by step if requested.

Every operation has one owner (`nvprof_kit._analysis.attribution.attribution`), so the sum of `gpu_self_ns` over all
rows equals the sum of all operations' durations. Every run checks this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.attribution import HOW, Attribution, Operations, join_warnings
from nvprof_kit._analysis.attribution.intervals import NONE, Bools, Cover, Int64Array, exact_sums
from nvprof_kit._analysis.attribution.steps import ALL_STEPS, StepChoice, StepOptions, choose_steps, step_windows
from nvprof_kit._analysis.layers.sums import MEMORY, PARTS, SPLIT_COLUMNS, Cells, sum_layers
from nvprof_kit._result.column import read_columns
from nvprof_kit._result.result import Result
from nvprof_kit._trace.schema import OP_KINDS, CaptureInfo, Trace
from nvprof_kit.issues import Issue
from nvprof_kit.names import LAYER_CATEGORIES, LAYER_PHASES, NO_LAYER

if TYPE_CHECKING:
    from nvprof_kit._analysis.hardware import Peaks
    from nvprof_kit._analysis.layers.memory import LayerMemory


COLUMNS = read_columns("nvprof_kit._analysis.layers", "layers")
"""The columns of `Layers.rows` and what they mean."""


LIMITS = read_columns("nvprof_kit._analysis.layers", "limits")
"""Columns that exist only with counts beside the capture, as far as they are known; not by step."""

BY_STEP = ("step", "instance")
"""Columns that exist only by step."""


@dataclass(frozen=True)
class Summary:
    """Key figures of the capture; times in nanoseconds.

    Attributes:
        total_ns: Sum of the operations' durations in the shown steps, or in the whole capture if it has no steps.
        capture_ns: The same of the whole capture.
        outside_ns: The part of `capture_ns` outside steps, 0 in a capture without steps; 0 if it is shown.
        left_out_ns: The part in steps that are not shown; the three parts add up to `capture_ns`.
        comm_ns: The part of `total_ns` in communication; None if the operations' names were not read.
        layer_ns: The part of `work_ns` (compute and copies) in a named layer.
        work_ns: The part of `total_ns` without communication, much of which is waiting.
        wall_ns: Wall time of the shown steps, summed over devices; without
            steps, from the first operation's start to the last one's end.
        busy_ns: The part of `wall_ns` in which the device ran at least one operation.
        ops: Number of operations in `total_ns`.
        steps: Number of shown steps.
        all_steps: Number of steps in the capture.
        layers: Number of distinct layers.
        by_how: Time by how it was attributed: ``launch``, ``graph node``, ``other thread``, ``none``.
        loop_layer_share: The share of forward, backward and recompute time in a named layer; 0 if there is none.
    """

    total_ns: int
    capture_ns: int
    outside_ns: int
    left_out_ns: int
    comm_ns: int | None
    layer_ns: int
    work_ns: int
    wall_ns: int
    busy_ns: int
    ops: int
    steps: int
    all_steps: int
    layers: int
    by_how: dict[str, int]
    loop_layer_share: float

    @property
    def busy_share(self) -> float:
        """The share of `wall_ns` in which the device was busy."""
        return self.busy_ns / self.wall_ns if self.wall_ns else 0.0


@dataclass(frozen=True, repr=False, eq=False)
class Layers(Result):
    """The per-layer table of one capture.

    Attributes:
        rows: One row per layer and phase, in model order, `(none)` last, over the shown steps; columns `COLUMNS`.
        tree: The printed tree: one row per layer in model order, then one per phase of `(none)`. Columns: layer, phase
            ('' for a layer), parent ('' at the top), depth, calls, forward_ns, backward_ns, recompute_ns, other_ns,
            total_ns, self_ns (its own operations), comm_ns (part of total_ns), cpu_ns, and comm_ns by phase
            (parts of a layer's comm_ns). Times of a layer include the layers inside it, by phase. They cover the shown
            steps, or the whole capture if it has no steps.
        summary: Key figures of the capture.
        warnings: What may be missing or distorted; each sentence says what to do about it.
        info: Recording tool, GPUs and processes of the capture.
        memory: The memory of each layer, if requested.
        steps: The shown steps, which `rows` and `tree` cover.
        splits: The columns of `rows` and `tree` that split the time, by ``class`` or ``phase``.
        depth: How many levels of the model to print and draw; None for all.
        peaks: The GPU's peaks that `LIMITS` are by; None without them.
    """

    rows: pd.DataFrame
    tree: pd.DataFrame
    summary: Summary
    warnings: tuple[Issue, ...]
    info: CaptureInfo
    steps: StepChoice
    memory: LayerMemory | None = None
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    depth: int | None = None
    peaks: Peaks | None = None

    columns: ClassVar = {"layers": {**COLUMNS, **LIMITS, **MEMORY, **SPLIT_COLUMNS}}

    def to_frame(self, view: str | None = None) -> pd.DataFrame:
        """The selected rows; if equal blocks are folded, with the columns ``folded_into`` and ``unlike``."""
        rows = self.table(view)
        if self.select.fold:
            from nvprof_kit._analysis.layers.fold import marked, tree_blocks

            rows = marked(rows, tree_blocks(self.tree).groups_of(rows, folds=True))
        return self.select.of(rows)


def layers(
    operations: Operations,
    *,
    steps: StepOptions = ALL_STEPS,
    by_step: bool = False,
    memory: bool = False,
    splits: Sequence[str] = (),
) -> Layers:
    """Compute the per-layer table of a capture.

    Args:
        operations: The operations of the capture with their owners.
        steps: The steps to include, by default all but warm-up.
        by_step: One row per (step, layer, phase) instead of per (layer, phase).
        memory: Add the memory columns of `nvprof_kit._analysis.layers.sums.MEMORY`.
        splits: How to split the time into columns, of `nvprof_kit._analysis.layers.sums.SPLITS`.

    Raises:
        AssertionError: The rows do not add up to the operations: a bug in this package.
        CaptureError: Memory was requested, but the capture has no memory data.
    """
    trace, attribution = operations.trace, operations.attribution
    choice = choose_steps(trace, attribution, steps)
    cells = Cells.of(attribution.ranges, choice, by_step)
    sums, split_columns, busy = sum_layers(operations, cells, splits)
    layers_memory = None
    if memory:
        from nvprof_kit._analysis.layers.memory import layer_memory

        layers_memory = layer_memory(trace, attribution.ranges, cells, by_step=by_step)
    is_row = np.any([sums[name] > 0 for name in ("calls", "gpu_ops", "gpu_total_ns", "cpu_ns")], axis=0)
    if layers_memory is not None:
        is_row.ravel()[layers_memory.by_cell.index] = True
    rows = cells.frame(sums, is_row, attribution.ranges.steps)
    total_ns = max(int(rows["gpu_self_ns"].sum()), 1)
    shares = {"share": rows["gpu_self_ns"] / total_ns, "total_share": rows["gpu_total_ns"] / total_ns}
    rows = rows.assign(**shares, steps=choice.count)
    absent = {*(("steps",) if by_step else BY_STEP), *(() if "name" in trace.ops else PARTS)}
    rows = rows[[name for name in (*COLUMNS, *chain(*split_columns.values())) if name not in absent]]
    tree = _tree(cells, sums, split_columns, is_row[cells.layer_rows :].any(axis=1))
    if layers_memory is not None:
        rows = layers_memory.beside(rows, np.arange(is_row.size).reshape(is_row.shape).T[is_row.T])
        if not by_step:
            tree = tree.assign(**layers_memory.of_tree(cells, tree))
    summary = _summary(operations, cells, sums, choice, busy)
    if int(rows["gpu_self_ns"].sum()) != summary.total_ns:
        raise AssertionError(
            f"{rows['gpu_self_ns'].sum()} ns in the rows, {summary.total_ns} ns in the operations: please report this"
        )
    of_memory = () if layers_memory is None else layers_memory.warnings
    return Layers(
        rows=rows,
        tree=tree,
        splits=split_columns,
        summary=summary,
        warnings=(*trace.info.warnings, *layer_warnings(trace, attribution, choice), *of_memory),
        info=trace.info,
        steps=choice,
        memory=layers_memory,
    )


def _tree(
    cells: Cells, sums: Mapping[str, Int64Array], splits: Mapping[str, tuple[str, ...]], ran: Bools
) -> pd.DataFrame:
    """The printed tree: layers including their submodules, by phase, and behind them what ran outside layers."""
    tree = cells.tree
    layers = {name: cells.by_layer(values).sum(axis=2) for name, values in sums.items()}
    outside = {name: values[cells.layer_rows :].sum(axis=1) for name, values in sums.items()}
    outside = {name: values[ran] for name, values in outside.items()}
    nothing, nowhere = np.zeros(len(tree.layers), dtype=np.int64), np.zeros(np.count_nonzero(ran), dtype=np.int64)
    total, comm = (tree.with_nested(layers[name]) for name in ("gpu_self_ns", "comm_ns"))

    def by_phase(values: Int64Array, ending: str) -> dict[str, Int64Array]:
        of_phase = dict(zip(cells.phases, values.T, strict=True))
        return {f"{phase}{ending}": np.append(of_phase.get(phase, nothing), nowhere) for phase in LAYER_PHASES}

    columns: dict[str, Any] = {
        "layer": [*tree.layers, *[NO_LAYER] * len(nowhere)],
        "phase": [*[""] * len(nothing), *np.array(cells.outside)[ran].tolist()],
        "parent": [*tree.parents, *[""] * len(nowhere)],
        "depth": np.append(tree.depth, nowhere),
        "calls": np.append(layers["calls"].max(axis=1, initial=0), outside["calls"]),
        **by_phase(total, "_ns"),
        "other_ns": np.append(nothing, outside["gpu_self_ns"]),
        "total_ns": np.append(total.sum(axis=1), outside["gpu_self_ns"]),
        "self_ns": np.append(layers["gpu_self_ns"].sum(axis=1), outside["gpu_self_ns"]),
        "comm_ns": np.append(comm.sum(axis=1), outside["comm_ns"]),
        "cpu_ns": np.append(layers["cpu_ns"].sum(axis=1), outside["cpu_ns"]),
        **by_phase(comm, "_comm_ns"),
        **{
            name: np.append(tree.with_nested(layers[name].sum(axis=1)), outside[name])
            for name in chain(*splits.values())
        },
    }
    return pd.DataFrame(columns).astype(dict.fromkeys(("layer", "phase", "parent"), object))


def _summary(
    operations: Operations, cells: Cells, sums: Mapping[str, Int64Array], choice: StepChoice, busy: Cover
) -> Summary:
    trace, attribution, duration = operations.trace, operations.attribution, operations.trace.durations
    is_shown = choice.of_ops(attribution)
    by_how = exact_sums(attribution.how[is_shown], duration[is_shown], len(HOW)).tolist()
    work = (sums["gpu_self_ns"] - sums["comm_ns"]).sum(axis=1)
    in_layers, in_loop = int(work[: cells.layer_rows].sum()), int(work[np.isin(cells.labels[1], LAYER_PHASES)].sum())
    total, capture = sum(by_how), int(duration.sum())
    outside = int(duration[(attribution.step < 0) & ~is_shown].sum())
    windows = step_windows(trace, attribution)
    is_window = np.append(choice.shown, False)[windows.instance]
    is_window |= choice.everything or not windows.in_step.any()
    device, start, end = windows.device[is_window], windows.start[is_window], windows.end[is_window]
    return Summary(
        total_ns=total,
        capture_ns=capture,
        outside_ns=outside,
        left_out_ns=capture - total - outside,
        comm_ns=int(sums["comm_ns"].sum()) if "name" in trace.ops else None,
        layer_ns=in_layers,
        work_ns=int(work.sum()),
        wall_ns=int((end - start).sum()),
        busy_ns=int(busy.inside(device, start, end).sum()),
        ops=int(sums["gpu_ops"].sum()),
        steps=choice.count,
        all_steps=len(choice.shown),
        layers=len(cells.tree.layers),
        by_how={how: ns for how, ns in zip(HOW, by_how, strict=True) if ns},
        loop_layer_share=in_layers / in_loop if in_loop else 0.0,
    )


def layer_warnings(trace: Trace, attribution: Attribution, choice: StepChoice) -> tuple[Issue, ...]:
    """All warnings about the owners of a capture's operations."""
    issues = []
    if not attribution.ranges.is_one_of(LAYER_CATEGORIES).any():
        issues.append(Issue.of("no-layers"))
    elif len(trace.ops) and (trace.ops["end_ns"] == trace.ops["start_ns"]).all():
        issues.append(Issue.of("no-time"))
    issues += join_warnings(trace, attribution.ranges)
    whole_graph = trace.ops["kind"].to_numpy() == OP_KINDS.index("graph")
    graph_replays = np.count_nonzero(whole_graph)
    if graph_replays and not any(issue.code == "whole-graphs" for issue in trace.info.warnings):
        issues.append(Issue.of("whole-graphs", graph_replays / len(trace.ops), count=graph_replays))
    duration, is_shown = trace.durations, choice.of_ops(attribution)
    outside_ns = int(duration[(attribution.step == NONE) & ~is_shown].sum())
    if not choice.asked and outside_ns:
        share = outside_ns / duration.sum()
        issues.append(Issue.of("outside-steps", share, percent=100 * share))
    if unattributed_ns := int(duration[is_shown & (attribution.how == HOW.index("none")) & ~whole_graph].sum()):
        share = unattributed_ns / duration[is_shown].sum()
        issues.append(Issue.of("unattributed", share, percent=100 * share))
    return tuple(issues)
