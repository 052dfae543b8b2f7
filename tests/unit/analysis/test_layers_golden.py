"""The per-layer tables of real captures, as files to read and to compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvprof_kit.analysis.layers import layers
from nvprof_kit.trace.open import open_capture

TESTS = Path(__file__).parents[2]
CAPTURES = sorted(TESTS.joinpath("data").glob("*.sqlite.xz"))
ANNOTATED = [path for path in CAPTURES if not path.name.startswith("hooks-")]


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.name.removesuffix(".sqlite.xz"))
def test_the_table_is_the_golden_one(capture: Path, request: pytest.FixtureRequest) -> None:
    golden = TESTS / "golden" / "layers" / capture.name.replace(".sqlite.xz", ".csv")
    found = layers(open_capture(capture)).rows.to_csv(index=False)
    if request.config.getoption("--update-golden"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(found)
    assert found == golden.read_text()


@pytest.mark.parametrize("capture", ANNOTATED, ids=lambda path: path.name.removesuffix(".sqlite.xz"))
def test_at_least_99_percent_of_forward_and_backward_is_in_a_named_layer(capture: Path) -> None:
    rows = layers(open_capture(capture)).rows
    loop = rows[rows["phase"].isin(["forward", "backward", "recompute"])]
    in_layers = loop[loop["layer"] != "(none)"]["gpu_self_ns"].sum()
    assert in_layers / loop["gpu_self_ns"].sum() >= 0.99


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.name.removesuffix(".sqlite.xz"))
def test_a_layer_holds_its_own_time_and_its_childrens(capture: Path) -> None:
    # of a checkpointed block, the part whose backward comes first runs the whole block again inside its own range;
    # that time stays with the layers that did the work
    result = layers(open_capture(capture))
    own = result.rows.groupby("layer")["gpu_self_ns"].sum()
    tree = result.tree[result.tree["layer"] != "(none)"]
    children = tree.groupby("parent")["total_ns"].sum()
    for layer, total in zip(tree["layer"], tree["total_ns"], strict=True):
        assert total == own.get(layer, 0) + children.get(layer, 0), layer
    assert result.tree.loc[result.tree["depth"] == 0, "total_ns"].sum() == result.summary.total_ns
