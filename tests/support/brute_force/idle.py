"""Reference implementation of idle causes: what a thread did at every nanosecond of a gap."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class Open(NamedTuple):
    """Something that is open on a thread from start to end."""

    name: str
    start: int
    end: int


def innermost(stack: list[Open], moment: int) -> str:
    """The open one that began last, of those the shortest; '' for none."""
    here = [one for one in stack if one.start <= moment < one.end]
    return max(here, key=lambda one: (one.start, -one.end)).name if here else ""


def spent(stack: list[Open], begin: int, end: int) -> Counter[str]:
    """Nanoseconds of a gap by what is innermost."""
    return Counter(innermost(stack, moment) for moment in range(begin, end))
