"""A list of lines of which a terminal shows the first that fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text


@dataclass
class Lines:
    """Lines of text in the order of their weight.

    Attributes:
        lines: The lines.
        beyond: Number of lines that were omitted before; the line about omitted lines counts them.
        rest: The line about omitted lines; ``{}`` is their number.
        least: Minimum number of lines on a terminal; 0 for that of all tables.
    """

    lines: Sequence[Text]
    beyond: int = 0
    rest: str = "… and {} more"
    least: int = 0

    @property
    def count(self) -> int:
        """Number of lines that may be omitted."""
        return len(self.lines)

    def parts(self, width: int, most: int | None = None, grow: bool = False) -> list[RenderableType]:
        """The first lines, and the number of the others; the arguments are those of `Grid.parts`."""
        shown = self.lines if most is None else self.lines[:most]
        hidden = len(self.lines) - len(shown) + self.beyond
        return [*shown, *([Text(self.rest.format(f"{hidden:,}"))] if hidden else [])]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render all lines."""
        yield from self.parts(options.max_width)
