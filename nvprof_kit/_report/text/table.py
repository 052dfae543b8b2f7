"""Tables that fit the terminal without truncating numbers, the lines around them, and how both are printed.

A table shortens texts, then leaves out columns; a line below it lists what is left out, and how to show it.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from nvprof_kit._report.text.texts import Milliseconds, cell, counted, filled, fit, heading
from nvprof_kit._result.column import Columns
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
_ASCII = str.maketrans("─█▉▊▋▌▍▎▏", "-#####   ")
"""For terminals that are ASCII only."""

_FOLDED_LABEL = re.compile(r" x\d+$")
_FOLDED = "xN: equal blocks {}; median, min and max are {}. --no-fold prints one line per block."


@dataclass(frozen=True)
class Bar:
    """A fraction of 1 as a bar in a column of ``bar``; any positive fraction shows at least a sliver."""

    share: float

    def text(self, width: int) -> str:
        """The bar in eighths of a character."""
        eighths = max(round(min(self.share, 1.0) * width * 8), int(self.share > 0))
        return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        name: The header.
        kind: ``left`` for texts, ``path`` for layer paths, ``words`` for texts that are wrapped, not shortened,
            ``right`` for numbers, or ``bar``.
        rank: If the width is insufficient, columns with the largest rank are left out first, from right to left.
        is_optional: Whether the column is left out if all its cells are empty.
    """

    name: str
    kind: str = "right"
    rank: int = 1
    is_optional: bool = False

    @classmethod
    def of(cls, columns: Columns, name: str, kind: str = "right", rank: int = 1, is_optional: bool = False) -> Column:
        """The column of an answer, with its heading."""
        return cls(heading(name, columns), kind, rank, is_optional)


FOLD_COLUMNS = {
    **{name: Column(name, rank=2, is_optional=True) for name in ("median", "min", "max")},
    "unlike": Column("unlike", "words", is_optional=True),
}
"""The columns of `fold_cells`."""


@dataclass(frozen=True)
class Row:
    """A row, with cells by the keys of the columns; without cells, a rule."""

    cells: Mapping[str, str | Bar] = field(default_factory=dict)
    style: str = ""
    cost: float | None = None


