"""What was found in a capture or on a machine: where it shows, why it matters, and the fix. Pure data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nvprof_kit._toml import read_toml

SEVERITIES = ("error", "warning", "note", "ok")
"""From what makes a run or a capture useless, through what distorts it and what is good to know, to what was checked
and is well.
"""

RULES: Mapping[str, str] = {
    name: text for group in read_toml("nvprof_kit", "rules.toml").values() for name, text in group.items()
}
"""Every rule by name, with what it looks at; that is also the title of a finding of a check."""


@dataclass(frozen=True)
class Finding:
    """A finding of a rule of `advise` or `doctor`.

    Attributes:
        rule: Name of the rule.
        title: The finding in a few words.
        evidence: The numbers from the capture, or the facts about the machine.
        layer, phase: Where it was found; '' if not in one place.
        start_ns, end_ns: The interval to look at in Nsight, in ns since the start of the capture; both 0 if none.
        saves_ns: Upper bound of what the fix could save, in ns per step and GPU; per GPU without steps.
        fix: The change or command to try; empty if there is nothing to fix.
        confidence: ``high``: the capture shows it; ``medium``: it follows under usual assumptions; ``low``: check
            first.
        refuted_by: An observation that would refute it.
        symptom_of: Name of the rule for its cause. If that rule found something, this finding is part of it.
        severity: ``error`` (the run or the capture is unusable), ``warning``, ``note`` or ``ok``.
        why: Why it matters; empty if all is well, or if `saves_ns` says so.
    """

    rule: str
    title: str
    evidence: str
    layer: str = ""
    phase: str = ""
    start_ns: int = 0
    end_ns: int = 0
    saves_ns: int = 0
    fix: str = ""
    confidence: str = "medium"
    refuted_by: str = ""
    symptom_of: str = ""
    severity: str = "warning"
    why: str = ""

    def __post_init__(self) -> None:
        if self.rule not in RULES or self.severity not in SEVERITIES:
            raise ValueError(f"no rule {self.rule!r} of severity {self.severity!r} is named in RULES and SEVERITIES")


def checked(severity: str, rule: str, evidence: str, why: str = "", fix: str = "") -> Finding:
    """The finding of a check, which has no place in time."""
    return Finding(rule, RULES[rule], evidence, severity=severity, why=why, fix=fix)


def of_case(package: str, file: str, case: str, severity: str = "", /, **facts: object) -> Finding:
    """The finding of a check with the texts of a case.

    Args:
        package: The package with the file.
        file: The texts of each case: arguments of `checked`, with the facts that they name.
        case: The case.
        severity: In place of the usual one.
        facts: What its texts have in braces.
    """
    texts = {key: text.format(**facts) for key, text in read_toml(package, file)[case].items()}
    return checked(**(texts | ({"severity": severity} if severity else {})))


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings, most severe first, otherwise in their order."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))
