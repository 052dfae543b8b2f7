"""Tables that fit the terminal without truncating numbers, the lines around them, and how both are printed.

A table shortens texts, omits columns, or stacks cells; a line below it lists what is omitted, and how to show it.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from nvprof_kit._report.text.texts import Milliseconds, cell, counted, fit, heading
from nvprof_kit._result.formats import plain, title
from nvprof_kit._result.selection import Selection
from nvprof_kit._trace.schema import CaptureInfo
from nvprof_kit.issues import printed

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.layers.fold import ByLayer

BAR_WIDTH = 24
_EIGHTHS = " ▏▎▍▌▋▊▉"


class Bar:
    """A fraction of 1 as a bar, in eighths of a character, or as ``#`` if the terminal is ASCII only."""

    def __init__(self, share: float, style: str = "cyan", width: int = BAR_WIDTH) -> None:
        self._share = min(max(share, 0.0), 1.0)
        self._style = Style.parse(style)
        self._width = width

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """The preferred width; the minimum is 0."""
        return Measurement(0, min(self._width, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The bar; any positive fraction shows at least a sliver."""
        width = min(self._width, options.max_width)
        if options.ascii_only:
            text = "#" * round(self._share * width)
        else:
            eighths = max(round(self._share * width * 8), 1 if self._share > 0 else 0)
            text = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
        yield Segment(text.ljust(width), self._style)
        yield Segment.line()


_GAP = 2
_SHORT, _SHORT_LABEL = 12, 24
"""Minimum widths of shortened texts: other columns, and the first column."""
_NO_BREAK = "\N{NO-BREAK SPACE}"
_UNIT = re.compile(r"(?<=\d) (?=%|ns|µs|ms|s\b|[KMGT]i?B)")
WIDE = 120
"""Width of a table outside a terminal; wider if the numbers need it."""


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        name: The header.
        kind: ``left`` for texts, ``path`` for layer paths, ``words`` for texts with figures, which are wrapped,
            not shortened, ``right`` for numbers, or ``bar``.
        rank: If the width is insufficient, columns with the largest rank are omitted first, from right to left; rank 0
            is always shown.
    """

    name: str
    kind: str
    rank: int = 1

    @property
    def is_text(self) -> bool:
        """Whether it may be narrower than its texts."""
        return self.kind in ("left", "path", "words")


@dataclass(frozen=True)
class Row:
    """A row; with `section`, a rule."""

    cells: tuple[RenderableType, ...] = ()
    style: str = ""
    cost: float | None = None
    section: bool = False


@dataclass
class Grid:
    """A table for display.

    Attributes:
        columns: The columns; the first names the rows.
        rows: The rows.
        limit: Maximum number of shown rows; None for all.
        way: How to show omitted rows and columns, other than a file.
        in_order: Whether the first rows are kept if not all are shown, and not the costliest.
        beyond: Number of rows that were omitted before; the line about omitted rows counts them.
        hidden_note: The line about omitted rows, if it has words of its own; ``{}`` is their number.
    """

    columns: list[Column]
    rows: list[Row] = field(default_factory=list)
    limit: int | None = None
    way: str = "-o FILE.csv has them all"
    in_order: bool = False
    beyond: int = 0
    hidden_note: str = ""

    def add_row(self, *cells: RenderableType, style: str = "", cost: float | None = None) -> None:
        """Add a row.

        Args:
            cells: A cell for each column.
            style: Rich style.
            cost: If not all rows fit, the costliest are shown, and rows without a cost always; if no row has a cost,
            the
                first ones.
        """
        self.rows.append(Row(cells, style, cost))

    def add_column(self, name: str, kind: str, cells: Sequence[RenderableType]) -> None:
        """Add a column with a cell for each row."""
        self.columns.append(Column(name, kind))
        self.rows = [replace(row, cells=(*row.cells, cell)) for row, cell in zip(self.rows, cells, strict=True)]

    def add_section(self) -> None:
        """Add a rule after the current rows."""
        self.rows.append(Row(section=True))

    def choose(self, select: Selection) -> None:
        """Print as many rows as selected: the costliest, or the first if they are sorted."""
        self.limit, self.in_order, self.way = select.top, bool(select.sort), "--top N or -o FILE.csv shows them"

    def parts(self, width: int, grow: bool = False) -> list[RenderableType]:
        """The table as it fits, and a line about what is omitted.

        Args:
            width: Width of a line in cells.
            grow: Exceed `width` rather than shorten a text or omit a column.
        """
        rows, hidden = self.rows, self.beyond
        until = next((index for index, row in enumerate(rows) if row.section), len(rows))
        body = [row for row in rows if row.cost is not None] or rows[:until]  # only these are omitted
        if self.limit is not None and len(body) > self.limit:
            ranked = body if self.in_order else sorted(body, key=lambda row: -(row.cost or 0.0))
            omitted = {id(row) for row in ranked[self.limit :]}
            rows = [row for row in rows if id(row) not in omitted]
            hidden += len(omitted)
        visible = replace(self, rows=rows)
        places, widths, lacking = visible._fitting_columns(width, grow)
        gone = [column.name for index, column in enumerate(self.columns) if index not in places and column.name]
        parts: list[RenderableType]
        if lacking and not grow:
            parts, gone = [*visible._stacked(width)], []
        else:
            parts = [visible._table(places, widths)]
        if hidden:
            tail = self.hidden_note or f"… and {{}} more {'row' if hidden == 1 else 'rows'}; {self.way}"
            parts.append(Text(tail.format(f"{hidden:,}"), "dim"))
        if gone:
            parts.append(Text(f"Too wide for {width} columns: {', '.join(gone)}; -o FILE.csv has them", "dim"))
        return parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render at the width given by Rich, with all rows."""
        yield from self.parts(options.max_width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """The preferred width."""
        widths = self._widths()
        full_width = _whole([*widths.values(), *(BAR_WIDTH for column in self.columns if column.kind == "bar")])
        return Measurement(min(_SHORT_LABEL, full_width), min(full_width, options.max_width)).normalize()

    def _widths(self) -> dict[int, int]:
        """Preferred width of each column except bars, by position."""
        return {
            index: max(map(_cells, [column.name, *(row.cells[index] for row in self.rows if not row.section)]))
            for index, column in enumerate(self.columns)
            if column.kind != "bar"
        }

    def _fitting_columns(self, width: int, grow: bool) -> tuple[list[int], dict[int, int], int]:
        """The positions of the shown columns, their widths, and the number of cells still missing."""
        natural = self._widths()
        bars = [index for index, column in enumerate(self.columns) if column.kind == "bar"]
        order = sorted(range(1, len(self.columns)), key=lambda place: (self.columns[place].rank, place))
        droppable = [index for index in order if self.columns[index].rank and index in natural]
        visible = set(natural)
        while True:
            widths = {index: natural[index] for index in sorted(visible)}
            lacking = max(_whole(widths.values()) - width, 0)
            if not grow:
                lacking = self._shorten(widths, lacking)
            if not lacking or grow or not droppable:
                break
            visible.discard(droppable.pop())
        left = width - _whole(widths.values()) - _GAP
        if bars and left > 0 and not lacking and len(visible) == len(natural):
            widths |= {
                index: max(min(BAR_WIDTH, left // len(bars)), cell_len(self.columns[index].name)) for index in bars
            }
        return sorted(widths), widths, lacking

    def _shorten(self, widths: dict[int, int], lacking: int) -> int:
        """Shorten texts, the longest first; returns the number of cells still missing."""
        texts = [index for index in widths if self.columns[index].is_text]
        others_than_label, label = ([index for index in texts if (index == 0) == first] for first in (False, True))
        for group, min_width in ((others_than_label, _SHORT), (label, _SHORT_LABEL)):
            floor = dict.fromkeys(group, min_width)
            for index in group:
                if self.columns[index].kind == "words":
                    cells = (_plain(row.cells[index]) for row in self.rows if not row.section)
                    floor[index] = max(
                        [min_width, *(cell_len(word) for text in cells for word in _joined(text).split(" "))]
                    )
            while lacking and (wider := [index for index in group if widths[index] > floor[index]]):
                widths[max(wider, key=lambda place: widths[place])] -= 1
                lacking -= 1
        return lacking

    def _table(self, places: Sequence[int], widths: dict[int, int]) -> Table:
        rich_table = Table(
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold"
        )
        for index in places:
            column = self.columns[index]
            justify = "right" if column.kind == "right" else "left"
            rich_table.add_column(column.name, justify=justify, no_wrap=True, overflow="ellipsis", width=widths[index])  # type: ignore[arg-type]
        cells = {index: self._column_cells(index, widths[index]) for index in places}
        number = 0
        for row in self.rows:
            if row.section:
                rich_table.add_section()
            else:
                rich_table.add_row(*(cells[index][number] for index in places), style=row.style)
                number += 1
        return rich_table

    def _column_cells(self, index: int, width: int) -> list[RenderableType]:
        """The cells of a column as they fit its width."""
        cells = [row.cells[index] for row in self.rows if not row.section]
        column = self.columns[index]
        if column.kind == "words":
            return [
                "\n".join(textwrap.wrap(_joined(cell), width, break_long_words=False, break_on_hyphens=False)).replace(
                    _NO_BREAK, " "
                )
                if isinstance(cell, str)
                else cell
                for cell in cells
            ]
        if not column.is_text:
            return cells
        texts = fit([cell if isinstance(cell, str) else "" for cell in cells], width, paths=column.kind == "path")
        return [text if isinstance(cell, str) else cell for cell, text in zip(cells, texts, strict=True)]

    def _stacked(self, width: int) -> Iterator[RenderableType]:
        """Each row as its label and, below it, names with values, as many as fit per line."""
        for row in self.rows:
            if row.section:
                yield Text("─" * min(width, WIDE), "dim")
                continue
            label, *cells = map(_plain, row.cells)
            yield Text(label, f"bold {row.style}".strip())
            pairs = zip(self.columns[1:], cells, strict=True)
            items = [f"{column.name} {cell}".strip() for column, cell in pairs if cell and column.kind != "bar"]
            yield from (Text(f"  {line}", row.style) for line in _lines(items, width - 2))


def _plain(cell: RenderableType) -> str:
    return "" if isinstance(cell, Bar) else plain(cell.plain if isinstance(cell, Text) else str(cell))


def _joined(text: str) -> str:
    """A text that is not wrapped between a number and its unit."""
    return _UNIT.sub(_NO_BREAK, text)


def _cells(cell: RenderableType) -> int:
    """Width of a cell's content."""
    return max(map(cell_len, _plain(cell).split("\n")))


def _whole(widths: Iterable[int]) -> int:
    """Width of a line with columns of these widths."""
    widths = list(widths)
    return sum(widths) + _GAP * (len(widths) - 1)


def _lines(items: Iterable[str], width: int) -> Iterator[str]:
    line = ""
    for item in (piece for item_text in items for piece in textwrap.wrap(item_text, width, break_long_words=False)):
        if line and cell_len(line) + 3 + cell_len(item) > width:
            yield line
            line = ""
        line += f"{'   ' if line else ''}{item}"
    if line:
        yield line


__all__ = ["Bar", "capture_facts", "capture_line", "html_of", "print_to", "table", "text_of", "warning_lines"]

_ANY = 1_000_000
"""A width that no table exceeds."""


class _PlainConsole(Console):
    """A console that removes control characters from texts."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render with Rich, keeping only its own control codes."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)


def print_to(file: TextIO, parts: Iterable[RenderableType], to_file: bool = False) -> None:
    """Print the parts of a report.

    On a terminal, output has colors and the terminal's width. Elsewhere it is plain and ``COLUMNS`` wide. If
    ``COLUMNS`` is not set, or with ``to_file``, it is 120 wide, or wider if the labels and numbers of a table need it.
    """
    if file.isatty():
        console = _PlainConsole(file=file, highlight=False, markup=False, force_jupyter=False)
        _print(console, parts, wrap=True)
        return
    columns = "" if to_file else os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() else WIDE
    console = _PlainConsole(
        file=file, width=width, highlight=False, markup=False, color_system=None, force_jupyter=False
    )
    with console.capture() as plain:
        _print(console, parts, grow=not columns.isdecimal())
    file.writelines(line.rstrip() + "\n" for line in plain.get().splitlines())


def _print(
    console: Console,
    parts: Iterable[RenderableType],
    grow: bool = False,
    wrap: bool = False,
) -> None:
    """Tables keep to the width; a line of text is wrapped on a terminal and written as is to a pipe."""
    width = console.width
    for element in parts:
        for renderable in element.parts(width, grow=grow) if isinstance(element, Grid) else (element,):
            if isinstance(renderable, Table) and grow:
                console.width = max(
                    width, console.measure(renderable, options=console.options.update(width=_ANY)).maximum
                )
            console.print(renderable, soft_wrap=isinstance(renderable, (str, Text)) and not wrap)
            console.width = width


def table(columns: Iterable[tuple[str, str]], ranks: Mapping[str, int] | None = None) -> Grid:
    """An empty table with a rule below its header.

    Args:
        columns: Name and kind of each: ``left`` for texts, ``path`` for layer paths, ``right`` for numbers, or ``bar``,
            which is omitted first if the width is insufficient.
        ranks: Ranks of columns by name, 1 by default: columns with the largest rank are omitted first, rank 0 is always
            shown.
    """
    return Grid([Column(name, kind, (ranks or {}).get(name, 1)) for name, kind in columns])


def frame_table(
    frame: pd.DataFrame,
    more: int = 0,
    *,
    headings: Mapping[str, str] = MappingProxyType({}),
    writers: Mapping[str, Callable[[Any], str]] = MappingProxyType({}),
    ranks: Mapping[str, int] = MappingProxyType({}),
    kinds: Mapping[str, str] = MappingProxyType({}),
    way: str = "… and {} more; --top shows them, csv has them all",
) -> Grid:
    """A table of an analysis as it is, with times in milliseconds.

    Args:
        frame: Its printed rows.
        more: How many further rows there are.
        headings: Headings of columns that are not `nvprof_kit._report.text.texts.heading`.
        writers: How columns are written, see `nvprof_kit._report.text.texts.cell`.
        ranks: See `table`.
        kinds: Kinds of columns that do not follow from their type.
        way: The line about further rows.
    """
    kinds = {"layer": "path", **KINDS, **kinds}
    columns = [
        (heading(name, headings), kinds.get(name, "right" if frame[name].dtype.kind in "iufb" else "left"))
        for name in map(str, frame.columns)
    ]
    grid = table(columns, ranks)
    grid.beyond, grid.hidden_note = max(more, 0), way
    for row in frame.to_dict("records"):
        grid.add_row(*(cell(str(name), value, writers) for name, value in row.items()))
    return grid


def layer_table(
    result: ByLayer,
    columns: Mapping[str, str],
    lines: Sequence[Mapping[str, str]],
    ranks: Mapping[str, int],
    ms: Milliseconds,
) -> tuple[Grid, list[str]]:
    """The table of an answer by layer and phase, as it is selected and folded, and its columns of folded rows.

    Args:
        result: The answer.
        columns: Headings and kinds of its columns behind layer and phase.
        lines: The cells of each printed row by heading.
        ranks: See `table`.
        ms: How its times are written.
    """
    rows = result.printed().to_dict("records")
    folds = [fold_cells(row, ms) for row in rows]
    names = sorted([*columns, *fold_columns(folds)], key=lambda name: not name)  # marks come last
    kinds = [(name, columns.get(name, KINDS.get(name, "right"))) for name in names]
    grid = table([("layer", "path"), ("phase", "left"), *kinds], {**ranks, **RANKS})
    grid.choose(result.select)
    for row, line, fold in zip(rows, lines, folds, strict=True):
        cells = {**line, **fold}
        grid.add_row(path_label(row), row["phase"], *(cells.get(name, "") for name in names), cost=row[result.time])
    return grid, names


def capture_line(info: CaptureInfo, steps: int, shown_steps: int | None = None) -> Text:
    """A line about the capture: file, tool, GPUs, processes and steps."""
    facts = "".join(f" · {fact}" for fact in capture_facts(info, steps, shown_steps))
    return Text(title(info.path), "bold").append(facts, style="not bold")


def capture_facts(info: CaptureInfo, steps: int, shown_steps: int | None = None) -> list[str]:
    """Facts about the capture: tool, GPUs, processes and steps, of which `shown` are in the figures."""
    prefix = f"{shown_steps} of " if shown_steps is not None and shown_steps != steps else ""
    facts = [
        info.tool,
        counted(info.gpus) if info.on_gpu else "no GPU",
        f"{info.processes} processes, added up" if info.processes > 1 else "",
        f"{prefix}{steps or 'no'} step{'s' * (steps != 1)}",
    ]
    return [fact for fact in facts if fact]


def warning_lines(issues: Iterable[str]) -> list[Text]:
    """The issues that are printed, one line each, the most severe first."""
    return [Text(f"! {issue}", "yellow") for issue in printed(issues)]


def text_of(parts: Iterable[RenderableType], to_file: bool = False) -> str:
    """The parts of a report as plain text, as written to a file by `print_to`."""
    file = StringIO()
    print_to(file, parts, to_file=to_file)
    return file.getvalue()


def html_of(parts: Iterable[RenderableType]) -> str:
    """The parts of a report as an HTML element with colors; texts are escaped, control characters replaced."""
    console = Console(
        file=StringIO(),
        width=WIDE,
        highlight=False,
        markup=False,
        record=True,
        force_terminal=True,
        force_jupyter=False,  # otherwise Rich displays each line in a notebook a second time
    )
    _print(console, parts, grow=True)
    style = "font-family:Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre;overflow-x:auto;line-height:1.3"
    return plain(console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>'))


_FOLDED = "xN: equal blocks {}; median, min and max are {}. --no-fold prints one line per block."
EACH = ("median", "min", "max")
_EACH_COLUMNS = (*EACH, "unlike")
RANKS = dict.fromkeys(EACH, 2) | {"unlike": 1}
KINDS = {"unlike": "words"}


def path_label(row: Mapping[Any, Any]) -> str:
    """A layer's path, and the number of folded blocks."""
    return f"{row['layer']} x{row['count']}" if row.get("count", 1) > 1 else str(row["layer"])


def fold_cells(row: Mapping[Any, Any], ms: Milliseconds) -> dict[str, str]:
    """The time of one of the equal blocks, or how a block differs from its equals."""
    each = {name: ms(row[f"{name}_ns"]) for name in EACH} if row.get("count", 1) > 1 else {}
    return each | ({"unlike": row["unlike"]} if row.get("unlike") else {})


def fold_columns(lines: Iterable[Mapping[str, str]]) -> list[str]:
    """The non-empty columns of `fold_cells`."""
    used = {name for line in lines for name in _EACH_COLUMNS if line.get(name)}
    return [name for name in _EACH_COLUMNS if name in used]


def ranked_notes(tables: Iterable[pd.DataFrame]) -> list[Text]:
    """A note about folded rows of `nvprof_kit._analysis.layers.fold.fold_ranked`, if there are any."""
    is_folded = any("unlike" in rows and "layer" in rows and rows["layer"].astype(str).str.contains(r" x\d+$").any()
                    for rows in tables)  # fmt: skip
    return [Text(_FOLDED.format("in one line with their sums", "of one of them"), "dim")] if is_folded else []


def fold_notes(columns: Iterable[str], figures: str, each: str) -> list[Text]:
    """A note about folded lines, if there are any.

    Args:
        columns: The table's columns.
        figures: The meaning of the figures of a folded line.
        each: The meaning of median, min and max.
    """
    is_folded = "median" in columns
    return [Text(_FOLDED.format(f"in one line; figures are {figures}", each), "dim")] if is_folded else []