@dataclass
class Grid:
    """A table for display.

    Attributes:
        columns: The columns; the first names the rows. At most one is a bar, which needs the width that others leave.
        select: How many rows to print: the costliest, or the first if they are sorted.
        rows: The rows.
        beyond: Number of rows that were omitted before; the line about omitted rows counts them.
    """

    columns: Mapping[str, Column]
    select: Selection | None = None
    rows: list[Row] = field(default_factory=list)
    beyond: int = 0

    def add(self, cells: Mapping[str, str | Bar], style: str = "", cost: float | None = None) -> None:
        """Add a row.

        Args:
            cells: Cells by column; others are empty.
            style: Rich style.
            cost: If not all rows fit, the costliest are shown, and rows without a cost always; if no row has a cost,
                the first ones.
        """
        texts = {key: cell if isinstance(cell, Bar) else title(cell) for key, cell in cells.items()}
        self.rows.append(Row(texts, style, cost))

    def add_section(self) -> None:
        """Add a rule after the current rows, if there are any."""
        self.rows.append(Row())

    @property
    def printed_columns(self) -> list[str]:
        """The keys of the columns, without the empty ones that are optional."""
        used = {key for row in self.rows for key, cell in row.cells.items() if cell}
        return [key for key, column in self.columns.items() if key in used or not column.is_optional]

    def parts(self, width: int, grow: bool = False) -> list[RenderableType]:
        """The table as it fits, and lines about what is left out.

        Args:
            width: Width of a line in cells.
            grow: Exceed `width` rather than shorten a text or leave out a column.
        """
        rows = self.rows
        if self.select is not None and self.select.top is not None:
            # of the rows with a cost the costliest, or of all the first
            ranked = [row for row in rows if row.cost is not None] or [row for row in rows if row.cells]
            if not self.select.sort:
                ranked.sort(key=lambda row: -(row.cost or 0.0))
            omitted = set(map(id, ranked[self.select.top :]))
            rows = [row for row in rows if id(row) not in omitted]
        widths = self._widths(rows, width, grow)
        cells = []
        for key, column_width in widths.items():
            kind = self.columns[key].kind
            texts: Sequence[Any] = [row.cells.get(key, "") for row in rows if row.cells]
            if kind in ("left", "path"):
                texts = fit(texts, column_width, kind == "path")
            elif kind == "words":
                # textwrap counts letters: one that is two cells wide is two
                spread = ("".join(letter + "\0" * (cell_len(letter) - 1) for letter in _joined(text)) for text in texts)
                wrapped = ("\n".join(textwrap.wrap(text, column_width)) for text in spread)
                texts = [text.replace("\0", "").replace(_NO_BREAK, " ") for text in wrapped]
            cells.append([_cell(text, column_width, kind) for text in (self.columns[key].name, *texts)])
        lines = zip(*cells, strict=True)
        rule = Text("─" * (sum(widths.values()) + _GAP * (len(widths) - 1)), no_wrap=True, overflow="crop")
        printed_rows = [_line(next(lines, ()), "bold"), rule]
        for above, row in pairwise((Row(), *rows)):
            if row.cells or above.cells:  # a rule is between rows
                printed_rows.append(_line(next(lines) if row.cells else (), row.style))
        parts: list[RenderableType] = [Group(*printed_rows)]
        if hidden := self.beyond + len(self.rows) - len(rows):
            way = "--top N shows them" if self.select is None else "--top N or -o FILE.csv shows them"
            parts.append(Text(f"… and {hidden:,} more {'row' if hidden == 1 else 'rows'}; {way}", "dim"))
        names = (self.columns[key].name for key in self.printed_columns if key not in widths)
        if hidden_names := [name for name in names if name]:
            parts.append(Text(f"Too wide for {width} columns: {', '.join(hidden_names)}; -o FILE.csv has them", "dim"))
        return parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render at the width given by Rich."""
        yield from self.parts(options.max_width)

    def _widths(self, rows: Sequence[Row], width: int, grow: bool) -> dict[str, int]:
        """The widths of the columns that are shown: as they are, or as narrow as it has to be."""
        keys = self.printed_columns
        widths, floors = {}, {}
        for key in keys:
            column = self.columns[key]
            if column.kind != "bar":
                texts = [column.name, *(str(row.cells.get(key, "")) for row in rows if row.cells)]
                widths[key] = max(map(cell_len, texts))
                pieces = [word for text in texts for word in _joined(text).split(" ")] if column.kind == "words" else []
                floor = max([_SHORT_LABEL if key == keys[0] else _SHORT, *map(cell_len, pieces)])
                floors[key] = widths[key] if column.kind == "right" else min(floor, widths[key])
        all_widths = dict(widths)

        def lacking(widths: Mapping[str, int]) -> int:
            return 0 if grow else sum(widths.values()) + _GAP * (len(widths) - 1) - width

        for key in sorted(keys[:0:-1], key=lambda key: -self.columns[key].rank):
            if key in widths and lacking({other: floors[other] for other in widths}) > 0:
                del widths[key]
        for group in ([key for key in widths if key != keys[0]], keys[:1]):  # the first column is shortened last
            while lacking(widths) > 0 and (wider := [key for key in group if widths[key] > floors[key]]):
                widths[max(wider, key=lambda key: widths[key])] -= 1
        left = width - sum(all_widths.values()) - _GAP * len(all_widths)
        bar_widths = dict.fromkeys([key for key in keys if self.columns[key].kind == "bar"], min(_BAR, left))
        return {key: (widths | bar_widths)[key] for key in keys if key in widths or (key in bar_widths and left > 0)}


def _cell(cell: str | Bar, width: int, kind: str) -> list[tuple[str, str]]:
    """The lines of a cell, as wide as its column and the gap behind it, with their style."""
    text, style = (cell.text(width), "cyan") if isinstance(cell, Bar) else (cell, "")
    lines = [line if cell_len(line) <= width else set_cell_size(line, width - 1) + "…" for line in text.split("\n")]
    padded = [(line, " " * (width - cell_len(line))) for line in lines]
    return [((f"{space}{line}" if kind == "right" else f"{line}{space}") + " " * _GAP, style) for line, space in padded]


def _line(cells: Sequence[list[tuple[str, str]]], style: str) -> Text:
    """A row of cells: a line, or as many as its highest cell has."""
    height = max(map(len, cells), default=0)
    filled_cells = [cell + [(" " * cell_len(cell[0][0]), "")] * (height - len(cell)) for cell in cells]
    lines = [Text.assemble(*line, style=style) for line in zip(*filled_cells, strict=True)]
    for line in lines:
        line.rstrip()
    return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)


def _joined(text: str) -> str:
    """A text that is not wrapped between a number and the percent sign."""
    return text.replace(" %", f"{_NO_BREAK}%")


class _PlainConsole(Console):
    """A console that removes control characters from texts."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render with Rich, keeping only its own control codes."""
        for segment in super().render(renderable, options):
            text = plain(segment.text)
            text = text.translate(_ASCII) if options is not None and options.ascii_only else text
            yield segment if segment.control else Segment(text, segment.style)


