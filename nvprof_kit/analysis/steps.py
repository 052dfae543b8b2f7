"""How long each step took: on the CPU, and on the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit.analysis.attribution import Attribution
from nvprof_kit.analysis.intervals import exact_sums, union_lengths
from nvprof_kit.errors import UsageError
from nvprof_kit.trace.schema import Trace

if TYPE_CHECKING:
    import pandas as pd


def step_times(trace: Trace, owned: Attribution) -> pd.DataFrame:
    """A row for each step, in order, all times int64 ns.

    Returns:
        step: its number; range_ns: how long its range was open on the CPU, the longest where several processes have
        one; gpu_ns: sum of the durations of its operations; busy_ns: length of their union, summed over devices;
        span_ns: from the start of its first operation to the end of its last, 0 where it has none.
    """
    import pandas as pd

    ranges = owned.ranges
    count = len(ranges.steps)
    lengths = np.zeros(count, dtype=np.int64)
    is_step = ranges.step >= 0
    np.maximum.at(lengths, ranges.step[is_step], (ranges.end - ranges.start)[is_step])
    inside = np.flatnonzero(owned.step >= 0)
    start, end, device = (trace.ops[name].to_numpy()[inside] for name in ("start_ns", "end_ns", "device"))
    step = owned.step[inside].astype(np.int64)
    last_moment = int(end.max(initial=0))
    first, last = np.full(count, last_moment, dtype=np.int64), np.zeros(count, dtype=np.int64)
    np.minimum.at(first, step, start)
    np.maximum.at(last, step, end)
    times: pd.DataFrame = pd.DataFrame(
        {
            "step": ranges.steps,
            "range_ns": lengths,
            "gpu_ns": exact_sums(step, end - start, count),
            "busy_ns": union_lengths(start, end, device, step, count),
            "span_ns": np.maximum(last - first, 0),
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
