"""Lanes on one line: order and distance stay, and lanes that do not fit are refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from nvprof_kit._analysis.attribution.nesting import Line, union

ANALYSIS = Path(__file__).parents[4] / "nvprof_kit" / "_analysis"


def test_places_of_a_later_lane_are_behind_all_of_an_earlier_one() -> None:
    lane, start, end = np.array([1, 0, 1]), np.array([100, 300, 250]), np.array([200, 350, 260])
    line = Line.over((start,), (end,))
    assert line == Line(origin=100, span=251)  # 350 - 100, and 1 beyond
    assert line.at(lane, start).tolist() == [251, 200, 401]
    assert line.at(lane, end).tolist() == [351, 250, 411]
    assert line.moment(line.at(lane, end)).tolist() == end.tolist()


def test_nothing_at_all_has_a_line() -> None:
    none = np.zeros(0, dtype=np.int64)
    assert Line.over((none,), (none,), beyond=2) == Line(0, 2)
    assert [one.tolist() for one in union(none, none)] == [[], []]


def test_lanes_that_do_not_fit_are_refused() -> None:
    far = np.array([0, 1 << 60])
    line = Line.over((far,), (far,))
    assert line.at(np.array([0, 3]), far).tolist() == [0, 3 * ((1 << 60) + 1) + (1 << 60)]
    with pytest.raises(OverflowError, match="6 lanes of"):
        line.at(np.array([0, 5]), far)


def test_a_union_joins_what_touches() -> None:
    begins, ends = union(np.array([50, 0, 10, 20]), np.array([60, 10, 15, 40]))
    assert (begins.tolist(), ends.tolist()) == ([0, 20, 50], [15, 40, 60])


def test_lanes_are_laid_out_in_one_place() -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in ANALYSIS.rglob("*.py")}
    assert [name for name, page in pages.items() if re.search(r"\* (self\.)?_?span\b", page)] == ["nesting.py"]
