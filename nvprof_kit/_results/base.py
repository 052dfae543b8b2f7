"""What every answer can do, whatever it is about."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from nvprof_kit._report.export import tables
from nvprof_kit._report.export.bounds import bounded
from nvprof_kit._report.export.writer import write_file
from nvprof_kit._report.plots import plots
from nvprof_kit._report.selection import EVERYTHING, Selection
from nvprof_kit._report.warnings import in_order
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

_Own = TypeVar("_Own", bound="Result")

TABLE = "table"
"""The form that is for a person to read."""

BY_SUFFIX = {".txt": TABLE} | {f".{name}": name for name in (*tables.FORMATS, *plots.FORMATS, "html")}
"""The forms of an answer, each by the suffix of its files."""


@dataclass(frozen=True, repr=False, eq=False)
class Result(ABC):
    """An answer.

    ``print(result)`` prints the table of the command line, a notebook shows it in colour; `to_frame` gives the figures,
    `save` writes them.

    Attributes:
        sources: The files that it was made of; `save` never writes over one of them.
        select: Which rows are printed and written, and in which order; see `selected`.
    """

    sources: tuple[Path, ...] = field(default=(), kw_only=True)
    select: Selection = field(default=EVERYTHING, kw_only=True)

    has_plot: ClassVar[bool] = False
    """Whether there is a picture of it."""

    if TYPE_CHECKING:

        @property
        def warnings(self) -> Sequence[str]:
            """Sentences on what may be missing or distorted, each with what to do."""

    @abstractmethod
    def to_frame(self) -> pd.DataFrame:
        """The answer as a table: int64 nanoseconds and bytes, units in the names of its columns."""

    @abstractmethod
    def parts(self) -> Iterable[RenderableType]:
        """What is printed: lines and tables of rich."""

    def figure(self) -> Figure:
        """The answer as a picture.

        Raises:
            UsageError: There is none of it.
        """
        from nvprof_kit._report.plots.bars import bars_figure

        values, labels = self._bars()
        frame = self.to_frame() if values else None
        if frame is None or not {*values, *labels} <= set(frame):
            raise no_plot(type(self).__name__)
        return bars_figure(frame, values, labels, type(self).__name__)

    def _bars(self) -> tuple[Sequence[str], Sequence[str]]:
        """The columns of `to_frame` that are drawn as bars, and those that name them; none where that says nothing."""
        return (), ()

    def page(self) -> bytes:
        """The answer as a page of HTML that needs nothing else."""
        from nvprof_kit._report.page.plain import result_page

        return result_page(type(self).__name__, self._repr_html_())

    def encode(self, form: str) -> bytes:
        """The answer in one of the forms of `save`, by its name: ``table``, ``csv``, ``json``, ``html``, ``png``."""
        if form == TABLE:
            from nvprof_kit._report.text.table.terminal import text_of

            return text_of(self.parts(), kept=True).encode("utf-8", "replace")
        if form == "html":
            return self.page()
        if form in plots.FORMATS:
            return plots.encode(self.figure(), form)
        if form == "json":
            return self._json(self.frame())
        table = bounded(self.frame(), self.select).rows
        return tables.encode(table, form) + (tables.quoted(in_order(self.warnings)) if form == "md" else b"")

    def frame(self) -> pd.DataFrame:
        """The rows that `select` leaves of `to_frame`, in the order wanted; all of them, whatever bound there is.

        Raises:
            UsageError: There is no column to sort by, or no layer matches.
        """
        return self.select.of(self.to_frame())

    def selected(
        self: _Own,
        *,
        where: str | Sequence[str] = (),
        sort: str = "",
        top: int | None = None,
        fold: bool | None = None,
        max_rows: int | None = None,
    ) -> _Own:
        """The same answer, of which only some rows are printed and written.

        Args:
            where: Globs of layers, in which ``*`` stands for anything.
            sort: Column to sort by, figures descending.
            top: Rows of a table that are printed.
            fold: Whether equal blocks are printed as one row; None where there are many.
            max_rows: Rows that are written to a file, the costliest.
        """
        patterns = (where,) if isinstance(where, str) else tuple(where)
        return replace(self, select=Selection(patterns, sort, top, fold, max_rows))

    @property
    def schema(self) -> str:
        """Name of the schema of the json answer, of `nvprof_kit._report.export.schemas.TABLES`."""
        return "rows"

    @property
    def answered(self) -> tuple[str, ...]:
        """The files that it was made of, as text."""
        return tuple(map(str, self.sources))

    def _json(self, table: pd.DataFrame) -> bytes:
        from nvprof_kit._report.export.answer import json_answer

        if os.environ.get("NVPROF_KIT_JSON") == "list":  # what it was before it had a schema; for one release
            return tables.encode(bounded(table, self.select).rows, "json")
        return json_answer(self.schema, table, in_order(self.warnings), self.answered, self.select)

    def warnings_beside(self, form: str) -> Sequence[str]:
        """The warnings that this form of the answer has no place for, and what a bound left out."""
        if form == "json" and os.environ.get("NVPROF_KIT_JSON") == "list":
            old = "NVPROF_KIT_JSON=list gives the bare list of rows that json was; the next release has no such thing"
            return (*in_order(self.warnings), f"{old}: read `rows` of the answer")
        if form in (TABLE, "html", "json", *plots.FORMATS):
            return in_order(self.warnings) if form in plots.FORMATS else ()
        found = bounded(self.frame(), self.select)
        return (*(() if form == "md" else in_order(self.warnings)), *((found.sentence,) if found.left_out else ()))

    def save(self, path: str | Path) -> Path:
        """Write the answer to a file, whole or not at all.

        Args:
            path: The file; its suffix tells the form: .csv, .json, .md, .parquet, .txt, .html, and, where there is a
                picture, .png, .svg, .pdf.

        Returns:
            The path.

        Raises:
            UsageError: No form has this suffix, there is no picture, the file is one that the answer was made of, or it
                cannot be written.
        """
        path = Path(path)
        form = BY_SUFFIX.get(path.suffix.lower())
        if form is None:
            raise UsageError(f"{path}: no format has this suffix; needed one of {' '.join(BY_SUFFIX)}")
        return write_file(path, self.encode(form), inputs=self.sources)

    def __str__(self) -> str:
        """The table that the command line prints."""
        from nvprof_kit._report.text.table.terminal import text_of

        return text_of(self.parts()).strip("\n")

    __repr__ = __str__

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The same for ``rich.print``."""
        yield from self.parts()

    def _repr_html_(self) -> str:
        from nvprof_kit._report.text.table.terminal import html_of

        return html_of(self.parts())

    __eq__ = object.__eq__
    __hash__ = object.__hash__


