"""Sums of counters over the launches of a row of the hardware table: means over time, and amounts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.ncu.counters import PERCENTAGES, STALL_PREFIX

if TYPE_CHECKING:
    import pandas as pd


BUSY = 60.0
"""A unit counts as busy from this percentage of its peak on."""

VERDICTS = ("memory", "compute", "latency", "not measured")
_MEMORY, _COMPUTE, _LATENCY, _UNKNOWN = range(4)
_UNITS = {"dram_pct": "DRAM", "l2_pct": "the L2 cache", "l1_pct": "the L1 cache"}
_FEW_WAVES = 1.0
_LOW_OCCUPANCY = 40.0


def verdicts(amounts: pd.DataFrame) -> npt.NDArray[np.int64]:
    """The verdict on each measured kernel, an index into `VERDICTS`."""
    compute, memory = (amounts[name].to_numpy() for name in ("compute_pct", "memory_pct"))
    busy = np.maximum(compute, memory) >= BUSY
    codes = np.where(busy, np.where(memory >= compute, _MEMORY, _COMPUTE), _LATENCY)
    codes[np.isnan(compute) | np.isnan(memory)] = _UNKNOWN
    return codes.astype(np.int64)


def judge(means: dict[str, float], time_by_verdict: npt.NDArray[np.float64]) -> tuple[str, str]:
    """The verdict that covers most of a group's kernel time, and the reason.

    Args:
        means: Time-weighted means of the group's kernels of that verdict, by the names of
            `nvprof_kit._analysis.ncu.counters.PERCENTAGES`, NaN for what was not measured.
        time_by_verdict: The group's time by verdict, shape ``(4,)``.

    Returns:
        One of `VERDICTS`, and a sentence without a full stop.
    """
    total = float(time_by_verdict.sum())
    if not total:
        return VERDICTS[_UNKNOWN], "no kernel of it was measured"
    verdict = int(np.argmax(time_by_verdict))
    share = f"{100 * time_by_verdict[verdict] / total:.0f} % of its time"
    if verdict == _UNKNOWN:
        return VERDICTS[verdict], "the report lacks sm__throughput and gpu__compute_memory_throughput (SpeedOfLight)"
    return VERDICTS[verdict], f"{share}: {(_why_memory, _why_compute, _why_latency)[verdict](means)}"


def _why_memory(means: dict[str, float]) -> str:
    measured = {name: means[name] for name in _UNITS if not np.isnan(means[name])}
    if not measured:
        return f"memory at {means['memory_pct']:.0f} % of its peak"
    busiest = max(measured, key=measured.__getitem__)
    return f"{_UNITS[busiest]} at {measured[busiest]:.0f} % of its peak"


def _why_compute(means: dict[str, float]) -> str:
    if means["tensor_pct"] >= 0.75 * means["compute_pct"]:
        return f"tensor cores at {means['tensor_pct']:.0f} % of their peak"
    tensor = "?" if np.isnan(means["tensor_pct"]) else f"{means['tensor_pct']:.0f} %"
    return f"the SMs at {means['compute_pct']:.0f} % of their peak, tensor cores at {tensor}"


def _why_latency(means: dict[str, float]) -> str:
    reasons = [f"compute at {means['compute_pct']:.0f} %, memory at {means['memory_pct']:.0f} % of peak"]
    if means["waves"] < _FEW_WAVES:
        reasons.append(f"grids fill {means['waves']:.1f} of the GPU")
    if means["occupancy_pct"] < _LOW_OCCUPANCY:
        reasons.append(f"occupancy {means['occupancy_pct']:.0f} %")
    return "; ".join(reasons)


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Pairs(NamedTuple):
    """The launches: an element for each row and item.

    Attributes:
        row: Row of the table.
        item: Row of the counters, -1 for operations that cannot be measured.
        ns, launches: Time and launches.
        rows: Number of rows of the table.
    """

    row: Ints
    item: Ints
    ns: Floats
    launches: Ints
    rows: int


class Sums:
    """Sums over the pairs by row.

    Args:
        pairs: What was launched.
        counted: Counters by item, the columns of `nvprof_kit._analysis.ncu.counters.counters`.
        measured: Which items were measured.
    """

    def __init__(self, pairs: Pairs, amounts: pd.DataFrame, measured: npt.NDArray[np.bool_]) -> None:
        hit = (pairs.item >= 0) & measured[pairs.item]
        self._all_ns = np.bincount(pairs.row, weights=pairs.ns, minlength=pairs.rows)
        self._key, self._item = pairs.row[hit], pairs.item[hit]
        self._ns, self._launches = pairs.ns[hit], pairs.launches[hit]
        self._count = pairs.rows
        self._counted = amounts
        self._verdict = verdicts(amounts)[self._item]

    def _values(self, name: str) -> Floats:
        values: Floats = self._counted[name].to_numpy()[self._item]
        return values

    def covered(self) -> Floats:
        """Share of the time that was measured."""
        covered = np.bincount(self._key, weights=self._ns, minlength=self._count)
        return covered / np.where(self._all_ns > 0, self._all_ns, 1.0)

    def mean(self, name: str, chosen: npt.NDArray[np.bool_] | None = None) -> Floats:
        """Time-weighted mean of the measured values, optionally of chosen pairs only; NaN if there are none."""
        values = self._values(name)
        is_measured = ~np.isnan(values) if chosen is None else ~np.isnan(values) & chosen
        weight = np.bincount(self._key[is_measured], weights=self._ns[is_measured], minlength=self._count)
        total = np.bincount(self._key[is_measured], weights=(values * self._ns)[is_measured], minlength=self._count)
        return np.where(weight > 0, total / np.where(weight > 0, weight, 1.0), np.nan)

    def amount(self, name: str) -> Floats:
        """Sum over all launches, NaN if nothing was measured."""
        values = self._values(name)
        is_measured = ~np.isnan(values)
        seen = np.bincount(self._key[is_measured], minlength=self._count) > 0
        total = np.bincount(
            self._key[is_measured], weights=(values * self._launches)[is_measured], minlength=self._count
        )
        return np.where(seen, total, np.nan)

    def first_stall(self) -> list[str | None]:
        """The main stall reason of each row, None if stalls were not measured."""
        names = [str(name) for name in self._counted if str(name).startswith(STALL_PREFIX)]
        if not names:
            return [None] * self._count
        means = np.array([self.mean(name) for name in names])
        missing = np.isnan(means).all(axis=0)
        best = np.argmax(np.nan_to_num(means, nan=-1.0), axis=0)
        return [
            None if gone else names[index].removeprefix(STALL_PREFIX)
            for gone, index in zip(missing.tolist(), best.tolist(), strict=True)
        ]

    def judged(self) -> list[tuple[str, str]]:
        """Verdict and reason of each row."""
        time = np.array(
            [
                np.bincount(self._key, weights=self._ns * (self._verdict == code), minlength=self._count)
                for code in range(len(VERDICTS))
            ]
        )
        costliest = np.argmax(time, axis=0)
        of_most = self._verdict == costliest[self._key]
        means = {name: self.mean(name, of_most) for name in PERCENTAGES}
        return [
            judge({name: float(values[row]) for name, values in means.items()}, time[:, row])
            for row in range(self._count)
        ]
