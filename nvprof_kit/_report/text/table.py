"""Tables that fit the terminal without truncating numbers, the lines around them, and how both are printed.

A table shortens texts, then leaves out columns; a line below it lists what is left out, and how to show it.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from nvprof_kit._report.text.texts import Milliseconds, cell, counted, filled, fit, heading
from nvprof_kit._result.formats import plain, title
from nvprof_kit._result.result import Selection
from nvprof_kit._trace.schema import CaptureInfo
from nvprof_kit.issues import printed

if TYPE_CHECKING:
    import pandas as pd

WIDE = 120
"""Width of a table outside a terminal; wider if the numbers need it."""

_UNLIMITED = 1_000_000
"""A width that no table exceeds."""

_GAP = 2
_SHORT, _SHORT_LABEL, _BAR = 12, 24, 24
"""Minimum widths of shortened texts: other columns, and the first column; and the width of a bar."""

_NO_BREAK = "\N{NO-BREAK SPACE}"

FOLD_KINDS = {"median": "right", "min": "right", "max": "right", "unlike": "words"}
FOLD_RANKS = {"median": 2, "min": 2, "max": 2}
_FOLDED = "xN: equal blocks {}; median, min and max are {}. --no-fold prints one line per block."


@dataclass(frozen=True)
class Bar:
    """A fraction of 1 as a bar in a column of ``bar``; any positive fraction shows at least a sliver."""

    share: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The bar in eighths of a character, or as ``#`` if the terminal is ASCII only."""
        eighths = max(round(min(self.share, 1.0) * options.max_width * 8), int(self.share > 0))
        text = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
        yield Text("#" * round(eighths / 8) if options.ascii_only else text, "cyan")


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        name: The header.
        kind: ``left`` for texts, ``path`` for layer paths, ``words`` for texts that are wrapped, not shortened,
            ``right`` for numbers, or ``bar``.
        rank: If the width is insufficient, columns with the largest rank are left out first, from right to left.
    """

    name: str
    kind: str
    rank: int = 1


@dataclass(frozen=True)
class Row:
    """A row; without cells, a rule."""

    cells: tuple[str | Bar, ...] = ()
    style: str = ""
    cost: float | None = None


@dataclass
class Grid:
    """A table for display.

    Attributes:
        columns: The columns; the first names the rows. At most one is a bar, which needs the width that others leave.
        rows: The rows.
        limit: Maximum number of shown rows; None for all.
        way: How to show omitted rows.
        in_order: Whether the first rows are kept if not all are shown, and not the costliest.
        beyond: Number of rows that were omitted before; the line about omitted rows counts them.
    """

    columns: list[Column]
    rows: list[Row] = field(default_factory=list)
    limit: int | None = None
    way: str = "--top N shows them"
    in_order: bool = False
    beyond: int = 0

    def add_row(self, *cells: str | Bar, style: str = "", cost: float | None = None) -> None:
        """Add a row.

        Args:
            cells: A cell for each column.
            style: Rich style.
            cost: If not all rows fit, the costliest are shown, and rows without a cost always; if no row has a cost,
                the first ones.
        """
        self.rows.append(Row(cells, style, cost))

    def add_column(self, name: str, kind: str, cells: Sequence[str | Bar]) -> None:
        """Add a column with a cell for each row."""
        self.columns.append(Column(name, kind))
        self.rows = [replace(row, cells=(*row.cells, cell)) for row, cell in zip(self.rows, cells, strict=True)]

    def add_section(self) -> None:
        """Add a rule after the current rows."""
        self.rows.append(Row())

    def choose(self, select: Selection) -> None:
        """Print as many rows as selected: the costliest, or the first if they are sorted."""
        self.limit, self.in_order, self.way = select.top, bool(select.sort), "--top N or -o FILE.csv shows them"

    def parts(self, width: int, grow: bool = False) -> list[RenderableType]:
        """The table as it fits, and lines about what is left out.

        Args:
            width: Width of a line in cells.
            grow: Exceed `width` rather than shorten a text or leave out a column.
        """
        rows = self.rows
        costly = [row for row in rows if row.cost is not None] or [row for row in rows if row.cells]
        if self.limit is not None:  # only these are left out
            ranked = costly if self.in_order else sorted(costly, key=lambda row: -(row.cost or 0.0))
            omitted = set(map(id, ranked[self.limit :]))
            rows = [row for row in rows if id(row) not in omitted]
        widths = self._widths(rows, width, grow)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        cells = []
        for index, column_width in widths.items():
            name, kind = self.columns[index].name, self.columns[index].kind
            table.add_column(name, justify="right" if kind == "right" else "left", no_wrap=True, width=column_width)
            texts: Sequence[Any] = [row.cells[index] for row in rows if row.cells]
            if kind in ("left", "path"):
                texts = fit(texts, column_width, kind == "path")
            elif kind == "words":
                texts = [
                    "\n".join(textwrap.wrap(_joined(text), column_width)).replace(_NO_BREAK, " ") for text in texts
                ]
            cells.append(texts)
        lines = zip(*cells, strict=True)
        for row in rows:
            if row.cells:
                table.add_row(*next(lines), style=row.style)
            else:
                table.add_section()
        parts: list[RenderableType] = [table]
        if hidden := self.beyond + len(self.rows) - len(rows):
            parts.append(Text(f"… and {hidden:,} more {'row' if hidden == 1 else 'rows'}; {self.way}", "dim"))
        if gone := [column.name for index, column in enumerate(self.columns) if index not in widths and column.name]:
            parts.append(Text(f"Too wide for {width} columns: {', '.join(gone)}; -o FILE.csv has them", "dim"))
        return parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render at the width given by Rich."""
        yield from self.parts(options.max_width)

    def _widths(self, rows: Sequence[Row], width: int, grow: bool) -> dict[int, int]:
        """The widths of the columns that are shown, by position: as they are, or as narrow as it has to be."""
        widths, floors = {}, {}
        for index, column in enumerate(self.columns):
            if column.kind != "bar":
                texts = [column.name, *(plain(str(row.cells[index])) for row in rows if row.cells)]
                widths[index] = max(map(cell_len, texts))
                pieces = [word for text in texts for word in _joined(text).split(" ")] if column.kind == "words" else []
                floor = max([_SHORT if index else _SHORT_LABEL, *map(cell_len, pieces)])
                floors[index] = widths[index] if column.kind == "right" else min(floor, widths[index])
        all_widths = dict(widths)

        def lacking(widths: Mapping[int, int]) -> int:
            return 0 if grow else sum(widths.values()) + _GAP * (len(widths) - 1) - width

        for index in sorted(widths, key=lambda index: (-self.columns[index].rank, -index)):
            if index and lacking({other: floors[other] for other in widths}) > 0:
                del widths[index]
        for texts_first in (True, False):  # the first column is shortened last
            group = [index for index in widths if bool(index) == texts_first]
            while lacking(widths) > 0 and (wider := [index for index in group if widths[index] > floors[index]]):
                widths[max(wider, key=lambda index: widths[index])] -= 1
        left = width - sum(all_widths.values()) - _GAP * len(all_widths)
        bars = [index for index, column in enumerate(self.columns) if column.kind == "bar"]
        return dict(sorted((widths | (dict.fromkeys(bars, min(_BAR, left)) if left > 0 else {})).items()))


