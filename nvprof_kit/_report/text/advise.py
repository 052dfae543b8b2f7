"""Text report of findings: one paragraph each, the largest saving first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._report.text.table.terminal import capture_line, warning_lines
from nvprof_kit._report.text.table.units import Milliseconds, percent

if TYPE_CHECKING:
    from nvprof_kit._analysis.advise.advise import Advice
    from nvprof_kit._findings import Finding

NO_SAVING = "nothing to save on this rank"
"""The saving of a finding that only says that this rank waits for others."""

_MS = Milliseconds(1, 3)


def advise_report(result: Advice) -> list[RenderableType]:
    """The report: the findings of the selected layers, in the selected order."""
    top = result.select.top or 10
    if result.select.asked:
        ranks = result.to_frame()["rank"].tolist()
        result = replace(result, findings=tuple(result.findings[rank - 1] for rank in ranks))
    parts: list[RenderableType] = [
        capture_line(result.info, result.steps),
        Text(f"The program: {result.program}{' (prefill and decode)' if result.program == 'mixed' else ''}"),
        "",
    ]
    for rank, finding in enumerate(result.findings[:top], 1):
        parts += [*_paragraph(rank, finding, result), ""]
    if not result.findings:
        parts += [Text("No rule found anything in this capture."), ""]
    if len(result.findings) > top:
        parts += [Text(f"… and {len(result.findings) - top:,} more; --top N shows them", "dim"), ""]
    note = "Savings are upper bounds. Findings overlap, so savings do not add up."
    return [*parts, Text(note, "dim"), *warning_lines(result.warnings), ""]


def saving(finding: Finding, result: Advice) -> str:
    """What a finding could save, for a reader."""
    if not finding.saves_ns:
        return NO_SAVING
    of = " and ".join(name for name, number in (("step", result.steps), ("GPU", result.gpus)) if number > 1)
    per = f" per {of}" if of else ""
    return f"at most {_MS(finding.saves_ns)} ms{per}, {percent(finding.saves_ns / result.wall_ns)}"


def _paragraph(rank: int, finding: Finding, result: Advice) -> list[Text]:
    place = " ".join(part for part in (finding.layer, finding.phase) if part)
    where = f"{finding.start_ns / 1e9:.6f} s to {finding.end_ns / 1e9:.6f} s"
    return [
        Text(f"{rank}. {finding.title}", "bold").append(f"  ({saving(finding, result)})", "not bold"),
        Text(f"   {finding.evidence}"),
        Text(f"   look at {f'{place}, ' if place else ''}{where}"),
        Text(f"   try: {finding.fix}", "cyan"),
        Text(f"   {finding.confidence} confidence; wrong if {finding.refuted_by}", "dim"),
    ]
