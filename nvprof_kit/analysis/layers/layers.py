"""The per-layer table: what each layer costs, by phase, and by step where asked.

Every operation has one owner (`nvprof_kit.analysis.attribution.attribution`), so the sum of `gpu_self_ns` over all
rows is the sum of all operations' durations. That is checked here at every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit.analysis.attribution.attribution import HOW, Attribution, attribute
from nvprof_kit.analysis.foreign.rules import Rules
from nvprof_kit.analysis.foreign.translate import translate
from nvprof_kit.analysis.layers.memory import LayerMemory, layer_memory, with_memory
from nvprof_kit.analysis.layers.order import model_order, parents
from nvprof_kit.analysis.layers.sums import LayerSums, sum_layers
from nvprof_kit.analysis.layers.warnings import layer_warnings
from nvprof_kit.names import LAYER_CATEGORIES, NO_LAYER, NO_PHASE
from nvprof_kit.trace.schema import CaptureInfo, Trace

if TYPE_CHECKING:
    import pandas as pd

LAYER_PHASES = tuple(category.value for category in LAYER_CATEGORIES)

COLUMNS = {
    "step": "number of the step, missing outside steps (only by step)",
    "layer": "module path, or `(none)` for work outside every layer",
    "phase": (
        "`forward`, `backward` or `recompute`; outside layers the text of the phase's range (`optimizer`, "
        "`data`, …) or `other`"
    ),
    "calls": (
        "times it ran: its ranges, and one for each CUDA-graph replay that ran it; for `(none)` the ranges of the phase"
    ),
    "gpu_ops": (
        "operations that are its own: kernels, copies, memsets and whole-graph replays whose innermost layer it is"
    ),
    "gpu_self_ns": "sum of the durations of these, in ns",
    "gpu_total_ns": "the same with everything nested in its ranges, in ns; for `(none)` its own",
    "gpu_busy_ns": "length of the union of the total's intervals, summed over devices, in ns",
    "cpu_ns": "CPU wall time inside its ranges, in ns",
    "share": "`gpu_self_ns` over the capture's sum, 0 to 1",
}
"""The columns of `LayersResult.rows` and what they mean."""


@dataclass(frozen=True)
class LayersOptions:
    """What to tell apart.

    Attributes:
        by_step: One row per (step, layer, phase) instead of per (layer, phase).
        rules: How the captured program names its ranges; None where it follows the contract.
        memory: Tell the memory too, with the columns of `nvprof_kit.analysis.layers.memory.MEMORY`.
    """

    by_step: bool = False
    rules: Rules | None = None
    memory: bool = False


@dataclass(frozen=True)
class Summary:
    """The capture in a few numbers; times in nanoseconds.

    Attributes:
        total_ns: Sum of all operations' durations.
        layer_ns: The part of it that is in a named layer.
        wall_ns: From the first operation's start to the last one's end.
        ops: Number of operations.
        steps: Number of distinct steps.
        layers: Number of distinct layers.
        by_how: Time by how its owner was told (`nvprof_kit.analysis.attribution.attribution.HOW`).
        loop_layer_share: Of the time of forward, backward and recompute, the share that is in a named layer; 0
            where there is none.
    """

    total_ns: int
    layer_ns: int
    wall_ns: int
    ops: int
    steps: int
    layers: int
    by_how: dict[str, int]
    loop_layer_share: float


@dataclass(frozen=True)
class LayersResult:
    """The per-layer table of one capture.

    Attributes:
        rows: The columns of `COLUMNS`, a row per (layer, phase), in the model's order, `(none)` last.
        tree: For reading: a row per layer in the model's order, then one per phase of `(none)`: layer, phase (''
            for a layer), parent ('' at the top), depth, calls, forward_ns, backward_ns, recompute_ns, other_ns,
            total_ns, cpu_ns. Times of a layer hold those of the layers in it, each in its own phase.
        summary: The capture in a few numbers.
        warnings: Sentences on what may be missing or distorted, each with what to do.
        info: What the capture says of itself.
        memory: The memory, where it was asked for.
    """

    rows: pd.DataFrame
    tree: pd.DataFrame
    summary: Summary
    warnings: tuple[str, ...]
    info: CaptureInfo
    memory: LayerMemory | None = None


def layers(trace: Trace, options: LayersOptions | None = None, attribution: Attribution | None = None) -> LayersResult:
    """What each layer of a capture costs.

    Args:
        trace: The capture.
        options: What to tell apart; per (layer, phase) by default.
        attribution: Who owns each operation, where that is known already; then the rules have been applied.

    Raises:
        AssertionError: The rows do not add up to the operations: a defect of this package.
        CaptureError: The memory was asked for, and the capture tells nothing of it.
    """
    options = options or LayersOptions()
    trace = translate(trace, options.rules if attribution is None else None)
    attribution = attribution or attribute(trace)
    sums = sum_layers(trace, attribution, by_step=options.by_step)
    parent = parents(attribution.ranges, sums.layers)
    order = model_order(attribution.ranges, sums.layers, parent)
    rows = _rows(sums, order, options)
    summary = _summary(trace, attribution, sums)
    if int(rows["gpu_self_ns"].sum()) != summary.total_ns:
        raise AssertionError(
            f"{rows['gpu_self_ns'].sum()} ns in the rows, {summary.total_ns} ns in the operations: please report this"
        )
    memory = layer_memory(trace, attribution, by_step=options.by_step) if options.memory else None
    return LayersResult(
        rows=rows if memory is None else with_memory(rows, memory),
        tree=_tree(sums, order, parent),
        summary=summary,
        warnings=(
            *trace.info.warnings,
            *layer_warnings(trace, attribution, summary.total_ns),
            *(() if memory is None else memory.warnings),
        ),
        info=trace.info,
        memory=memory,
    )


def _rows(sums: LayerSums, order: dict[str, int], options: LayersOptions) -> pd.DataFrame:
    """The table of the contract, in the model's order, without rows of which nothing was seen."""
    import pandas as pd

    loop_rank = {phase: rank for rank, phase in enumerate((*sums.loop_phases, NO_PHASE))}
    place = [
        (order[layer], LAYER_PHASES.index(phase))
        if layer != NO_LAYER
        else (len(order), loop_rank.get(phase, len(loop_rank)))
        for layer, phase in sums.keys
    ]
    by_place = np.array(sorted(range(len(place)), key=place.__getitem__), dtype=np.int64)
    seen = (sums.calls > 0) | (sums.ops > 0) | (sums.total_ns > 0) | (sums.cpu_ns > 0)
    # by step first, what lies outside steps (column 0) last; within a step in the model's order
    columns = np.roll(np.arange(seen.shape[1]), -1)
    column, key = (part.ravel() for part in np.meshgrid(columns, by_place, indexing="ij"))
    keep = seen[key, column]
    key, column = key[keep], column[keep]
    self_ns = sums.self_ns[key, column]
    total = int(sums.self_ns.sum())
    numbers = np.concatenate(([0], sums.steps))
    rows = {
        "step": pd.arrays.IntegerArray(numbers[column], column == 0),
        "layer": np.array([layer for layer, _ in sums.keys], dtype=object)[key],
        "phase": np.array([phase for _, phase in sums.keys], dtype=object)[key],
        "calls": sums.calls[key, column],
        "gpu_ops": sums.ops[key, column],
        "gpu_self_ns": self_ns,
        "gpu_total_ns": sums.total_ns[key, column],
        "gpu_busy_ns": sums.busy_ns[key, column],
        "cpu_ns": sums.cpu_ns[key, column],
        "share": self_ns / total if total else np.zeros(len(key)),
    }
    table: pd.DataFrame = pd.DataFrame({name: rows[name] for name in COLUMNS if options.by_step or name != "step"})
    return table