def _console(file: TextIO, **options: Any) -> Console:
    return _PlainConsole(file=file, highlight=False, markup=False, emoji=False, force_jupyter=False, **options)


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


def frame_table(
    frame: pd.DataFrame, top: int, columns: Columns | None = None, mib: bool = False, bar: str = ""
) -> Grid:
    """A table of an analysis, with times in milliseconds; columns without a value are left out.

    Args:
        frame: Its rows.
        top: How many of them are printed.
        columns: The columns of the answer, for their headings.
        mib: Write bytes in MiB, not in units of 10⁶.
        bar: The column that bars show, if it is there.
    """
    rows = filled(frame.head(top))
    printed_columns: dict[str, Column] = {}
    for name, values in rows.items():
        is_number = values.dtype.kind in "iufb" or not values.dropna().astype(str).str.contains(r"[^\W\d_]").any()
        kind = {"layer": "path", "unlike": "words"}.get(str(name), "right" if is_number else "left")
        printed_columns[str(name)] = Column(heading(str(name), columns, mib), kind)
    grid = Grid(printed_columns | ({"": Column("", "bar")} if bar in frame else {}), beyond=max(len(frame) - top, 0))
    longest = (frame[bar].max() or 1.0) if bar in frame else 1.0
    for row in rows.to_dict("records"):
        bars = {"": Bar(row[bar] / longest)} if bar in row else {}
        grid.add({**{str(name): cell(str(name), value, mib) for name, value in row.items()}, **bars})
    return grid


def capture_line(info: CaptureInfo, steps: int, all_steps: int) -> Text:
    """A line about the capture: file, tool, GPUs, processes and steps."""
    facts = "".join(f" · {fact}" for fact in capture_facts(info, steps, all_steps))
    return Text(title(info.path), "bold").append(facts, style="not bold")


def capture_facts(info: CaptureInfo, steps: int, all_steps: int) -> list[str]:
    """Facts about the capture: tool, GPUs, processes and how many of its steps are in the figures."""
    gpus = counted(info.gpus) if info.on_gpu else "no GPU"
    processes = f"{info.processes} processes, added up" if info.processes > 1 else ""
    of_steps = f"{all_steps or 'no'} step{'s' * (all_steps != 1)}"
    of_steps = of_steps if steps == all_steps else f"{steps} of {of_steps}"
    return [fact for fact in (info.tool, gpus, processes, of_steps) if fact]


def below(notes: Iterable[str], issues: Iterable[str]) -> list[Text]:
    """What stands below a table: notes on it, then the issues that are printed, the most severe first."""
    return [*(Text(note, "dim") for note in notes), *(Text(f"! {issue}", "yellow") for issue in printed(issues))]


def fold_cells(row: Mapping[Any, Any], ms: Milliseconds) -> dict[str, str]:
    """The time of one of the equal blocks, or how a block differs from its equals."""
    each = {name: ms(row[f"{name}_ns"]) for name in ("median", "min", "max")} if row["count"] > 1 else {}
    return each | ({"unlike": row["unlike"]} if row["unlike"] else {})


def fold_notes(grid: Grid, figures: str, each: str) -> list[str]:
    """A note about folded lines, if there are any.

    Args:
        grid: The table.
        figures: The meaning of the figures of a folded line.
        each: The meaning of median, min and max.
    """
    labels = [str(row.cells.get(next(iter(grid.columns)), "")) for row in grid.rows]
    is_folded = any(_FOLDED_LABEL.search(label) for label in labels)
    return [_FOLDED.format(f"in one line; figures are {figures}", each)] if is_folded else []


def ranked_notes(tables: Iterable[pd.DataFrame]) -> list[str]:
    """A note about folded rows of `nvprof_kit._analysis.layers.fold.fold_ranked`, if there are any."""
    is_folded = any("unlike" in rows and rows["layer"].astype(str).str.contains(_FOLDED_LABEL).any() for rows in tables)
    return [_FOLDED.format("in one line with their sums", "of one of them")] if is_folded else []
