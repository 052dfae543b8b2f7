"""Lanes on one line and chains of crossing ranges that are longer than any capture at hand."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from nvprof_kit._analysis.attribution.intervals import union_lengths
from nvprof_kit._analysis.attribution.nesting import Line, nest

ANALYSIS = Path(__file__).parents[4] / "nvprof_kit" / "_analysis"


def test_lanes_that_do_not_fit_are_refused() -> None:
    far = np.array([0, 1 << 60])
    line = Line.over((far,), (far,))
    assert line.at(np.array([0, 3]), far).tolist() == [0, 3 * ((1 << 60) + 1) + (1 << 60)]
    with pytest.raises(OverflowError, match="6 lanes of"):
        line.at(np.array([0, 5]), far)


def test_busy_time_of_many_steps_on_many_devices_in_a_long_capture() -> None:
    hour, groups, lanes = 3600 * 10**9, 1_000_000, 8
    start = np.array([0, 10, hour])
    lengths = union_lengths(start, start + 20, np.array([7, 7, 0]), np.array([5, 5, groups - 1]), groups)
    assert lengths[[5, groups - 1]].tolist() == [30, 20]
    assert lengths.sum() == 50
    assert groups * lanes * hour > np.iinfo(np.int64).max  # what one number for group, lane and moment would need


def test_lanes_are_laid_out_in_one_place() -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in ANALYSIS.rglob("*.py")}
    assert [name for name, page in pages.items() if re.search(r"\* (self\.)?_?span\b", page)] == ["nesting.py"]


def test_a_chain_of_ranges_that_cross_is_cut_at_once() -> None:
    """Each begins before the one before it ends: as many levels as ranges, if they were peeled off one by one, which
    takes minutes.
    """
    count = 100_000
    start = np.arange(count) * 100
    nesting = nest(start, start + 150, np.zeros(count, dtype=np.int64))
    assert nesting.crossing
    assert nesting.parent.tolist() == list(range(-1, count - 1))
    assert nesting.innermost(np.array([0, 0]), np.array([120, 99])).tolist() == [1, 0]
