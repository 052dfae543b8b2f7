"""Figures as a person reads them, and the bars and lines that every table is made of."""

from __future__ import annotations

import re
from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.captures.layers_result import layers_result, tree

from nvprof_kit import Layers


def layers_of(*times: int, steps: int = 0) -> Layers:
    """A table of layers without children that took these nanoseconds."""
    rows = [tree().iloc[[0]].assign(layer=f"l{n}", forward_ns=ns, total_ns=ns) for n, ns in enumerate(times)]
    total = pd.concat([*rows, tree().iloc[:0]], ignore_index=True).assign(backward_ns=0)
    summary = replace(layers_result().summary, total_ns=sum(times), steps=steps)
    plain = layers_result().rows.drop(columns=["step", "instance"])
    return layers_result(rows=plain, tree=total, summary=summary)


def cells(result: Layers) -> list[list[str]]:
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
