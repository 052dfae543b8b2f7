"""Checks of the times in JSON; `nvprof_kit._trace.validate` checks what was read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nvprof_kit._trace.validate import AGAIN
from nvprof_kit.errors import CaptureError

Int64Array = npt.NDArray[np.int64]

_SAMPLE, _FEW = 10_000, 20
"""How many events of a kind are looked at to find where most are, and how few are too few."""


def strays(starts: Mapping[str, Int64Array]) -> tuple[str, ...]:
    """Warnings about events that lie more than an hour, and a hundred times as long as nearly all others last together,
    before or after the others.

    Args:
        starts: Start times in ns by the name of the events in the file.
    """
    sampled = [times[:: max(len(times) // _SAMPLE, 1)] for times in starts.values()]
    sample = np.concatenate([np.empty(0, dtype=np.int64), *sampled])
    if len(sample) < _FEW:
        return ()
    first, median, last = np.quantile(sample, (0.02, 0.5, 0.98), method="nearest")
    limit = max(100 * int(last - first), 3600 * 10**9)
    counts = {name: int(np.count_nonzero(np.abs(times - int(median)) > limit)) for name, times in starts.items()}
    return tuple(
        f"ts of {name} lies hours away from the rest of the trace in {count} events; what they tell is wrong"
        for name, count in counts.items()
        if count
    )


def whole_ns(named: str | Path, noun: str, microseconds: npt.NDArray[np.float64], origin_us: float = 0.0) -> Int64Array:
    """Convert microseconds to integer nanoseconds.

    Args:
        named: The file.
        noun: Their name in the file: ``dur of kernel``.
        microseconds: The values, shape ``(n,)``.
        origin_us: The origin to subtract.

    Raises:
        CaptureError: A value is not a number or exceeds int64.
    """
    nanoseconds = np.rint((microseconds - origin_us) * 1000)
    wrong = microseconds[~(np.abs(nanoseconds) < 2**62)]
    if len(wrong):
        raise CaptureError(f"{named}: {noun} is {wrong[0]} in {len(wrong)} events; {AGAIN}")
    return nanoseconds.astype(np.int64)
