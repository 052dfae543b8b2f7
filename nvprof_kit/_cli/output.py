"""Arguments and output shared by the reading verbs: captures, output file and format."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from nvprof_kit._cli.progress import each
from nvprof_kit._result import formats
from nvprof_kit._result.formats import title
from nvprof_kit._result.result import TABLE, no_plot
from nvprof_kit._result.writer import refuse_input, write_file
from nvprof_kit._result.writer import writing as write_into
from nvprof_kit.errors import UsageError
from nvprof_kit.names import DOMAIN

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nvprof_kit._api.capture import Capture
    from nvprof_kit._result.result import Result
    from nvprof_kit._result.writer import Document

_BY_SUFFIX = {".txt": TABLE} | {f".{name}": name for name in (*formats.TABLES, *formats.PICTURES)}


@dataclass(frozen=True)
class Output:
    """The destination of a result.

    Attributes:
        form: ``table`` or a format of `nvprof_kit._result.formats` and `nvprof_kit._result.formats`.
        path: The file to write; None for stdout.
    """

    form: str
    path: Path | None = None

    @classmethod
    def of(cls, form: str | None, path: Path | None, more: tuple[str, ...] = (), plot: bool = True) -> Output:
        """The output for ``--format`` and ``-o``; without a format, the file's suffix decides.

        Args:
            form: The requested format.
            path: The requested file.
            more: Additional formats of this verb, by suffix.
            plot: Whether the verb supports plots.

        Raises:
            UsageError: The suffix is unknown and no format is given, the verb does not support plots, or parquet would
                go to a terminal.
        """
        by_suffix = _BY_SUFFIX | {f".{name}": name for name in more}
        form = form or (by_suffix.get(path.suffix.lower()) if path else TABLE)
        if form is None:
            raise UsageError(f"{path}: no format has this suffix; needed one of {' '.join(by_suffix)}, or --format")
        if form in formats.PICTURES and not plot:
            raise no_plot(click.get_current_context().command_path.partition(" ")[2])
        if form == "parquet" and path is None and sys.stdout.isatty():
            raise UsageError("parquet cannot be printed to a terminal; write it to a file with -o FILE.parquet")
        return cls(form, path)

    @classmethod
    def among(cls, by_suffix: Mapping[str, str], path: Path | None, form: str | None = None) -> Output:
        """The output of a verb that writes a file for another program: the suffix decides; the first is the default.

        Args:
            by_suffix: The formats by suffix, longer suffixes first.
            path: The requested file.
            form: The requested format, which overrides the suffix.

        Raises:
            UsageError: The suffix is unknown, or the output would go to a terminal.
        """
        suffixes = " ".join(by_suffix)
        if path is None:
            if sys.stdout.isatty():
                raise UsageError(f"the output cannot be printed to a terminal; write it to a file with -o ({suffixes})")
            return cls(form or next(iter(by_suffix.values())))
        name = path.name.lower()
        form = form or next((candidate for suffix, candidate in by_suffix.items() if name.endswith(suffix)), None)
        if form is None:
            raise UsageError(f"{path}: no format has this suffix; needed one of {suffixes}")
        return cls(form, path)

    def spare(self, inputs: Iterable[str | Path]) -> None:
        """Reject an output that would overwrite an input, before reading."""
        if self.path is not None:
            refuse_input(self.path, inputs)

    def write_results(self, results: Sequence[Result]) -> None:
        """Write results; several results become one table with a column ``capture``.

        Raises:
            UsageError: The file cannot be written or is an input, or the row selection is invalid.
        """
        sources = [source for result in results for source in result.sources]
        if self.form == TABLE:
            self.print([list(result.parts()) for result in results], sources)
        else:
            from nvprof_kit._result.result import Several

            answer = results[0] if len(results) == 1 else Several(tuple(results))
            self.write(answer.encode(self.form), answer.warnings_beside(self.form), sources)

    def write_document(self, document: Document) -> None:
        """Write a file for another program.

        Raises:
            UsageError: The file cannot be written, or is one of the inputs.
        """
        self.write(document.pieces(), document.warnings, document.sources)

    def write(
        self, data: bytes | Iterable[bytes], warnings: Iterable[str] = (), inputs: Iterable[str | Path] = ()
    ) -> None:
        """Write data or an image, and its warnings to stderr, because these formats cannot contain them.

        Raises:
            UsageError: The file cannot be written, or is one of the inputs.
        """
        pieces = (data,) if isinstance(data, bytes) else data
        if self.path is None:
            with _stdout():
                for piece in pieces:
                    sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()
        else:
            with write_into(self.path, inputs=inputs) as file:
                file.writelines(pieces)
        try:
            for warning in warnings:
                print("!", title(warning), file=sys.stderr)
        except OSError:  # stderr is closed; the output is complete, so keep the exit status
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    def print(self, results: Sequence[Sequence[RenderableType]], inputs: Iterable[str | Path] = ()) -> None:
        """Print text results, separated by empty lines.

        Raises:
            UsageError: The file cannot be written, or is one of the inputs.
        """
        from nvprof_kit._report.text.table import print_to, text_of

        if self.path is None:
            with _stdout():
                for parts in _apart(results):
                    print_to(sys.stdout, parts)
                sys.stdout.flush()
        else:
            write_file(self.path, text_of(chain(*_apart(results)), to_file=True), inputs=inputs)


def _apart(results: Sequence[Sequence[RenderableType]]) -> Iterator[Sequence[RenderableType]]:
    """The parts of each result, with an empty line between two. What one says of its data, no other says again."""
    from rich.text import Text

    last: RenderableType = ""
    said: set[str] = set()
    for number, parts in enumerate(results):
        issues = {piece.plain for piece in parts if isinstance(piece, Text) and piece.plain.startswith("! ")}
        printed = [piece for piece in parts if not (isinstance(piece, Text) and piece.plain in said)]
        said |= issues
        yield ["", *printed] if number and last != "" else printed
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


def writing(*more: str, plot: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add ``--format`` and ``-o`` to a verb; they are passed as one `Output`, before its own arguments.

    Args:
        more: Additional formats of this verb, selected by suffix.
        plot: Whether the verb supports plots.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def parsed(form: str | None, path: Path | None, **options: Any) -> None:
            verb(Output.of(form, path, more, plot), **options)

        decorated: Callable[..., None] = parsed
        return _FORMAT(_FILE(decorated))

    return decorate


@dataclass(frozen=True)
class Reading:
    """The common arguments of the reading verbs.

    Attributes:
        captures: The files to read.
        domain: NVTX domain of the ranges; None if not given.
        output: The destination of the result.
        nsys: Whether the verb supports only nsys captures.
    """

    captures: tuple[str, ...]
    domain: str | None
    output: Output
    nsys: bool = False

    def open(
        self, capture: str, rules: str | None = None, kernel_rules: Path | None = None, model: Path | None = None
    ) -> Capture:
        """Open one of the captures.

        Raises:
            CaptureError: The file is not a capture; the message says what it is.
            UsageError: The output would overwrite the capture, or the rules or the model's file are invalid.
        """
        from nvprof_kit._api.capture import Capture
        from nvprof_kit._trace.files.kinds import CAPTURES, NEEDED, NEEDED_NSYS, NSYS, expect
        from nvprof_kit._trace.files.own_process import share_memory

        share_memory()
        expect(capture, *((NSYS, NEEDED_NSYS) if self.nsys else (CAPTURES, NEEDED)))
        opened = Capture(capture, rules=rules, domain=self.domain, kernel_rules=kernel_rules, model=model)
        self.output.spare(opened.sources)
        return opened


def reading(
    short_help: str, *, nsys: bool = False, kernel_rules: bool = False
) -> Callable[[Callable[..., Result]], click.Command]:
    """Make a verb of a function that asks one question of an opened capture, with its options as arguments.

    The verb takes captures, ``--domain``, ``--rules``, ``--model``, ``--format`` and ``-o``, asks each capture, and
    writes the answers. While the function runs, ``click.get_current_context().obj`` is the `Output`.

    Args:
        short_help: The line in the list of verbs.
        nsys: Whether the verb supports only nsys captures.
        kernel_rules: Whether the verb takes ``--kernel-rules``.
    """
    from nvprof_kit._cli import inputs

    def decorate(ask: Callable[..., Result]) -> click.Command:
        @functools.wraps(ask)
        def verb(
            *,
            captures: tuple[str, ...],
            domain: str,
            form: str | None,
            path: Path | None,
            rules: str | None,
            model: Path | None,
            **options: Any,
        ) -> None:
            rules_path = options.pop("rules_path", None)
            output = Output.of(form, path)
            if output.form in formats.PICTURES and len(captures) > 1:
                raise UsageError(f"a plot shows one capture, not {len(captures)}; plot them one by one")
            click.get_current_context().obj = output
            request = Reading(captures, named_domain(domain), output, nsys)
            output.write_results(
                each(captures, lambda capture: ask(request.open(capture, rules, rules_path, model), **options))
            )

        decorated: Callable[..., None] = verb
        decorated = inputs.kernel_rules(decorated) if kernel_rules else decorated
        for option in (inputs.model_option, inputs.rules_option, domain_option, _FILE, _FORMAT, _CAPTURES):
            decorated = option(decorated)
        return click.command(name=ask.__name__, short_help=short_help)(decorated)

    return decorate


def named_domain(domain: str) -> str | None:
    """The domain given by the user; None if it is only the default."""
    source = click.get_current_context().get_parameter_source("domain")
    return domain if source is ParameterSource.COMMANDLINE else None


def reading_into(
    by_suffix: Mapping[str, str], *, named: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`reading` for a verb that writes a file for another program, in a format selected by suffix.

    Args:
        by_suffix: The formats by suffix, longer suffixes first.
        named: Whether ``--format`` can select the format too.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def parsed(
            captures: tuple[str, ...], domain: str, path: Path | None, form: str | None = None, **options: Any
        ) -> None:
            verb(Reading(captures, named_domain(domain), Output.among(by_suffix, path, form)), **options)

        forms = click.Choice(tuple(dict.fromkeys(by_suffix.values())))
        decorated = (
            click.option("--format", "form", type=forms, help="Format of the file.")(parsed) if named else parsed
        )
        return _CAPTURES(_FILE(domain_option(decorated)))

    return decorate


_CAPTURES = click.argument("captures", metavar="CAPTURE...", nargs=-1, required=True)
_FORMAT = click.option(
    "--format",
    "form",
    type=click.Choice((TABLE, *formats.TABLES)),
    help="Output format. [default: a table to read, or by the suffix of FILE]",
)
_FILE = click.option(
    "-o",
    "--output",
    "path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write to FILE; its suffix selects the format.",
)
domain_option = click.option(
    "--domain",
    default=DOMAIN,
    show_default=True,
    help="NVTX domain of the ranges; separate several with commas; '' or default is the default domain.",
)
"""Adds ``--domain`` to a verb."""
