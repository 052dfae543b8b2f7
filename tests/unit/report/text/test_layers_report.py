"""The per-layer table as a person reads it: its lines, figures and bars, at a terminal and in a notebook."""

from __future__ import annotations

import builtins
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import rich.jupyter
from hypothesis import given, settings
from hypothesis import strategies as st
from support.captures.layers_result import MS, layers_result, rows_by_step, tree

import nvprof_kit


def printed(**changes: object) -> str:
    """The table with its times in phases: the rows are not by step."""
    rows = rows_by_step().drop(columns=["step", "instance"])
    return str(layers_result(**{"rows": rows, **changes}))


def labels(text: str) -> list[str]:
    table = text.split("\n\n", 1)[1].partition("\ntotal")[0]
    return [line[:20].rstrip() for line in table.splitlines()[2:] if line]


def test_without_steps_the_times_are_the_captures() -> None:
    summary = replace(layers_result().summary, steps=0)
    assert "model                 2    12.00     18.00  30.00                   75.0 %" in printed(summary=summary)


def test_depth_hides_children_and_keeps_what_is_outside() -> None:
    assert labels(printed(depth=2)) == [
        "model", "  layers.0", "  layers.1", "  lm_head", "(none) forward", "(none) optimizer", "(none) other",
    ]  # fmt: skip


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


def test_by_step_children_are_in_their_parents_and_the_steps_in_order() -> None:
    # model.layers.0: own 3 + attn 6, own 1 + attn 6; model: all layers below
    assert str(layers_result()).split("\n\n", 1)[1] == BY_STEP


def test_many_steps_say_how_many_are_left_out() -> None:
    rows = pd.concat([rows_by_step().assign(step=number, instance=number) for number in range(11)])
    rows = rows.astype({"step": "Int64", "instance": "Int64"})
    text = str(layers_result(rows=rows.reset_index(drop=True)))
    assert "step 7" in text
    assert "step 8" not in text
    assert "3 more columns are left out here; -o FILE.csv has all steps." in text


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


def layers_of(*times: int, steps: int = 0) -> nvprof_kit.Layers:
    """A table of layers without children that took these nanoseconds."""
    rows = [tree().iloc[[0]].assign(layer=f"l{n}", forward_ns=ns, total_ns=ns) for n, ns in enumerate(times)]
    total = pd.concat([*rows, tree().iloc[:0]], ignore_index=True).assign(backward_ns=0)
    summary = replace(layers_result().summary, total_ns=sum(times), steps=steps)
    plain = layers_result().rows.drop(columns=["step", "instance"])
    return layers_result(rows=plain, tree=total, summary=summary)


def cells(result: nvprof_kit.Layers) -> list[list[str]]:
    """The cells of the layers: name, calls, forward, total, share, perhaps a bar, CPU."""
    return [re.split(" {2,}", line) for line in str(result).splitlines() if re.match(r"l\d", line)]


@pytest.mark.parametrize(
    ("times", "steps", "printed"),
    [
        # a total has about four digits, those of a step where there are several; what would be 0 has a smaller unit
        ((1_234_000,), 0, ["1.234"]),
        ((12_340_000, 4_999), 0, ["12.34", "5 µs"]),
        ((1_234_000_000, 300), 0, ["1,234", "300 ns"]),
        ((1_234_567_890_000,), 0, ["1,234,568"]),
        ((1_234_000_000,), 100, ["12.34"]),
        ((1_000_000, 1), 100, ["0.010", "<1 ns"]),
    ],
)
def test_times(times: tuple[int, ...], steps: int, printed: list[str]) -> None:
    assert [row[2] for row in cells(layers_of(*times, steps=steps))] == printed


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 10**15), min_size=1, max_size=6))
def test_percentages_always_add_up(times: list[int]) -> None:
    shares = [row[4].removesuffix(" %") for row in cells(layers_of(*times))]
    tenths = [0 if text.startswith("<") else round(10 * float(text)) for text in shares]
    assert sum(tenths) == 1000
    assert all(abs(tenth / 1000 - ns / sum(times)) <= 0.001 for tenth, ns in zip(tenths, times, strict=True))


@pytest.mark.parametrize(("share", "bar"), [(0.001, "▏"), (0.5, "█" * 12), (0.53, "█" * 12 + "▊"), (1, "█" * 24)])
def test_bars(share: float, bar: str) -> None:
    assert cells(layers_of(1_000_000, round(1_000_000 * share)))[1][5] == bar


def test_a_pipe_gets_no_colours_and_no_spaces_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    text = layers_result().encode("table").decode()
    assert "\x1b" not in text and not [line for line in text.splitlines() if line != line.rstrip()]
    widths = []
    for columns in ("80", "100", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        widths.append(max(line.count("█") for line in str(layers_of(1_000_000)).splitlines()))
    assert widths == sorted(widths) and widths[0] < widths[-1] == 24


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {
                "path": "r.sqlite",
                "tool": "nsys 2024.2",
                "gpus": ("NVIDIA H200", "NVIDIA H200", "NVIDIA L4"),
                "processes": 2,
            },
            "r.sqlite · nsys 2024.2 · 2 x NVIDIA H200, NVIDIA L4 · 2 processes, added up · 2 steps",
        ),
        (
            {"path": "r.json", "tool": "PyTorch profiler (Kineto)", "on_gpu": False},
            "r.json · PyTorch profiler (Kineto) · no GPU · 2 steps",
        ),
    ],
)
def test_the_line_about_the_capture(changes: dict[str, object], line: str) -> None:
    result = layers_result()
    assert str(replace(result, info=replace(result.info, **changes))).splitlines()[0] == line


DATA = Path(__file__).parents[3] / "data"


class ZMQInteractiveShell:
    """By this name rich knows that it runs in Jupyter."""


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What rich shows by itself in a notebook."""
    found: list[object] = []
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setattr(rich.jupyter, "display", lambda *parts: found.append(parts))
    return found


def test_an_answer_is_shown_once(shown: list[object]) -> None:
    layers = nvprof_kit.open(DATA / "encoder-2023.4.sqlite.xz").layers(depth=2)
    assert layers._repr_html_().startswith("<pre")
    assert "Encoder" in str(layers) and "Encoder" in repr(layers)
    assert shown == []  # else each line stands above the table once more


def test_a_job_and_its_tables(shown: list[object]) -> None:
    ranks = [DATA / "ranks" / f"ranks-ddp-layer.rank{rank}-2024.2.sqlite.xz" for rank in (0, 1)]
    job = nvprof_kit.open_job(ranks)
    assert "straggler" in job._repr_html_() and repr(job) == str(job)
    clocks = job.clocks()
    assert clocks._repr_html_().startswith("<pre") and "offset" in repr(clocks)
    assert shown == []


def test_a_notebook_shows_a_plot_as_a_picture() -> None:
    capture = nvprof_kit.open(DATA / "slow-2024.2.sqlite.xz")
    for plot in (capture.plot(steps=5), capture.layers(depth=2).plot()):
        assert "data:image/png" in plot._repr_html_() and len(plot._repr_html_()) < 200_000
