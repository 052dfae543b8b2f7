"""Tables that fit the terminal without truncating numbers: shortens texts, omits columns, or stacks cells.

A line below the table lists what is omitted, and how to show it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from nvprof_kit._report.text.table.bar import BAR_WIDTH, Bar
from nvprof_kit._report.text.table.shorten import fit
from nvprof_kit._result.plain import plain
from nvprof_kit._result.selection import Selection

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
        most: Maximum number of shown rows; None for all.
        way: How to show omitted rows and columns, other than a file.
        in_order: Whether the first rows are kept if not all are shown, and not the costliest.
        beyond: Number of rows that were omitted before; the line about omitted rows counts them.
        rest: The line about omitted rows, if it has words of its own; ``{}`` is their number.
    """

    columns: list[Column]
    rows: list[Row] = field(default_factory=list)
    most: int | None = None
    way: str = ""
    in_order: bool = False
    beyond: int = 0
    rest: str = ""

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

    def add_section(self) -> None:
        """Add a rule after the current rows."""
        self.rows.append(Row(section=True))

    def choose(self, select: Selection) -> None:
        """Print as many rows as selected: the costliest, or the first if they are sorted."""
        self.most, self.in_order, self.way = select.top, bool(select.sort), "--top N or -o FILE.csv shows them"

    def parts(self, width: int, grow: bool = False) -> list[RenderableType]:
        """The table as it fits, and a line about what is omitted.

        Args:
            width: Width of a line in cells.
            grow: Exceed `width` rather than shorten a text or omit a column.
        """
        rows, hidden = self._shown_rows()
        hidden += self.beyond
        shown = replace(self, rows=rows)
        places, widths, lacking = shown._fitting_columns(width, grow)
        gone = [one.name for place, one in enumerate(self.columns) if place not in places and one.name]
        parts: list[RenderableType]
        if lacking and not grow:
            parts, gone = [*shown._stacked(width)], []
        else:
            parts = [shown._table(places, widths)]
        if hidden:
            rest = self.rest or f"… and {{}} more {'row' if hidden == 1 else 'rows'}; {self._way()}"
            parts.append(Text(rest.format(f"{hidden:,}"), "dim"))
        if gone:
            parts.append(Text(f"Too wide for {width} columns: {', '.join(gone)}; -o FILE.csv has them", "dim"))
        return parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render at the width given by Rich, with all rows."""
        yield from self.parts(options.max_width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """The preferred width."""
        widths = self._widths()
        most = _whole([*widths.values(), *(BAR_WIDTH for one in self.columns if one.kind == "bar")])
        return Measurement(min(_SHORT_LABEL, most), min(most, options.max_width)).normalize()

    def _way(self) -> str:
        return self.way or "-o FILE.csv has them all"

    def _shown_rows(self) -> tuple[list[Row], int]:
        """The shown rows, and the number of omitted rows."""
        body = self._body()
        if self.most is None or len(body) <= self.most:
            return self.rows, 0
        ranked = body if self.in_order else sorted(body, key=lambda row: -(row.cost or 0.0))
        hidden = {id(row) for row in ranked[self.most :]}
        return [row for row in self.rows if id(row) not in hidden], len(hidden)

    def _body(self) -> list[Row]:
        """The rows that may be omitted: those with a cost, else those above the first rule."""
        with_cost = [row for row in self.rows if row.cost is not None]
        until = next((place for place, row in enumerate(self.rows) if row.section), len(self.rows))
        return with_cost or self.rows[:until]

    def _widths(self) -> dict[int, int]:
        """Preferred width of each column except bars, by position."""
        return {
            place: max(map(_cells, [one.name, *(row.cells[place] for row in self.rows if not row.section)]))
            for place, one in enumerate(self.columns)
            if one.kind != "bar"
        }

    def _fitting_columns(self, width: int, grow: bool) -> tuple[list[int], dict[int, int], int]:
        """The positions of the shown columns, their widths, and the number of cells still missing."""
        natural = self._widths()
        bars = [place for place, one in enumerate(self.columns) if one.kind == "bar"]
        order = sorted(range(1, len(self.columns)), key=lambda place: (self.columns[place].rank, place))
        droppable = [place for place in order if self.columns[place].rank and place in natural]
        shown = set(natural)
        while True:
            widths = {place: natural[place] for place in sorted(shown)}
            lacking = max(_whole(widths.values()) - width, 0)
            if not grow:
                lacking = self._shorten(widths, lacking)
            if not lacking or grow or not droppable:
                break
            shown.discard(droppable.pop())
        left = width - _whole(widths.values()) - _GAP
        if bars and left > 0 and not lacking and len(shown) == len(natural):
            widths |= {
                place: max(min(BAR_WIDTH, left // len(bars)), cell_len(self.columns[place].name)) for place in bars
            }
        return sorted(widths), widths, lacking

    def _shorten(self, widths: dict[int, int], lacking: int) -> int:
        """Shorten texts, the longest first; returns the number of cells still missing."""
        texts = [place for place in widths if self.columns[place].is_text]
        rest, label = ([place for place in texts if (place == 0) == first] for first in (False, True))
        for group, least in ((rest, _SHORT), (label, _SHORT_LABEL)):
            floor = {place: max(least, self._longest_word(place)) for place in group}
            while lacking and (wider := [place for place in group if widths[place] > floor[place]]):
                widths[max(wider, key=lambda place: widths[place])] -= 1
                lacking -= 1
        return lacking

    def _longest_word(self, place: int) -> int:
        """Width that a column of words needs; 0 for other columns."""
        if self.columns[place].kind != "words":
            return 0
        texts = (_plain(row.cells[place]) for row in self.rows if not row.section)
        return max((cell_len(word) for text in texts for word in _joined(text).split(" ")), default=0)

    def _table(self, places: Sequence[int], widths: dict[int, int]) -> Table:
        made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for place in places:
            one = self.columns[place]
            justify = "right" if one.kind == "right" else "left"
            made.add_column(one.name, justify=justify, no_wrap=True, overflow="ellipsis", width=widths[place])  # type: ignore[arg-type]
        cells = {place: self._column_cells(place, widths[place]) for place in places}
        number = 0
        for row in self.rows:
            if row.section:
                made.add_section()
            else:
                made.add_row(*(cells[place][number] for place in places), style=row.style)
                number += 1
        return made

    def _column_cells(self, place: int, width: int) -> list[RenderableType]:
        """The cells of a column as they fit its width."""
        cells = [row.cells[place] for row in self.rows if not row.section]
        column = self.columns[place]
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
            items = [f"{one.name} {cell}".strip() for one, cell in pairs if cell and one.kind != "bar"]
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
    for item in (part for one in items for part in textwrap.wrap(one, width, break_long_words=False)):
        if line and cell_len(line) + 3 + cell_len(item) > width:
            yield line
            line = ""
        line += f"{'   ' if line else ''}{item}"
    if line:
        yield line
