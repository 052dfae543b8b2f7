"""The base class of all answers; which of their rows are asked for; several of them as one, and plots."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from glob import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, TypeVar

from nvprof_kit._result import formats
from nvprof_kit._result.column import CAPTURE, FOLDED, Columns
from nvprof_kit._result.writer import write_file
from nvprof_kit.errors import ToolError, UsageError, require, require_choice, require_positive
from nvprof_kit.issues import Issue, in_order, listing, printed

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa
    from matplotlib.figure import Figure
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult


_Own = TypeVar("_Own", bound="Result")

TABLE = "table"
"""The format for people to read."""

BY_SUFFIX = {".txt": TABLE} | {f".{name}": name for name in (*formats.TABLES, *formats.PICTURES, "html")}
"""The formats of a result by file suffix."""


def renderers() -> Any:
    """The module that shows results to people, which has a function for each way of showing; it is found by its name,
    since a result knows nothing of it.
    """
    return import_module("nvprof_kit._report.renderers")


class RowOptions(TypedDict, total=False):
    """Which rows of an answer are printed and written, and in which order; every question takes these arguments.

    Attributes:
        where: Only layers that match, such as 'model.layers.3.*'; ``*`` matches any text. Repeatable.
        sort: Column to sort by, named as in csv, with or without the unit; numbers in descending order.
        top: Rows of each printed table, the costliest first; csv, json, md and parquet keep all rows.
        fold: Equal blocks as one line, `layers.0-79 x80`; csv and json keep all rows and add the column folded_into.
            [default: in the printed table, if 8 or more blocks are equal]
    """

    where: str | Sequence[str]
    sort: str
    top: int | None
    fold: bool | None


@dataclass(frozen=True)
class Selection:
    """A selection of rows.

    Attributes:
        where: Glob patterns of layers, in which ``*`` matches any text; keeps rows that match one of them. Empty keeps
            all.
        sort: Column to sort by: numbers descending, texts ascending. '' keeps the order.
        top: Maximum number of rows to print; None for the default of the command.
        fold: Whether to print equal blocks as one row; None folds if there are many.
    """

    where: tuple[str, ...] = ()
    sort: str = ""
    top: int | None = None
    fold: bool | None = None

    @property
    def asked(self) -> bool:
        """Whether rows are filtered or sorted."""
        return bool(self.where or self.sort)

    def matches(self, layer: str) -> bool:
        """Whether a layer is selected."""
        return not self.where or any(fnmatchcase(layer, pattern) for pattern in self.where)

    def of(self, table: pd.DataFrame) -> pd.DataFrame:
        """The selected rows, sorted; a table without layers keeps all rows.

        Raises:
            UsageError: The sort column does not exist, or no layer matches.
        """
        return self.each({"": table})[""]

    def among(self, table: pd.DataFrame) -> pd.DataFrame:
        """The rows of the selected layers, in their order.

        Raises:
            UsageError: No layer matches.
        """
        return replace(self, sort="").of(table)

    def sorted(self, table: pd.DataFrame) -> pd.DataFrame:
        """All rows, sorted.

        Raises:
            UsageError: The sort column does not exist.
        """
        return replace(self, where=()).of(table)

    def each(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
        """Select rows from several tables: filters those with layers and sorts those with the sort column.

        Raises:
            UsageError: No table has the sort column, or no layer matches in any table.
        """
        selected = dict(tables)
        if self.where:
            of_tables = {name: table["layer"].astype(str) for name, table in tables.items() if "layer" in table}
            layers = [*dict.fromkeys(layer for of_table in of_tables.values() for layer in of_table.unique())]
            if layers and not any(map(self.matches, layers)):
                raise UsageError(f"--where {' '.join(self.where)}: no layer matches; available: {listing(layers, 4)}")
            for name, of_table in of_tables.items():
                selected[name] = tables[name][of_table.map(self.matches).astype(bool).to_numpy()]
        if self.sort:
            sort_columns = {name: matching(self.sort, table) for name, table in tables.items()}
            if not any(sort_columns.values()):
                available = dict.fromkeys(str(column) for table in tables.values() for column in table)
                raise UsageError(f"--sort {self.sort}: no such column; available: {', '.join(available)}")
            for name, columns in sort_columns.items():
                if columns:
                    by, rows = columns[0], selected[name]
                    ascending = rows[by].dtype.kind not in "iufb"
                    selected[name] = rows.sort_values(by, ascending=ascending, kind="stable", na_position="last")
        return selected


EVERYTHING = Selection()
"""All rows in their original order."""

UNFOLDED = Selection(fold=False)
"""The same without folding."""


def matching(name: str, table: pd.DataFrame) -> list[str]:
    """The columns with this name, with or without unit: ``gpu_total`` also matches ``gpu_total_ns``."""
    text = name.strip().lower().replace("-", "_").replace(" ", "_")
    columns = [str(column) for column in table.columns]
    exact = [column for column in columns if column.lower() == text]
    return exact or [column for column in columns if column.lower().rpartition("_")[0] == text]


@dataclass(frozen=True, repr=False, eq=False)
class Result:
    """The answer to a question.

    ``print(result)`` prints the same table as the command line, and a notebook displays it in color. `to_frame` returns
    the figures as a DataFrame, and `save` writes them to a file.

    Attributes:
        sources: The input files; `save` refuses to overwrite them.
        select: Which rows are printed and written, and in which order; see `selected`.
        columns: The columns of each table, by the name of the table's schema in JSON.
        bars: For each of these tables, the columns that `figure` draws as bars, and those with the labels.
    """

    sources: tuple[Path, ...] = field(default=(), kw_only=True)
    select: Selection = field(default=EVERYTHING, kw_only=True)

    columns: ClassVar[Mapping[str, Columns]] = {}
    bars: ClassVar[Mapping[str, tuple[Sequence[str], Sequence[str]]]] = {}

    if TYPE_CHECKING:

        @property
        def warnings(self) -> Sequence[Issue]:
            """What may be missing or distorted; each sentence says what to do about it."""

        @property
        def rows(self) -> pd.DataFrame:
            """All rows of the answer's only table."""

    def table(self, view: str | None = None) -> pd.DataFrame:
        """All rows of a table; None for the one that is printed, or the first of those.

        Raises:
            UsageError: The answer has no such table.
        """
        if view is not None:
            raise UsageError(f"{view}: this answer has a single table; leave its name out")
        return self.rows

    def to_frame(self, view: str | None = None) -> pd.DataFrame:
        """The figures as a DataFrame: the rows that were asked for, sorted; a limit to what is printed does not apply.

        Units are in the names of the columns; ``_ns`` and ``_bytes`` are int64.

        Args:
            view: The table, if the answer has several.

        Raises:
            UsageError: The answer has no such table, the sort column does not exist, or no layer matches.
        """
        return self.select.of(self.table(view))

    def to_arrow(self, view: str | None = None) -> pa.Table:
        """`to_frame` as a table of Apache Arrow."""
        import pyarrow

        return pyarrow.Table.from_pandas(self.to_frame(view), preserve_index=False)

    def to_polars(self, view: str | None = None) -> pl.DataFrame:
        """`to_frame` as a DataFrame of Polars, which shares the memory of `to_arrow`.

        Raises:
            ToolError: Polars is not installed.
        """
        try:
            import polars
        except ImportError:
            raise ToolError("to_polars() needs Polars: pip install polars") from None
        frame = polars.from_arrow(self.to_arrow(view))
        assert isinstance(frame, polars.DataFrame)
        return frame

    def __len__(self) -> int:
        """The number of rows of `to_frame`."""
        return len(self.to_frame())

    def __bool__(self) -> bool:
        """An answer without rows is an answer."""
        return True

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows of `to_frame`, each as a dictionary by column; a missing value is None."""
        return iter(formats.records(self.to_frame()))

    def __contains__(self, layer: object) -> bool:
        """Whether a row is of this layer."""
        rows = self.table()
        return isinstance(layer, str) and "layer" in rows and layer in set(rows["layer"].astype(str))

    def __getitem__(self: _Own, layer: str) -> _Own:
        """The same answer for one layer, by its path.

        Raises:
            KeyError: There is no such layer.
        """
        if layer not in self:
            raise KeyError(f"{layer!r}: no row is of this layer")
        return replace(self, select=replace(self.select, where=(escape(layer),), fold=False))

    def parts(self) -> Sequence[RenderableType]:
        """What is printed: Rich renderables."""
        renderables: Sequence[RenderableType] = renderers().parts(self)
        return renderables

    def figure(self) -> Figure:
        """Draw the result with Matplotlib.

        Raises:
            UsageError: This result has no plot.
        """
        drawn: Figure = renderers().figure(self)
        return drawn

    def plot(self) -> Plot:
        """Draw the result, to be displayed in a notebook.

        Raises:
            UsageError: This result has no plot.
        """
        return Plot(self.figure(), self.to_frame(), tuple(self.warnings), sources=self.sources)

    def page(self) -> bytes:
        """The result as a self-contained HTML page, UTF-8 encoded."""
        page: bytes = renderers().page(self)
        return page

    def encode(self, data_format: str) -> bytes:
        """Encode the result.

        Args:
            data_format: ``table`` or a format of `save`, without the dot: ``csv``, ``json``, ``md``, ``parquet``,
                ``html``, ``png``, …

        Raises:
            UsageError: There is no such format, or the result has no plot.
        """
        require_choice(data_format, BY_SUFFIX.values(), "data_format")
        if data_format == TABLE:
            text: str = renderers().text_of(self.parts(), to_file=True)
            return text.encode("utf-8", "replace")
        if data_format == "html":
            return self.page()
        if data_format in formats.PICTURES:
            picture: bytes = renderers().encode_figure(self.figure(), data_format)
            return picture
        if data_format == "json":
            return self._json(self.to_frame())
        below = formats.quoted(printed(self.warnings)) if data_format == "md" else b""
        return formats.encode(self.to_frame(), data_format) + below

    def selected(
        self: _Own, *, where: str | Sequence[str] = (), sort: str = "", top: int | None = None, fold: bool | None = None
    ) -> _Own:
        """Choose which rows to print and write.

        Args:
            where: Glob patterns of layers; ``*`` matches any text.
            sort: Column to sort by, with or without its unit; numbers in descending order.
            top: Maximum number of rows to print per table.
            fold: Whether to print equal blocks as one row; None folds if there are many.

        Returns:
            A copy of the result with this selection.

        Raises:
            UsageError: ``sort`` is no text, or ``top`` is no number of rows.
        """
        patterns = (where,) if isinstance(where, str) else tuple(where)
        require(sort, str, "sort", "the name of a column")
        require_positive(top, "top")
        require(fold, (bool, type(None)), "fold", "True or False")
        require_positive(getattr(self, "depth", None), "depth")
        return replace(self, select=Selection(patterns, sort, top, fold))

    @property
    def schema(self) -> str:
        """Name of the JSON schema; docs/data.md lists all."""
        return next(iter(self.columns), "rows")

    def columns_of(self, schema: str) -> Columns:
        """The columns that a table may have, those of folded rows and of several captures among them."""
        return {"capture": CAPTURE, **FOLDED, **self.columns.get(schema, {})}

    def _json(self, table: pd.DataFrame) -> bytes:
        facts = {
            **formats.schema_of(self.schema),
            "warnings": list(in_order(self.warnings)),
            "sources": [str(source) for source in self.sources],
        }
        return formats.json_answer(facts, table, self.columns_of(self.schema))

    def warnings_beside(self, data_format: str) -> Sequence[str]:
        """The warnings that a format has no place for."""
        return () if data_format in (TABLE, "html", "json", "md") else printed(self.warnings)

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
        data_format = BY_SUFFIX.get(path.suffix.lower())
        if data_format is None:
            raise UsageError(f"{path}: no format has this suffix; needed one of {' '.join(BY_SUFFIX)}")
        return write_file(path, self.encode(data_format), inputs=self.sources)

    def __str__(self) -> str:
        """The table that the command line prints."""
        text: str = renderers().text_of(self.parts())
        return text.strip("\n")

    __repr__ = __str__

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Print with ``rich.print``."""
        yield from self.parts()

    def _repr_html_(self) -> str:
        element: str = renderers().html_of(self.parts())
        return element

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
    def warnings(self) -> tuple[Issue, ...]:
        """All warnings, each with its file."""
        return tuple(
            Issue(issue.code, issue.severity, issue.share, f"{result.sources[0]}: {issue}")
            for result in self.results
            for issue in result.warnings
        )

    @property
    def schema(self) -> str:
        """Name of the JSON schema."""
        return self.results[0].schema

    def columns_of(self, schema: str) -> Columns:
        """The columns that a table may have."""
        return self.results[0].columns_of(schema)

    def table(self, view: str | None = None) -> pd.DataFrame:
        """The rows of all results, with the column ``capture``."""
        return formats.with_capture([(str(result.sources[0]), result.to_frame(view)) for result in self.results])

    def to_frame(self, view: str | None = None) -> pd.DataFrame:
        """The same as `table`: each result has already selected its rows."""
        return self.table(view)

    def parts(self) -> list[RenderableType]:
        """The printed results, with an empty line between two. An issue that several have is printed once."""
        parts: list[RenderableType] = []
        said: set[str] = set()
        for result in self.results:
            parts += [""] if parts and parts[-1] != "" else []
            lines = [(renderable, getattr(renderable, "plain", "")) for renderable in result.parts()]
            parts += [renderable for renderable, line in lines if line not in said]
            said |= {line for _, line in lines if line.startswith("! ")}
        return parts


