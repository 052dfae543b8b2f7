"""What would make a profile fail or mislead, as an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvprof_kit._findings import Finding
from nvprof_kit._results.base import Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


@dataclass(frozen=True, repr=False, eq=False)
class Checks(Result):
    """What was found, by ``machine`` or by capture.

    Attributes:
        found: The findings: evidence, why it matters, and the fix.
        warnings: None; the findings say it all.
    """

    found: Mapping[str, Sequence[Finding]]
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no error among the findings."""
        return not any(finding.severity == "error" for findings in self.found.values() for finding in findings)

    @property
    def schema(self) -> str:
        """Name of the schema of the json answer."""
        return "doctor"

    def to_frame(self) -> pd.DataFrame:
        """A row per finding."""
        from nvprof_kit._report.text.doctor import findings_table

        return findings_table(self.found)

    def parts(self) -> list[RenderableType]:
        """The findings, a paragraph each."""
        from nvprof_kit._report.text.doctor import findings_report

        return findings_report(self.found)
