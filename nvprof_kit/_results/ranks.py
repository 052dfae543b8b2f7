"""The results of a `Job`: `Ranks` with all tables, and `RankTable` for a single one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from nvprof_kit._ranks import clocks, groups, replay, stages, waits
from nvprof_kit._ranks.answer import RanksAnswer
from nvprof_kit._result import formats
from nvprof_kit._result.column import Columns
from nvprof_kit._result.result import Result, no_plot
from nvprof_kit.issues import Issue, in_order

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from nvprof_kit._result.document import Document

VIEWS = ("waits", "charges", "layers", "clocks", "groups", "bubbles", "micro-batches", "critical-path", "what-if")
"""The tables of a job, by name."""
REPLAYED = ("groups", "bubbles", "micro-batches", "critical-path", "what-if")
"""Those that are only made of a limited number of collectives."""


COLUMNS: Mapping[str, Columns] = {
    "ranks-waits": waits.WAIT_COLUMNS,
    "ranks-charges": waits.CHARGE_COLUMNS,
    "ranks-layers": stages.LAYER_COLUMNS,
    "ranks-clocks": clocks.COLUMNS,
    "ranks-groups": groups.GROUP_COLUMNS,
    "ranks-bubbles": stages.BUBBLE_COLUMNS,
    "ranks-micro-batches": stages.MICRO_BATCH_COLUMNS,
    "ranks-critical-path": replay.PATH_COLUMNS,
    "ranks-what-if": replay.WHAT_IF_COLUMNS,
}
"""The columns of each table, by its schema."""


@dataclass(frozen=True, repr=False, eq=False)
class RankTable(Result):
    """A table of a job.

    Attributes:
        name: Name of the table: ``waits``, ``charges``, ``layers``, …
        rows: The table; the same as `to_frame`.
        warnings: What may be missing or distorted in the job.
        top: Maximum number of rows to print.
    """

    name: str
    rows: pd.DataFrame
    warnings: tuple[Issue, ...] = ()
    top: int = field(default=20, kw_only=True)

    columns: ClassVar = COLUMNS

    @property
    def schema(self) -> str:
        """Name of the JSON schema."""
        return f"ranks-{self.name}"

    def table(self, view: str | None = None) -> pd.DataFrame:
        """The table."""
        return self.rows

    def parts(self) -> list[RenderableType]:
        """The printed rows, and the total number of rows."""
        from nvprof_kit._report.text.ranks import rank_table

        return rank_table(self.to_frame(), self.top)

    def to_frame(self, view: str | None = None) -> pd.DataFrame:
        """The selected rows; where equal blocks are folded, ``charges`` with ``folded_into`` and ``unlike``."""
        if not self.select.fold or self.name != "charges":
            return super().to_frame()
        from nvprof_kit._analysis.layers.fold_ranked import mark_ranked

        return self.select.of(mark_ranked(self.rows, "wait_ns"))

    def figure(self) -> Figure:
        """Draw ``waits`` and ``charges`` as one bar per late rank, split by cause; ``layers`` as a heat map by rank.

        Raises:
            UsageError: The table is another one, or empty.
        """
        from nvprof_kit._report.plots import ranks

        drawn = {"waits": ranks.waits_figure, "charges": ranks.waits_figure, "layers": ranks.layers_figure}
        if self.name not in drawn or not len(self.rows):
            raise no_plot(f"the table {self.name}" if len(self.rows) else f"an empty table {self.name}")
        return drawn[self.name](self.rows)


@dataclass(frozen=True, repr=False, eq=False)
class Ranks(Result, RanksAnswer):
    """All tables of a job.

    Attributes:
        top: Maximum number of rows to print per table.
        make_page: Makes the page of the job; `save` writes it as ``.html``.
    """

    top: int = field(default=10, kw_only=True)
    make_page: Callable[[], Document] | None = field(default=None, kw_only=True)

    columns: ClassVar = COLUMNS

    def table(self, view: str | None = None) -> pd.DataFrame:
        """One table: ``waits`` (by default), ``charges``, ``layers``, ``clocks``, ``groups``, ``bubbles``,
        ``micro-batches``, ``critical-path`` or ``what-if``.
        """
        return RanksAnswer.table(self, view or "waits")

    def only(self, view: str) -> RankTable:
        """One of the tables of `to_frame` as a separate result."""
        return RankTable(view, self.table(view), self.warnings, top=self.top, sources=self.sources)

    def parts(self) -> list[RenderableType]:
        """The printed report: verdict, waiting by cause, layers, clocks, critical path and what-if."""
        from nvprof_kit._report.text.ranks import ranks_report

        views = (
            {name: getattr(self, name) for name in ("charges", "layers", "critical_path")} if self.select.where else {}
        )
        chosen: dict[str, Any] = dict(self.select.each(views))
        return ranks_report(replace(self, **chosen), self.top, self.select.fold)

    @property
    def schema(self) -> str:
        """Name of the JSON schema of the table ``waits``."""
        return "ranks-waits"

    def encode(self, form: str) -> bytes:
        """As in `Result`; ``html`` is the page of the job, ``json`` all tables."""
        if form == "html" and self.make_page is not None:
            return self.make_page().data
        if form != "json":
            return super().encode(form)
        tables = {view: self.table(view) for view in VIEWS}
        chosen = self.select.each({view: table for view, table in tables.items() if table is not None})
        unknown: dict[str, str] = {}
        for view, table in chosen.items():
            unknown |= formats.reasons(table, self.columns_of(f"ranks-{view}"))
        if self.not_replayed:
            unknown |= {name.replace("-", "_"): self.not_replayed for name in ("replay_error", *REPLAYED)}
        answer = self.to_dict() | {
            "warnings": list(in_order(self.warnings)),
            "sources": list(self.answered),
            "unknown": unknown,
            "columns": {
                view.replace("-", "_"): formats.described(table, self.columns_of(f"ranks-{view}"))
                for view, table in chosen.items()
            },
            **{view.replace("-", "_"): formats.records(table) for view, table in chosen.items()},
        }
        return (formats.as_json(answer, indent=1) + "\n").encode("utf-8", "replace")

    def figure(self) -> Figure:
        """Draw how long the other ranks waited for each rank, split by cause."""
        from nvprof_kit._report.plots.ranks import waits_figure

        if not len(self.charges):
            raise no_plot("a job without waiting")
        return waits_figure(self.charges)
