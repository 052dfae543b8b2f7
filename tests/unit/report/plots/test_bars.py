"""Bars of a table: which rows, what they are called, in what unit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import nvprof_kit
from nvprof_kit.errors import UsageError

DATA = Path(__file__).parents[3] / "data"


def test_rows_units_and_names() -> None:
    result = nvprof_kit.open(DATA / "slow-2024.2.sqlite.xz").breakdown()
    axes, frame = result.figure().axes[0], result.to_frame()
    names = ["(none)" if pd.isna(step) else f"step {step}" for step in frame["step"]]
    assert [label.get_text() for label in axes.get_yticklabels()] == names  # one device alone
    # in ms: each part begins where the one before ends
    parts = ["compute_ns", "exposed_comm_ns", "exposed_copy_ns", "idle_ns"]
    widths = np.array([bar.get_width() for bar in axes.patches]).reshape(-1, len(frame))
    assert widths == pytest.approx(frame[parts].to_numpy().T / 1e6) and axes.get_xlabel() == "ms"
    begins = np.array([bar.get_x() for bar in axes.patches]).reshape(widths.shape)
    shown = widths > 0
    assert begins[shown] == pytest.approx((widths.cumsum(axis=0) - widths)[shown])


def test_the_largest_are_drawn_in_the_tables_order() -> None:
    result = nvprof_kit.open(DATA / "eager-2023.4.sqlite.xz").summary("kernel")
    figure = result.figure()
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    rows = len(result.to_frame())
    assert rows > len(names) == 30 and figure.get_suptitle().endswith(f"(and {rows - 30} smaller)")


def test_answers_have_pictures(tmp_path: Path) -> None:
    capture = nvprof_kit.open(DATA / "slow-2024.2.sqlite.xz")
    for answer in (capture.breakdown(), capture.breakdown("idle"), capture.summary("kernel"), capture.advise()):
        assert answer.save(tmp_path / "x.png").stat().st_size > 1_000
    with pytest.raises(UsageError, match="Summary has no plot"):
        capture.summary().figure()  # eight views are no picture
    with pytest.raises(UsageError, match="Breakdown has no plot"):
        capture.breakdown("queue").figure()
