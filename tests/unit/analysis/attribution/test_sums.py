"""Sums of millions of rows by several keys, and the launches among calls that were read for something else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nvprof_kit._analysis.attribution.intervals import sums_by
from nvprof_kit._ranks.lane import latest
from nvprof_kit._trace.open import open_capture
from nvprof_kit._trace.schema import BUSY_CALLS

DATA = Path(__file__).parents[3] / "data"


@pytest.mark.parametrize("apart", [1, 100, 1 << 40])
def test_sums_are_those_of_pandas(apart: int) -> None:
    random = np.random.default_rng(0)
    # 6**3 possible keys are looked up, 501**3 are sorted, and of keys 2**40 apart no single number can be made
    keys = [random.integers(-2, 4, 500) * apart for _ in range(3)]
    values = [random.integers(0, 1 << 40, 500) for _ in range(2)]
    frame = pd.DataFrame(dict(enumerate([*keys, *values])))
    wanted = frame.groupby([0, 1, 2])[[3, 4]].sum().reset_index()
    found, sums = sums_by(keys, values)
    for column, made in zip(wanted, [*found, *sums], strict=True):
        assert np.array_equal(wanted[column].to_numpy(), made)


def test_sums_of_nothing() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    found, sums = sums_by([nothing, nothing], [nothing])
    assert [len(one) for one in (*found, *sums)] == [0, 0, 0]


def test_the_latest_mark_before_each_moment() -> None:
    marks, moments = np.array([2, 2, 5, 9]), np.array([0, 2, 4, 5, 8])
    assert latest(marks, moments).tolist() == [-1, 1, 1, 2, 2]
    assert latest(marks[:0], moments).tolist() == [-1] * 5


@pytest.mark.parametrize("busy", [(), (BUSY_CALLS,)])
def test_launches_are_the_same_where_calls_are_read_too(busy: tuple[str, ...]) -> None:
    file = DATA / "hooks-ddp-2024.2.sqlite.xz"
    alone = open_capture(file, optional=("duration_ns",)).api
    assert open_capture(file, optional=("duration_ns", "calls", *busy)).api.equals(alone)
