"""What every table for a person is made of: the console it is printed to, bars, and the lines around it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from io import StringIO
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from nvprof_kit._report.plain import plain
from nvprof_kit._report.text.table.bar import Bar
from nvprof_kit._report.text.table.grid import WIDE, Column, Grid
from nvprof_kit._report.text.table.units import counted
from nvprof_kit._report.warnings import in_order
from nvprof_kit._trace.schema import CaptureInfo

__all__ = ["Bar", "capture_facts", "capture_line", "html_of", "print_to", "table", "text_of", "warning_lines"]

_ANY = 1_000_000
"""Cells that no table needs."""
_AROUND = 8
"""Lines of a terminal that are left to what stands around a table."""


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
        console = _PlainConsole(file=file, highlight=False, markup=False, force_jupyter=False)
        _print(console, parts, height=console.height - _AROUND, wrap=True)
        return
    columns = "" if kept else os.environ.get("COLUMNS", "")
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
    height: int | None = None,
    wrap: bool = False,
) -> None:
    """Tables keep to the width; a line of text is wrapped between words on a terminal, and a pipe gets it whole."""
    width = console.width
    for part in parts:
        for one in part.parts(width, height, grow) if isinstance(part, Grid) else (part,):
            if isinstance(one, Table) and grow:
                console.width = max(width, console.measure(one, options=console.options.update(width=_ANY)).maximum)
            console.print(one, soft_wrap=isinstance(one, (str, Text)) and not wrap)
            console.width = width


def table(columns: Iterable[tuple[str, str]], ranks: Mapping[str, int] | None = None) -> Grid:
    """An empty table with a rule under its head.

    Args:
        columns: Name and kind of each: ``left`` for texts, ``path`` for paths of layers, ``right`` for figures, or
            ``bar``, which gives way first where the width is short.
        ranks: Ranks of columns by name: where the width is short those of the largest go first, those of 0 stay. All
            others have 1.
    """
    return Grid([Column(name, kind, (ranks or {}).get(name, 1)) for name, kind in columns])


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
    """What may be wrong with the figures, a line each, the most severe first."""
    return [Text(f"! {warning}", "yellow") for warning in in_order(warnings)]


def text_of(parts: Iterable[RenderableType], kept: bool = False) -> str:
    """The parts of a report as plain text, as `print_to` writes them to a file."""
    file = StringIO()
    print_to(file, parts, kept=kept)
    return file.getvalue()


def html_of(parts: Iterable[RenderableType]) -> str:
    """The parts of a report as an element of HTML, with their colours; no text in them is taken for markup."""
    console = Console(
        file=StringIO(),
        width=WIDE,
        highlight=False,
        markup=False,
        record=True,
        force_terminal=True,
        force_jupyter=False,  # in a notebook rich would show every line once more by itself
    )
    _print(console, parts, grow=True)
    style = "font-family:Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre;overflow-x:auto;line-height:1.3"
    return console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')
