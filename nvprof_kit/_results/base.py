"""What every answer can do, whatever it is about."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from nvprof_kit._report.export import tables
from nvprof_kit._report.export.writer import write_file
from nvprof_kit._report.plots import plots
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

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
    """

    sources: tuple[Path, ...] = field(default=(), kw_only=True)

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
            from nvprof_kit._report.text.terminal import text_of

            return text_of(self.parts(), kept=True).encode("utf-8", "replace")
        if form == "html":
            return self.page()
        if form in plots.FORMATS:
            return plots.encode(self.figure(), form)
        return tables.encode(self.to_frame(), form)

    def warnings_beside(self, form: str) -> Sequence[str]:
        """The warnings that this form of the answer has no place for."""
        return () if form in (TABLE, "html") else self.warnings

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
        from nvprof_kit._report.text.terminal import text_of

        return text_of(self.parts()).strip("\n")

    __repr__ = __str__

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The same for ``rich.print``."""
        yield from self.parts()

    def _repr_html_(self) -> str:
        from nvprof_kit._report.text.terminal import html_of

        return html_of(self.parts())

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def no_plot(what: str) -> UsageError:
    """That something has no picture."""
    return UsageError(f"{what} has no plot; needed a table format: .csv, .json, .md, .parquet or .txt")
