"""Cells of ncu's CSV: numbers and units, in the locale of its process and scaled, and a thread's NVTX ranges.

An NVTX cell is ``557  "nvprof_kit:step 0:Int64:0:RGB:0xff:REGISTERED:step 0"  "…" ``: the thread, then its ranges,
outermost first in each domain. The fields of a range are domain, name, payload type and value, color type and value,
message type and message. Nothing is escaped, so colons and quotes can appear anywhere; the message repeats the name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

_POWERS = {"n": -9, "u": -6, "m": -3, "": 0, "K": 3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15}
_SCALED = {"byte": "byte", "hz": "hz", "Hz": "hz", "cycle": "cycle", "inst": "inst", "sector": "sector"}
_TIME = re.compile(r"([num]?)(second|s)")
_AMOUNT = re.compile(r"([KkMGTP]?)(byte|hz|Hz|cycle|inst|sector)s?")

_SPACES = " \u00a0\u202f'\u2019"  # digit group separators of some locales
_INSTANCES = re.compile(rf"(?P<number>[-+\d.,{_SPACES}]+) \(.*\)", re.DOTALL)
_NUMBER = re.compile(rf"[-+]?\d[\d.,{_SPACES}]*(?:[eE][-+]?\d+)?")
_SCALED_BY_NCU = re.compile(r"[-+]?\d+\.\d{6}")
_NOTHING = frozenset({"", "no data", "n/a", "nan", "N/A"})


@dataclass(frozen=True)
class NumberStyle:
    """The number format of a report. Attributes: decimal: The decimal separator. certain: False if the numbers are
    ambiguous.
    """

    decimal: str = "."
    certain: bool = True


def base_unit(unit: str) -> tuple[str, float]:
    """The base unit of a unit, and the factor to convert a value.

    >>> base_unit("usecond"), base_unit("Ghz"), base_unit("cycle/nsecond"), base_unit("Kbyte/block")
    (('ns', 1000.0), ('hz', 1000000000.0), ('hz', 1000000000.0), ('byte/block', 1000.0))
    """
    above, slash, below = unit.partition("/")
    name, power = _base(above)
    if not slash:
        return ("ns", 10.0 ** (power + 9)) if name == "second" else (name, 10.0**power)
    under, power_below = _base(below)
    factor = 10.0 ** (power - power_below)
    if name == "cycle" and under == "second":
        return "hz", factor
    return f"{name}/{'s' if under == 'second' else under}", factor


def _base(unit: str) -> tuple[str, int]:
    """A unit without its prefix, and the prefix's power of ten."""
    time, amount = _TIME.fullmatch(unit), _AMOUNT.fullmatch(unit)
    if time:
        return "second", _POWERS[time[1]]
    if amount:
        return _SCALED[amount[2]], _POWERS[amount[1]]
    return unit, 0


def number_style(cells: Iterable[str]) -> NumberStyle:
    """Detect the number format of a report from all its cells; only unambiguous numbers decide.

    If a number has both separators, the last one is decimal. A repeated separator groups digits. A separator that is
    not followed by three digits, or that follows four digits or a single zero, is decimal.
    """
    votes = {".": 0, ",": 0}
    uncertain = False
    for cell in cells:
        text = cell.strip()
        if not _NUMBER.fullmatch(text) or _SCALED_BY_NCU.fullmatch(text) or not ("." in text or "," in text):
            continue
        marks = [letter for letter in text if letter in ".,"]
        integer, *_, fraction = re.split(r"[.,]", text.lstrip("+-").split("e")[0].split("E")[0])
        if len(set(marks)) == 2:
            votes[marks[-1]] += 1
        elif len(marks) > 1:
            votes["," if marks[0] == "." else "."] += 1
        elif len(fraction) != 3 or len(integer) > 3 or integer == "0":
            votes[marks[0]] += 1
        else:
            uncertain = True
    if votes["."] == votes[","]:
        return NumberStyle(".", certain=not uncertain and not votes["."])
    best = max(votes, key=votes.__getitem__)
    return NumberStyle(best, certain=min(votes.values()) == 0)


def parse_number(cell: str, style: NumberStyle) -> float | None:
    """The number in a cell; NaN if the cell is empty or ``no data``; None if it contains text.

    Instance values after the number, `` (3; 4)``, are ignored.
    """
    text = cell.strip()
    if text in _NOTHING:
        return float("nan")
    instances = _INSTANCES.fullmatch(text)
    if instances:
        text = instances["number"].strip()
    if not _NUMBER.fullmatch(text):
        return None
    decimal = "." if _SCALED_BY_NCU.fullmatch(text) else style.decimal
    group = "," if decimal == "." else "."
    for mark in (group, *_SPACES):
        text = text.replace(mark, "")
    try:
        return float(text.replace(decimal, "."))
    except ValueError:
        return None


DEFAULT_DOMAIN = "<default domain>"
"""ncu's name for the default domain."""

_BETWEEN = re.compile(r'"\s+"')
_THREAD = re.compile(r"\s*(\d+)?\s*")
_PAYLOAD_AND_COLOUR = re.compile(
    r"(?:Int64|Uint64|Int32|Uint32|Double|Float|Json|none):.*:(?:\w+):(?:0x[0-9a-fA-F]+|none)", re.DOTALL
)
_MESSAGE = re.compile(r":(?:ASCII|REGISTERED|UNICODE|none):")


class NvtxState(NamedTuple):
    """The ranges open on the thread that launched a kernel.

    Attributes:
        tid: The thread; -1 if the cell is empty.
        ranges: (domain, name) pairs, outermost first in each domain. '' is the default domain.
    """

    tid: int
    ranges: tuple[tuple[str, str], ...]

    def of_domain(self, domain: str) -> tuple[str, ...]:
        """The names of one domain's ranges, outermost first."""
        return tuple(name for its, name in self.ranges if its == domain)


def parse_cell(cell: str) -> NvtxState:
    """The thread and the ranges of a push/pop cell, with CSV quotes already unescaped."""
    thread = _THREAD.match(cell)
    body = cell[thread.end() if thread else 0 :].strip()
    tid = int(thread[1]) if thread and thread[1] else -1
    if len(body) < 2:
        return NvtxState(tid, ())
    entries = _BETWEEN.split(body.removeprefix('"').removesuffix('"'))
    return NvtxState(tid, tuple(map(parse_range, entries)))


def parse_range(entry: str) -> tuple[str, str]:
    """Domain and name of one range; '' is the default domain."""
    for message in _MESSAGE.finditer(entry):
        text = entry[message.end() :]
        domain = _before(entry[: message.start()], text)
        if text and domain is not None:
            return "" if domain == DEFAULT_DOMAIN else domain, text
    # no message repeats the name: drop the last six fields; the domain ends at the first colon
    named = entry.rsplit(":", 6)[0] if entry.count(":") >= 7 else entry
    domain, _, name = named.partition(":")
    return "" if domain == DEFAULT_DOMAIN else domain, name


def _before(text: str, name: str) -> str | None:
    """The domain before a name that is followed by payload and color; None if no such name is found."""
    sought = f":{name}:"
    for match in re.finditer(f"(?={re.escape(sought)})", text):  # lookahead, because matches can overlap
        if _PAYLOAD_AND_COLOUR.fullmatch(text[match.start() + len(sought) :]):
            return text[: match.start()]
    return None
