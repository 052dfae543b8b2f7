"""How numbers, times and names are written: with units, without the noise of C++, and short enough to fit a column."""

from __future__ import annotations

import math
import os.path
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rich.cells import cell_len

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


_CAST = re.compile(r"\((?:unsigned |signed )?(?:int|long|long long|short|char|bool)\)(?=[-\w])")
_NAMESPACES = re.compile(r"(?:\w+::|<unnamed>::|\(anonymous namespace\)::)+(?=\w)")
_INSTANCE = re.compile(r"::[\[{]lambda\([^\[\]{}]*?\)(?: \(instance |#)(\d+)\)?[\]}]")
"""A lambda and its number in its function."""
_INNERMOST = re.compile(r"\((?!anonymous namespace)[^()\[\]{}]*\)|\[[^()\[\]{}]*\]|\{[^()\[\]{}]*\}")
"""Parameters of a function and the signature of a lambda, without others inside."""
_CALL_OPERATOR = re.compile(r"::(?:operator *|lambda\d*)?(?: *const)?(?=::|[,>#]|$)")
_RETURNS = re.compile(r"(?<=[<, ])void (?=\w)")
_PLAIN_ARGUMENT = re.compile(
    r"-?\d+[uUlL]*|true|false|(?:const )?(?:unsigned |signed )?(?:int|long|long long|short|char|bool|float|double|void)"
    r"(?: const)?[ *&]*|(?:__)?(?:nv_|hip_)?(?:half2?|bfloat16|bfloat162|bfloat16_t|half_t|tfloat32_t)|Half|BFloat16"
    r"|u?int\d+_t|(?:Tensor(?:List|Iterator)|OffsetCalculator|TrivialOffset|LoadWith|StoreWith|OpaqueType|array\b).*"
)
"""Template arguments that say on which numbers a kernel works, and not what it does."""
_LABEL = re.compile(r"(\s*)(.*?)((?: x\d+)?)", re.DOTALL)
"""A line's label: indentation, path, and number of folded blocks."""


def kernel_names(names: Iterable[str]) -> dict[str, str]:
    """Short names of kernels by their full names; different kernels have different names.

    Return type, parameters, namespaces and casts go; lambdas and template arguments that are numbers or types go too,
    unless two of the kernels differ by nothing else.
    """
    chosen: dict[str, str] = {}
    left = list(dict.fromkeys(names))
    for lambdas, arguments in ((False, False), (True, False), (False, True), (True, True)):
        short = {name: _kernel(name, lambdas, arguments) for name in left}
        users: dict[str, int] = {}
        for text in short.values():
            users[text] = users.get(text, 0) + 1
        taken = set(chosen.values())
        chosen |= {name: text for name, text in short.items() if users[text] == 1 and text not in taken}
        left = [name for name in left if name not in chosen]
    return chosen | {name: name for name in left}


def _kernel(name: str, lambdas: bool, arguments: bool) -> str:
    """A kernel's short name, with or without numbers of lambdas and plain template arguments."""
    text = name.removeprefix("void ").replace("(anonymous namespace)", "<unnamed>")
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0 and index:
            text = text[:index]
            break
    text = _CAST.sub("", _NAMESPACES.sub("", text))
    text = _INSTANCE.sub(r"#\1" if lambdas else "", text)
    while (reduced := _INNERMOST.sub("", text)) != text:
        text = reduced
    text = _RETURNS.sub("", _CALL_OPERATOR.sub("", text))
    return text if arguments else _without_plain_arguments(text)


def _without_plain_arguments(text: str) -> str:
    """A name without the template arguments that are numbers and types."""
    open_index, end = text.find("<"), text.rfind(">")
    if open_index < 0 or end < open_index:
        return text
    arguments = [_without_plain_arguments(argument.strip()) for argument in _split(text[open_index + 1 : end])]
    telling = [argument for argument in arguments if argument and not _PLAIN_ARGUMENT.fullmatch(argument)]
    if len(telling) == 1 and (wrapped := re.fullmatch(r"\w+<(.*[^>])>+", telling[0])) and "," not in wrapped.group(1):
        telling = [wrapped.group(1)]  # of a wrapper of one function, such as BinaryFunctor<AddFunctor>, the function
    return (
        f"{text[:open_index]}<{', '.join(telling)}>{text[end + 1 :]}"
        if telling
        else text[:open_index] + text[end + 1 :]
    )


