"""The per-layer tables of real captures, as files to read and to compare with."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.golden import Golden

import nvprof_kit

CAPTURES = sorted((Path(__file__).parents[3] / "data").glob("*.sqlite.xz"))
SHARED = {
    "ddp": 0.98,  # DDP copies its gradient buckets after the backward pass of every layer
    "fsdp": 0.9,  # FSDP gathers what the root holds (embedding, head) before the first layer's backward begins
}
"""Captures in which the wrapper of the whole model works in them, too: the least share in a layer, and why."""

ANNOTATED = [path for path in CAPTURES if not path.name.startswith("hooks-")]


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.name.removesuffix(".sqlite.xz"))
def test_the_table_is_the_golden_one(capture: Path, golden: Golden) -> None:
    found = nvprof_kit.open(capture).layers(steps="all").rows.to_csv(index=False)
    golden(f"layers/{capture.name.replace('.sqlite.xz', '.csv')}", found)


@pytest.mark.parametrize("capture", ANNOTATED, ids=lambda path: path.name.removesuffix(".sqlite.xz"))
def test_all_of_forward_and_backward_is_in_a_layer_but_the_first_gradient(capture: Path) -> None:
    """``loss.backward()`` fills the gradient of the loss by one kernel, which belongs to no layer."""
    result = nvprof_kit.open(capture).layers(steps="all")
    loop = result.rows[result.rows["phase"].isin(["forward", "backward", "recompute"])]
    outside = loop[loop["layer"] == "(none)"]
    least = next((share for name, share in SHARED.items() if capture.name.startswith(name)), None)
    if least is not None:
        assert loop["gpu_self_ns"].sum() - outside["gpu_self_ns"].sum() >= least * loop["gpu_self_ns"].sum()
        return
    assert outside.loc[outside["phase"] != "backward", "gpu_ops"].sum() == 0
    assert outside["gpu_ops"].sum() <= result.summary.all_steps


FORMATS = [path for path in CAPTURES if path.name.startswith(("checkpoint", "graph-", "generate", "ddp-"))]


@pytest.mark.parametrize("capture", FORMATS, ids=lambda path: path.name.removesuffix(".sqlite.xz"))
def test_the_totals_of_the_rows_add_up_to_the_printed_ones(capture: Path) -> None:
    """Over the phases of each layer, in the shown steps: also for a model of which only the blocks run again."""
    result = nvprof_kit.open(capture).layers(by="step")
    printed = result.tree[result.tree["layer"] != "(none)"].set_index("layer")["total_ns"]
    rows = result.rows
    totals = rows[rows["layer"] != "(none)"].groupby("layer")["gpu_total_ns"].sum()
    assert totals.reindex(printed.index, fill_value=0).to_dict() == printed.to_dict()
