"""Text report of `doctor` findings."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._findings import SEVERITIES, Finding

if TYPE_CHECKING:
    from nvprof_kit._analysis.checks import Checks

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}


def findings_report(checks: Checks) -> list[RenderableType]:
    """The findings by subject, the most severe first, and their number by severity."""
    found = checks.found
    parts: list[RenderableType] = []
    for subject, findings in found.items():
        parts += [Text(subject, "bold")] if len(found) > 1 else []
        for finding in findings:
            parts += _lines(finding)
    counted = Counter(finding.severity for findings in found.values() for finding in findings)
    named = [
        f"{counted[level]} {level if level == 'ok' or counted[level] == 1 else level + 's'}" for level in SEVERITIES
    ]
    return [*parts, "", ", ".join(text for text, level in zip(named, SEVERITIES, strict=True) if counted[level])]


def _lines(finding: Finding) -> list[RenderableType]:
    head = Text.assemble((f"{finding.severity:8}", _STYLES[finding.severity]), f"{finding.title}: {finding.evidence}")
    more = [("why", finding.why), ("fix", finding.fix)]
    return [head, *(Text(f"{'':8}{name:5}{text}", "dim" if name == "why" else "") for name, text in more if text)]
