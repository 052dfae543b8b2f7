"""The stages that `global_timer` timed, as an answer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from nvprof_kit._analysis.timers import TimersResult
from nvprof_kit._results.base import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import RenderableType


@dataclass(frozen=True, repr=False, eq=False)
class Timers(Result, TimersResult):
    """How long the timed stages take on every rank, how far the ranks are apart, and which one the others wait for.

    Attributes:
        by_call: Whether `to_frame` gives a row for each single call.
    """

    by_call: bool = field(default=False, kw_only=True)

    has_plot: ClassVar[bool] = True

    @property
    def schema(self) -> str:
        """Name of the schema of the json answer."""
        return "timers-calls" if self.by_call else "timers"

    def to_frame(self) -> pd.DataFrame:
        """A row per stage, and per rank where that was asked for; or per call."""
        return self.calls if self.by_call else self.rows

    def parts(self) -> list[RenderableType]:
        """The verdict, and the table."""
        from nvprof_kit._report.text.timers import timers_report

        rows = self.select.of(self.rows)
        return timers_report(replace(self, rows=rows), self.select.top)

    def figure(self) -> Figure:
        """The stages in time, a row for each rank."""
        from nvprof_kit._report.text.timers import timeline_figure

        return timeline_figure(self)
