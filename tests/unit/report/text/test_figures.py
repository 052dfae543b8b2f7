"""Figures as a person reads them, and the bars and lines that every table is made of."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from nvprof_kit._report.text.table import Bar, capture_line, print_to, table
from nvprof_kit._report.text.texts import (
    Cells,
    Milliseconds,
    count_per_step,
    duration,
    mb_cell,
    memory_size,
    mib_cell,
    percent,
    percents,
    rate_cell,
)
from nvprof_kit._trace.schema import CaptureInfo

CASES: list[tuple[Callable[..., object], object, object]] = [
    # a total has about four digits, those of a step where there are several
    *((lambda ns: Milliseconds.for_total(ns).decimals, ns, decimals) for ns, decimals in (
        (0, 3), (1_234_000, 3), (12_340_000, 2), (123_400_000, 1), (1_234_000_000, 0))),
    (lambda ns: Milliseconds.for_total(ns, 100), 1_234_000_000, Milliseconds(divisor=100, decimals=2)),
    *((Milliseconds(divisor=1, decimals=2), ns, text) for ns, text in (
        (0, ""), (4_999, "<0.01"), (5_001, "0.01"), (1_234_567_890_000, "1,234,567.89"))),
    (Milliseconds(divisor=1, decimals=0), 400_000, "<1"),
    *((lambda pair: count_per_step(*pair), pair, text) for pair, text in (
        ((0, 2), ""), ((8, 2), "4"), ((5, 4), "1.2"), ((40_000, 10), "4,000"))),
    *((percent, share, text) for share, text in ((0, "0.0 %"), (0.0004, "0.04 %"), (0.0005, "0.1 %"), (0.5, "50.0 %"))),
    (percents, [1, 1, 1], ["33.4 %", "33.3 %", "33.3 %"]),
    (percents, [], []),
    (percents, [0, 0], ["0.0 %", "0.0 %"]),
    (percents, [1, 99_999, 0], ["0.001 %", "100.0 %", "0.0 %"]),
    (mib_cell, 3 << 20, "3.0"),
    (mib_cell, 12 << 10, "12 KiB"),
    (mib_cell, -8, "-8 B"),
    (mib_cell, 0, "0.0"),
    (mb_cell, 1_500_000, "1.5"),
    (mb_cell, 12_000, "12 kB"),
    (rate_cell, 1.54, "1.5"),
    (rate_cell, 0.008, "8 MB/s"),
    (rate_cell, 1e-9, "<1 kB/s"),
    (memory_size, 12 << 10, "12 KiB"),
    (Cells(1, 3), -300, "-300 ns"),
    (Cells(1, 1), 20_000, "20 µs"),
    (duration, 300, "300 ns"),
    (duration, 1_234_000, "1.234 ms"),
]  # fmt: skip


@pytest.mark.parametrize(("write", "figure", "text"), CASES)
def test_a_figure(write: Callable[..., object], figure: object, text: object) -> None:
    assert write(figure) == text


@given(st.lists(st.integers(0, 10**15), min_size=1).filter(any))
def test_percentages_always_add_up(parts: list[int]) -> None:
    tenths = [0 if text.startswith("<") else round(10 * float(text.removesuffix(" %"))) for text in percents(parts)]
    assert sum(tenths) == 1000
    assert all(abs(tenth / 1000 - part / sum(parts)) <= 0.001 for tenth, part in zip(tenths, parts, strict=True))


def printed(*parts: object) -> list[str]:
    print_to(file := io.StringIO(), parts)
    return file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("share", "bar"), [(0, ""), (0.001, "▏"), (0.5, "████"), (0.55, "████▍"), (1, "████████"), (7, "████████")]
)
def test_bar(share: float, bar: str) -> None:
    assert printed(Bar(share, width=8)) == [bar]


def test_bar_in_ascii() -> None:
    console = Console(file=io.TextIOWrapper(raw := io.BytesIO(), encoding="ascii"), width=40)
    console.print(Bar(0.5, width=8))
    console.file.flush()
    assert raw.getvalue() == b"####    \n"


def test_a_pipe_gets_no_colours_and_no_spaces_at_the_end() -> None:
    made = table([("name", "left"), ("ms", "right"), ("", "bar")])
    made.add_row("a", "1.5", Bar(0.25), style="bold")
    assert printed(made, Text("end", "dim")) == ["name   ms", "─" * 35, "a     1.5  ██████", "end"]


def test_columns_decides_the_width_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    made = table([("name", "left"), ("", "bar")])
    made.add_row("abc", Bar(1))
    assert printed(made)[-1] == "abc   " + "█" * 24
    monkeypatch.setenv("COLUMNS", "20")
    assert printed(made)[-1] == "abc   " + "█" * 14


def test_capture_line() -> None:
    info = CaptureInfo(
        path="r.sqlite", tool="nsys 2024.2", gpus=("NVIDIA H200", "NVIDIA H200", "NVIDIA L4"), processes=2
    )
    assert (
        str(capture_line(info, 1))
        == "r.sqlite · nsys 2024.2 · 2 x NVIDIA H200, NVIDIA L4 · 2 processes, added up · 1 step"
    )
    cpu = CaptureInfo(path="r.json", tool="PyTorch profiler (Kineto)", on_gpu=False)
    assert str(capture_line(cpu, 0)) == "r.json · PyTorch profiler (Kineto) · no GPU · no steps"
