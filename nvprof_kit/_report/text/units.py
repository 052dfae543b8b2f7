"""Formats numbers with units for tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

_NS_PER_MS = 1_000_000


@dataclass(frozen=True)
class Milliseconds:
    """Formats times in milliseconds, all with the same number of decimals.

    Attributes:
        divisor: Divisor of each time, such as the number of steps.
        decimals: Number of decimals.
    """

    divisor: int
    decimals: int

    @classmethod
    def for_total(cls, total_ns: int, divisor: int = 1) -> Milliseconds:
        """Enough decimals for four digits of a table's total (1.234, 12.34, 123.4), from 0 to 3."""
        total_ms = max(total_ns / divisor / _NS_PER_MS, 1e-9)
        return cls(divisor, min(max(3 - math.floor(math.log10(total_ms)), 0), 3))

    def __call__(self, ns: int) -> str:
        """The time; '' for zero. A small time is never shown as 0."""
        if ns == 0:
            return ""
        text = f"{ns / self.divisor / _NS_PER_MS:,.{self.decimals}f}"
        return text if text.strip("-0.,") else f"<{10.0**-self.decimals:.{self.decimals}f}"


@dataclass(frozen=True)
class Cells(Milliseconds):
    """The same for table cells: times too small for the decimals are in µs or ns, such as ``20 µs``."""

    def __call__(self, ns: int) -> str:
        """The time; '' for zero."""
        text = super().__call__(ns)
        if not text.startswith("<"):
            return text
        each = ns / self.divisor
        return f"{each / 1000:,.0f} µs" if abs(each) >= 1000 else f"{each:.0f} ns" if abs(each) >= 1 else "<1 ns"


def duration(ns: int) -> str:
    """A time with its unit, for sentences: ``1.234 ms``, ``20 µs``."""
    text = Cells(1, 3)(ns) or "0"
    return text if text.endswith("s") else f"{text} ms"


def count_per_step(count: int, steps: int) -> str:
    """A count divided by the steps: ``8``, or ``0.2`` if it is not an integer; '' for zero."""
    if count == 0:
        return ""
    return f"{count // steps:,}" if count % steps == 0 else f"{count / steps:,.1f}"


def mib_cell(count: int) -> str:
    """Bytes in MiB for table cells: ``1,234.5``; small numbers are in KiB or bytes, such as ``12 KiB``."""
    text = f"{count / (1 << 20):,.1f}"
    if not count or text.strip("-0."):
        return text
    return f"{count / 1024:.0f} KiB" if abs(count) >= 1024 else f"{count} B"


def memory_size(count: int) -> str:
    """Bytes with their unit, for sentences: ``1,234.5 MiB``, ``12 KiB``."""
    text = mib_cell(count)
    return text if text.endswith("B") else f"{text} MiB"


def mb_cell(count: float) -> str:
    """Bytes in units of 10⁶ bytes for table cells: ``1,234.5``; small numbers are in kB or bytes, such as ``12 kB``."""
    text = f"{count / 1e6:,.1f}"
    if not count or text.strip("-0."):
        return text
    return f"{count / 1000:.0f} kB" if abs(count) >= 1000 else f"{count:.0f} B"


def rate_cell(gb_per_s: float) -> str:
    """A rate in units of 10⁹ bytes per second for table cells: ``1,234.5``; small rates are in MB/s or kB/s."""
    text = f"{gb_per_s:,.1f}"
    if not gb_per_s or text.strip("-0."):
        return text
    each = gb_per_s * 1e6
    return f"{each / 1000:.0f} MB/s" if each >= 1000 else f"{each:.0f} kB/s" if each >= 1 else "<1 kB/s"


def percent(share: float) -> str:
    """A fraction as ``12.3 %``, or, if small, as ``0.03 %``."""
    if not 0 < share < 0.0005:
        return f"{100 * share:.1f} %"
    return f"{100 * share:.1g} %" if share >= 0.000005 else "<0.001 %"


def percents(parts: Sequence[int]) -> list[str]:
    """The parts of a whole in percent, rounded to add up to 100.0: the largest remainders are rounded up."""
    total = sum(parts) or 1
    exact = [1000 * ns / total for ns in parts]
    tenths = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(parts)), key=lambda index: tenths[index] - exact[index])
    for index in by_remainder[: 1000 - sum(tenths) if any(parts) else 0]:
        tenths[index] += 1
    return [
        percent(min(ns / total, 0.000499)) if ns and not tenth else percent(tenth / 1000)
        for ns, tenth in zip(parts, tenths, strict=True)
    ]


def counted(names: Iterable[str]) -> str:
    """Names with their counts: ``2 x NVIDIA H100, NVIDIA A100``."""
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in Counter(names).items())


def is_missing(value: Any) -> bool:
    """Whether a table has no value there."""
    return value is None or str(value) in ("<NA>", "nan", "NaT")


MS = Cells(1, 3)
"""Milliseconds with three decimals."""

BY_ENDING: Mapping[str, Callable[[Any], str]] = MappingProxyType(
    {
        "_at_ns": lambda ns: f"{ns / 1e9:.6f} s",
        "_ns": lambda ns: MS(round(ns)),
        **dict.fromkeys(("share", "ratio", "utilisation", "hidden", "of_link", "of_limit", "fragmentation"), percent),
        "gb_per_s": rate_cell,
        "bytes": mb_cell,
    }
)
"""How the value of a column is written, by the end of the column's name."""


def cell(name: str, value: Any, writers: Mapping[str, Callable[[Any], str]] = MappingProxyType({})) -> str:
    """A value of a table: '' if it is missing, else as one of `writers` or `BY_ENDING` writes it.

    Args:
        name: The column.
        value: The value.
        writers: How columns are written that have their own way, by the end of their names.
    """
    if is_missing(value):
        return ""
    if isinstance(value, str):
        return value
    for ending, write in (*writers.items(), *BY_ENDING.items()):
        if name.endswith(ending):
            return write(value)
    if isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:,.1f}" if isinstance(value, float) and value != int(value) else f"{int(value):,}"


def heading(name: str, headings: Mapping[str, str] = MappingProxyType({})) -> str:
    """The heading of a column by its name: what it measures, without its unit."""
    text = headings.get(name, name.replace("gb_per_s", "GB/s").removesuffix("_ns").replace("_", " "))
    return text.replace("cpu ", "CPU ").replace("gpu ", "GPU ")
