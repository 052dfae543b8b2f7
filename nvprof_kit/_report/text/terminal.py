"""What every table for a person is made of: the console it is printed to, bars, and the lines around it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from io import StringIO
from typing import TextIO

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text

from nvprof_kit._report.plain import plain
from nvprof_kit._report.text.units import counted
from nvprof_kit._trace.schema import CaptureInfo

_EIGHTHS = " ▏▎▍▌▋▊▉"
_SHORT, _SHORT_LABEL = 12, 24
"""Cells that a text, and the first column's, is not shortened below."""


class _PlainConsole(Console):
    """A console that prints no control character of the texts that it is given."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What rich renders, its own control codes left as they are."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)


def print_to(file: TextIO, parts: Iterable[RenderableType], kept: bool = False) -> None:
    """Print the parts of a report: on a terminal in colour and at its width, else plain and ``COLUMNS`` wide; where
    that is not set, or the file is ``kept``, 120 and as much more as the labels and figures of a table need.
    """
    if file.isatty():
        _print(_PlainConsole(file=file, highlight=False, markup=False, force_jupyter=False), parts)
        return
    columns = "" if kept else os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() else 120
    console = _PlainConsole(
        file=file, width=width, highlight=False, markup=False, color_system=None, force_jupyter=False
    )
    with console.capture() as plain:
        _print(console, parts, grow=not columns.isdecimal())
    file.writelines(line.rstrip() + "\n" for line in plain.get().splitlines())


def _print(console: Console, parts: Iterable[RenderableType], grow: bool = False) -> None:
    """Tables keep to the width; a line of text stays one line, which a terminal wraps and a pipe gets whole."""
    width = console.width
    for part in parts:
        if isinstance(part, Table):
            lacking = _shorten(part, console, labels=not grow)
            console.width = width + lacking if grow else width
        console.print(part, soft_wrap=isinstance(part, (str, Text)))
        console.width = width


def _shorten(made: Table, console: Console, labels: bool) -> int:
    """Shorten a table's texts, the longest first, until it fits the console, so that no figure is cut.

    Args:
        made: The table.
        console: Where it goes.
        labels: Shorten the first column too, after the others.

    Returns:
        How many cells are still lacking where every text is short.
    """
    widths = {column._index: _content(column, console) for column in made.columns if column.no_wrap}
    texts = [column for column in made.columns if column.no_wrap and column.justify == "left"]
    lacking = max(sum(widths.values()) + 2 * len(made.columns) - 1 - console.width, 0)
    for group, least in ((texts[1:], _SHORT), (texts[:1] if labels else [], _SHORT_LABEL)):
        while lacking and any(widths[column._index] > least for column in group):
            widths[max(group, key=lambda column: widths[column._index])._index] -= 1
            lacking -= 1
    for column in texts:
        column.max_width = widths[column._index]
    return lacking


def _content(column: Column, console: Console) -> int:
    """Cells that a column's longest entry takes."""
    return max(console.measure(cell).maximum for cell in (column.header, *column.cells))


class Bar:
    """A share of 1 as a bar, in eighths of a character, or in ``#`` where the terminal knows only ASCII."""

    def __init__(self, share: float, style: str = "cyan", width: int = 24) -> None:
        self._share = min(max(share, 0.0), 1.0)
        self._style = Style.parse(style)
        self._width = width

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """As wide as it likes to be, and down to nothing."""
        return Measurement(0, min(self._width, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The bar; any share above nothing shows at least a sliver."""
        width = min(self._width, options.max_width)
        if options.ascii_only:
            text = "#" * round(self._share * width)
        else:
            eighths = max(round(self._share * width * 8), 1 if self._share > 0 else 0)
            text = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
        yield Segment(text.ljust(width), self._style)
        yield Segment.line()


def table(columns: Iterable[tuple[str, str]]) -> Table:
    """An empty table with a rule under its head.

    Args:
        columns: Name and kind of each: ``left``, ``right``, or ``bar``, which gives way first where the width is short.
    """
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name, kind in columns:
        if kind == "bar":
            made.add_column(name)
        else:
            made.add_column(name, justify="right" if kind == "right" else "left", no_wrap=True, overflow="ellipsis")
    return made


def capture_line(info: CaptureInfo, steps: int) -> Text:
    """Which capture this is: file, tool, GPUs, processes and steps."""
    facts = "".join(f" · {fact}" for fact in capture_facts(info, steps))
    return Text(info.path, "bold").append(facts, style="not bold")


def capture_facts(info: CaptureInfo, steps: int) -> list[str]:
    """What made a capture and where: tool, GPUs, processes and steps."""
    facts = [
        info.tool,
        counted(info.gpus) if info.on_gpu else "no GPU",
        f"{info.processes} processes" if info.processes > 1 else "",
        f"{steps or 'no'} step{'s' * (steps != 1)}",
    ]
    return [fact for fact in facts if fact]


def warning_lines(warnings: Iterable[str]) -> list[Text]:
    """What may be wrong with the figures, a line each."""
    return [Text(f"! {warning}", "yellow") for warning in warnings]


def text_of(parts: Iterable[RenderableType], kept: bool = False) -> str:
    """The parts of a report as plain text, as `print_to` writes them to a file."""
    file = StringIO()
    print_to(file, parts, kept=kept)
    return file.getvalue()


def html_of(parts: Iterable[RenderableType]) -> str:
    """The parts of a report as an element of HTML, with their colours; no text in them is taken for markup."""
    console = Console(
        file=StringIO(),
        width=120,
        highlight=False,
        markup=False,
        record=True,
        force_terminal=True,
        force_jupyter=False,  # in a notebook rich would show every line once more by itself
    )
    _print(console, parts, grow=True)
    style = "font-family:Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre;overflow-x:auto;line-height:1.3"
    return console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')
