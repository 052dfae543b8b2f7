"""How numbers, times and names are written: with units, without the noise of C++, and short enough to fit a column."""

from __future__ import annotations

import math
import os.path
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from nvprof_kit._result.column import Columns, column_of
from nvprof_kit._toml import read_toml

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.advise.advise import Advice
    from nvprof_kit._findings import Finding

TEXTS: Mapping[str, Mapping[str, str]] = read_toml("nvprof_kit._report.text", "texts.toml")
"""Headings of tables, by the answer, and ``notes`` below them."""


@dataclass(frozen=True)
class Milliseconds:
    """Writes times in milliseconds, all with the same number of decimals; a call writes one without its unit.

    Attributes:
        divisor: Divisor of each time, such as the number of steps.
        decimals: Number of decimals.
    """

    divisor: int = 1
    decimals: int = 3

    @classmethod
    def for_total(cls, total_ns: int, divisor: int = 1) -> Milliseconds:
        """Enough decimals for four digits of a table's total (1.234, 12.34, 123.4), from 0 to 3."""
        total_ms = max(total_ns / divisor / 1e6, 1e-9)
        return cls(divisor, min(max(3 - math.floor(math.log10(total_ms)), 0), 3))

    def __call__(self, ns: int) -> str:
        """The time; '' for zero. Times too small for the decimals are in µs or ns, such as ``20 µs``."""
        each = ns / self.divisor
        text = f"{each / 1e6:,.{self.decimals}f}"
        if not ns or text.strip("-0.,"):
            return text if ns else ""
        return f"{each / 1000:,.0f} µs" if abs(each) >= 1000 else f"{each:.0f} ns" if abs(each) >= 1 else "<1 ns"

    def with_unit(self, ns: int) -> str:
        """The time for a sentence: ``1.234 ms``, ``20 µs``, ``0 ms``."""
        text = self(ns) or "0"
        return text if text.endswith("s") else f"{text} ms"


MS = Milliseconds()
"""Milliseconds with three decimals."""


def count_per_step(count: int, steps: int) -> str:
    """A count divided by the steps: ``8``, or ``0.2`` if it is not an integer; '' for zero."""
    if count == 0:
        return ""
    return f"{count // steps:,}" if count % steps == 0 else f"{count / steps:,.1f}"


def _in_units(amount: float, size: float, *smaller: tuple[float, str]) -> str:
    """An amount in units of a size with one decimal: ``1,234.5``; if that is 0.0, in a smaller unit: ``12 KiB``."""
    text = f"{amount / size:,.1f}"
    if not amount or text.strip("-0."):
        return text
    size, unit = next((pair for pair in smaller if abs(amount) >= pair[0]), smaller[-1])
    return f"{amount / size:.0f} {unit}"


def mib_cell(count: float) -> str:
    """Bytes in MiB for table cells; small numbers are in KiB or bytes."""
    return _in_units(count, 1 << 20, (1 << 10, "KiB"), (1, "B"))


def memory_size(count: int) -> str:
    """Bytes with their unit, for sentences: ``1,234.5 MiB``, ``12 KiB``."""
    text = mib_cell(count)
    return text if text.endswith("B") else f"{text} MiB"


def mb_cell(count: float) -> str:
    """Bytes in units of 10⁶ bytes for table cells; small numbers are in kB or bytes."""
    return _in_units(count, 1e6, (1e3, "kB"), (1, "B"))


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


def saving(finding: Finding, result: Advice) -> str:
    """What a finding could save, for a reader."""
    if not finding.saves_ns:
        return "nothing to save on this rank"
    of = " and ".join(name for name, number in (("step", result.steps), ("GPU", result.gpus)) if number > 1)
    per = f" per {of}" if of else ""
    return f"at most {MS.with_unit(finding.saves_ns)}{per}, {percent(finding.saves_ns / result.wall_ns)}"


def counted(names: Iterable[str]) -> str:
    """Names with their counts: ``2 x NVIDIA H100, NVIDIA A100``."""
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in Counter(names).items())


def is_missing(value: Any) -> bool:
    """Whether a table has no value there."""
    return value is None or str(value) in ("<NA>", "nan", "NaT")


