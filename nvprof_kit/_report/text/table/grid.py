"""A table that fits the terminal without a cut figure: texts are shortened, columns go, or rows stack.

What is left out is named in a line below, with the way to it.
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

from nvprof_kit._report.plain import plain
from nvprof_kit._report.text.table.bar import BAR_WIDTH, Bar

_GAP = 2
_SHORT, _SHORT_LABEL = 12, 24
"""Cells that a text, and the first column's, is not shortened below."""
_LEAST_ROWS = 8
_LABEL = re.compile(r"(\s*)(.*?)((?: x\d+)?)", re.DOTALL)
"""A line's label: how far it is indented, a path, and how many equal blocks it stands for."""
WIDE = 120
"""Cells of a table that goes to no terminal; it grows where its figures need more."""


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        name: Its head.
        kind: ``left`` for texts, ``path`` for paths of layers, ``right`` for figures, or ``bar``.
        rank: Columns go in the order of their ranks where the width is short, the largest first, and of one rank from
            the right; those of rank 0 stay.
    """

    name: str
    kind: str
    rank: int = 1

    @property
    def is_text(self) -> bool:
        """Whether it may be shortened."""
        return self.kind in ("left", "path")


@dataclass(frozen=True)
class Row:
    """A line; a `section` is a rule."""

    cells: tuple[RenderableType, ...] = ()
    style: str = ""
    cost: float | None = None
    section: bool = False


@dataclass
class Grid:
    """A table for reading.

    Attributes:
        columns: Its columns; the first names the rows.
        rows: Its lines.
        most: Lines that are shown, None for as many as fit.
        way: What shows the lines and columns that are left out, besides a file.
    """

    columns: list[Column]
    rows: list[Row] = field(default_factory=list)
    most: int | None = None
    way: str = ""

    def add_row(self, *cells: RenderableType, style: str = "", cost: float | None = None) -> None:
        """Add a line.

        Args:
            cells: A cell for each column.
            style: Style of rich.
            cost: Where not all lines are shown, the costliest are; those without a cost always, and where no line has
                one, the first.
        """
        self.rows.append(Row(cells, style, cost))

    def add_section(self) -> None:
        """Add a rule below the lines so far."""
        self.rows.append(Row(section=True))

    def parts(self, width: int, height: int | None = None, grow: bool = False) -> list[RenderableType]:
        """The table as it fits, and what was left out.

        Args:
            width: Cells of a line.
            height: Lines of the terminal; None for all lines.
            grow: Shorten texts but the first, and be wider than `width` where the figures need it.
        """
        rows, hidden = self._fitting_rows(height)
        shown = replace(self, rows=rows)
        places, widths, lacking = shown._fitting_columns(width, grow)
        gone = [one.name for place, one in enumerate(self.columns) if place not in places and one.name]
        parts: list[RenderableType]
        if lacking and not grow:
            parts, gone = [*shown._stacked(width)], []
        else:
            parts = [shown._table(places, widths)]
        if hidden:
            parts.append(Text(f"… and {hidden:,} more {'row' if hidden == 1 else 'rows'}; {self._way()}", "dim"))
        if gone:
            parts.append(Text(f"Too wide for {width} columns: {', '.join(gone)}; -o FILE.csv has them", "dim"))
        return parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As it fits the width that rich gives it, with every line."""
        yield from self.parts(options.max_width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """As wide as it would like to be."""
        widths = self._widths()
        most = _whole([*widths.values(), *(BAR_WIDTH for one in self.columns if one.kind == "bar")])
        return Measurement(min(_SHORT_LABEL, most), min(most, options.max_width)).normalize()

    def _way(self) -> str:
        return self.way or "-o FILE.csv has them all"

    def _fitting_rows(self, height: int | None) -> tuple[list[Row], int]:
        """The lines that are shown, and how many are not."""
        body = self._body()
        fixed = sum(not row.section for row in self.rows) - len(body)
        most = self.most
        if most is None and height is not None:
            most = max(height - fixed - 1, _LEAST_ROWS)
        if most is None or len(body) <= most:
            return self.rows, 0
        hidden = {id(row) for row in sorted(body, key=lambda row: -(row.cost or 0.0))[most:]}
        return [row for row in self.rows if id(row) not in hidden], len(hidden)

    def _body(self) -> list[Row]:
        """The lines of which not all need be shown: those with a cost, else those above the first rule."""
        told = [row for row in self.rows if row.cost is not None]
        until = next((place for place, row in enumerate(self.rows) if row.section), len(self.rows))
        return told or self.rows[:until]

    def _widths(self) -> dict[int, int]:
        """Cells that each column but bars would like, by place."""
        return {
            place: max(map(_cells, [one.name, *(row.cells[place] for row in self.rows if not row.section)]))
            for place, one in enumerate(self.columns)
            if one.kind != "bar"
        }

    def _fitting_columns(self, width: int, grow: bool) -> tuple[list[int], dict[int, int], int]:
        """The places of the columns that are shown, their widths, and how many cells are lacking all the same."""
        natural = self._widths()
        bars = [place for place, one in enumerate(self.columns) if one.kind == "bar"]
        order = sorted(range(1, len(self.columns)), key=lambda place: (self.columns[place].rank, place))
        droppable = [place for place in order if self.columns[place].rank and place in natural]
        shown = set(natural)
        while True:
            widths = {place: natural[place] for place in sorted(shown)}
            lacking = self._shorten(widths, max(_whole(widths.values()) - width, 0), labels=not grow)
            if not lacking or grow or not droppable:
                break
            shown.discard(droppable.pop())
        left = width - _whole(widths.values()) - _GAP
        if bars and left > 0 and not lacking and len(shown) == len(natural):
            widths |= {
                place: max(min(BAR_WIDTH, left // len(bars)), cell_len(self.columns[place].name)) for place in bars
            }
        return sorted(widths), widths, lacking

    def _shorten(self, widths: dict[int, int], lacking: int, labels: bool) -> int:
        """Take cells from the texts, the longest first; gives what is lacking where every text is short."""
        texts = [place for place in widths if self.columns[place].is_text]
        rest, label = ([place for place in texts if (place == 0) == first] for first in (False, True))
        for group, least in ((rest, _SHORT), (label if labels else [], _SHORT_LABEL)):
            while lacking and any(widths[place] > least for place in group):
                widths[max(group, key=lambda place: widths[place])] -= 1
                lacking -= 1
        return lacking

    def _table(self, places: Sequence[int], widths: dict[int, int]) -> Table:
        made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for place in places:
            one = self.columns[place]
            justify = "right" if one.kind == "right" else "left"
            made.add_column(one.name, justify=justify, no_wrap=True, overflow="ellipsis", width=widths[place])  # type: ignore[arg-type]
        for row in self.rows:
            if row.section:
                made.add_section()
            else:
                made.add_row(*(self._cell(row, place, widths[place]) for place in places), style=row.style)
        return made

    def _cell(self, row: Row, place: int, width: int) -> RenderableType:
        cell = row.cells[place]
        kind = self.columns[place].kind
        if not isinstance(cell, str) or kind not in ("path", "left"):
            return cell
        return short_path(cell, width) if kind == "path" else short_text(cell, width)

    def _stacked(self, width: int) -> Iterator[RenderableType]:
        """Each line as its label and, below it, name and figure, as many as go in a line."""
        for row in self.rows:
            if row.section:
                yield Text("─" * min(width, WIDE), "dim")
                continue
            label, *cells = map(_plain, row.cells)
            yield Text(label, f"bold {row.style}".strip())
            told = zip(self.columns[1:], cells, strict=True)
            items = [f"{one.name} {cell}".strip() for one, cell in told if cell and one.kind != "bar"]
            yield from (Text(f"  {line}", row.style) for line in _lines(items, width - 2))


def _plain(cell: RenderableType) -> str:
    return "" if isinstance(cell, Bar) else plain(cell.plain if isinstance(cell, Text) else str(cell))


def _cells(cell: RenderableType) -> int:
    """Cells that an entry takes."""
    return max(map(cell_len, _plain(cell).split("\n")))


def _whole(widths: Iterable[int]) -> int:
    """Cells of a line with columns of these widths."""
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


def short_path(path: str, width: int) -> str:
    """A layer's path in some cells: its first parts go, so that what tells it from its equals stays, and no number is
    cut.
    """
    if cell_len(path) <= width:
        return path
    indent, name, count = _LABEL.fullmatch(path).groups()  # type: ignore[union-attr]  # it matches every text
    room = width - len(indent) - len(count)
    parts = name.split(".")
    for first in range(1, len(parts)):
        text = f"….{'.'.join(parts[first:])}"
        if cell_len(text) <= room:
            return indent + text + count
    return f"{indent}{short_text(parts[-1], room)}{count}"


def short_text(text: str, width: int) -> str:
    """A text in some cells; a number at its end that does not fit goes whole."""
    if cell_len(text) <= width:
        return text
    kept = text[: max(width - 1, 0)]
    while cell_len(kept) > width - 1:
        kept = kept[:-1]
    if kept[-1:].isdigit() and text[len(kept)].isdigit():
        kept = kept.rstrip("0123456789.,")
    return f"{kept}…"
