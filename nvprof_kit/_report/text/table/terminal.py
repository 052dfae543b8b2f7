"""Terminal output of reports: the console, tables, and the lines around them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from io import StringIO
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from nvprof_kit._report.text.table.bar import Bar
from nvprof_kit._report.text.table.grid import WIDE, Column, Grid
from nvprof_kit._report.text.table.units import counted
from nvprof_kit._result.plain import plain, title
from nvprof_kit._trace.schema import CaptureInfo
from nvprof_kit.issues import printed

__all__ = ["Bar", "capture_facts", "capture_line", "html_of", "print_to", "table", "text_of", "warning_lines"]

_ANY = 1_000_000
"""A width that no table exceeds."""


class _PlainConsole(Console):
    """A console that removes control characters from texts."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render with Rich, keeping only its own control codes."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)


def print_to(file: TextIO, parts: Iterable[RenderableType], kept: bool = False) -> None:
    """Print the parts of a report.

    On a terminal, output has colors and the terminal's width. Elsewhere it is plain and ``COLUMNS`` wide. If
    ``COLUMNS`` is not set, or the file is ``kept``, it is 120 wide, or wider if the labels and numbers of a table need
    it.
    """
    if file.isatty():
        console = _PlainConsole(file=file, highlight=False, markup=False, force_jupyter=False)
        _print(console, parts, wrap=True)
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
    wrap: bool = False,
) -> None:
    """Tables keep to the width; a line of text is wrapped on a terminal and written as is to a pipe."""
    width = console.width
    for part in parts:
        for one in part.parts(width, grow=grow) if isinstance(part, Grid) else (part,):
            if isinstance(one, Table) and grow:
                console.width = max(width, console.measure(one, options=console.options.update(width=_ANY)).maximum)
            console.print(one, soft_wrap=isinstance(one, (str, Text)) and not wrap)
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


def capture_line(info: CaptureInfo, steps: int, shown: int | None = None) -> Text:
    """A line about the capture: file, tool, GPUs, processes and steps."""
    facts = "".join(f" · {fact}" for fact in capture_facts(info, steps, shown))
    return Text(title(info.path), "bold").append(facts, style="not bold")


def capture_facts(info: CaptureInfo, steps: int, shown: int | None = None) -> list[str]:
    """Facts about the capture: tool, GPUs, processes and steps, of which `shown` are in the figures."""
    part = f"{shown} of " if shown is not None and shown != steps else ""
    facts = [
        info.tool,
        counted(info.gpus) if info.on_gpu else "no GPU",
        f"{info.processes} processes" if info.processes > 1 else "",
        f"{part}{steps or 'no'} step{'s' * (steps != 1)}",
    ]
    return [fact for fact in facts if fact]


def warning_lines(issues: Iterable[str]) -> list[Text]:
    """The issues that are printed, one line each, the most severe first."""
    return [Text(f"! {issue}", "yellow") for issue in printed(issues)]


def text_of(parts: Iterable[RenderableType], kept: bool = False) -> str:
    """The parts of a report as plain text, as written to a file by `print_to`."""
    file = StringIO()
    print_to(file, parts, kept=kept)
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
