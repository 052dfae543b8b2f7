"""Where answers go, their formats, and progress while they are made."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nvprof_kit._result import formats
from nvprof_kit._result.formats import title
from nvprof_kit._result.result import TABLE
from nvprof_kit._result.writer import Document, refuse_input, write_file, writing
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nvprof_kit._api.capture import Capture
    from nvprof_kit._result.result import Result

WITHOUT_PLOT = {".txt": TABLE} | {f".{name}": name for name in formats.TABLES}
TABLES = WITHOUT_PLOT | {f".{name}": name for name in formats.PICTURES}
WITH_PAGE = TABLES | {".html": "html"}
"""The formats of answers by suffix, the default first."""


@dataclass(frozen=True)
class Output:
    """The destination of an answer.

    Attributes:
        data_format: ``table`` or a format of `nvprof_kit._result.formats`.
        path: The file to write; None for stdout.
    """

    data_format: Any
    path: Path | None = None

    @classmethod
    def of(cls, data_format: str | None, path: Path | None, by_suffix: Mapping[str, str] = TABLES) -> Output:
        """The output for ``--format`` and ``-o``; without a format, the file's suffix decides.

        Args:
            data_format: The requested format.
            path: The requested file.
            by_suffix: The formats of the verb by suffix, longer suffixes and the default first.

        Raises:
            UsageError: The suffix is none of these, or a terminal would get what is not for reading.
        """
        suffixes = " ".join(by_suffix)
        named = next(
            (name for suffix, name in by_suffix.items() if path and path.name.lower().endswith(suffix)),
            None,
        )
        chosen = data_format or (named if path else next(iter(by_suffix.values())))
        if chosen is None:
            raise UsageError(f"{path}: no format has this suffix; needed one of {suffixes}, or --format")
        if path is None and sys.stdout.isatty() and (chosen == "parquet" or TABLE not in by_suffix.values()):
            raise UsageError(f"the output cannot be printed to a terminal; write it to a file with -o ({suffixes})")
        return cls(chosen, path)

    def spare(self, inputs: Iterable[str | Path]) -> None:
        """Reject an output that would overwrite an input, before reading."""
        if self.path is not None:
            refuse_input(self.path, inputs)

    def write_results(self, results: Sequence[Result]) -> None:
        """Write answers; several become one table with a column ``capture``.

        Raises:
            UsageError: The file cannot be written or is an input, or the row selection is invalid.
        """
        sources = [source for result in results for source in result.sources]
        if self.data_format == TABLE:
            self._print([list(result.parts()) for result in results], sources)
        else:
            from nvprof_kit._result.result import Several

            answer = results[0] if len(results) == 1 else Several(tuple(results))
            self._write((answer.encode(self.data_format),), answer.warnings_beside(self.data_format), sources)

    def write_document(self, document: Document) -> None:
        """Write a file for another program.

        Raises:
            UsageError: The file cannot be written, or is one of the inputs.
        """
        self._write(document.pieces(), document.warnings, document.sources)

    def _write(self, pieces: Iterable[bytes], warnings: Iterable[str], inputs: Iterable[str | Path]) -> None:
        """Write data or an image, and its warnings to stderr, because these formats cannot contain them."""
        if self.path is None:
            with _stdout():
                for piece in pieces:
                    sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()
        else:
            with writing(self.path, inputs=inputs) as file:
                file.writelines(pieces)
        try:
            for warning in warnings:
                print("!", title(warning), file=sys.stderr)
        except OSError:  # stderr is closed; the output is complete, so keep the exit status
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    def _print(self, results: Sequence[Sequence[RenderableType]], inputs: Iterable[str | Path]) -> None:
        from nvprof_kit._report.text.table import print_to, text_of

        if self.path is None:
            with _stdout():
                for parts in _separated(results):
                    print_to(sys.stdout, parts)
                sys.stdout.flush()
        else:
            write_file(self.path, text_of(chain(*_separated(results)), to_file=True), inputs=inputs)


def _separated(results: Sequence[Sequence[RenderableType]]) -> Iterator[Sequence[RenderableType]]:
    """The parts of each answer, with an empty line between two. An issue that several have is printed once."""
    from rich.text import Text

    last: RenderableType = ""
    printed: set[str] = set()
    for number, parts in enumerate(results):
        issues = {piece.plain for piece in parts if isinstance(piece, Text) and piece.plain.startswith("! ")}
        new_parts = [piece for piece in parts if not (isinstance(piece, Text) and piece.plain in printed)]
        printed |= issues
        yield ["", *new_parts] if number and last != "" else new_parts
        last = parts[-1] if parts else last


@contextmanager
def _stdout() -> Iterator[None]:
    """Turn errors while printing, such as a full disk, into a one-line error."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # buffered data would fail again at exit
        raise UsageError(f"stdout: cannot write it: {error.strerror}; the output is incomplete") from None


def output_options(by_suffix: Mapping[str, str]) -> list[click.Parameter]:
    """``-o`` and, if there are several formats, ``--format``, which make the `Output` of a verb together."""

    def output(context: click.Context, _: click.Parameter, path: str | None) -> Output:
        return Output.of(context.params.pop("data_format", None), Path(path) if path else None, by_suffix)

    forms = [name for name in dict.fromkeys(by_suffix.values()) if name not in (*formats.PICTURES, "html")]
    text = f"Write to FILE, whose suffix selects the format: {', '.join(by_suffix)}."
    options: list[click.Parameter] = [
        click.Option(["output", "-o", "--output"], metavar="FILE", callback=output, help=text)
    ]
    if len(forms) > 1:
        text = f"Format. [default: {forms[0]}, or by the suffix of FILE]"
        options.insert(0, click.Option(["data_format", "--format"], type=click.Choice(forms), is_eager=True, help=text))
    return options


def open_input(output: Output, path: str, *, nsys: bool = False, **options: Any) -> Capture:
    """Open a capture that the output must not overwrite.

    Raises:
        CaptureError: The file is not a capture; the message says what it is.
        UsageError: The output would overwrite the capture, or the rules or the model's file are invalid.
    """
    from nvprof_kit._api.capture import Capture
    from nvprof_kit._trace.files.kinds import CAPTURES, NEEDED, NEEDED_NSYS, NSYS, expect
    from nvprof_kit._trace.files.process import share_memory

    share_memory()
    expect(path, *((NSYS, NEEDED_NSYS) if nsys else (CAPTURES, NEEDED)))
    opened = Capture(path, **options)
    output.spare(opened.sources)
    return opened


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Show progress on stderr, if that is a terminal. Yields a function that takes the next stage's description."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda words: bar.update(task, description=escape(words))


Answer = TypeVar("Answer")


def each(captures: Sequence[str], read: Callable[[str], Answer]) -> list[Answer]:
    """Apply a function to each capture and show the current one."""
    answers = []
    with progress() as report:
        for number, capture in enumerate(captures, 1):
            report(f"reading {capture}" + (f", {number} of {len(captures)}" if len(captures) > 1 else ""))
            answers.append(read(capture))
    return answers
