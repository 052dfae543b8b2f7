"""Equal blocks in ranked tables: one row with their sums; those unlike their equals are named and stay."""

from __future__ import annotations

import pandas as pd
import pytest

from nvprof_kit._analysis.layers.fold import fold_ranked, mark_ranked
from nvprof_kit._result.column import Column

COLUMNS = {"gpu_ns": Column("time", "ns"), "gb_per_s": Column("rate", "gb_per_s", kind="float", fold="mean")}


def copies(costs: list[int], phase: str = "forward") -> pd.DataFrame:
    """A copy of each block, and one outside of all."""
    rows = [
        {"layer": f"layers.{block}.mlp", "phase": phase, "ops": 2, "gpu_ns": cost, "gb_per_s": 10.0 + block}
        for block, cost in enumerate(costs)
    ]
    return pd.DataFrame([*rows, {"layer": "(none)", "phase": "data", "ops": 1, "gpu_ns": 500, "gb_per_s": 1.0}])


def test_equal_rows_are_one_with_their_sums() -> None:
    folded = fold_ranked(copies([100, 102, 98, 100, 300]), COLUMNS, "gpu_ns", True)
    assert folded["layer"].tolist() == ["(none)", "layers.0-3.mlp x4", "layers.4.mlp"]
    together = folded.iloc[1]
    # 100 + 102 + 98 + 100; two operations each; the mean rate of 10, 11, 12 and 13
    assert (together["gpu_ns"], together["ops"], together["gb_per_s"]) == (400, 8, 11.5)
    assert (together["median_ns"], together["min_ns"], together["max_ns"]) == (100, 98, 102)
    assert folded["unlike"].tolist() == ["", "", "+200 %"]  # 300 beside a median of 100
    assert folded["gpu_ns"].sum() == 400 + 300 + 500
    assert folded["gpu_ns"].dtype == "int64" and pd.isna(folded["median_ns"].iloc[0])


def test_by_default_only_many_fold() -> None:
    few, many = copies([100] * 7), copies([100] * 8)
    assert fold_ranked(few, COLUMNS, "gpu_ns", None) is few
    assert fold_ranked(many, COLUMNS, "gpu_ns", None)["layer"].tolist() == ["layers.0-7.mlp x8", "(none)"]
    assert fold_ranked(many, COLUMNS, "gpu_ns", False) is many


def test_what_differs_in_a_text_or_another_cost_stays_apart() -> None:
    both = pd.concat([copies([100] * 3), copies([100] * 3, "backward").iloc[:3]], ignore_index=True)
    folded = fold_ranked(both, COLUMNS, "gpu_ns", True)
    assert sorted(zip(folded["layer"], folded["phase"], strict=True)) == [
        ("(none)", "data"),
        ("layers.0-2.mlp x3", "backward"),
        ("layers.0-2.mlp x3", "forward"),
    ]
    wide = copies([100] * 4).assign(host_ns=[50, 50, 50, 900, 0])
    folded = fold_ranked(wide, COLUMNS, "gpu_ns", True, ("gpu_ns", "host_ns"))
    assert folded["layer"].tolist() == ["(none)", "layers.0-2.mlp x3", "layers.3.mlp"]


def test_a_layer_with_several_rows_of_a_kind_does_not_fold() -> None:
    twice = pd.concat([copies([100] * 3)] * 2, ignore_index=True)
    assert fold_ranked(twice, COLUMNS, "gpu_ns", True) is twice


@pytest.mark.parametrize("rows", [copies([]), pd.DataFrame({"stack": ["a"], "gpu_ns": [1]})])
def test_nothing_to_fold(rows: pd.DataFrame) -> None:
    assert fold_ranked(rows, COLUMNS, "gpu_ns", True) is rows
    assert (
        "folded_into" not in mark_ranked(rows, COLUMNS, "gpu_ns")
        or not mark_ranked(rows, COLUMNS, "gpu_ns")["folded_into"].any()
    )


def test_a_file_keeps_every_row() -> None:
    rows = copies([100, 102, 98, 300])
    marked = mark_ranked(rows, COLUMNS, "gpu_ns")
    assert marked["folded_into"].tolist() == ["layers.0-2.mlp"] * 3 + ["", ""]
    assert marked["unlike"].tolist() == ["", "", "", "+200 %", ""]
    assert marked[list(rows.columns)].equals(rows)


def test_lists_in_lists_fold_by_place_unless_the_places_are_alike() -> None:
    # experts cost the same; of each decoder block, layer.0 is self-attention, layer.1 cross-attention
    expert = [{"layer": f"layers.{one}.experts.{two}", "gpu_ns": 100 + one} for one in range(4) for two in range(3)]
    decoder = [{"layer": f"block.{one}.layer.{two}", "gpu_ns": (600, 200)[two]} for one in range(4) for two in range(2)]
    assert fold_ranked(pd.DataFrame([*expert, *decoder]), COLUMNS, "gpu_ns", True)["layer"].tolist() == [
        "block.0-3.layer.0 x4",
        "layers.0-3.experts.0-2 x12",
        "block.0-3.layer.1 x4",
    ]
