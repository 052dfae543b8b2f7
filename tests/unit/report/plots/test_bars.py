"""Bars of a table: which rows, what they are called, in what unit."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import nvprof_kit
from nvprof_kit._report.plots.bars import MAX_BARS, bars_figure
from nvprof_kit.errors import UsageError

DATA = Path(__file__).parents[3] / "data"


def test_rows_units_and_names() -> None:
    frame = pd.DataFrame(
        {
            "step": pd.array([3, None, 4], dtype="Int64"),
            "device": [0, 0, 0],
            "compute_ns": [2_000_000, 0, 1_000_000],
            "idle_ns": [1_000_000, 500_000, 0],
        }
    )
    axes = bars_figure(frame, ("compute_ns", "idle_ns"), ("step", "device"), "Breakdown").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["step 3", "(none)", "step 4"]  # one device alone
    # in ms; idle begins where computing ends: at 2, at 0 and at 1
    bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
    assert bars == [(0, 2), (0, 0), (0, 1), (2, 1), (0, 0.5), (1, 0)]
    assert axes.get_xlabel() == "ms"


def test_the_largest_are_drawn_in_the_tables_order() -> None:
    frame = pd.DataFrame({"layer": [f"l{n}" for n in range(40)], "change_ns": [n - 20 for n in range(40)]})
    figure = bars_figure(frame, ("change_ns",), ("layer",), "Diff")
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(names) == MAX_BARS and names[0] == "l0" and names[-1] == "l39" and "l20" not in names
    assert figure.get_suptitle() == "Diff (and 9 smaller)"  # 40 rows, one of them without a change


def test_answers_have_pictures(tmp_path: Path) -> None:
    capture = nvprof_kit.open(DATA / "slow-2024.2.sqlite.xz")
    for answer in (capture.breakdown(), capture.breakdown("idle"), capture.summary("kernel"), capture.advise()):
        assert answer.save(tmp_path / "x.png").stat().st_size > 1_000
    with pytest.raises(UsageError, match="Summary has no plot"):
        capture.summary().figure()  # eight views are no picture
    with pytest.raises(UsageError, match="Breakdown has no plot"):
        capture.breakdown("queue").figure()
