"""The result of `doctor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nvprof_kit._findings import Finding
from nvprof_kit._report.text.doctor import COLUMNS
from nvprof_kit._result.result import Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


@dataclass(frozen=True, repr=False, eq=False)
class Checks(Result):
    """Findings about the machine or about captures.

    Attributes:
        found: The findings by ``machine`` or by capture: what was seen, why it matters, and how to fix it.
        warnings: Always empty; what could be a warning is a finding.
    """

    found: Mapping[str, Sequence[Finding]]
    warnings: tuple[str, ...] = ()

    columns: ClassVar = {"doctor": COLUMNS}

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not any(finding.severity == "error" for findings in self.found.values() for finding in findings)

    def to_frame(self) -> pd.DataFrame:
        """One row per finding."""
        from nvprof_kit._report.text.doctor import findings_table

        return findings_table(self.found)

    def parts(self) -> list[RenderableType]:
        """The printed findings, one paragraph each."""
        from nvprof_kit._report.text.doctor import findings_report

        return findings_report(self.found)
