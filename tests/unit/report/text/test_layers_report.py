"""The per-layer table as a person reads it."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from support.captures.layers_result import MS, layers_result, rows_by_step, tree

import nvprof_kit


def printed(**changes: object) -> str:
    """The table with its times in phases: the rows are not by step."""
    rows = rows_by_step().drop(columns=["step", "instance"])
    return str(layers_result(**{"rows": rows, **changes}))


def labels(text: str) -> list[str]:
    table = text.split("\n\n", 1)[1].partition("\ntotal")[0]
    return [line[:20].rstrip() for line in table.splitlines()[2:] if line]


def test_the_whole_report() -> None:
    # 40 ms in 2 steps: 20.00 ms per step, so two decimals; total: forward 6 + 1 outside the layers, backward 9
    assert printed() == REPORT


def test_without_steps_the_times_are_the_captures() -> None:
    summary = replace(layers_result().summary, steps=0)
    assert "model                 2    12.00     18.00  30.00                   75.0 %" in printed(summary=summary)


def test_depth_hides_children_and_keeps_what_is_outside() -> None:
    assert labels(printed(depth=2)) == [
        "model", "  layers.0", "  layers.1", "  lm_head", "(none) forward", "(none) optimizer", "(none) other",
    ]  # fmt: skip


def test_percentages_of_the_top_level_add_up() -> None:
    thirds = tree().iloc[[0, 5, 6]].assign(total_ns=[MS, MS, MS])
    text = printed(tree=thirds, summary=replace(layers_result().summary, total_ns=3 * MS))
    assert [share for share in ("33.4 %", "33.3 %") for _ in range(text.count(share))] == ["33.4 %", *["33.3 %"] * 2]


@pytest.mark.parametrize(
    ("changes", "expected", "absent"),
    [
        ({}, "GPU busy: 80.0 % of 25.00 ms per step", "recompute"),
        ({"on_gpu": False}, "Operator time: 20.00 ms per step", "GPU time"),
        ({"by_how": {"launch": 10 * MS, "graph node": 30 * MS - 1, "none": 1}},
         "known from: the range around its launch 25.0 %, the range in which its CUDA graph was captured 75.0 %, ",
         "Warm-up"),
        ({"by_how": {"launch": 30 * MS, "none": 10 * MS}}, "In a named layer", "known from"),
    ],
)  # fmt: skip
def test_lines_about_the_capture(changes: dict[str, object], expected: str, absent: str) -> None:
    result = layers_result()
    info = replace(result.info, on_gpu=False, gpus=()) if "on_gpu" in changes else result.info
    text = printed(info=info, summary=replace(result.summary, by_how=changes.get("by_how", result.summary.by_how)))
    assert expected in text
    assert absent not in text


def test_recompute_has_a_column_where_there_is_any() -> None:
    with_recompute = tree()
    with_recompute.loc[0, ["backward_ns", "recompute_ns"]] = [10 * MS, 8 * MS]
    text = printed(tree=with_recompute)
    assert "recompute" in text
    assert "5.00       4.00  15.00" in text


def test_an_empty_capture() -> None:
    empty = replace(
        layers_result().summary, total_ns=0, layer_ns=0, wall_ns=0, ops=0, steps=0, by_how={}, loop_layer_share=0.0
    )
    assert "GPU time: 0 ms, 0 operations\n" in printed(tree=tree()[:0], summary=empty)


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_any_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    table = printed().split("\n\n")[1]
    assert max(map(len, table.splitlines())) <= columns
    assert ("forward" in table) == (columns > 40)


def test_by_step_children_are_in_their_parents_and_the_steps_in_order() -> None:
    # model.layers.0: own 3 + attn 6, own 1 + attn 6; model: all layers below
    assert str(layers_result()).split("\n\n", 1)[1] == BY_STEP


def test_many_steps_say_how_many_are_left_out() -> None:
    numbers = (pd.array([number] * 15, dtype="Int64") for number in range(11))
    rows = pd.concat([rows_by_step().assign(step=number, instance=number) for number in numbers])
    text = str(layers_result(rows=rows.reset_index(drop=True)))
    assert "step 7" in text
    assert "step 8" not in text
    assert "3 more columns are left out here; -o FILE.csv has all steps." in text


def test_a_new_column_is_one_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `Column` beside the others, and its values: csv, JSON, Markdown, frames, --sort and what it means follow."""
    columns = {**nvprof_kit.Layers.columns["layers"], "flop": nvprof_kit_column("operations counted", "flop")}
    monkeypatch.setattr(nvprof_kit.Layers, "columns", {"layers": columns})
    rows = rows_by_step()
    result = layers_result(rows=rows.assign(flop=range(len(rows)))).selected(sort="flop", top=1)
    assert result.to_frame()["flop"].iloc[0] == len(rows) - 1
    answer = result.encode("json").decode()
    assert '"flop": {"type": "int", "unit": "flop", "meaning": "operations counted"}' in answer
    assert result.encode("csv").decode().splitlines()[0].endswith(",flop")
    assert "| flop |" in result.encode("md").decode()


def nvprof_kit_column(meaning: str, unit: str) -> object:
    return replace(nvprof_kit.Layers.columns["layers"]["gpu_self_ns"], meaning=meaning, unit=unit)


BY_STEP = """\
layer             step 0  step 1  outside
─────────────────────────────────────────
model              16.00   14.00
  layers.0          9.00    7.00
    attn            6.00    6.00
  layers.1          5.00    5.00
  lm_head           2.00    2.00
(none) forward              2.00
(none) optimizer    4.00    3.00     1.00
(none) other

total              20.00   19.00     1.00

Milliseconds of GPU time in each step, all phases together, including nested layers.
! nsys dropped 3 events; record less at once"""

REPORT = """\
run.sqlite · nsys 2023.4.4.54 · NVIDIA H200 · 2 steps
GPU time: 20.00 ms per step (40.00 ms in 2 steps), 1,234 operations
GPU busy: 80.0 % of 25.00 ms per step
In a named layer: 75.0 % of it, 93.8 % of forward and backward

layer             calls  forward  backward  total  self share  total share                              CPU
───────────────────────────────────────────────────────────────────────────────────────────────────────────
model                 1     6.00      9.00  15.00                   75.0 %  ████████████████████████  20.00
  layers.0            1     3.00      5.00   8.00      10.0 %       40.0 %  ████████████▊             10.00
    attn              1     2.50      3.50   6.00      30.0 %       30.0 %  █████████▋                 7.50
  layers.1            1     2.00      3.00   5.00      25.0 %       25.0 %  ████████                   6.00
  lm_head             1     1.00      1.00   2.00      10.0 %       10.0 %  ███▎                       1.50

(none) forward        1     1.00             1.00       5.0 %        5.0 %  █▋                        22.00
(none) optimizer      1                      4.00      20.0 %       20.0 %  ██████▍                    0.50
(none) other                                                         0.0 %

total                       7.00      9.00  20.00                  100.0 %

Milliseconds per step of GPU time, with nested layers; self share: without. CPU: wall time inside the layer's ranges.
! nsys dropped 3 events; record less at once"""
