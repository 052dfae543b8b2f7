"""The base class of all results."""

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
"""The format for people to read."""

BY_SUFFIX = {".txt": TABLE} | {f".{name}": name for name in (*tables.FORMATS, *plots.FORMATS, "html")}
"""The formats of a result by file suffix."""


@dataclass(frozen=True, repr=False, eq=False)
class Result(ABC):
    """The result of a question.

    ``print(result)`` prints the same table as the command line, and a notebook displays it in color. `to_frame` returns
    the figures as a DataFrame, and `save` writes them to a file.

    Attributes:
        sources: The input files; `save` refuses to overwrite them.
        select: Which rows are printed and written, and in which order; see `selected`.
    """

    sources: tuple[Path, ...] = field(default=(), kw_only=True)
    select: Selection = field(default=EVERYTHING, kw_only=True)

    has_plot: ClassVar[bool] = False
    """Whether `figure` has a drawing made for this result."""

    if TYPE_CHECKING:

        @property
        def warnings(self) -> Sequence[str]:
            """What may be missing or distorted; each sentence says what to do about it."""

    @abstractmethod
    def to_frame(self) -> pd.DataFrame:
        """The figures as a DataFrame; units are in the column names: ``_ns`` and ``_bytes`` are int64."""

    @abstractmethod
    def parts(self) -> Iterable[RenderableType]:
        """What is printed: Rich renderables."""

    def figure(self) -> Figure:
        """Draw the result with Matplotlib.

        Raises:
            UsageError: This result has no plot.
        """
        from nvprof_kit._report.plots.bars import bars_figure

        values, labels = self._bars()
        frame = self.to_frame() if values else None
        if frame is None or not {*values, *labels} <= set(frame):
            raise no_plot(type(self).__name__)
        return bars_figure(frame, values, labels, type(self).__name__)

    def _bars(self) -> tuple[Sequence[str], Sequence[str]]:
        """The columns of `to_frame` to draw as bars, and the columns with labels; empty if there is no such plot."""
        return (), ()

    def page(self) -> bytes:
        """The result as a self-contained HTML page, UTF-8 encoded."""
        from nvprof_kit._report.page.plain import result_page

        return result_page(type(self).__name__, self._repr_html_())

    def encode(self, form: str) -> bytes:
        """Encode the result.

        Args:
            form: ``table`` or a format of `save`, without the dot: ``csv``, ``json``, ``md``, ``parquet``, ``html``,
                ``png``, …

        Raises:
            UsageError: The result has no plot.
        """
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
        """The rows of `to_frame` that `select` chooses, sorted; a limit on the number of rows is not applied.

        Raises:
            UsageError: The sort column does not exist, or no layer matches.
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
        budget: int | None = None,
    ) -> _Own:
        """Choose which rows to print and write.

        Args:
            where: Glob patterns of layers; ``*`` matches any text.
            sort: Column to sort by; numbers in descending order.
            top: Maximum number of rows to print per table.
            fold: Whether to print equal blocks as one row; None folds if there are many.
            max_rows: Maximum number of rows to write to a file; the costliest are kept.
            budget: Maximum number of bytes of a JSON answer, which then contains as many of the costliest rows as fit.

        Returns:
            A copy of the result with this selection.
        """
        patterns = (where,) if isinstance(where, str) else tuple(where)
        return replace(self, select=Selection(patterns, sort, top, fold, max_rows, budget))

    @property
    def schema(self) -> str:
        """Name of the JSON schema; docs/json.md lists all."""
        return "rows"

    @property
    def answered(self) -> tuple[str, ...]:
        """The input files, as text."""
        return tuple(map(str, self.sources))

    def _json(self, table: pd.DataFrame) -> bytes:
        from nvprof_kit._report.export.answer import json_answer

        if os.environ.get("NVPROF_KIT_JSON") == "list":  # the format before JSON had a schema; for one release
            return tables.encode(bounded(table, self.select).rows, "json")
        return json_answer(self.schema, table, in_order(self.warnings), self.answered, self.select)

    def warnings_beside(self, form: str) -> Sequence[str]:
        """The warnings that a format has no place for, and how many rows were left out."""
        if form == "json" and os.environ.get("NVPROF_KIT_JSON") == "list":
            old = "NVPROF_KIT_JSON=list gives the bare list of rows that json was; the next release has no such thing"
            return (*in_order(self.warnings), f"{old}: read `rows` of the answer")
        if form in (TABLE, "html", "json", *plots.FORMATS):
            return in_order(self.warnings) if form in plots.FORMATS else ()
        found = bounded(self.frame(), self.select)
        return (*(() if form == "md" else in_order(self.warnings)), *((found.sentence,) if found.left_out else ()))

    def save(self, path: str | Path) -> Path:
        """Write the result to a file. The file appears complete or not at all.

        Args:
            path: The file. The suffix selects the format: .csv, .json, .md, .parquet, .txt, .html, and, if the result
                has a plot, .png, .svg, .pdf.

        Returns:
            The path.

        Raises:
            UsageError: The suffix is unknown, the result has no plot, or the file is an input or cannot be written.
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
        """Print with ``rich.print``."""
        yield from self.parts()

    def _repr_html_(self) -> str:
        from nvprof_kit._report.text.table.terminal import html_of

        return html_of(self.parts())

    __eq__ = object.__eq__
    __hash__ = object.__hash__


@dataclass(frozen=True, repr=False, eq=False)
class Several(Result):
    """Several results combined. The first column, ``capture``, says where a row comes from.

    Attributes:
        results: The results, each with its own selection.
    """

    results: Sequence[Result]

    @property
    def warnings(self) -> tuple[str, ...]:
        """All warnings, each with its file."""
        return tuple(f"{result.sources[0]}: {one}" for result in self.results for one in result.warnings)

    @property
    def schema(self) -> str:
        """Name of the JSON schema."""
        return self.results[0].schema

    @property
    def answered(self) -> tuple[str, ...]:
        """The input files, as text."""
        return tuple(str(source) for result in self.results for source in result.sources)

    def to_frame(self) -> pd.DataFrame:
        """The rows of all results, with the column ``capture``."""
        return tables.with_capture([(str(result.sources[0]), result.frame()) for result in self.results])

    def frame(self) -> pd.DataFrame:
        """The same as `to_frame`: each result has already selected its rows."""
        return self.to_frame()

    def parts(self) -> list[RenderableType]:
        """The printed results, one below the other."""
        return [part for result in self.results for part in result.parts()]


def no_plot(what: str) -> UsageError:
    """The error that something has no plot."""
    return UsageError(f"{what} has no plot; needed a table format: .csv, .json, .md, .parquet or .txt")
