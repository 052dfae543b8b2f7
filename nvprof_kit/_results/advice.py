"""The result of `Capture.advise`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from nvprof_kit._analysis.advise.advise import COLUMNS, AdviseResult
from nvprof_kit._result.result import Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


@dataclass(frozen=True, repr=False, eq=False)
class Advice(Result, AdviseResult):
    """Findings of a capture, ranked by the time they could save."""

    columns: ClassVar = {"advise": COLUMNS}
    bars: ClassVar = {"advise": (("saves_ns",), ("title",))}

    def table(self, view: str | None = None) -> pd.DataFrame:
        """One row per finding, the largest saving first."""
        return self.rows

    def _shown(self) -> Advice:
        """A copy with the findings of the selected layers, sorted."""
        if not self.select.asked:
            return self
        ranks = self.to_frame()["rank"].tolist()
        return replace(self, findings=tuple(self.findings[rank - 1] for rank in ranks))

    def parts(self) -> list[RenderableType]:
        """The printed findings, one paragraph each."""
        from nvprof_kit._report.text.advise import advise_report

        return [*advise_report(self._shown(), self.select.top or 10), ""]
