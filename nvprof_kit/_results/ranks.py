"""The results of a `Job`: `Ranks` with all tables, and `RankTable` for a single one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from nvprof_kit._analysis.ranks.answer import RanksAnswer
from nvprof_kit._report.warnings import in_order
from nvprof_kit._results.base import Result, no_plot

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from nvprof_kit._report.export.bounds import Bounded
    from nvprof_kit._results.document import Document

VIEWS = ("waits", "charges", "layers", "clocks", "groups", "bubbles", "micro-batches", "critical-path", "what-if")
"""The tables of a job, by name."""
REPLAYED = ("groups", "bubbles", "micro-batches", "critical-path", "what-if")
"""Those that are only made of a limited number of collectives."""


def columns_of(view: str) -> Mapping[str, str]:
    """The meaning of the columns of a job's table."""
    from nvprof_kit._analysis.ranks import bubbles, clocks, layers, parallel, replay
    from nvprof_kit._analysis.ranks.waits import waits

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
        name: Name of the table: ``waits``, ``charges``, ``layers``, …
        rows: The table; the same as `to_frame`.
        columns: The meaning of each column.
        warnings: What may be missing or distorted in the job.
        top: Maximum number of rows to print.
    """

    name: str
    rows: pd.DataFrame
    columns: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    top: int = field(default=20, kw_only=True)

    has_plot: ClassVar[bool] = True

    @property
    def schema(self) -> str:
        """Name of the JSON schema."""
        return f"ranks-{self.name}"

    def to_frame(self) -> pd.DataFrame:
        """The table."""
        return self.rows

    def parts(self) -> list[RenderableType]:
        """The printed rows, and the total number of rows."""
        from nvprof_kit._report.text.ranks import rank_table

        return rank_table(self.frame(), self.top)

    def frame(self) -> pd.DataFrame:
        """The selected rows; where equal blocks are folded, ``charges`` with ``folded_into`` and ``unlike``."""
        if not self.select.fold or self.name != "charges":
            return super().frame()
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

    has_plot: ClassVar[bool] = True

    def to_frame(self, view: str = "waits") -> pd.DataFrame:
        """One table: ``waits``, ``charges``, ``layers``, ``clocks``, ``groups``, ``bubbles``,
        ``micro-batches``, ``critical-path`` or ``what-if``.
        """
        return self.table(view)

    def only(self, view: str) -> RankTable:
        """One of the tables of `to_frame` as a separate result."""
        return RankTable(view, self.table(view), columns_of(view), self.warnings, top=self.top, sources=self.sources)

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
        """As in `Result`; ``html`` is the page of the job, ``json`` all tables, each shortened to the limit on rows."""
        if form == "html" and self.make_page is not None:
            return self.make_page().data
        if form != "json":
            return super().encode(form)
        from nvprof_kit._report.export.bounds import bounded

        tables = {view: self.table(view) for view in VIEWS}
        chosen = self.select.each({view: table for view, table in tables.items() if table is not None})
        most = self.select.max_rows
        while True:
            data = self._whole({view: bounded(table, self.select, most) for view, table in chosen.items()})
            longest = min(max(map(len, chosen.values())), max(map(len, chosen.values())) if most is None else most)
            if self.select.budget is None or len(data) <= self.select.budget or not longest:
                return data
            most = longest * min(self.select.budget * 9 // 10, len(data) // 2) // len(data)

    def _whole(self, found: Mapping[str, Bounded]) -> bytes:
        """All tables as one JSON document."""
        from nvprof_kit._report.export import schemas
        from nvprof_kit._report.export.answer import missing_in, records
        from nvprof_kit._report.export.tables import as_json

        missing = {name: view for view, one in found.items() for name in missing_in(one.rows)}
        reasons = {name: schemas.reasons(f"ranks-{view}", [name])[name] for name, view in missing.items()}
        if self.not_replayed:
            reasons |= {name.replace("-", "_"): self.not_replayed for name in ("replay_error", *REPLAYED)}
        cut = {view: one.truncated for view, one in found.items() if one.left_out}
        whole = self.to_dict() | {
            "warnings": list(in_order(self.warnings)),
            "sources": list(self.answered),
            "unknown": reasons,
            "truncated": cut or None,
            **{view.replace("-", "_"): records(one.rows) for view, one in found.items()},
        }
        return (as_json(whole, indent=1) + "\n").encode("utf-8", "replace")

    def figure(self) -> Figure:
        """Draw how long the other ranks waited for each rank, split by cause."""
        from nvprof_kit._report.plots.ranks import waits_figure

        if not len(self.charges):
            raise no_plot("a job without waiting")
        return waits_figure(self.charges)