@dataclass(frozen=True, repr=False, eq=False)
class Several(Result):
    """Several answers, whose rows a first column ``capture`` tells apart.

    Attributes:
        results: The answers, each with its own selection.
    """

    results: Sequence[Result]

    @property
    def warnings(self) -> tuple[str, ...]:
        """All warnings, each with the file that it is of."""
        return tuple(f"{result.sources[0]}: {one}" for result in self.results for one in result.warnings)

    @property
    def schema(self) -> str:
        """Name of the schema of the json answer."""
        return self.results[0].schema

    @property
    def answered(self) -> tuple[str, ...]:
        """The files that they were made of."""
        return tuple(str(source) for result in self.results for source in result.sources)

    def to_frame(self) -> pd.DataFrame:
        """All rows, with the column ``capture``."""
        return tables.with_capture([(str(result.sources[0]), result.frame()) for result in self.results])

    def frame(self) -> pd.DataFrame:
        """The same: each answer has selected its rows."""
        return self.to_frame()

    def parts(self) -> list[RenderableType]:
        """One below the other."""
        return [part for result in self.results for part in result.parts()]


def no_plot(what: str) -> UsageError:
    """That something has no picture."""
    return UsageError(f"{what} has no plot; needed a table format: .csv, .json, .md, .parquet or .txt")