def _split(arguments: str) -> Iterator[str]:
    """Template arguments one by one."""
    depth, start = 0, 0
    for index, letter in enumerate(arguments):
        depth += (letter == "<") - (letter == ">")
        if letter == "," and depth == 0:
            yield arguments[start:index]
            start = index + 1
    yield arguments[start:]


def fit(texts: Sequence[str], width: int, paths: bool = False) -> list[str]:
    """Texts cut to a width so that different texts stay different, if the width allows it.

    Args:
        texts: The cells of one column.
        width: Width in cells.
        paths: The texts are layer paths, whose leading parts go first. Other texts lose their middle, and what they
            have in common with those that they would be confused with.
    """
    short = {text: _path(text, width) if paths else _middle(text, width) for text in texts}
    differences: dict[str, set[int]] = {text: set() for text in short}
    for _ in range(8):
        users: dict[str, list[str]] = {}
        for text, cut in short.items():
            users.setdefault(cut, []).append(text)
        for group in users.values():
            if len(group) > 1:
                length = len(os.path.commonprefix(group))  # noqa: RUF071 - of letters
                while length and any(text[length : length + 1].isdigit() for text in group):
                    length -= 1  # the difference begins with a letter
                for text in group:
                    differences[text].add(length)
                    short[text] = _with_differences(text, sorted(differences[text]), width)
        if len(users) == len(short):
            break
    return [short[text] for text in texts]


def _with_differences(text: str, places: Sequence[int], width: int) -> str:
    """The beginning of a text, and what follows each place where another text differs from it."""
    stem = re.match(r"\s*[\w.]*", text[: places[0]]).group()[: max(width // 3, 1)]  # type: ignore[union-attr]
    if len(places) == 1:
        return _middle(f"{stem}…{text[places[0] :]}", width)
    stem = stem[: max(width // 4, 1)]
    room = (width - len(stem)) // len(places) - 1
    ends = [*places[1:], len(text)]
    return stem + "".join(f"…{_fitting(text[start:end], room)}" for start, end in zip(places, ends, strict=True))


def _middle(text: str, width: int) -> str:
    """A text without its middle; a number is never cut, but omitted."""
    if cell_len(text) <= width:
        return text
    indent = text[: len(text) - len(text.lstrip())]
    text, width = text.lstrip().rstrip(">"), max(width - len(indent), 1)
    tail = _fitting(text, width // 3, from_end=True) if width > 8 else ""
    if text[: -len(tail) or None][-1:].isalnum():
        tail = tail.lstrip("0123456789")
    start = _fitting(text, width - 1 - cell_len(tail))
    return f"{indent}{start}…{tail}"


def _fitting(text: str, width: int, from_end: bool = False) -> str:
    """The beginning or end of a text that fits and cuts no number."""
    letters = text[::-1] if from_end else text
    count = width
    while count and cell_len(letters[:count]) > width:
        count -= 1
    if letters[:count][-1:].isdigit() and letters[count : count + 1].isdigit():
        count = len(letters[:count].rstrip("0123456789.,"))
    return letters[:count][::-1] if from_end else letters[:count]


def _path(path: str, width: int) -> str:
    """A layer's path without leading parts, because its end distinguishes layers."""
    if cell_len(path) <= width:
        return path
    indent, name, count = _LABEL.fullmatch(path).groups()  # type: ignore[union-attr]  # it matches every text
    room = width - len(indent) - len(count)
    parts = name.split(".")
    for first in range(1, len(parts)):
        text = f"….{'.'.join(parts[first:])}"
        if cell_len(text) <= room:
            return f"{indent}{text}{count}"
    return f"{indent}{_middle(parts[-1], room)}{count}"