def table_named(tables: Mapping[str, pd.DataFrame], view: str) -> pd.DataFrame:
    """One of the tables of an answer by its name.

    Raises:
        UsageError: The answer has no such table.
    """
    if view not in tables:
        raise UsageError(f"{view}: no such view here; available: {', '.join(tables)}")
    return tables[view]


def no_plot(subject: str, views: Sequence[str] = ()) -> UsageError:
    """The error that something has no plot, though some of its views have one."""
    of_views = f", or one view: {', '.join(views)}" if views else ""
    return UsageError(f"{subject} has no plot; needed a table format: .csv, .json, .md, .parquet or .txt{of_views}")


@dataclass(frozen=True, repr=False, eq=False)
class Plot(Result):
    """A plot. A notebook displays it; `save` writes it as .png, .svg or .pdf.

    Attributes:
        drawn: The Matplotlib figure.
        rows: The plotted data.
        warnings: What may be missing or distorted.
    """

    drawn: Figure
    rows: pd.DataFrame
    warnings: tuple[Issue, ...] = ()

    def parts(self) -> list[RenderableType]:
        """A line that says how to save the plot, which a terminal cannot show."""
        return ["a plot; save it as .png, .svg or .pdf"]

    def figure(self) -> Figure:
        """The Matplotlib figure."""
        return self.drawn

    def _repr_html_(self) -> str:
        coded = base64.b64encode(renderers().encode_figure(self.drawn, "png")).decode()
        return f'<img alt="a plot" style="max-width:100%" src="data:image/png;base64,{coded}">'
