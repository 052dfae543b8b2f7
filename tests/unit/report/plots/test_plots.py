"""The pictures of a capture in time and of a roofline: what is drawn, and what is written on it."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from support.data import DATA

import nvprof_kit
from nvprof_kit.errors import UsageError


def test_a_step_is_drawn_from_its_begin_to_its_end(file):
    file.range_("step 1", 0, 100, category="step", payload=1)
    file.kernel(250, 1050, launched=(20, 21), stream=8)  # runs into step 2, which is open from 110 on
    file.range_("step 2", 110, 1000, category="step", payload=2)
    file.range_("a", 112, 140)
    file.range_("a.3", 125, 135)
    file.kernel(1000, 1100, launched=(120, 121))
    file.kernel(1200, 1400, launched=(130, 131))
    plot = nvprof_kit.open(file.write()).plot(steps=2)
    assert plot.rows["layer"].tolist() == ["(none)", "a", "a.3"]
    figure = plot.figure()
    (axes,) = figure.axes
    assert figure.get_suptitle() == "Step 2 in time on Test GPU" and axes.get_xlabel() == "time, ms"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["forward", "idle"]
    assert {text.get_text() for text in axes.texts} == {"a", "a.3"}
    # 100 of the 350 ns from the end of step 1
    assert "GPU 0 idle, 28.6 %" in [label.get_text() for label in axes.get_yticklabels()]


def test_a_roofline_holds_every_ceiling_and_names_few_dots():
    (axes,) = nvprof_kit.open_ncu(DATA / "ncu" / "roofline-2025.3.csv.xz").layers().figure().axes
    assert sum(len(dots.get_offsets()) for dots in axes.collections) == 32  # a dot a kernel that computes and moves
    texts = [text.get_text().strip() for text in axes.texts]
    assert texts[:3] == ["FP32 65 T/s", "tensor bf16 to fp32 1,037 T/s", "DRAM 4.8 TB/s"]
    assert 0 < len(texts[3:]) <= 12
    assert [text.get_text() for text in axes.get_legend().get_texts()][-2:] == ["model.layers.0", "forward"]
    assert len({tuple(dots.get_facecolor()[0]) for dots in axes.collections}) == 5  # a colour a layer


def test_rows_units_and_names():
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


def test_the_largest_are_drawn_in_the_tables_order():
    result = nvprof_kit.open(DATA / "eager-2023.4.sqlite.xz").summary("kernel")
    figure = result.figure()
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    rows = len(result.to_frame())
    assert rows > len(names) == 30 and figure.get_suptitle().endswith(f"(and {rows - 30} smaller)")


@pytest.mark.slow
def test_answers_have_pictures(tmp_path):
    capture = nvprof_kit.open(DATA / "slow-2024.2.sqlite.xz")
    metrics = nvprof_kit.open(DATA / "metrics" / "llama-2023.4.sqlite.xz").metrics()
    breakdowns = (capture.breakdown(), capture.breakdown("idle"))
    for answer in (*breakdowns, capture.summary("kernel"), capture.advise(), metrics):
        assert answer.save(tmp_path / "x.png").stat().st_size > 1_000
    with pytest.raises(UsageError, match=r"Summary has no plot.* or one view: device, overview,"):
        capture.summary().figure()  # eight views are no picture
    with pytest.raises(UsageError, match="Breakdown has no plot"):
        capture.breakdown("queue").figure()


def test_bars_of_layers_are_a_level_of_the_model_and_add_up():
    capture = nvprof_kit.open(DATA / "flops" / "llama12-2024.2.sqlite.xz")
    tree, summary = capture.layers().tree, capture.layers().summary
    for depth, bars in ((1, 4), (2, 6), (3, 21), (4, 69), (None, 21)):  # none: as many levels as 40 bars allow
        (axes,) = capture.layers(depth=depth).figure().axes
        lengths = pd.Series([patch.get_width() for patch in axes.patches]).groupby(
            [round(patch.get_y() + patch.get_height() / 2) for patch in axes.patches]
        ).sum()  # fmt: skip
        assert lengths.sum() == pytest.approx(summary.total_ns / 1e6 / summary.steps)
        labels = [label.get_text().removesuffix(" (itself)") for label in axes.get_yticklabels()]
        assert len(labels) == len(lengths) == bars
        assert tree[tree["layer"].isin(labels)]["depth"].max() == (depth or 3) - 1
    assert not replace(capture.layers(), tree=tree[:0]).figure().axes[0].patches
