"""The per-layer tables of real captures, as files to read and to compare with."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.golden import Golden

from nvprof_kit._analysis.layers.layers import layers
from nvprof_kit._trace.open import open_capture

CAPTURES = sorted((Path(__file__).parents[3] / "data").glob("*.sqlite.xz"))
LEAST_IN_LAYERS = {
    "graph-whole": 0.0,  # whole-graph tracing: a replay is one operation; the table says which flag to use
    "ddp": 0.98,  # DDP copies its gradient buckets after the backward pass of every layer
    "fsdp": 0.9,  # FSDP gathers what the root holds (embedding, head) before the first layer's backward begins
}
"""Captures of which less than 99 % of forward and backward can be in a layer, and why."""

ANNOTATED = [path for path in CAPTURES if not path.name.startswith("hooks-")]


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.name.removesuffix(".sqlite.xz"))
def test_the_table_is_the_golden_one(capture: Path, golden: Golden) -> None:
    found = layers(open_capture(capture)).rows.to_csv(index=False)
    golden(f"layers/{capture.name.replace('.sqlite.xz', '.csv')}", found)


@pytest.mark.parametrize("capture", ANNOTATED, ids=lambda path: path.name.removesuffix(".sqlite.xz"))
def test_at_least_99_percent_of_forward_and_backward_is_in_a_named_layer(capture: Path) -> None:
    rows = layers(open_capture(capture)).rows
    loop = rows[rows["phase"].isin(["forward", "backward", "recompute"])]
    in_layers = loop[loop["layer"] != "(none)"]["gpu_self_ns"].sum()
    least = next((share for name, share in LEAST_IN_LAYERS.items() if capture.name.startswith(name)), 0.99)
    assert in_layers >= least * loop["gpu_self_ns"].sum()
