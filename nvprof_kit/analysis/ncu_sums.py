"""Sums of counters over the launches that a row of the hardware table is about: means over time, and amounts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit.analysis.ncu_bound import VERDICTS, judge, verdicts
from nvprof_kit.analysis.ncu_counters import PERCENTAGES, STALL_PREFIX

if TYPE_CHECKING:
    import pandas as pd

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Pairs(NamedTuple):
    """What was launched: an element for each row and item.

    Attributes:
        row: Row of the table.
        item: Row of the counters, -1 for what cannot be measured.
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
        counted: Counters by item, the columns of `nvprof_kit.analysis.ncu_counters.counters`.
        measured: Which items were measured.
    """

    def __init__(self, pairs: Pairs, counted: pd.DataFrame, measured: npt.NDArray[np.bool_]) -> None:
        hit = (pairs.item >= 0) & measured[pairs.item]
        self._all_ns = np.bincount(pairs.row, weights=pairs.ns, minlength=pairs.rows)
        self._key, self._item = pairs.row[hit], pairs.item[hit]
        self._ns, self._launches = pairs.ns[hit], pairs.launches[hit]
        self._count = pairs.rows
        self._counted = counted
        self._verdict = verdicts(counted)[self._item]

    def _values(self, name: str) -> Floats:
        values: Floats = self._counted[name].to_numpy()[self._item]
        return values

    def covered(self) -> Floats:
        """Share of the time that was measured."""
        covered = np.bincount(self._key, weights=self._ns, minlength=self._count)
        return covered / np.where(self._all_ns > 0, self._all_ns, 1.0)

    def mean(self, name: str, chosen: npt.NDArray[np.bool_] | None = None) -> Floats:
        """Mean over time of what was measured, among some of the pairs, NaN for nothing."""
        values = self._values(name)
        there = ~np.isnan(values) if chosen is None else ~np.isnan(values) & chosen
        weight = np.bincount(self._key[there], weights=self._ns[there], minlength=self._count)
        total = np.bincount(self._key[there], weights=(values * self._ns)[there], minlength=self._count)
        return np.where(weight > 0, total / np.where(weight > 0, weight, 1.0), np.nan)

    def amount(self, name: str) -> Floats:
        """Sum over all launches, NaN for nothing."""
        values = self._values(name)
        there = ~np.isnan(values)
        seen = np.bincount(self._key[there], minlength=self._count) > 0
        total = np.bincount(self._key[there], weights=(values * self._launches)[there], minlength=self._count)
        return np.where(seen, total, np.nan)

    def first_stall(self) -> list[str | None]:
        """The reason for which most warps wait, None where that was not measured."""
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
        most = np.argmax(time, axis=0)
        of_most = self._verdict == most[self._key]
        means = {name: self.mean(name, of_most) for name in PERCENTAGES}
        return [
            judge({name: float(values[row]) for name, values in means.items()}, time[:, row])
            for row in range(self._count)
        ]
