"""Names of kernels short enough for a table."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_NS_PER_MS = 1_000_000


@dataclass(frozen=True)
class Milliseconds:
    """Writes times as milliseconds, every one with the same number of decimals, so that a column can be read down.

    Attributes:
        divisor: What each time is divided by first: the number of steps, where times are per step.
        decimals: Digits behind the point.
    """

    divisor: int
    decimals: int

    @classmethod
    def for_total(cls, total_ns: int, divisor: int = 1) -> Milliseconds:
        """As many decimals as give a table's total four digits: 1.234, 12.34, 123.4, and then whole milliseconds."""
        total_ms = max(total_ns / divisor / _NS_PER_MS, 1e-9)
        return cls(divisor, min(max(3 - math.floor(math.log10(total_ms)), 0), 3))

    def __call__(self, ns: int) -> str:
        """The time, '' for none at all, and never a zero for a little."""
        if ns == 0:
            return ""
        text = f"{ns / self.divisor / _NS_PER_MS:,.{self.decimals}f}"
        return text if text.strip("0.,") else f"<{10.0**-self.decimals:.{self.decimals}f}"


@dataclass(frozen=True)
class Cells(Milliseconds):
    """The same for the cells of a table: what is too little for its decimals is written in µs or ns, ``20 µs``."""

    def __call__(self, ns: int) -> str:
        """The time, '' for none at all."""
        text = super().__call__(ns)
        if not text.startswith("<"):
            return text
        each = ns / self.divisor
        return f"{each / 1000:,.0f} µs" if each >= 1000 else f"{each:.0f} ns" if each >= 1 else "<1 ns"


def count_per_step(count: int, steps: int) -> str:
    """A count divided by the steps: ``8``, or ``0.2`` where it does not come out even, and '' for none."""
    if count == 0:
        return ""
    return f"{count // steps:,}" if count % steps == 0 else f"{count / steps:,.1f}"


def mib(count: int) -> str:
    """Bytes in MiB: ``1,234.5``, and never a zero for a little."""
    text = f"{count / (1 << 20):,.1f}"
    return ("<0.1" if count > 0 else ">-0.1") if count and text in ("0.0", "-0.0") else text


def mib_cell(count: int) -> str:
    """The same for the cells of a table: a little is written in KiB or bytes, ``12 KiB``."""
    text = mib(count)
    if not text.startswith(("<", ">")):
        return text
    return f"{count / 1024:.0f} KiB" if abs(count) >= 1024 else f"{count} B"


def percent(share: float) -> str:
    """A share of 1 as ``12.3 %``, and a little one as ``0.03 %``."""
    if not 0 < share < 0.0005:
        return f"{100 * share:.1f} %"
    return f"{100 * share:.1g} %" if share >= 0.000005 else "<0.001 %"


def percents(parts: Sequence[int]) -> list[str]:
    """The parts of a whole as percentages whose digits add up to 100.0: those with the largest remainders go up."""
    whole = sum(parts) or 1
    exact = [1000 * part / whole for part in parts]
    tenths = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(parts)), key=lambda index: tenths[index] - exact[index])
    for index in by_remainder[: 1000 - sum(tenths) if any(parts) else 0]:
        tenths[index] += 1
    return [
        percent(min(part / whole, 0.000499)) if part and not tenth else percent(tenth / 1000)
        for part, tenth in zip(parts, tenths, strict=True)
    ]


def counted(names: Iterable[str]) -> str:
    """Names with how often each occurs: ``2 x NVIDIA H100, NVIDIA A100``."""
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in Counter(names).items())


_NAMESPACES = re.compile(r"(?:\w+::|<unnamed>::|\(anonymous namespace\)::)+(?=\w)")


def short_kernel(name: str, width: int = 60) -> str:
    """A kernel's name without its return type, parameters and namespaces, cut to a width."""
    plain = _without_parameters(name.removeprefix("void ").replace("(anonymous namespace)", "<unnamed>"))
    plain = _NAMESPACES.sub("", plain)
    return plain if len(plain) <= width else f"{plain[: width - 1]}…"


def _without_parameters(name: str) -> str:
    """What stands before the parenthesis that is outside every angle bracket."""
    depth = 0
    for place, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return name[:place]
    return name
