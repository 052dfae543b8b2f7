"""Text reports of findings: of advise one paragraph each, the largest saving first; of doctor one line each."""

from __future__ import annotations

from collections import Counter

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._analysis.advise.advise import Advice
from nvprof_kit._analysis.checks import Checks
from nvprof_kit._findings import SEVERITIES
from nvprof_kit._report.text.table import below, capture_line
from nvprof_kit._report.text.texts import saving


def advise_report(result: Advice) -> list[RenderableType]:
    """The report: the findings of the selected layers, in the selected order."""
    top = result.select.top or 10
    findings = result.findings
    if result.select.asked:
        findings = tuple(findings[rank - 1] for rank in result.to_frame()["rank"])
    program = Text(f"The program: {result.program}{' (prefill and decode)' if result.program == 'mixed' else ''}")
    parts: list[RenderableType] = [capture_line(result.info, result.steps, result.all_steps), program, ""]
    for rank, finding in enumerate(findings[:top], 1):
        layer_text = " ".join(word for word in (finding.layer, finding.phase) if word)
        where = f"{finding.start_ns / 1e9:.6f} s to {finding.end_ns / 1e9:.6f} s"
        parts += [
            Text(f"{rank}. {finding.title}", "bold").append(f"  ({saving(finding, result)})", "not bold"),
            Text(f"   {finding.evidence}"),
            Text(f"   look at {f'{layer_text}, ' if layer_text else ''}{where}"),
            Text(f"   try: {finding.fix}", "cyan"),
            Text(f"   {finding.confidence} confidence; wrong if {finding.refuted_by}", "dim"),
            "",
        ]
    if not findings:
        parts += [Text("No rule found anything in this capture."), ""]
    if len(findings) > top:
        parts += [Text(f"… and {len(findings) - top:,} more; --top N shows them", "dim"), ""]
    note = "Savings are upper bounds. Findings overlap, so savings do not add up."
    return [*parts, *below((note,), result.warnings), ""]


_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}


def findings_report(checks: Checks) -> list[RenderableType]:
    """The findings by subject, the most severe first, and their number by severity."""
    parts: list[RenderableType] = []
    for subject, findings in checks.findings.items():
        parts += [Text(subject, "bold")] if len(checks.findings) > 1 else []
        for finding in findings:
            severity = (f"{finding.severity:8}", _STYLES[finding.severity])
            parts.append(Text.assemble(severity, f"{finding.title}: {finding.evidence}"))
            parts += [Text(f"{'':8}why  {finding.why}", "dim")] if finding.why else []
            parts += [Text(f"{'':8}fix  {finding.fix}")] if finding.fix else []
    counts = Counter(finding.severity for findings in checks.findings.values() for finding in findings)
    totals = (f"{counts[level]} {level}{'s' * (level != 'ok' and counts[level] != 1)}" for level in SEVERITIES)
    return [*parts, "", ", ".join(total for total in totals if not total.startswith("0 "))]
