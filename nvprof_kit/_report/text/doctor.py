"""Text report and table of `doctor` findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._findings import SEVERITIES, Finding
from nvprof_kit._result.column import Column, Columns

if TYPE_CHECKING:
    import pandas as pd

COLUMNS: Columns = {
    "subject": Column("the capture, or `machine`", kind="str"),
    "level": Column("`error` (the run or the capture is of no use), `warning` (it misleads), `note`, `ok`", kind="str"),
    "check": Column("what was checked", kind="str"),
    "seen": Column("what was found", kind="str"),
    "why": Column("why it matters", kind="str"),
    "fix": Column("the command or change that fixes it", kind="str"),
}
"""Columns of the findings table with their meaning."""

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}


def findings_table(found: Mapping[str, Iterable[Finding]]) -> pd.DataFrame:
    """A row for each finding, with the columns `COLUMNS`."""
    import pandas as pd

    rows = [
        (subject, one.severity, one.title, one.evidence, one.why, one.fix)
        for subject, findings in found.items()
        for one in findings
    ]
    table: pd.DataFrame = pd.DataFrame(rows, columns=list(COLUMNS)).astype(str)
    return table


def findings_report(found: Mapping[str, Sequence[Finding]]) -> list[RenderableType]:
    """The findings by subject, the most severe first, and their number by severity."""
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
