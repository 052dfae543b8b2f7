"""Sorts and deduplicates the warnings of an answer."""

from __future__ import annotations

import re
from collections.abc import Iterable

_HEAVY = re.compile(
    r"\b(lost|dropped|too small|damaged|no layer's range|no length|truncated|corrupt|clocks? differ)\b", re.I
)
_OF = re.compile(r"(\d[\d,]*) of (\d[\d,]*)")
_SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%")


def in_order(warnings: Iterable[str]) -> tuple[str, ...]:
    """Sort warnings: those that affect all figures first, then by the affected share of the capture, then in order."""
    return tuple(sorted(dict.fromkeys(warnings), key=lambda one: -_weight(one)))


def _weight(warning: str) -> float:
    if _HEAVY.search(warning):
        return 2.0 + _part(warning)
    return _part(warning)


def _part(warning: str) -> float:
    """The share in a warning; 0 for none."""
    counted = _OF.search(warning)
    if counted:
        part, whole = (int(text.replace(",", "")) for text in counted.groups())
        return min(part / whole, 1.0) if whole else 0.0
    share = _SHARE.search(warning)
    return min(float(share.group(1)) / 100, 1.0) if share else 0.0
