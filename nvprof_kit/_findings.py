"""What a doctor says: something seen, why it matters, and how to fix it. Pure data, shared by whoever examines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LEVELS = ("error", "warning", "note", "ok")
"""From what makes a run or a capture useless, through what distorts it and what is good to know, to what was checked
and is well.
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was checked.

    Attributes:
        level: One of `LEVELS`.
        check: What was checked, in two or three words.
        seen: What was found.
        why: Why it matters; empty where all is well.
        fix: The command or the change that fixes it; empty where there is nothing to fix.
    """

    level: str
    check: str
    seen: str
    why: str = ""
    fix: str = ""


def by_gravity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings, most severe first, otherwise in their order."""
    return tuple(sorted(findings, key=lambda finding: LEVELS.index(finding.level)))
