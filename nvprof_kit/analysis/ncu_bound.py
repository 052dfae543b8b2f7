"""What keeps a kernel from running faster, and why we say so.

The rule is that of ncu's speed of light: a unit that is busy for `BUSY` percent of what it can do is what the kernel
waits for; where neither the compute units nor the memory are, the kernel waits for itself (latency): too few warps,
too small a grid, one instruction after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pandas as pd

BUSY = 60.0
"""Percent of its peak from which on a unit counts as busy."""

VERDICTS = ("memory", "compute", "latency", "not measured")
_MEMORY, _COMPUTE, _LATENCY, _UNKNOWN = range(4)
_UNITS = {"dram_pct": "DRAM", "l2_pct": "the L2 cache", "l1_pct": "the L1 cache"}
_FEW_WAVES = 1.0
_LOW_OCCUPANCY = 40.0


def verdicts(counted: pd.DataFrame) -> npt.NDArray[np.int64]:
    """The verdict on each measured kernel, an index into `VERDICTS`."""
    compute, memory = (counted[name].to_numpy() for name in ("compute_pct", "memory_pct"))
    busy = np.maximum(compute, memory) >= BUSY
    found = np.where(busy, np.where(memory >= compute, _MEMORY, _COMPUTE), _LATENCY)
    found[np.isnan(compute) | np.isnan(memory)] = _UNKNOWN
    return found.astype(np.int64)


def judge(means: dict[str, float], time_by_verdict: npt.NDArray[np.float64]) -> tuple[str, str]:
    """The verdict on a group of kernels: that on most of its time; and the reason.

    Args:
        means: Time-weighted means of the group's kernels of that verdict, by the names of
            `nvprof_kit.analysis.ncu_counters.PERCENTAGES`, NaN for what was not measured.
        time_by_verdict: The group's time by verdict, shape ``(4,)``.

    Returns:
        One of `VERDICTS`, and a sentence without a full stop.
    """
    whole = float(time_by_verdict.sum())
    if not whole:
        return VERDICTS[_UNKNOWN], "no kernel of it was measured"
    most = int(np.argmax(time_by_verdict))
    share = f"{100 * time_by_verdict[most] / whole:.0f} % of its time"
    if most == _UNKNOWN:
        return VERDICTS[most], "the report lacks sm__throughput and gpu__compute_memory_throughput (SpeedOfLight)"
    return VERDICTS[most], f"{share}: {(_why_memory, _why_compute, _why_latency)[most](means)}"


def _why_memory(means: dict[str, float]) -> str:
    known = {name: means[name] for name in _UNITS if not np.isnan(means[name])}
    if not known:
        return f"memory at {means['memory_pct']:.0f} % of its peak"
    busiest = max(known, key=known.__getitem__)
    return f"{_UNITS[busiest]} at {known[busiest]:.0f} % of its peak"


def _why_compute(means: dict[str, float]) -> str:
    if means["tensor_pct"] >= 0.75 * means["compute_pct"]:
        return f"tensor cores at {means['tensor_pct']:.0f} % of their peak"
    return f"the SMs at {means['compute_pct']:.0f} % of their peak, tensor cores at {_percent(means['tensor_pct'])}"


def _why_latency(means: dict[str, float]) -> str:
    reasons = [f"compute at {means['compute_pct']:.0f} %, memory at {means['memory_pct']:.0f} % of peak"]
    if means["waves"] < _FEW_WAVES:
        reasons.append(f"grids fill {means['waves']:.1f} of the GPU")
    if means["occupancy_pct"] < _LOW_OCCUPANCY:
        reasons.append(f"occupancy {means['occupancy_pct']:.0f} %")
    return "; ".join(reasons)


def _percent(value: float) -> str:
    return "?" if np.isnan(value) else f"{value:.0f} %"
