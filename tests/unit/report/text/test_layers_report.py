"""The per-layer table as a person reads it: its lines, figures and bars, at a terminal and in a notebook."""

import builtins
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import rich.jupyter
from hypothesis import given
from hypothesis import strategies as st
from support.captures.nsys_file import NsysFile
from support.data import DATA

import nvprof_kit

MS = 1_000_000


def program(path: Path, numbers: Sequence[int] = (0, 1)) -> nvprof_kit.Capture:
    """A model of two blocks, an optimizer outside of it, and a kernel behind the steps; block 0 itself takes 2 ms in
    step 0 and 1 ms in others.
    """
    file = NsysFile(path)
    ranges = [("model", 10, 1000), ("model.layers.0", 20, 400), ("model.layers.0.attn", 30, 200)]
    for step, number in enumerate(numbers):
        zero = 100 * MS * step
        file.range_(f"step {number}", zero, zero + 25 * MS, category="step", payload=number)
        for text, start, end in (*ranges, ("model.layers.1", 410, 700)):
            file.range_(text, zero + start, zero + end, category="forward")
        file.range_("optimizer", zero + 2000, zero + 3000, category="phase")
        begin = zero + 5 * MS
        for launch, ms in ((50, 6), (300, 1 + (step == 0)), (500, 5), (2500, 4)):
            file.kernel(begin, begin + ms * MS, launched=(zero + launch, zero + launch + 5))
            begin += ms * MS
    last = 100 * len(numbers) * MS
    file.kernel(last + MS, last + 2 * MS, launched=(last - MS, last - MS + 5))
    return nvprof_kit.open(file.write())


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> nvprof_kit.Capture:
    return program(tmp_path_factory.mktemp("program") / "run.sqlite")


def test_the_table_of_phases_and_that_of_steps(capture, tmp_path, golden):
    """Per step 16.5 ms: the blocks 7.5 (one step 8, one 7) and 5, the optimizer 4; behind the steps 1 of 34 ms."""
    tables = capture.layers(), capture.layers(by="step", steps="all")
    golden("layers/printed.txt", "".join(str(table).split("\n", 1)[1] + "\n" for table in tables))
    assert "attn" not in str(capture.layers(depth=2)) and "(none) optimizer" in str(capture.layers(depth=2))
    many = str(program(tmp_path / "run.sqlite", range(11)).layers(by="step"))
    assert "step 7" in many and "step 8" not in many
    assert "3 more columns are left out here; -o FILE.csv has all steps." in many
    twice = str(program(tmp_path / "twice.sqlite", (1, 2, 1)).layers(by="step"))
    assert "step 1 (0)  step 2 (1)  step 1 (2)" in twice and "(0)" not in many


@pytest.mark.parametrize(
    ("info", "by_how", "expected", "absent"),
    [
        ({"on_gpu": False, "gpus": ()}, {}, "Operator time: 16.50 ms per step", "GPU time"),
        ({}, {"launch": 10 * MS, "graph node": 23 * MS - 1, "none": 1},
         "known from: the range around its launch 30.3 %, the range in which its CUDA graph was captured 69.7 %, ",
         "recompute"),
        ({}, {"launch": 30 * MS, "none": 3 * MS}, "In a named layer", "known from"),
        ({"path": "r.sqlite", "tool": "nsys 2024.2", "gpus": ("NVIDIA H200", "NVIDIA H200", "NVIDIA L4"),
          "processes": 2}, {},
         "r.sqlite · nsys 2024.2 · 2 x NVIDIA H200, NVIDIA L4 · 2 processes, added up · 2 steps\n", "Warm-up"),
        ({"path": "r.json", "tool": "PyTorch profiler (Kineto)", "on_gpu": False}, {},
         "r.json · PyTorch profiler (Kineto) · no GPU · 2 steps\n", "GPU"),
    ],
)  # fmt: skip
def test_lines_about_the_capture(info, by_how, expected, absent, capture):
    result = capture.layers()
    summary = replace(result.summary, by_how=by_how or result.summary.by_how)
    head = str(replace(result, info=replace(result.info, **info), summary=summary)).split("\n\n", 1)[0] + "\n"
    assert expected in head and absent not in head.replace("no GPU", "")


def test_recompute_has_a_column_where_there_is_any(capture):
    result = capture.layers()
    tree = result.tree.copy()
    tree.loc[0, ["forward_ns", "backward_ns", "recompute_ns"]] = [7 * MS, 10 * MS, 8 * MS]
    text = str(replace(result, tree=tree))
    assert "recompute" in text and "3.50      5.00       4.00  12.50" in text


def layers_of(capture: nvprof_kit.Capture, *times: int, steps: int = 0) -> nvprof_kit.Layers:
    """A table of layers without children that took these nanoseconds."""
    result = capture.layers()
    row = result.tree.iloc[[0]].assign(backward_ns=0)
    tree = pd.concat([row.assign(layer=f"l{n}:fire:", forward_ns=ns, total_ns=ns) for n, ns in enumerate(times)])
    summary = replace(result.summary, total_ns=sum(times), steps=steps)
    return replace(result, tree=tree.reset_index(drop=True), summary=summary)


def cells(result: nvprof_kit.Layers) -> list[list[str]]:
    """The cells of the layers: name (not an emoji), calls, forward, total, share, perhaps a bar, CPU."""
    return [re.split(" {2,}", line) for line in str(result).splitlines() if re.match(r"l\d:fire: ", line)]


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
def test_times(times, steps, printed, capture):
    assert [row[2] for row in cells(layers_of(capture, *times, steps=steps))] == printed


@given(times=st.lists(st.integers(1, 10**15), min_size=1, max_size=6))
def test_percentages_always_add_up(times, capture):
    shares = [row[4].removesuffix(" %") for row in cells(layers_of(capture, *times))]
    tenths = [0 if text.startswith("<") else round(10 * float(text)) for text in shares]
    assert sum(tenths) == 1000
    assert all(abs(tenth / 1000 - ns / sum(times)) <= 0.001 for tenth, ns in zip(tenths, times, strict=True))


def test_a_pipe_gets_no_colours_and_no_spaces_at_the_end(capture, monkeypatch):
    text = capture.layers().encode("table").decode()
    assert "\x1b" not in text and not [line for line in text.splitlines() if line != line.rstrip()]
    widths = []
    for columns in ("80", "100", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        widths.append(max(line.count("█") for line in str(layers_of(capture, 1_000_000)).splitlines()))
    assert widths == sorted(widths) and widths[0] < widths[-1] == 24


def test_an_answer_is_shown_once(monkeypatch):
    shown: list[object] = []
    shell = type("ZMQInteractiveShell", (), {})  # by this name rich knows that it runs in Jupyter
    monkeypatch.setattr(builtins, "get_ipython", shell, raising=False)
    monkeypatch.setattr(rich.jupyter, "display", lambda *parts: shown.append(parts))
    layers = nvprof_kit.open(DATA / "encoder-2023.4.sqlite.xz").layers(depth=2)
    assert layers._repr_html_() and "Encoder" in str(layers) and "Encoder" in repr(layers)
    assert shown == []  # else each line stands above the table once more


def test_a_notebook_shows_a_plot_as_a_picture():
    capture = nvprof_kit.open(DATA / "slow-2024.2.sqlite.xz")
    for plot in (capture.plot(steps=5), capture.layers(depth=2).plot()):
        assert "data:image/png" in plot._repr_html_() and len(plot._repr_html_()) < 200_000
