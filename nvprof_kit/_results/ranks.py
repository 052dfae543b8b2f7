"""The ranks of a job, as answers: one with everything, and its tables one by one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from nvprof_kit._analysis.ranks.answer import RanksAnswer
from nvprof_kit._results.base import Result, no_plot

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import RenderableType


def columns_of(view: str) -> Mapping[str, str]:
    """What the columns of a job's table mean."""
    from nvprof_kit._analysis.ranks import bubbles, clocks, layers, parallel, replay, waits

    return {
        "waits": waits.WAIT_COLUMNS,
        "charges": waits.CHARGE_COLUMNS,
        "layers": layers.COLUMNS,
        "clocks": clocks.COLUMNS,
        "groups": parallel.GROUP_COLUMNS,
        "bubbles": bubbles.BUBBLE_COLUMNS,
        "micro-batches": bubbles.MICRO_BATCH_COLUMNS,
        "critical-path": replay.PATH_COLUMNS,
        "what-if": replay.WHAT_IF_COLUMNS,
    }[view]


@dataclass(frozen=True, repr=False, eq=False)
class RankTable(Result):
    """A table of a job.

    Attributes:
        name: What it is of: ``waits``, ``charges``, ``layers``, …
        rows: The table; `to_frame` gives it too.
        columns: What its columns mean.
        warnings: Sentences on what may be missing or distorted in the job.
        top: Lines that are printed.
    """

    name: str
    rows: pd.DataFrame
    columns: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    top: int = field(default=20, kw_only=True)

    has_plot: ClassVar[bool] = True

    def to_frame(self) -> pd.DataFrame:
        """The table."""
        return self.rows

    def parts(self) -> list[RenderableType]:
        """The first lines, and how many there are."""
        from nvprof_kit._report.text.ranks import rank_table

        return rank_table(self.rows, self.top)

    def figure(self) -> Figure:
        """Of waits and charges a bar for each late rank, by cause; of layers a heat map of layers and ranks.

        Raises:
            UsageError: Of the other tables there is none, nor of an empty one.
        """
        from nvprof_kit._report.plots import ranks

        drawn = {"waits": ranks.waits_figure, "charges": ranks.waits_figure, "layers": ranks.layers_figure}
        if self.name not in drawn or not len(self.rows):
            raise no_plot(f"the table {self.name}" if len(self.rows) else f"an empty table {self.name}")
        return drawn[self.name](self.rows)


@dataclass(frozen=True, repr=False, eq=False)
class Ranks(Result, RanksAnswer):
    """All that is told of a job's ranks.

    Attributes:
        top: Lines of each table that are printed.
    """

    top: int = field(default=10, kw_only=True)

    has_plot: ClassVar[bool] = True

    def to_frame(self, view: str = "waits") -> pd.DataFrame:
        """One of the tables: ``waits``, ``charges``, ``layers``, ``clocks``, ``groups``, ``bubbles``,
        ``micro-batches``, ``critical-path`` or ``what-if``.
        """
        return self.table(view)

    def only(self, view: str) -> RankTable:
        """One of the tables that `to_frame` gives, as an answer of its own."""
        return RankTable(view, self.table(view), columns_of(view), self.warnings, top=self.top, sources=self.sources)

    def parts(self) -> list[RenderableType]:
        """The verdict, who waited for whom and why, layers, clocks, critical path and what-if."""
        from nvprof_kit._report.text.ranks import ranks_report

        return ranks_report(self, self.top)

    def encode(self, form: str) -> bytes:
        """As other answers; as json it is everything, in the layout of ``nvprof-kit ranks --format json``."""
        if form == "json":
            return (json.dumps(self.to_dict(), ensure_ascii=False, indent=1) + "\n").encode()
        return super().encode(form)

    def figure(self) -> Figure:
        """How long the others waited for each rank, by cause."""
        from nvprof_kit._report.plots.ranks import waits_figure

        if not len(self.charges):
            raise no_plot("a job without waiting")
        return waits_figure(self.charges)
