"""The pictures of a capture in time and of a roofline: what is drawn, and what is written on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support.captures.layers_result import layers_result, tree
from support.captures.nsys_file import NsysFile

import nvprof_kit
from nvprof_kit.errors import UsageError

DATA = Path(__file__).parents[3] / "data"


def test_a_step_is_drawn_from_its_begin_to_its_end(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
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


def test_a_roofline_holds_every_ceiling_and_names_few_dots() -> None:
    (axes,) = nvprof_kit.open_ncu(DATA / "ncu" / "roofline-2025.3.csv.xz").layers().figure().axes
    assert sum(len(dots.get_offsets()) for dots in axes.collections) == 32  # a dot a kernel that computes and moves
    texts = [text.get_text().strip() for text in axes.texts]
    assert texts[:3] == ["FP32 65 T/s", "tensor bf16 to fp32 1,037 T/s", "DRAM 4.8 TB/s"]
    assert 0 < len(texts[3:]) <= 12
    assert [text.get_text() for text in axes.get_legend().get_texts()][-2:] == ["model.layers.0", "forward"]
    assert len({tuple(dots.get_facecolor()[0]) for dots in axes.collections}) == 5  # a colour a layer


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


OUTSIDE = {"(none) forward": 1.0, "(none) optimizer": 4.0}


def bars(result: nvprof_kit.Layers) -> dict[str, float]:
    """The length of each bar, all phases together, in ms per step."""
    (axes,) = result.figure().axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    lengths = dict.fromkeys(labels, 0.0)
    for patch in axes.patches:
        lengths[labels[round(patch.get_y() + patch.get_height() / 2)]] += patch.get_width()
    return {label: round(length, 6) for label, length in lengths.items()}


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (1, {"model": 15.0}),
        (2, {"model.layers.0": 8.0, "model.layers.1": 5.0, "lm_head": 2.0}),
        # all levels are the leaves and what their parents did themselves: 16 - 12 of the block, nothing of the model
        (None, {"model.layers.0 (itself)": 2.0, "model.layers.0.attn": 6.0, "model.layers.1": 5.0, "lm_head": 2.0}),
    ],
)
def test_bars_are_a_level_of_the_model_and_add_up(depth: int | None, expected: dict[str, float]) -> None:
    found = bars(layers_result(depth=depth))
    assert found == {**expected, **OUTSIDE}
    assert sum(found.values()) == 20.0  # 40 ms in 2 steps


def test_a_large_model_is_cut_where_the_bars_still_fit() -> None:
    blocks = pd.concat([tree().iloc[[1, 2]].replace("model.layers.0", f"model.layers.{n}") for n in range(21)])
    large = pd.concat([tree().iloc[[0]], blocks], ignore_index=True)
    large.loc[large["depth"] == 2, "layer"] = large["parent"] + ".attn"
    assert len(bars(layers_result(tree=large, depth=3))) > 40
    labels = [label for label in bars(layers_result(tree=large)) if label != "model (itself)"]
    assert {label.count(".") for label in labels} == {2} and len(labels) <= 40


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_every_format_is_drawn(tmp_path: Path, suffix: str, start: bytes) -> None:
    timeline = nvprof_kit.open(DATA / "llama-2023.4.sqlite.xz").plot()
    for answer in (layers_result(), layers_result(tree=tree()[:0]), timeline):
        assert answer.save(tmp_path / f"plot{suffix}").read_bytes().startswith(start)
