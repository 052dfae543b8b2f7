"""Cells of ncu's CSV: numbers and units, in the locale of its process and scaled, and a thread's NVTX ranges.

An NVTX cell is ``557  "nvprof_kit:step 0:Int64:0:RGB:0xff:REGISTERED:step 0"  "…" ``: the thread, then its ranges,
outermost first in each domain. The fields of a range are domain, name, payload type and value, color type and value,
message type and message. Nothing is escaped, so colons and quotes can appear anywhere; the message repeats the name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

import numpy as np
import numpy.typing as npt
import pandas as pd

from nvprof_kit.issues import Issue

Float64Array = npt.NDArray[np.float64]

_POWERS = {"n": -9, "u": -6, "m": -3, "": 0, "K": 3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15}
_UNIT = re.compile(r"([num]?)(second|s)|([KkMGTP]?)(byte|hz|Hz|cycle|inst|sector)s?")

_SPACES = " \u00a0\u202f'\u2019"  # digit group separators of some locales
_INSTANCES = re.compile(rf"(?P<number>[-+\d.,{_SPACES}]+) \(.*\)", re.DOTALL)
_NUMBER = re.compile(rf"[-+]?\d[\d.,{_SPACES}]*(?:[eE][-+]?\d+)?")
_SCALED_BY_NCU = re.compile(r"[-+]?\d+\.\d{6}")
_EMPTY = frozenset({"", "no data", "n/a", "nan", "N/A"})

DEFAULT_DOMAIN = "<default domain>"
"""ncu's name for the default domain."""

_CELL = re.compile(r'\s*(\d*)\s*"?(.*?)"?\s*', re.DOTALL)
_BETWEEN = re.compile(r'"\s+"')
_PAYLOAD_AND_COLOR = re.compile(
    r"(?:Int64|Uint64|Int32|Uint32|Double|Float|Json|none):.*:(?:\w+):(?:0x[0-9a-fA-F]+|none)", re.DOTALL
)
_MESSAGE = re.compile(r":(?:ASCII|REGISTERED|UNICODE|none):")


@cache
def base_unit(unit: str) -> tuple[str, float]:
    """The base unit of a unit, and the factor to convert a value.

    >>> base_unit("usecond"), base_unit("Ghz"), base_unit("cycle/nsecond"), base_unit("Kbyte/block")
    (('ns', 1000.0), ('hz', 1000000000.0), ('hz', 1000000000.0), ('byte/block', 1000.0))
    """
    names, power = [], 0
    for factor, sign in zip(unit.split("/", 1), (1, -1), strict=False):
        match = _UNIT.fullmatch(factor)
        names.append("s" if match and match[2] else match[4].lower() if match else factor)
        power += sign * _POWERS[match[1] or match[3] or ""] if match else 0
    if names == ["s"]:
        return "ns", 10.0 ** (power + 9)
    return "hz" if names == ["cycle", "s"] else "/".join(names), 10.0**power


def parse_metrics(
    cells: pd.DataFrame, factors: pd.DataFrame
) -> tuple[dict[str, Float64Array], dict[str, list[str]], list[Issue]]:
    """Numeric metrics in base units, text metrics as text, and what is doubtful about the numbers.

    Args:
        cells: A column of text per metric.
        factors: By what to multiply each cell, or all of a column.
    """
    metrics, texts, warnings = {}, {}, []
    distinct = {*cells.to_numpy().ravel()}
    decimal, is_certain = _decimal_mark(distinct)
    if not is_certain:
        warnings.append(Issue.of("ncu-decimal-mark", mark=decimal))
    number_of_cell = {cell: _parse_number(cell, decimal) for cell in distinct}
    for name in map(str, cells):
        column = cells[name].tolist()
        values = np.array([number_of_cell[cell] for cell in column], dtype=np.float64)
        unreadable = [cell for cell in column if number_of_cell[cell] is None]
        if len(unreadable) > np.count_nonzero(~np.isnan(values)):
            texts[name] = column
            continue
        metrics[name] = values * factors[name].to_numpy()
        if unreadable:
            counts = {"count": len(unreadable), "total": len(column)}
            warnings.append(Issue.of("ncu-numbers", metric=name, example=unreadable[0], **counts))
    return metrics, texts, warnings


def _decimal_mark(cells: Iterable[str]) -> tuple[str, bool]:
    """The decimal separator of a report from all its cells, and whether it is certain; only unambiguous numbers decide.

    If a number has both separators, the last one is decimal. A repeated separator groups digits. A separator that is
    not followed by three digits, or that follows four digits or a single zero, is decimal.
    """
    votes = {".": 0, ",": 0}
    is_ambiguous = False
    for text in map(str.strip, cells):
        if not _NUMBER.fullmatch(text) or _SCALED_BY_NCU.fullmatch(text) or not ("." in text or "," in text):
            continue
        marks = re.findall("[.,]", text)
        integer, *_, fraction = re.split("[.,]", re.sub("[eE].*", "", text).lstrip("+-"))
        if len(set(marks)) == 2:
            votes[marks[-1]] += 1
        elif len(marks) > 1:
            votes["," if marks[0] == "." else "."] += 1
        elif len(fraction) != 3 or len(integer) > 3 or integer == "0":
            votes[marks[0]] += 1
        else:
            is_ambiguous = True
    if votes["."] == votes[","]:
        return ".", not is_ambiguous and not votes["."]
    return max(votes, key=votes.__getitem__), min(votes.values()) == 0


def _parse_number(cell: str, decimal: str) -> float | None:
    """The number in a cell with this decimal separator; NaN if the cell is empty or ``no data``; None if it contains
    text. Instance values after the number, `` (3; 4)``, are ignored.
    """
    text = cell.strip()
    if text in _EMPTY:
        return float("nan")
    if instances := _INSTANCES.fullmatch(text):
        text = instances["number"].strip()
    if not _NUMBER.fullmatch(text):
        return None
    decimal = "." if _SCALED_BY_NCU.fullmatch(text) else decimal
    for mark in {*".,", *_SPACES} - {decimal}:
        text = text.replace(mark, "")
    try:
        return float(text.replace(decimal, "."))
    except ValueError:
        return None


def parse_nvtx(cell: str) -> tuple[int, list[tuple[str, str]]]:
    """The thread and the open ranges in a push/pop cell, with CSV quotes already unescaped: -1 for the thread if the
    cell is empty; domain and name of each range, outermost first in each domain, '' for the default domain.
    """
    match = _CELL.fullmatch(cell)
    thread, ranges = match.groups() if match else ("", "")
    return int(thread[:18] or -1), [_parse_range(text) for text in _BETWEEN.split(ranges) if text]


def _parse_range(text: str) -> tuple[str, str]:
    """Domain and name of one range: the name is followed by payload, color and a message that repeats it."""
    for message in _MESSAGE.finditer(text):
        name = text[message.end() :]
        for match in re.finditer(f"(?=:{re.escape(name)}:)", text):  # lookahead, because matches can overlap
            if name and _PAYLOAD_AND_COLOR.fullmatch(text, match.start() + len(name) + 2, message.start()):
                domain = text[: match.start()]
                return "" if domain == DEFAULT_DOMAIN else domain, name
    # no message repeats the name: drop the last six fields; the domain ends at the first colon
    domain, _, name = (text.rsplit(":", 6)[0] if text.count(":") >= 7 else text).partition(":")
    return "" if domain == DEFAULT_DOMAIN else domain, name
