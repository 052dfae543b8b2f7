"""Fits a report to the height of a terminal: fewer rows per table, then fewer sections; a line says what is left out.

Warnings, and the text around the tables, are always printed; where even that is too high, their long lines end after a
clause, and a line says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text

from nvprof_kit._report.text.table.grid import Grid
from nvprof_kit._report.text.table.lines import Lines

LEAST_ROWS = (5, 2)
"""Minimum number of rows of a table, if it has as many; the second one where the first are too many to fit."""

_CLAUSE = re.compile(r"[;:.,](?= )| ·(?= )")
"""The end of a clause, after which a line may be shortened: never inside a number."""


class Heading(Text):
    """The first part of a section that a terminal may leave out.

    Attributes:
        size: Number of parts after this one that belong to the section.
        name: Name of the section, as an argument of `option`; without one, the heading is printed alone if it fits.
        option: The option that shows one section.
        way: What shows all of them.
    """

    size = 0
    name = ""
    option = ""
    way = ""


class Rest(Text):
    """The line about sections that were omitted before; a terminal adds those that it leaves out."""

    def __init__(self, count: int, words: str) -> None:
        super().__init__(words.format(f"{count:,}"), "dim")
        self.count = count


def section(
    parts: Sequence[RenderableType], name: str = "", option: str = "--view", way: str = "--top N shows all"
) -> list[RenderableType]:
    """Mark parts of a report as a section that a terminal may leave out; the first part is a text."""
    first, *others = parts
    if not isinstance(first, Text):
        raise TypeError(f"a section begins with a text, not with {type(first).__name__}")
    heading = Heading(style=first.style)
    heading.append_text(first)
    heading.size, heading.name, heading.option, heading.way = len(others), name, option, way
    return [heading, *others]


def fitted(console: Console, parts: Sequence[RenderableType], height: int) -> list[RenderableType]:
    """The report as it fits, the spacious form first: without empty lines, and with fewer rows, only if need be.

    Args:
        console: The terminal.
        parts: The report.
        height: Lines to print at most, if the report can be shortened that far.
    """
    while parts and parts[-1] == "":
        parts = parts[:-1]
    screens: list[_Screen] = []
    for pieces, least in _forms(list(_pieces(parts)), console.width, height):
        screens.append(_Screen(console, pieces, height, least))
        if screens[-1].used <= height:
            return screens[-1].parts()
    return screens[1].parts()


def _forms(spacious: list[_Piece], width: int, height: int) -> Iterator[tuple[list[_Piece], int]]:
    """The forms of a report, from the whole to the shortest, each with the minimum number of rows of its tables."""
    most, least = LEAST_ROWS
    yield spacious, most
    dense = [*_dense(spacious)]
    yield dense, most
    yield dense, least
    if brief := _brief(dense, width, height):
        yield brief, most
        yield brief, least


@dataclass(frozen=True)
class _Piece:
    """Parts that are printed together; without `heading`, always."""

    parts: tuple[RenderableType, ...]
    heading: Heading | None = None


def _pieces(parts: Sequence[RenderableType]) -> Iterator[_Piece]:
    place = 0
    while place < len(parts):
        part = parts[place]
        size = 1 + part.size if isinstance(part, Heading) else 1
        yield _Piece(tuple(parts[place : place + size]), part if isinstance(part, Heading) else None)
        place += size


def _dense(pieces: Iterable[_Piece]) -> Iterator[_Piece]:
    """The pieces without empty lines."""
    for piece in pieces:
        if parts := tuple(part for part in piece.parts if part != ""):
            yield _Piece(tuple(part.dense() if isinstance(part, Grid) else part for part in parts), piece.heading)


def _brief(dense: Sequence[_Piece], width: int, height: int) -> list[_Piece]:
    """The pieces with the lines around the tables shortened; none if there are no tables, or no line to shorten."""
    if not any(isinstance(part, (Grid, Lines)) for piece in dense for part in piece.parts):
        return []  # then the lines are the answer
    made = [
        piece if piece.heading else replace(piece, parts=tuple(_shortened(part, width) for part in piece.parts))
        for piece in dense
    ]
    note = Text(f"Lines with … are shortened for {height + 1} lines; --top N shows all", "dim")
    return [*made, _Piece((note,))] if made != list(dense) else []


def _shortened(part: RenderableType, width: int) -> RenderableType:
    """A line that is wider than the terminal, up to the last clause that fits, or else up to its first one."""
    if isinstance(part, Lines):
        return replace(part, lines=[_clauses(line, width) for line in part.lines])
    return _clauses(part, width) if type(part) is Text else part


def _clauses(line: Text, width: int) -> Text:
    if line.cell_len <= width:
        return line
    ends = [found.start() for found in _CLAUSE.finditer(line.plain)]
    fitting = [end for end in ends if cell_len(line.plain[:end]) + 2 <= width]
    if not ends:
        return line
    made = line[: fitting[-1] if fitting else ends[0]]
    return made.append(" …")


class _Screen:
    """The chosen sections, and the number of rows of each table.

    Attributes:
        used: Number of lines.
    """

    def __init__(self, console: Console, pieces: Sequence[_Piece], height: int, least: int) -> None:
        self._console, self._pieces, self._height = console, pieces, height
        tables = [part for piece in pieces for part in piece.parts if isinstance(part, (Grid, Lines))]
        self._rows = {id(part): min(part.least or least, part.count) for part in tables}
        self._whole = {id(piece) for piece in pieces if piece.heading is None}
        self._titles: set[int] = set()
        self.used = sum(self._size(piece) for piece in pieces if piece.heading is None)
        self._choose([piece for piece in pieces if piece.heading is not None])
        for part in (part for piece in pieces if id(piece) in self._whole for part in piece.parts):
            if isinstance(part, (Grid, Lines)):
                self._grow(part)

    def parts(self) -> list[RenderableType]:
        """What is printed."""
        note = self._note([piece for piece in self._pieces if id(piece) not in self._whole])
        last = max((place for place, piece in enumerate(self._pieces) if piece.heading is not None), default=-1)
        made: list[RenderableType] = []
        for place, piece in enumerate(self._pieces):
            if id(piece) in self._whole and not (note and isinstance(piece.parts[0], Rest)):
                made += [one for part in piece.parts for one in self._shown(part)]
            elif id(piece) in self._titles:
                made.append(piece.parts[0])
            made += note if place == last else []
        return made

    def _choose(self, sections: Sequence[_Piece]) -> None:
        """Choose the sections that fit with the least rows, and headings of others."""
        sizes = [self._size(piece) for piece in sections]
        if self.used + sum(sizes) <= self._height:
            self._whole |= set(map(id, sections))
            self.used += sum(sizes)
            return
        self.used += sum(map(self._lines, self._note(sections)))
        titles = [0 if piece.heading and piece.heading.name else self._lines(piece.parts[0]) for piece in sections]
        if any(titles) and self.used + sum(titles) <= self._height:
            self._titles = set(map(id, sections))
            self.used += sum(titles)
        else:
            titles = [0] * len(sections)
        needed = not any(id(part) in self._rows for piece in self._pieces for part in piece.parts if not piece.heading)
        for piece, size, title in zip(sections, sizes, titles, strict=True):
            if self.used + size - title <= self._height or needed:  # a report without any table is no answer
                self._whole.add(id(piece))
                self.used += size - title
                needed = False

    def _grow(self, part: Grid | Lines) -> None:
        """Give a table as many of the remaining lines as it needs."""
        others = self.used - self._lines(part)
        low, high = self._rows[id(part)], min(part.count, self._height)
        while low < high:
            self._rows[id(part)] = middle = (low + high + 1) // 2
            low, high = (middle, high) if others + self._lines(part) <= self._height else (low, middle - 1)
        self._rows[id(part)] = low
        self.used = others + self._lines(part)

    def _size(self, piece: _Piece) -> int:
        return sum(map(self._lines, piece.parts))

    def _lines(self, part: RenderableType) -> int:
        """Number of lines of a part."""
        return sum(len(self._console.render_lines(one, pad=False)) for one in self._shown(part))

    def _shown(self, part: RenderableType) -> list[RenderableType]:
        if isinstance(part, (Grid, Lines)):
            return part.parts(self._console.width, self._rows[id(part)])
        return [part]

    def _note(self, hidden: Sequence[_Piece]) -> list[RenderableType]:
        """The line about the sections that are left out."""
        headings = [piece.heading for piece in hidden if piece.heading is not None]
        if not headings:
            return []
        first = headings[0]
        if names := ", ".join(dict.fromkeys(one.name for one in headings if one.name)):
            option = f" ({first.option} NAME)" if first.option else ""
            return [Text(f"Too high for {self._height + 1} lines: {names}{option}; {first.way}", "dim")]
        starts = (piece.parts[0] for piece in self._pieces)
        before = sum(one.count for one in starts if isinstance(one, Rest))
        if not self._titles:
            return [Text(f"… and {len(headings) + before:,} more; {first.way}", "dim")]
        more = f", and {before:,} more" if before else ""
        return [Text(f"… of {len(headings)} only the titles fit{more}; {first.way}", "dim")]