BY_ENDING: Mapping[str, Callable[[Any], str]] = {
    "_at_ns": lambda ns: f"{ns / 1e9:.6f} s",
    "delay_ns": lambda ns: f"{ns / 1000:,.1f} µs",
    "_ns": lambda ns: MS(round(ns)),
    **dict.fromkeys(
        ("share", "ratio", "utilisation", "hidden", "covered", "of_link", "of_limit", "fragmentation"), percent
    ),
    "gb_per_s": lambda rate: _in_units(rate * 1e9, 1e9, (1e6, "MB/s"), (1e3, "kB/s")),
    **dict.fromkeys(("bytes", "bytes_per_step"), mb_cell),
    "address": hex,
}
"""How the value of a column is written, by the end of the column's name."""


def cell(name: str, value: Any, mib: bool = False) -> str:
    """A value of a table as `BY_ENDING` writes it; '' if it is missing.

    Args:
        name: The column.
        value: The value.
        mib: Write bytes in MiB, not in units of 10⁶.
    """
    if is_missing(value):
        return ""
    if isinstance(value, str):
        return value
    for ending, write in BY_ENDING.items():
        if name.endswith(ending):
            return mib_cell(value) if mib and write is mb_cell else write(value)
    if isinstance(value, bool):
        return "yes" if value else ""
    is_fraction = isinstance(value, float) and value != int(value)
    return f"{int(value):,}" if not is_fraction else f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"


def heading(name: str, columns: Columns | None = None, mib: bool = False) -> str:
    """The heading of a column: its own, or its name, without its unit if that is milliseconds.

    Args:
        name: The column's name.
        columns: The columns of the answer, which need not have it.
        mib: Whether bytes are written in MiB.
    """
    column = column_of(columns or {}, name)
    if column is not None and column.heading:
        return column.heading
    text = name.replace("gb_per_s", "GB/s").replace("bytes", "MiB" if mib else "MB")
    text = text.removesuffix("_ns").replace("_", " ")
    return text.replace("cpu ", "CPU ").replace("gpu ", "GPU ")


def filled(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows without the columns in which no row has a value."""
    return rows.loc[:, rows.notna().any() & ~rows.isin([""]).all()] if len(rows) else rows


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
        users = Counter(short.values())
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
    inside = f"<{', '.join(telling)}>" if telling else ""
    return text[:open_index] + inside + text[end + 1 :]


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
    """Texts cut to a width so that different texts stay different.

    Args:
        texts: The cells of one column.
        width: Width in cells.
        paths: The texts are layer paths, whose leading parts go first. Other texts lose their middle, or what they have
            in common with those that they would be confused with; if that is not enough, they get a number.
    """
    short = {text: _path(text, width) if paths else _middle(text, width) for text in texts}

    def alike() -> list[list[str]]:
        texts_of: dict[str, list[str]] = {}
        for text, cut in short.items():
            texts_of.setdefault(cut, []).append(text)
        return [group for group in texts_of.values() if len(group) > 1]

    for group in alike():
        start = len(os.path.commonprefix(group))  # noqa: RUF071 - of letters
        while start and any(text[start : start + 1].isdigit() for text in group):
            start -= 1  # the difference begins with a letter
        short |= {text: _middle(f"{text[: min(start, width // 3)]}…{text[start:]}", width) for text in group}
    for group in alike():
        room = width - len(f"~{len(group)}")
        short |= {text: f"{_middle(short[text], room)}~{number}" for number, text in enumerate(group, 1)}
    return [short[text] for text in texts]


def _middle(text: str, width: int) -> str:
    """A text without its middle; a number is never cut, but omitted."""
    if cell_len(text) <= width:
        return text
    indent = text[: len(text) - len(text.lstrip())]
    text, width = text.lstrip().rstrip(">"), max(width - len(indent), 1)
    tail = _fitting(text, width // 3, from_end=True) if width > 8 else ""
    if text[: -len(tail) or None][-1:].isalnum():
        tail = tail.lstrip("0123456789")
    return f"{indent}{_fitting(text, width - 1 - cell_len(tail))}…{tail}"


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
