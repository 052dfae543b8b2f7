"""How long each step took: on the CPU, and on the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nvprof_kit.analysis.attribution.attribution import Attribution
from nvprof_kit.analysis.attribution.intervals import exact_sums, union_lengths
from nvprof_kit.analysis.attribution.nesting import NONE, Int64Array
from nvprof_kit.analysis.attribution.windows import devices_of
from nvprof_kit.errors import UsageError
from nvprof_kit.trace.schema import Trace

if TYPE_CHECKING:
    import pandas as pd


class Occurrences(NamedTuple):
    """The times each step ran, by step and start: a number that two loops share, or two runs, has several.

    Attributes:
        step: Index into `Ranges.steps`, shape ``(o,)``.
        start, end: From the first to the last moment of its ranges, which overlap where several processes run it.
        of_ops: The occurrence each operation belongs to, `NONE` outside steps, shape ``(n,)``.
    """

    step: Int64Array
    start: Int64Array
    end: Int64Array
    of_ops: Int64Array


def occurrences(trace: Trace, attribution: Attribution) -> Occurrences:
    """The times each step ran; an operation belongs to the last one of its step that had begun before it."""
    ranges = attribution.ranges
    rows, end = np.flatnonzero((ranges.step >= 0) & ranges.first), ranges.whole_end
    rows = rows[np.lexsort((ranges.start[rows], ranges.step[rows]))]
    op_start = trace.ops["start_ns"].to_numpy()
    latest = int(max(end[rows].max(initial=0), op_start.max(initial=0)))
    earliest = int(min(ranges.start[rows].min(initial=0), op_start.min(initial=0)))
    shift = ranges.step[rows] * (latest - earliest + 1) - earliest  # steps one behind the other
    begins, reach = ranges.start[rows] + shift, np.maximum.accumulate(end[rows] + shift)
    fresh = np.concatenate(([True], begins[1:] >= reach[:-1])) if len(rows) else np.zeros(0, dtype=bool)
    first = np.flatnonzero(fresh)
    last = np.append(first[1:], len(rows)) - 1 if len(first) else first
    step = ranges.step[rows[first]]
    op_step = attribution.step.astype(np.int64)
    found = np.searchsorted(begins[first], op_step * (latest - earliest + 1) + op_start - earliest, side="right") - 1
    # an operation before its step's first range, by the clocks' error, belongs to that one
    found = np.maximum(found, np.searchsorted(step, op_step))
    return Occurrences(step, ranges.start[rows[first]], (reach - shift)[last], np.where(op_step >= 0, found, NONE))


def step_times(trace: Trace, attribution: Attribution) -> pd.DataFrame:
    """A row for each step, in order, all times int64 ns; of a step that ran several times the sum.

    Returns:
        step: its number; range_ns: how long it was open on the CPU; gpu_ns: sum of the durations of its operations;
        busy_ns: length of their union, summed over devices; span_ns: from the start of its first operation to the end
        of its last, 0 where it has none.
    """
    import pandas as pd

    found, count = occurrences(trace, attribution), len(attribution.ranges.steps)
    inside = np.flatnonzero(found.of_ops >= 0)
    start, end = (trace.ops[name].to_numpy()[inside] for name in ("start_ns", "end_ns"))
    device = devices_of(trace)[1][inside]
    step, occurrence = attribution.step[inside].astype(np.int64), found.of_ops[inside]
    first = np.full(len(found.step), int(end.max(initial=0)), dtype=np.int64)
    last = np.zeros(len(found.step), dtype=np.int64)
    np.minimum.at(first, occurrence, start)
    np.maximum.at(last, occurrence, end)
    times: pd.DataFrame = pd.DataFrame(
        {
            "step": attribution.ranges.steps,
            "range_ns": exact_sums(found.step, found.end - found.start, count),
            "gpu_ns": exact_sums(step, end - start, count),
            "busy_ns": union_lengths(start, end, device, step, count),
            "span_ns": exact_sums(found.step, np.maximum(last - first, 0), count),
        }
    )
    return times


def typical_step(times: pd.DataFrame) -> int | None:
    """The step whose length (the longer of `range_ns` and `span_ns`) is the median's, None where there is no step."""
    if not len(times):
        return None
    return int(times["step"].iloc[_by_length(times)[(len(times) - 1) // 2]])


def slowest_step(times: pd.DataFrame) -> int | None:
    """The step that took longest, None where there is no step."""
    return int(times["step"].iloc[_by_length(times)[-1]]) if len(times) else None


def require_step(times: pd.DataFrame, step: int, path: str) -> None:
    """Refuse a step that a capture does not have.

    Raises:
        UsageError: There is no such step.
    """
    numbers = times["step"].tolist()
    if step not in numbers:
        there = f"it has steps {min(numbers)} to {max(numbers)}" if numbers else "it has no steps"
        raise UsageError(f"{path}: no step {step}; {there}")


def _by_length(times: pd.DataFrame) -> list[int]:
    length = np.maximum(times["range_ns"].to_numpy(), times["span_ns"].to_numpy())
    order: list[int] = np.argsort(length, kind="stable").tolist()
    return order
