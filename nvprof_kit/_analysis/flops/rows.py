"""The rows of the table of operations, and how well the steps of a capture use the GPU, all layers together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nvprof_kit._analysis.attribution.attribution import Attribution, Operations, op_owners
from nvprof_kit._analysis.attribution.intervals import union_lengths
from nvprof_kit._analysis.attribution.warm_up import StepChoice
from nvprof_kit._analysis.attribution.windows import devices_of, step_times
from nvprof_kit._analysis.flops.counted import Counted, Key, Work, add, computed_again
from nvprof_kit._analysis.hardware import Peaks
from nvprof_kit._analysis.layers.layers import LAYER_PHASES
from nvprof_kit._analysis.layers.sums import StepColumns, sum_layers
from nvprof_kit._trace.schema import Trace
from nvprof_kit.names import NO_LAYER

_MATRIX_KERNELS = ("gemm", "attention")
_ODD = 0.02
"""Share of a row's own time in matrix kernels above which it is suspicious that no operation was counted."""


class Row(NamedTuple):
    """A layer and phase.

    Attributes:
        key: Both.
        calls: Times it ran.
        busy_ns: Length of the union of its operations' intervals, and of those of the layers it holds in this phase,
            summed over devices.
        held: The layer did not run in this phase itself, only layers inside it did.
    """

    key: Key
    calls: int
    busy_ns: int
    held: bool = False


def captured_rows(trace: Trace, attribution: Attribution, choice: StepChoice) -> list[Row]:
    """The rows in the capture's steps, or in all of a capture without steps; in the model's order, `(none)` last.

    Args:
        trace: The capture.
        attribution: Who owns each operation.
        choice: The steps that count.
    """
    sums = sum_layers(trace, attribution, StepColumns.apart(choice.shown))
    order = sums.tree.index
    column = 1 if len(choice.shown) else 0
    calls, ops, busy = (values[:, column] for values in (sums.calls, sums.ops, sums.busy_ns))
    seen = np.flatnonzero((calls > 0) | (ops > 0) | (busy > 0)).tolist()
    rows = [
        Row(sums.keys[index], int(calls[index]), int(busy[index]), sums.keys[index] in sums.without_ranges)
        for index in seen
    ]
    loop = {phase: order_of for order_of, phase in enumerate(sums.loop_phases)}

    def order_of(row: Row) -> tuple[int, int]:
        layer, phase = row.key
        if layer == NO_LAYER:
            return len(order), loop.get(phase, len(loop))
        return order[layer], LAYER_PHASES.index(phase)

    return sorted(rows, key=order_of)


def times_of(row: Row, program: Counted, steps: int) -> float:
    """How often the counted work of a row ran in the capture's `steps`; NaN if that cannot be known, or if only layers
    inside it ran.
    """
    if row.held:
        return math.nan
    if row.key[0] == NO_LAYER and steps and program.steps:
        return steps / program.steps
    calls = program.calls.get(row.key, 0)
    return row.calls / calls if calls else math.nan


def uncounted_rows(operations: Operations, program: Counted, rows: Sequence[Row]) -> dict[Key, float]:
    """Rows that run matrix or attention kernels although no operation was counted or is unknown there, because these
    kernels were not launched by PyTorch operators. Each with the share of such kernels in its own time.
    """
    import pandas as pd

    trace = operations.trace
    if "name" not in trace.ops or not trace.info.on_gpu:
        return {}
    layer, phase = op_owners(operations.attribution)
    is_matrix = np.any([operations.classes.is_a(name) for name in _MATRIX_KERNELS], axis=0)
    ns = (trace.ops["end_ns"] - trace.ops["start_ns"]).to_numpy()
    frame = pd.DataFrame({"layer": layer, "phase": phase, "ns": ns, "matrix": np.where(is_matrix, ns, 0)})
    sums = frame.groupby(["layer", "phase"], observed=True)[["ns", "matrix"]].sum()
    own_work = program.with_own_work({row.key for row in rows if not row.held})
    return {
        (str(layer), str(phase)): matrix / total
        for (layer, phase), total, matrix in sums.itertuples()
        if total and matrix / total > _ODD and (layer, phase) not in own_work
    }


