"""The per-layer table as a person reads it."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from support.captures.layers_result import MS, layers_result, tree

from nvprof_kit._report.text.layers import LayersView, Line, layers_lines, layers_report, total_line
from nvprof_kit._report.text.table.terminal import print_to


def times(forward: str = "", backward: str = "", recompute: str = "") -> dict[str, str]:
    return {"forward": forward, "backward": backward, "recompute": recompute}


def test_lines_are_per_step_and_indented() -> None:
    # 40 ms in 2 steps: 20.00 ms per step, so two decimals
    assert layers_lines(layers_result(), LayersView()) == [
        Line("model", "1", times("6.00", "9.00"), "15.00", "75.0 %", 0.75, "20.00"),
        Line("  layers.0", "1", times("3.00", "5.00"), "8.00", "40.0 %", 0.4, "10.00", self_percent="10.0 %"),
        Line("    attn", "1", times("2.50", "3.50"), "6.00", "30.0 %", 0.3, "7.50", self_percent="30.0 %"),
        Line("  layers.1", "1", times("2.00", "3.00"), "5.00", "25.0 %", 0.25, "6.00", self_percent="25.0 %"),
        Line("  lm_head", "1", times("1.00", "1.00"), "2.00", "10.0 %", 0.1, "1.50", self_percent="10.0 %"),
        Line("(none) forward", "1", times("1.00"), "1.00", "5.0 %", 0.05, "22.00", outside=True, self_percent="5.0 %"),
        Line("(none) optimizer", "1", times(), "4.00", "20.0 %", 0.2, "0.50", outside=True, self_percent="20.0 %"),
        Line("(none) other", "", times(), "", "0.0 %", 0.0, "", outside=True),
    ]


def test_the_total_is_the_sum_of_the_top_level() -> None:
    # forward 6 + 1 outside the layers, backward 9, total 15 + 1 + 4
    assert total_line(layers_result()) == Line("total", "", times("7.00", "9.00"), "20.00", "100.0 %")


def test_without_steps_the_times_are_the_captures() -> None:
    result = layers_result()
    whole = replace(result, summary=replace(result.summary, steps=0))
    assert layers_lines(whole, LayersView())[0] == Line(
        "model", "2", times("12.00", "18.00"), "30.00", "75.0 %", 0.75, "40.00"
    )


def test_depth_hides_children_and_keeps_what_is_outside() -> None:
    labels = [line.label for line in layers_lines(layers_result(), LayersView(depth=2))]
    assert labels == [
        "model",
        "  layers.0",
        "  layers.1",
        "  lm_head",
        "(none) forward",
        "(none) optimizer",
        "(none) other",
    ]


def test_percentages_of_the_top_level_add_up() -> None:
    thirds = tree().iloc[[0, 5, 6]].assign(total_ns=[MS, MS, MS])
    result = layers_result(tree=thirds)
    lines = layers_lines(replace(result, summary=replace(result.summary, total_ns=3 * MS)), LayersView())
    assert [line.percent for line in lines] == ["33.4 %", "33.3 %", "33.3 %"]


def printed(result: object) -> str:
    print_to(file := io.StringIO(), layers_report(result, LayersView()))  # type: ignore[arg-type]
    return file.getvalue()


def test_the_whole_report() -> None:
    assert printed(layers_result()) == REPORT


def test_recompute_has_a_column_where_there_is_any() -> None:
    with_recompute = tree()
    with_recompute.loc[0, ["backward_ns", "recompute_ns"]] = [10 * MS, 8 * MS]
    text = printed(layers_result(tree=with_recompute))
    assert "recompute" in text
    assert "5.00       4.00  15.00" in text


def test_a_capture_without_a_gpu_says_so() -> None:
    result = layers_result()
    text = printed(replace(result, info=replace(result.info, on_gpu=False, gpus=())))
    assert "Operations are CPU operators: this capture has no GPU" in text
    assert "Operator time: 20.00 ms per step" in text
    assert "GPU time" not in text


def test_how_the_owner_was_told_where_it_was_not_always_the_launch() -> None:
    result = layers_result()
    by_how = {"launch": 10 * MS, "graph node": 30 * MS - 1, "none": 1}
    text = printed(replace(result, summary=replace(result.summary, by_how=by_how)))
    assert "Attributed by: launch 25.0 %, graph node 75.0 %, none <0.001 %" in text


def test_an_empty_capture() -> None:
    result = layers_result(tree=tree()[:0])
    empty = replace(result.summary, total_ns=0, layer_ns=0, wall_ns=0, ops=0, steps=0, by_how={}, loop_layer_share=0.0)
    assert "GPU time: 0 ms, 0 operations\n" in printed(replace(result, summary=empty))


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_any_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    table = printed(layers_result()).split("\n\n")[1]
    assert max(map(len, table.splitlines())) <= columns
    assert ("forward" in table) == (columns > 40)


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
! nsys dropped 3 events; record less at once
"""