def _joined(text: str) -> str:
    """A text that is not wrapped between a number and the percent sign."""
    return text.replace(" %", f"{_NO_BREAK}%")


class _PlainConsole(Console):
    """A console that removes control characters from texts."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render with Rich, keeping only its own control codes."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)


def _console(file: TextIO, **options: Any) -> Console:
    return _PlainConsole(file=file, highlight=False, markup=False, force_jupyter=False, **options)


def _print(console: Console, parts: Iterable[RenderableType], width: int, grow: bool = False) -> None:
    for element in parts:
        console.print(*(element.parts(width, grow) if isinstance(element, Grid) else [element]), sep="\n")


def print_to(file: TextIO, parts: Iterable[RenderableType], to_file: bool = False) -> None:
    """Print the parts of a report.

    On a terminal, output has colors and the terminal's width. Elsewhere it is plain and ``COLUMNS`` wide. If
    ``COLUMNS`` is not set, or with ``to_file``, it is 120 wide, or wider if the labels and numbers of a table need it.
    """
    if file.isatty():
        console = _console(file)
        _print(console, parts, console.width)
        return
    columns = "" if to_file else os.environ.get("COLUMNS", "")
    console = _console(file, width=_UNLIMITED, color_system=None)  # texts are not wrapped
    with console.capture() as capture:
        _print(console, parts, int(columns) if columns.isdecimal() else WIDE, grow=not columns.isdecimal())
    file.writelines(line.rstrip() + "\n" for line in capture.get().splitlines())


def text_of(parts: Iterable[RenderableType], to_file: bool = False) -> str:
    """The parts of a report as plain text, as written to a file by `print_to`."""
    file = StringIO()
    print_to(file, parts, to_file=to_file)
    return file.getvalue()


def html_of(parts: Iterable[RenderableType]) -> str:
    """The parts of a report as an HTML element with colors; texts are escaped, control characters replaced."""
    console = _console(StringIO(), width=_UNLIMITED, record=True, force_terminal=True)
    _print(console, parts, WIDE, grow=True)
    style = "font-family:Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre;overflow-x:auto;line-height:1.3"
    return console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')


def table(columns: Iterable[tuple[str, str]], ranks: Mapping[str, int] = MappingProxyType({})) -> Grid:
    """An empty table.

    Args:
        columns: Name and kind of each, see `Column`.
        ranks: Ranks of columns by name, 1 by default.
    """
    return Grid([Column(name, kind, ranks.get(name, 1)) for name, kind in columns])


def frame_table(frame: pd.DataFrame, top: int, mib: bool = False) -> Grid:
    """A table of an analysis, with times in milliseconds; columns without a value are left out.

    Args:
        frame: Its rows.
        top: How many of them are printed.
        mib: Write bytes in MiB, not in units of 10⁶.
    """
    rows = filled(frame.head(top))
    columns = []
    for name, values in rows.items():
        is_number = values.dtype.kind in "iufb" or not values.dropna().astype(str).str.contains(r"[^\W\d_]").any()
        kind = {"layer": "path", "unlike": "words"}.get(str(name), "right" if is_number else "left")
        columns.append((heading(str(name), mib), kind))
    grid = table(columns)
    grid.beyond = max(len(frame) - top, 0)
    for row in rows.to_dict("records"):
        grid.add_row(*(cell(str(name), value, mib) for name, value in row.items()))
    return grid


def capture_line(info: CaptureInfo, steps: int, all_steps: int) -> Text:
    """A line about the capture: file, tool, GPUs, processes and steps."""
    facts = "".join(f" · {fact}" for fact in capture_facts(info, steps, all_steps))
    return Text(title(info.path), "bold").append(facts, style="not bold")


def capture_facts(info: CaptureInfo, steps: int, all_steps: int) -> list[str]:
    """Facts about the capture: tool, GPUs, processes and how many of its steps are in the figures."""
    prefix = f"{steps} of " if steps != all_steps else ""
    facts = [
        info.tool,
        counted(info.gpus) if info.on_gpu else "no GPU",
        f"{info.processes} processes, added up" if info.processes > 1 else "",
        f"{prefix}{all_steps or 'no'} step{'s' * (all_steps != 1)}",
    ]
    return [fact for fact in facts if fact]


def warning_lines(issues: Iterable[str]) -> list[Text]:
    """The issues that are printed, one line each, the most severe first."""
    return [Text(f"! {issue}", "yellow") for issue in printed(issues)]


def fold_cells(row: Mapping[Any, Any], ms: Milliseconds) -> dict[str, str]:
    """The time of one of the equal blocks, or how a block differs from its equals."""
    each = {name: ms(row[f"{name}_ns"]) for name in FOLD_RANKS} if row["count"] > 1 else {}
    return each | ({"unlike": row["unlike"]} if row["unlike"] else {})


def fold_columns(lines: Iterable[Mapping[str, str]]) -> list[str]:
    """The non-empty columns of `fold_cells`."""
    used = {name for line in lines for name in line}
    return [name for name in FOLD_KINDS if name in used]


def fold_notes(columns: Iterable[str], figures: str, each: str) -> list[Text]:
    """A note about folded lines, if there are any.

    Args:
        columns: The table's columns.
        figures: The meaning of the figures of a folded line.
        each: The meaning of median, min and max.
    """
    is_folded = "median" in columns
    return [Text(_FOLDED.format(f"in one line; figures are {figures}", each), "dim")] if is_folded else []


def ranked_notes(tables: Iterable[pd.DataFrame]) -> list[Text]:
    """A note about folded rows of `nvprof_kit._analysis.layers.fold.fold_ranked`, if there are any."""
    is_folded = any("unlike" in rows and rows["layer"].astype(str).str.contains(r" x\d+$").any() for rows in tables)
    return [Text(_FOLDED.format("in one line with their sums", "of one of them"), "dim")] if is_folded else []
