"""The per-layer table with a column for each step."""

from __future__ import annotations

import io

import pandas as pd
from support.captures.layers_result import MS, layers_result, rows_by_step

from nvprof_kit._report.text.layers import LayersView
from nvprof_kit._report.text.layers_by_step import MAX_STEPS, layers_by_step, layers_by_step_report
from nvprof_kit._report.text.table.terminal import print_to


def test_children_are_in_their_parents_and_the_steps_in_order() -> None:
    times = layers_by_step(layers_result()) // MS
    assert list(times.columns) == [0, 1, "outside"]
    assert list(times.itertuples(name=None)) == [
        ("model", 16, 14, 0),  # all layers below
        ("model.layers.0", 9, 7, 0),  # own 3 + attn 6, own 1 + attn 6
        ("model.layers.0.attn", 6, 6, 0),
        ("model.layers.1", 5, 5, 0),
        ("lm_head", 2, 2, 0),
        ("(none)forward", 0, 2, 0),
        ("(none)optimizer", 4, 3, 1),
        ("(none)other", 0, 0, 0),
        ("total", 20, 19, 1),
    ]


def printed(**changes: object) -> str:
    print_to(file := io.StringIO(), layers_by_step_report(layers_result(**changes), LayersView(depth=1)))
    return file.getvalue()


def test_report() -> None:
    assert printed().split("\n\n", 1)[1] == (
        "layer             step 0  step 1  outside\n"
        "─────────────────────────────────────────\n"
        "model              16.00   14.00\n"
        "(none) forward              2.00\n"
        "(none) optimizer    4.00    3.00     1.00\n"
        "(none) other\n"
        "\n"
        "total              20.00   19.00     1.00\n"
        "\n"
        "Milliseconds of GPU time in each step, all phases together, including nested layers.\n"
        "! nsys dropped 3 events; record less at once\n"
    )


def test_many_steps_say_how_many_are_left_out() -> None:
    numbers = (pd.array([number] * 15, dtype="Int64") for number in range(MAX_STEPS + 3))
    rows = pd.concat([rows_by_step().assign(step=number, instance=number) for number in numbers])
    text = printed(rows=rows.reset_index(drop=True))
    assert "step 7" in text
    assert "step 8" not in text
    assert "3 more columns are left out here; -o FILE.csv has all steps." in text
