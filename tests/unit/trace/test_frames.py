"""Distinct rows of columns, against NumPy, which sorts whole rows."""

from __future__ import annotations

import numpy as np
import pytest

from nvprof_kit._trace.frames import distinct, distinct_rows


@pytest.mark.parametrize("high", [3, 1 << 40])
def test_distinct_rows_are_those_of_numpy(high: int) -> None:
    random = np.random.default_rng(0)
    columns = [random.integers(-high, high, 200)[random.integers(0, 200, 500)] for _ in range(3)]
    found, which = distinct_rows(*columns)
    expected, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    assert np.stack(found, axis=1).tolist() == expected.tolist()
    assert which.tolist() == inverse.ravel().tolist()


def test_no_rows_have_no_distinct_ones() -> None:
    none = np.empty(0, dtype=np.int64)
    (first, second), which = distinct_rows(none, none)
    assert (len(first), len(second), len(which), len(distinct(none)[0])) == (0, 0, 0, 0)
