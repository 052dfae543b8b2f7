"""The result of `TimerLog.timers`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from nvprof_kit._analysis.timers import CALL_COLUMNS, COLUMNS, TimersResult
from nvprof_kit._result.result import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import RenderableType


@dataclass(frozen=True, repr=False, eq=False)
class Timers(Result, TimersResult):
    """How long the timed stages take on each rank, how much the ranks differ, and which rank the others wait for.

    Attributes:
        by_call: Whether `to_frame` returns one row per call.
    """

    by_call: bool = field(default=False, kw_only=True)

    columns: ClassVar = {"timers": COLUMNS, "timers-calls": CALL_COLUMNS}

    @property
    def schema(self) -> str:
        """Name of the JSON schema."""
        return "timers-calls" if self.by_call else "timers"

    def to_frame(self) -> pd.DataFrame:
        """One row per stage, per stage and rank, or per call, as requested."""
        return self.calls if self.by_call else self.rows

    def parts(self) -> list[RenderableType]:
        """The printed verdict and table."""
        from nvprof_kit._report.text.timers import timers_report

        rows = self.select.of(self.rows)
        return timers_report(replace(self, rows=rows), self.select)

    def figure(self) -> Figure:
        """Draw the stages over time, one row per rank."""
        from nvprof_kit._report.text.timers import timeline_figure

        return timeline_figure(self)
