"""What the steps of a capture get out of the GPU, all layers together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nvprof_kit.analysis.attribution import Attribution
from nvprof_kit.analysis.flops_counted import Counted, Key, Work, add, computed_again
from nvprof_kit.analysis.gpu_peaks import Peaks
from nvprof_kit.analysis.intervals import union_lengths
from nvprof_kit.analysis.steps import step_times
from nvprof_kit.analysis.windows import devices_of
from nvprof_kit.trace.schema import Trace


@dataclass(frozen=True)
class Whole:
    """A step on average; of a capture without steps all of it.

    Attributes:
        steps: Number of steps, 0 where there are none.
        devices: GPUs that ran something.
        step_ns: How long a step took: the longer of its range and the span of its operations.
        busy_ns: Time of a step in which a GPU worked, summed over devices.
        flops: Floating point operations of a step.
        model_flops: The same without what is computed again.
        hfu: Over the step's time on all its GPUs; NaN where no peak is known.
        mfu: The same of the model's operations.
        busy_hfu: Over the busy time alone.
        busy_mfu: The same of the model's operations.
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
        """Whether more was counted than the GPU can do in that time."""
        return self.hfu > 1 or self.busy_hfu > 1


def whole(trace: Trace, owned: Attribution, counted: Counted, times: Mapping[Key, float], peaks: Peaks | None) -> Whole:
    """The steps of a capture together.

    Args:
        trace: The capture.
        owned: Who owns each operation.
        counted: What was counted.
        times: How often what was counted of each row happened.
        peaks: The GPU's peaks.
    """
    steps = step_times(trace, owned)
    lanes, of_op = devices_of(trace)
    devices = max(len(lanes), 1)
    if len(steps):
        length = int(np.maximum(steps["range_ns"], steps["span_ns"]).sum())
        busy = int(steps["busy_ns"].sum())
    else:
        start, end = (trace.ops[name].to_numpy() for name in ("start_ns", "end_ns"))
        length = int(end.max(initial=0) - start.min(initial=end.max(initial=0)))
        busy = int(union_lengths(start, end, of_op, np.zeros(len(start), dtype=np.int64), 1)[0])
    total, model = _captured(counted, times)
    many = max(len(steps), 1)
    return Whole(
        steps=len(steps),
        devices=devices,
        step_ns=length / many,
        busy_ns=busy / many,
        flops=sum(total.values()) / many,
        model_flops=sum(model.values()) / many,
        hfu=utilisation(total, peaks, length * devices),
        mfu=utilisation(model, peaks, length * devices),
        busy_hfu=utilisation(total, peaks, busy),
        busy_mfu=utilisation(model, peaks, busy),
    )


def utilisation(work: Work, peaks: Peaks | None, time_ns: float, times: float = 1.0) -> float:
    """The time that some operations, so many times, take at their peaks, over a time; NaN where a peak or the time is
    not known.
    """
    if peaks is None or not time_ns or without_peak(work, peaks):
        return math.nan
    return sum(flops / peaks.flops[dtype] for dtype, flops in work.items()) * times * 1e9 / time_ns


def without_peak(work: Work, peaks: Peaks) -> list[str]:
    """The types of number in some operations of which no peak is known."""
    return sorted(dtype for dtype in work if dtype not in peaks.flops)


def _captured(counted: Counted, times: Mapping[Key, float]) -> tuple[Work, Work]:
    """All operations of the capture, and those without what is computed again. What was counted in a range that the
    capture lacks goes with the nearest one around it.
    """
    total: Work = {}
    model: Work = {}
    for chain, work in counted.work.items():
        told = (times[key] for key in chain if not math.isnan(times.get(key, math.nan)))
        often = next(told, 0.0)
        add(total, work, often)
        add(model, {} if computed_again(chain) is not None else work, often)
    return total, model