def _tree(sums: LayerSums, order: dict[str, int], parent: dict[str, str]) -> pd.DataFrame:
    """The table for reading, from the sums over all steps."""
    import pandas as pd

    depth: dict[str, int] = {}
    records = []
    held = _held(sums, order, parent)
    for layer in sorted(order, key=order.__getitem__):  # a parent comes before its children
        depth[layer] = depth[parent[layer]] + 1 if parent[layer] else 0
        times = [held[layer, phase] for phase in LAYER_PHASES]
        calls = max(sums.over_phases(sums.calls, layer).values())
        cpu = sum(sums.over_phases(sums.cpu_ns, layer).values())
        records.append((layer, "", parent[layer], depth[layer], calls, *times, 0, sum(times), cpu))
    for phase in dict.fromkeys((*sums.loop_phases, *LAYER_PHASES, NO_PHASE)):
        outside = sums.outside(phase)
        if outside.ops or outside.calls:
            records.append(
                (NO_LAYER, phase, "", 0, outside.calls, 0, 0, 0, outside.self_ns, outside.self_ns, outside.cpu_ns)
            )
    names = [
        "layer",
        "phase",
        "parent",
        "depth",
        "calls",
        *(f"{phase}_ns" for phase in LAYER_PHASES),
        "other_ns",
        "total_ns",
        "cpu_ns",
    ]
    tree: pd.DataFrame = pd.DataFrame.from_records(records, columns=names)
    return tree


def _held(sums: LayerSums, order: dict[str, int], parent: dict[str, str]) -> dict[tuple[str, str], int]:
    """Time of each layer in each phase with that of the layers it holds.

    It goes by the model and not by what encloses what: a checkpointed block is run again inside the backward of the
    part that asks for it first, which is no reason to give that part the others' time.
    """
    held = {(layer, phase): sums.own(layer, phase) for layer in order for phase in LAYER_PHASES}
    for layer in sorted(order, key=order.__getitem__, reverse=True):  # children come before their parent
        if parent[layer]:
            for phase in LAYER_PHASES:
                held[parent[layer], phase] += held[layer, phase]
    return held


def _summary(trace: Trace, attribution: Attribution, sums: LayerSums) -> Summary:
    start, end = trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
    by_how = np.bincount(attribution.how, weights=end - start, minlength=len(HOW)).astype(np.int64)
    by_key = sums.self_ns.sum(axis=1)
    in_layers = sum(int(ns) for (layer, _), ns in zip(sums.keys, by_key, strict=True) if layer != NO_LAYER)
    in_loop = sum(int(ns) for (_, phase), ns in zip(sums.keys, by_key, strict=True) if phase in LAYER_PHASES)
    return Summary(
        total_ns=int((end - start).sum()),
        layer_ns=in_layers,
        wall_ns=int(end.max() - start.min()) if len(end) else 0,
        ops=len(start),
        steps=len(attribution.ranges.steps),
        layers=len(sums.layers),
        by_how={how: int(ns) for how, ns in zip(HOW, by_how, strict=True) if ns},
        loop_layer_share=in_layers / in_loop if in_loop else 0.0,
    )
