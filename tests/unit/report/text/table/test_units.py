"""Nanoseconds and shares as a person reads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvprof_kit._report.text.units import (
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


@pytest.mark.parametrize(
    ("total_ns", "decimals"),
    [(0, 3), (900_000, 3), (1_234_000, 3), (12_340_000, 2), (123_400_000, 1), (1_234_000_000, 0), (98_765_000_000, 0)],
)
def test_a_total_has_about_four_digits(total_ns: int, decimals: int) -> None:
    assert Milliseconds.for_total(total_ns).decimals == decimals


def test_the_decimals_are_those_of_the_total_per_step() -> None:
    assert Milliseconds.for_total(1_234_000_000, 100) == Milliseconds(divisor=100, decimals=2)


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, ""),
        (1, "<0.01"),
        (4_999, "<0.01"),
        (5_001, "0.01"),
        (12_345_678, "12.35"),
        (1_234_567_890_000, "1,234,567.89"),
    ],
)
def test_milliseconds(ns: int, text: str) -> None:
    assert Milliseconds(divisor=1, decimals=2)(ns) == text


def test_whole_milliseconds_of_almost_nothing() -> None:
    assert Milliseconds(divisor=1, decimals=0)(400_000) == "<1"


@pytest.mark.parametrize(("count", "steps", "text"), [(0, 2, ""), (8, 2, "4"), (5, 4, "1.2"), (40_000, 10, "4,000")])
def test_count_per_step(count: int, steps: int, text: str) -> None:
    assert count_per_step(count, steps) == text


@pytest.mark.parametrize(("share", "text"), [(0, "0.0 %"), (0.0004, "0.04 %"), (0.0005, "0.1 %"), (0.5, "50.0 %")])
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text


def test_thirds_add_up_to_a_hundred() -> None:
    assert percents([1, 1, 1]) == ["33.4 %", "33.3 %", "33.3 %"]


def test_percentages_of_nothing() -> None:
    assert percents([]) == []
    assert percents([0, 0]) == ["0.0 %", "0.0 %"]


def test_a_little_is_not_nothing() -> None:
    assert percents([1, 99_999, 0]) == ["0.001 %", "100.0 %", "0.0 %"]


@given(st.lists(st.integers(0, 10**15), min_size=1).filter(any))
def test_percentages_always_add_up(parts: list[int]) -> None:
    tenths = [0 if text.startswith("<") else round(10 * float(text.removesuffix(" %"))) for text in percents(parts)]
    assert sum(tenths) == 1000
    assert all(abs(tenth / 1000 - part / sum(parts)) <= 0.001 for tenth, part in zip(tenths, parts, strict=True))


@pytest.mark.parametrize(
    ("cell", "of", "text"),
    [
        (mib_cell, 3 << 20, "3.0"),
        (mib_cell, 12 << 10, "12 KiB"),
        (mib_cell, -8, "-8 B"),
        (mib_cell, 0, "0.0"),
        (mb_cell, 1_500_000, "1.5"),
        (mb_cell, 12_000, "12 kB"),
        (mb_cell, 8, "8 B"),
        (rate_cell, 1.54, "1.5"),
        (rate_cell, 0.008, "8 MB/s"),
        (rate_cell, 0.00042, "420 kB/s"),
        (rate_cell, 1e-9, "<1 kB/s"),
        (rate_cell, 0, "0.0"),
        (memory_size, 12 << 10, "12 KiB"),
        (memory_size, 3 << 20, "3.0 MiB"),
        (Cells(1, 3), -300, "-300 ns"),
        (Cells(1, 1), 20_000, "20 µs"),
        (duration, 300, "300 ns"),
        (duration, 1_234_000, "1.234 ms"),
    ],
)
def test_a_small_figure_scales_its_unit(cell: Callable[[float], str], of: float, text: str) -> None:
    assert cell(of) == text