def uncounted_shares(
    operations: Operations, program: Counted, rows: Sequence[Row], choice: StepChoice
) -> dict[str, float]:
    """Share of the GPU time in layers that run products, attention or experts of which no operation was counted, by the
    layer's name without its place in the model; the largest first.
    """
    import pandas as pd

    trace = operations.trace
    if "name" not in trace.ops or not trace.info.on_gpu:
        return {}
    layer, phase = op_owners(operations.attribution)
    is_matrix = np.any([operations.classes.is_a(name) for name in (*_MATRIX_KERNELS, "experts")], axis=0)
    ns = (trace.ops["end_ns"] - trace.ops["start_ns"]).to_numpy()
    frame = pd.DataFrame({"layer": layer, "phase": phase, "ns": ns, "matrix": np.where(is_matrix, ns, 0)})
    inside = choice.of_ops(operations.attribution)
    total, frame = int(ns[inside].sum()), frame[inside & ~operations.classes.is_a("comm")]
    keys = {row.key for row in rows if not row.held}
    worked = (chain for chain, work in program.work.items() if any(work.values()))
    has_work = {next((key for key in chain if key in keys), chain[0]) for chain in worked}
    shares: dict[str, float] = {}
    for row in (
        frame.groupby(["layer", "phase"], observed=True)[["ns", "matrix"]].sum().reset_index().to_dict("records")
    ):
        if row["matrix"] > _ODD * max(row["ns"], 1) and (row["layer"], row["phase"]) not in has_work:
            parts = [segment for segment in str(row["layer"]).split(".") if not segment.isdecimal()]
            name = parts[-1].rstrip("0123456789").rstrip("_") if parts else str(row["layer"])
            shares[name] = shares.get(name, 0.0) + row["ns"] / max(total, 1)
    return dict(sorted(shares.items(), key=lambda share: -share[1]))


@dataclass(frozen=True)
class Whole:
    """Figures over all layers, for a mean step; for the whole capture if it has no steps.

    Attributes:
        steps: Number of steps, 0 without steps.
        devices: Number of GPUs that ran operations.
        step_ns: Mean duration of a step in ns, with the boundaries of `breakdown`.
        busy_ns: Time per step in which a GPU was busy, summed over devices, in ns.
        flops: Floating point operations per step.
        model_flops: The same without recomputation.
        hfu: Hardware FLOPs utilization over the duration of the step on all GPUs, 0 to 1; NaN if no peak is known.
        mfu: Model FLOPs utilization: the same for `model_flops`.
        busy_hfu: Like `hfu`, over the busy time only.
        busy_mfu: Like `mfu`, over the busy time only.
    """

    steps: int
    devices: int
    step_ns: float
    busy_ns: float
    flops: float
    model_flops: float
    hfu: float
    mfu: float
    busy_hfu: float
    busy_mfu: float

    @property
    def above_the_peak(self) -> bool:
        """Whether more operations were counted than the GPU can do in that time."""
        return self.hfu > 1 or self.busy_hfu > 1


def whole(
    trace: Trace,
    attribution: Attribution,
    program: Counted,
    times: Mapping[Key, float],
    *,
    peaks: Peaks | None,
    choice: StepChoice,
) -> Whole:
    """The steps of a capture together.

    Args:
        trace: The capture.
        attribution: Who owns each operation.
        program: What was counted.
        times: How often what was counted of each row happened.
        peaks: The GPU's peaks.
        choice: The steps that count.
    """
    steps = step_times(trace, attribution)[choice.shown]
    lanes, of_op = devices_of(trace)
    devices = max(len(lanes), 1)
    if len(steps):
        length = int(steps["wall_ns"].sum())
        busy = int(steps["busy_ns"].sum())
    else:
        start, end = (trace.ops[name].to_numpy() for name in ("start_ns", "end_ns"))
        length = int(end.max(initial=0) - start.min(initial=end.max(initial=0)))
        busy = int(union_lengths(start, end, of_op, np.zeros(len(start), dtype=np.int64), 1)[0])
    total, model = _captured(program, times)
    step_count = max(len(steps), 1)
    return Whole(
        steps=len(steps),
        devices=devices,
        step_ns=length / step_count,
        busy_ns=busy / step_count,
        flops=sum(total.values()) / step_count,
        model_flops=sum(model.values()) / step_count,
        hfu=utilisation(total, peaks, length * devices),
        mfu=utilisation(model, peaks, length * devices),
        busy_hfu=utilisation(total, peaks, busy),
        busy_mfu=utilisation(model, peaks, busy),
    )


def utilisation(work: Work, peaks: Peaks | None, time_ns: float, times: float = 1.0) -> float:
    """The time that `times` such operations take at their peaks, over a time; NaN if a peak or the time is unknown."""
    if peaks is None or not time_ns or without_peak(work, peaks):
        return math.nan
    return sum(flops / peaks.flops[dtype] for dtype, flops in work.items()) * times * 1e9 / time_ns


def without_peak(work: Work, peaks: Peaks) -> list[str]:
    """The number types among these operations whose peak is unknown."""
    return sorted(dtype for dtype in work if dtype not in peaks.flops)


def _captured(program: Counted, times: Mapping[Key, float]) -> tuple[Work, Work]:
    """All operations of the capture, and the same without recomputation. What was counted in a range that the capture
    lacks is assigned to the nearest enclosing range that it has.
    """
    total: Work = {}
    model: Work = {}
    for chain, work in program.work.items():
        measured = (times[key] for key in chain if not math.isnan(times.get(key, math.nan)))
        often = next(measured, 0.0)
        add(total, work, often)
        add(model, {} if computed_again(chain) is not None else work, often)
    return total, model
