"""The per-layer table as a plot: the bars first, then that every format can be drawn."""

from __future__ import annotations

import pandas as pd
import pytest
from support.captures.layers_result import MS, layers_result, tree

from nvprof_kit._report.plots.layers import MAX_BARS, layers_bars, layers_figure
from nvprof_kit._report.plots.plots import encode
from nvprof_kit._result.formats import PICTURES


def bars(depth: int | None = None) -> list[tuple[object, ...]]:
    made = layers_bars(tree(), depth)
    made.iloc[:, 1:] //= MS
    return list(made.itertuples(index=False, name=None))


OUTSIDE = [("(none) forward", 0, 0, 0, 2), ("(none) optimizer", 0, 0, 0, 8)]


def test_all_levels_are_the_leaves_and_what_their_parents_did_themselves() -> None:
    assert bars() == [
        # the model's 12 and 18 are all in its children
        ("model.layers.0 (itself)", 1, 3, 0, 0),  # 6 - 5, 10 - 7
        ("model.layers.0.attn", 5, 7, 0, 0),
        ("model.layers.1", 4, 6, 0, 0),
        ("lm_head", 2, 2, 0, 0),
        *OUTSIDE,
    ]


def test_one_level() -> None:
    assert bars(1) == [("model", 12, 18, 0, 0), *OUTSIDE]


def test_two_levels() -> None:
    assert bars(2) == [
        ("model.layers.0", 6, 10, 0, 0),
        ("model.layers.1", 4, 6, 0, 0),
        ("lm_head", 2, 2, 0, 0),
        *OUTSIDE,
    ]


@pytest.mark.parametrize("depth", [None, 1, 2, 3])
def test_bars_add_up_to_the_total(depth: int | None) -> None:
    assert int(layers_bars(tree(), depth).iloc[:, 1:].to_numpy().sum()) == 40 * MS


def test_a_large_model_is_cut_where_the_bars_still_fit() -> None:
    blocks = pd.concat(
        [tree().iloc[[1, 2]].replace("model.layers.0", f"model.layers.{n}") for n in range(MAX_BARS // 2 + 1)]
    )
    large = pd.concat([tree().iloc[[0]], blocks], ignore_index=True)
    large.loc[large["depth"] == 2, "layer"] = large["parent"] + ".attn"
    assert len(layers_bars(large, 3)) > MAX_BARS
    assert {label.count(".") for label in layers_bars(large)["label"] if label != "model (itself)"} == {2}


@pytest.mark.parametrize("plot_format", PICTURES)
def test_every_format_is_drawn(plot_format: str) -> None:
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert encode(layers_figure(layers_result()), plot_format).startswith(starts[plot_format])


def test_what_the_plot_says() -> None:
    figure = layers_figure(layers_result(), depth=1)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["model", "(none) forward", "(none) optimizer"]
    assert [text.get_text() for text in axes.texts] == ["75.0 %", "5.0 %", "20.0 %"]
    assert axes.get_xlabel() == "GPU time, ms per step"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["forward", "backward", "other"]
    assert max(bar.get_width() for bar in axes.patches) == 9.0  # the model's backward, 18 ms in 2 steps


def test_a_long_name_leaves_room_for_the_bars() -> None:
    long = tree().replace({"lm_head": "x" * 10_000 + ".lm_head"})
    labels = [tick.get_text() for tick in layers_figure(layers_result(tree=long), depth=2).axes[0].get_yticklabels()]
    assert labels[2] == "….lm_head" and max(map(len, labels)) <= 60


def test_nothing_to_draw() -> None:
    assert encode(layers_figure(layers_result(tree=tree()[:0])), "svg")
