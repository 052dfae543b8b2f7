"""Step times: CPU range, GPU time and wall time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._analysis.attribution.attribution import Attribution
from nvprof_kit._analysis.attribution.intervals import exact_sums, union_lengths
from nvprof_kit._analysis.attribution.nesting import Int64Array
from nvprof_kit._analysis.attribution.windows import devices_of, step_windows
from nvprof_kit._trace.schema import Trace
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd


def step_times(trace: Trace, attribution: Attribution) -> pd.DataFrame:
    """One row per step instance, in order, indexed by instance; all times int64 ns.

    Returns:
        step: step number; range_ns: how long its range was open on the CPU; gpu_ns: sum of the durations of its
        operations; busy_ns: length of their union, summed over devices; span_ns: from the start of its first operation
        to the end of its last, 0 if it has none; wall_ns: duration of its window
        (`nvprof_kit._analysis.attribution.windows`), the longest if several devices ran it; start_ns, end_ns: first
        start and last end of its ranges and operations.
    """
    import pandas as pd

    count = len(attribution.ranges.steps)
    inside = np.flatnonzero(attribution.step >= 0)
    start, end = (trace.ops[name].to_numpy()[inside] for name in ("start_ns", "end_ns"))
    device, instance = devices_of(trace)[1][inside], attribution.step[inside].astype(np.int64)
    starts, ends = _ranges(attribution, count)
    first, last = _ends(instance, start, end, count)
    ran = np.bincount(instance, minlength=count) > 0
    times: pd.DataFrame = pd.DataFrame(
        {
            "step": attribution.ranges.steps,
            "range_ns": ends - starts,
            "gpu_ns": exact_sums(instance, end - start, count),
            "busy_ns": union_lengths(start, end, device, instance, count),
            "span_ns": np.where(ran, last - first, 0),
            "wall_ns": _walls(trace, attribution, count),
            "start_ns": np.where(ran, np.minimum(starts, first), starts),
            "end_ns": np.where(ran, np.maximum(ends, last), ends),
        }
    )
    return times


def _ranges(attribution: Attribution, count: int) -> tuple[Int64Array, Int64Array]:
    """First start and last end of each instance's ranges, which overlap if several processes run it."""
    ranges = attribution.ranges
    rows = np.flatnonzero(ranges.step >= 0)
    return _ends(ranges.step[rows], ranges.start[rows], ranges.end[rows], count)


def _ends(instance: Int64Array, start: Int64Array, end: Int64Array, count: int) -> tuple[Int64Array, Int64Array]:
    first = np.full(count, int(end.max(initial=0)), dtype=np.int64)
    last = np.full(count, int(start.min(initial=0)), dtype=np.int64)
    np.minimum.at(first, instance, start)
    np.maximum.at(last, instance, end)
    return first, last


def _walls(trace: Trace, attribution: Attribution, count: int) -> Int64Array:
    walls = np.zeros(count, dtype=np.int64)
    if count and len(trace.ops):
        windows = step_windows(trace, attribution)
        in_steps = np.flatnonzero(windows.in_step)
        np.maximum.at(walls, windows.instance[in_steps], (windows.end - windows.start)[in_steps])
    elif count:
        walls = np.subtract(*_ranges(attribution, count)[::-1])
    return walls


def median_place(lengths: Int64Array) -> int:
    """Index of the median length: the lower median, and the first of equals.

    Args:
        lengths: At least one length, shape ``(n,)``.
    """
    return int(np.argsort(lengths, kind="stable")[(len(lengths) - 1) // 2])


def typical_step(times: pd.DataFrame) -> int | None:
    """The instance with the median `wall_ns`, None if there is no step."""
    return int(times.index[median_place(times["wall_ns"].to_numpy())]) if len(times) else None


def slowest_step(times: pd.DataFrame) -> int | None:
    """The instance with the largest `wall_ns`, the last of equals; None if there is no step."""
    return int(times.index[np.argsort(times["wall_ns"].to_numpy(), kind="stable")[-1]]) if len(times) else None


def instance_of(times: pd.DataFrame, step: int, path: str) -> int:
    """The first instance with a step number.

    Raises:
        UsageError: There is no such step.
    """
    matches = np.flatnonzero(times["step"].to_numpy() == step)
    if not len(matches):
        numbers = times["step"].tolist()
        sentence = f"it has steps {min(numbers)} to {max(numbers)}" if numbers else "it has no steps"
        raise UsageError(f"{path}: no step {step}; {sentence}")
    return int(times.index[matches[0]])
