"""A device's time in pieces, compared with what runs in every single nanosecond."""

from __future__ import annotations

import numpy as np
import pytest

from nvprof_kit._analysis.attribution.nesting import Int64Array
from nvprof_kit._analysis.breakdown.activity import COMM, COMPUTE, COPY, IDLE
from nvprof_kit._ranks import lane as lane_module
from nvprof_kit._ranks.lane import idle_gaps, lanes_of

LENGTH = 120


def operations(seed: int) -> tuple[Int64Array, Int64Array, np.ndarray, Int64Array]:
    """Starts, ends and sorts of operations that overlap, some without a length, and cuts."""
    random = np.random.default_rng(seed)
    start = random.integers(0, LENGTH - 20, 30)
    end = start + random.choice([0, 1, 3, 20], 30)
    sort = random.choice([COMPUTE, COMM, COPY], 30).astype(np.int8)
    cuts = np.unique(random.integers(start.min(), end.max() + 1, 12))
    return start, end, sort, cuts


def expected(start: Int64Array, end: Int64Array, sort: np.ndarray, moment: int) -> tuple[int, int]:
    """State and operation at a moment: the first to begin of the sort that takes precedence, as long as it lasts."""
    for kind in (COMPUTE, COMM, COPY):
        running = [
            (start[one], end[one], one)
            for one in range(len(start))
            if sort[one] == kind and start[one] <= moment < end[one]
        ]
        if running:
            return kind, min(running)[2]
    return IDLE, -1


@pytest.mark.parametrize("block", [1, 3, 1_000])
@pytest.mark.parametrize("seed", range(8))
def test_pieces_show_what_runs_at_each_moment(seed: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "_BLOCK", block)
    start, end, sort, cuts = operations(seed)
    lanes = lanes_of(start, end, sort, cuts)
    assert (len(lanes) > 3) == (block < 4)
    piece = [np.concatenate(column) for column in zip(*lanes, strict=True)]
    begins, ends, state, op, segment = piece
    assert begins[0] == start.min() and ends[-1] == end.max() and (begins[1:] == ends[:-1]).all()
    assert begins.tolist() == sorted({*start, *end, *cuts} - {end.max()})
    assert segment.tolist() == [int((cuts <= one).sum()) for one in begins]
    for begin, finish, its, one in zip(begins, ends, state, op, strict=True):
        for moment in range(begin, finish):
            assert (its, one) == expected(start, end, sort, moment)


@pytest.mark.parametrize("block", [1, 1_000])
def test_idle_pieces_that_adjoin_are_one_gap_up_to_a_bound(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "_BLOCK", block)
    # busy from 10 to 20 and from 60 to 70; idle from 20 to 60, cut at 25, 30 and 40; an operation without length at 50
    start, end = np.array([10, 50, 60]), np.array([20, 50, 70])
    lanes = lanes_of(start, end, np.full(3, COMPUTE, dtype=np.int8), np.array([10, 25, 30, 40]))
    # a step from 5 to 30, and another until 80; and the operation at 50 parts the idle time
    found = idle_gaps(start, end, np.array([5, 30, 50, 80]))
    assert found.start.tolist() == [5, 20, 30, 50, 70]
    assert found.end.tolist() == [10, 30, 50, 60, 80]
    # idle pieces: 20 to 25, 25 to 30, 30 to 40, 40 to 50, 50 to 60
    assert np.concatenate([found.of_pieces(one) for one in lanes]).tolist() == [1, 1, 2, 2, 3]
