"""The per-layer table as a plot: the bars, and that every format can be drawn."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from support.captures.layers_result import layers_result, tree

import nvprof_kit

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
    assert layers_result().save(tmp_path / f"layers{suffix}").read_bytes().startswith(start)
    assert layers_result(tree=tree()[:0]).save(tmp_path / f"empty{suffix}").stat().st_size > 500
