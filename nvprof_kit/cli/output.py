"""What every reading verb has: captures to read, and a place and a form for the answer."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvprof_kit.errors import UsageError
from nvprof_kit.names import DOMAIN
from nvprof_kit.report.export import tables
from nvprof_kit.report.plain import plain
from nvprof_kit.report.plots import plots

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

_BY_SUFFIX = {".txt": "table"} | {f".{name}": name for name in (*tables.FORMATS, *plots.FORMATS)}


@dataclass(frozen=True)
class Output:
    """Where an answer goes.

    Attributes:
        form: ``table``, or one of the formats of `nvprof_kit.report.export.tables` and `nvprof_kit.report.plots.plots`.
        path: The file to write, None for stdout.
    """

    form: str
    path: Path | None = None

    @classmethod
    def of(cls, form: str | None, path: Path | None, more: tuple[str, ...] = ()) -> Output:
        """The output that ``--format`` and ``-o`` ask for: the file's suffix decides unless the format is named.

        Args:
            form: The format that was named.
            path: The file that was named.
            more: Formats of this verb alone, each by its suffix.

        Raises:
            UsageError: The suffix is none of ours and no format is named, or parquet is to go to a terminal.
        """
        by_suffix = _BY_SUFFIX | {f".{name}": name for name in more}
        form = form or (by_suffix.get(path.suffix.lower()) if path else "table")
        if form is None:
            raise UsageError(f"{path}: no format has this suffix; needed one of {' '.join(by_suffix)}, or --format")
        if form == "parquet" and path is None and sys.stdout.isatty():
            raise UsageError("parquet is not for a terminal; write it to a file with -o FILE.parquet")
        return cls(form, path)

    @classmethod
    def among(cls, by_suffix: Mapping[str, str], path: Path | None) -> Output:
        """The output of a verb whose answer is a file for another program: the suffix decides, the first by default.

        Raises:
            UsageError: The suffix is none of these, or the answer is to go to a terminal.
        """
        suffixes = " ".join(by_suffix)
        if path is None:
            if sys.stdout.isatty():
                raise UsageError(f"the answer is not for a terminal; write it to a file with -o ({suffixes})")
            return cls(next(iter(by_suffix.values())))
        form = by_suffix.get(path.suffix.lower())
        if form is None:
            raise UsageError(f"{path}: no format has this suffix; needed one of {suffixes}")
        return cls(form, path)

    def write(self, data: bytes, warnings: Iterable[str] = ()) -> None:
        """Write an answer that is data or a picture, and its warnings to stderr: it has no place for them.

        Raises:
            UsageError: The file cannot be written.
        """
        if self.path is None:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        else:
            try:
                self.path.write_bytes(data)
            except OSError as error:
                raise UsageError(f"{self.path}: cannot write it: {error.strerror}") from None
        try:
            for warning in warnings:
                print("!", plain(warning), file=sys.stderr)
        except OSError:  # nobody reads stderr: the answer is written, and its status stays
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    def write_tables(self, told: Sequence[tuple[str, pd.DataFrame, Iterable[str]]]) -> None:
        """Write the tables of captures as data, with a column ``capture`` if there are several, and their warnings.

        Args:
            told: For each capture its path, its table and what is uncertain about it.

        Raises:
            UsageError: The file cannot be written.
        """
        if len(told) == 1:
            _, rows, warnings = told[0]
        else:
            rows = tables.with_capture([(path, rows) for path, rows, _ in told])
            warnings = [f"{path}: {warning}" for path, _, warnings in told for warning in warnings]
        self.write(tables.encode(rows, self.form), warnings)

    def print(self, parts: Iterable[RenderableType]) -> None:
        """Print an answer that is text for a person.

        Raises:
            UsageError: The file cannot be written.
        """
        from nvprof_kit.report.text.terminal import print_to

        if self.path is None:
            print_to(sys.stdout, parts)
            return
        try:
            with self.path.open("w", encoding="utf-8") as file:
                print_to(file, parts, kept=True)
        except OSError as error:
            raise UsageError(f"{self.path}: cannot write it: {error.strerror}") from None


def writing(*more: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb ``--format`` and ``-o``; it gets them as one `Output`, before its own arguments.

    Args:
        more: Formats of this verb alone, chosen by the file's suffix.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def parsed(form: str | None, path: Path | None, **options: Any) -> None:
            verb(Output.of(form, path, more), **options)

        decorated: Callable[..., None] = parsed
        return _FORMAT(_FILE(decorated))

    return decorate


@dataclass(frozen=True)
class Reading:
    """What every reading verb is told.

    Attributes:
        captures: The files to read.
        domain: NVTX domain of the ranges.
        output: Where the answer goes.
    """

    captures: tuple[str, ...]
    domain: str
    output: Output


def reading(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the arguments of every reading verb; it gets them as one `Reading`, before its own options."""

    @functools.wraps(verb)
    def parsed(captures: tuple[str, ...], domain: str, form: str | None, path: Path | None, **options: Any) -> None:
        verb(Reading(captures, domain, Output.of(form, path)), **options)

    decorated: Callable[..., None] = parsed
    for option in (domain_option, _FILE, _FORMAT, _CAPTURES):
        decorated = option(decorated)
    return decorated


def reading_into(by_suffix: Mapping[str, str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The same for a verb whose answer is a file for another program, in one of the forms that the suffixes name."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def parsed(captures: tuple[str, ...], domain: str, path: Path | None, **options: Any) -> None:
            verb(Reading(captures, domain, Output.among(by_suffix, path)), **options)

        return _CAPTURES(_FILE(domain_option(parsed)))

    return decorate


_CAPTURES = click.argument("captures", metavar="CAPTURE...", nargs=-1, required=True)
_FORMAT = click.option(
    "--format",
    "form",
    type=click.Choice(("table", *tables.FORMATS)),
    help="Form of the answer; a table for reading by default.",
)
_FILE = click.option(
    "-o",
    "--output",
    "path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write to FILE; its suffix decides the format.",
)
domain_option = click.option(
    "--domain",
    default=DOMAIN,
    show_default=True,
    help="NVTX domain of the ranges, several by commas; '' or default is the default domain.",
)
"""Gives a verb ``--domain``."""
