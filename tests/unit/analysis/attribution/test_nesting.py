"""Which range is innermost, where ranges nest and where they cross, judged range by range."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nvprof_kit._analysis.attribution.nesting import NONE, nest

RANGES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8), st.integers(1, 2)), max_size=8)


@given(RANGES)
def test_the_innermost_is_the_open_one_that_started_last(ranges: list[tuple[int, int, int]]) -> None:
    start, length, tid = (
        (np.array(column, dtype=np.int64) for column in zip(*ranges, strict=True))
        if ranges
        else [np.zeros(0, dtype=np.int64)] * 3
    )
    end = start + length
    nesting = nest(start, end, tid)
    crossing = [
        (one, other)
        for one in range(len(start))
        for other in range(len(start))
        if tid[one] == tid[other] and start[one] < start[other] < end[one] < end[other]
    ]
    assert nesting.crossing == bool(crossing)
    for thread in (1, 2):
        for moment in range(30):
            held = [i for i in range(len(start)) if tid[i] == thread and start[i] <= moment < end[i]]
            (found,) = nesting.innermost(np.array([thread]), np.array([moment])).tolist()
            assert (found == NONE) == (not held)
            # of those that started last the shortest is the innermost
            assert not held or (start[found], -end[found]) == max((start[i], -end[i]) for i in held)


def test_a_chain_of_ranges_that_cross_is_cut_at_once() -> None:
    """Each begins before the one before it ends: as many levels as ranges, if they were peeled off one by one, which
    takes minutes. `tests/bench/bench_nesting.py` says how long it takes.
    """
    count = 100_000
    start = np.arange(count) * 100
    nesting = nest(start, start + 150, np.zeros(count, dtype=np.int64))
    assert nesting.crossing
    assert nesting.parent.tolist() == list(range(-1, count - 1))
    assert nesting.innermost(np.array([0, 0]), np.array([120, 99])).tolist() == [1, 0]
