"""What is found about a machine or about captures before and after a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pandas as pd

from nvprof_kit._findings import Finding
from nvprof_kit._result.column import read_columns
from nvprof_kit._result.result import Result
from nvprof_kit.issues import Issue

COLUMNS = read_columns("nvprof_kit._analysis", "checks")
"""Columns of the findings table with their meaning."""


@dataclass(frozen=True, repr=False, eq=False)
class Checks(Result):
    """Findings about the machine or about captures.

    Attributes:
        findings: The findings by ``machine`` or by capture: what was seen, why it matters, and how to fix it.
        warnings: Always empty; what could be a warning is a finding.
    """

    findings: Mapping[str, Sequence[Finding]]
    warnings: tuple[Issue, ...] = ()

    columns: ClassVar = {"doctor": COLUMNS}

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not any(finding.severity == "error" for findings in self.findings.values() for finding in findings)

    @property
    def rows(self) -> pd.DataFrame:
        """One row per finding."""
        rows = [
            (subject, finding.severity, finding.title, finding.evidence, finding.why, finding.fix)
            for subject, findings in self.findings.items()
            for finding in findings
        ]
        return pd.DataFrame(rows, columns=list(COLUMNS)).astype(str)
