"""A verb is declared once: by a function, in a section of the help, with an example; and where its answer goes.

Its arguments are the function's positional ones and its options the others: their kind is the annotation, their help
what the docstring says of them. Options that are the arguments of a function of the library are taken from that.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from nvprof_kit._analysis.hardware import parse_peak
from nvprof_kit._api.capture import Capture
from nvprof_kit._api.capture import open as open_capture
from nvprof_kit._result import formats
from nvprof_kit._result.result import TABLE, Result, RowOptions, Several
from nvprof_kit._result.writer import Document, refuse_input, writing
from nvprof_kit._toml import read_toml
from nvprof_kit._trace.files.kinds import NEEDED_NSYS, NSYS, expect
from nvprof_kit._trace.files.process import keep_freed_memory
from nvprof_kit.errors import UsageError

_OPTIONS = read_toml("nvprof_kit._cli", "options.toml")
LETTERS: Mapping[str, str] = _OPTIONS["letters"]
METAVARS: Mapping[str, str] = _OPTIONS["metavars"]

POSITIVE = ("depth", "top")
"""Numbers of things, which are 1 at least."""


class LazyGroup(click.Group):
    """Verbs, also those below another. A module of verbs is loaded when one of them is asked for."""

    modules = ("reading", "job", "sources", "capture")

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb of this name, of the first module that has it."""
        for module in self.modules:
            if cmd_name not in self._loaded:
                import_module(f"nvprof_kit._cli.verbs.{module}")
        return self._loaded.get(cmd_name)

    @property
    def commands(self) -> MutableMapping[str, click.Command]:
        """All verbs."""
        for module in self.modules:
            import_module(f"nvprof_kit._cli.verbs.{module}")
        return self._loaded

    @commands.setter
    def commands(self, commands: MutableMapping[str, click.Command]) -> None:
        self._loaded = commands

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a verb."""
        self._loaded[name or cmd.name or ""] = cmd


class VerbGroup(LazyGroup):
    """The verbs of the command line, listed by section."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each section."""
        width = max(map(len, self.commands))
        for section in SECTIONS:
            with formatter.section(section.title):
                rows = [(f"{verb.name:{width}}", verb.get_short_help_str(200)) for verb in section.commands]
                formatter.write_dl(rows)


@click.group(
    cls=VerbGroup, name="nvprof-kit", no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]}
)
def group() -> None:
    """Per-layer GPU and CPU costs of transformers, from NVIDIA Nsight data."""


class Section:
    """A section of the help. Its verbs are declared with it."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.commands: list[click.Command] = []

    def add(self, command: click.Command, under: click.Group | None = None) -> None:
        """Add a command, below another verb or of its own."""
        (under or group).add_command(command)
        if under is None:
            self.commands.append(command)

    def verb(
        self,
        example: str,
        *,
        also: Iterable[Callable[..., Any]] = (),
        without: Iterable[str] = (),
        writes: Mapping[str, str] | None = None,
        name: str = "",
        under: click.Group | None = None,
        cls: type[click.Command] = click.Command,
        help: str = "",
        **settings: Any,
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Make a verb of a function.

        Args:
            example: A command line, shown below the options.
            also: Functions whose arguments are options too, passed by name.
            without: Arguments of these that are no options.
            writes: The formats that a verb with an argument ``output: Output`` writes, by suffix; None for those of a
                table without a plot.
            name: The verb; '' for the function's name.
            under: The verb that this one stands below.
            cls: The class of the command.
            help: Its help; '' for the function's docstring.
            settings: Context settings of click.
        """

        def decorate(function: Callable[..., None]) -> Callable[..., None]:
            declared: dict[str, click.Parameter] = {}
            for source in (function, *also):
                for parameter in _parameters(source, positional=source is function, writes=writes):
                    if parameter.name not in without:
                        declared.setdefault(str(parameter.name), parameter)
            if any(parameter.type is click.UNPROCESSED for parameter in declared.values()):
                settings.setdefault("allow_interspersed_args", False)
            text, epilog = help or _description(function), f"\b\nExample:\n  {example}"
            params = list(declared.values())
            command = cls(name or function.__name__, settings, function, params, help=text, epilog=epilog)
            self.add(command, under)
            return function

        return decorate

    def question(
        self,
        method: Callable[..., Result],
        example: str,
        *,
        nsys: bool = False,
        without: Iterable[str] = (),
        name: str = "",
        under: click.Group | None = None,
    ) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
        """Make a verb of a method of `Capture` that answers one question; its arguments are the verb's options.

        The decorated function gets each opened capture and the options, and returns the answer.

        Args:
            method: The method.
            example: A command line, shown below the options.
            nsys: Whether only captures of nsys can answer.
            without: Arguments that are no options.
            name: The verb; '' for the name of the method.
            under: The verb that this one stands below.
        """

        def decorate(ask: Callable[..., Result]) -> Callable[..., Result]:
            def answer(output: Output, captures: tuple[str, ...], **options: Any) -> None:
                if output.data_format in formats.PICTURES and len(captures) > 1:
                    raise UsageError(f"a plot shows one capture, not {len(captures)}; plot them one by one")
                click.get_current_context().obj = output
                opening, results = pop_opening(options), []
                with progress() as report:
                    for number, path in enumerate(captures, 1):
                        report(f"reading {path}" + (f", {number} of {len(captures)}" if len(captures) > 1 else ""))
                        capture = open_input(output, path, nsys=nsys, **opening)
                        capture.is_last_question = True
                        results.append(ask(capture, **options))
                output.write_results(results)

            kineto = "" if nsys else ", or a PyTorch trace (.json, .json.gz)"
            kinds = f"A CAPTURE is an nsys .sqlite, .nsys-rep or parquetdir{kineto}, also packed as .xz."
            text = f"{_description(method)}\n\n{kinds}"
            verb = functools.partial(self.verb, example, name=name or method.__name__, under=under, help=text)
            verb(also=(method, open_capture), without=("path", *without), writes=TABLES)(answer)
            return ask

        return decorate


def pop_opening(options: dict[str, Any]) -> dict[str, Any]:
    """Take those options of a verb out that say how a capture is opened."""
    return {name: options.pop(name) for name in inspect.signature(open_capture).parameters if name in options}


def _parameters(
    source: Callable[..., Any], *, positional: bool, writes: Mapping[str, str] | None
) -> Iterable[click.Parameter]:
    """The options of a function's arguments and, if asked for, its positional arguments."""
    meanings = _meanings(source)
    for parameter in inspect.signature(source).parameters.values():
        kind = str(parameter.annotation)
        if kind == "Output":
            yield from output_options(TABLES if writes is None else writes)
        elif parameter.kind is parameter.VAR_KEYWORD and "RowOptions" in kind:
            texts = _meanings(RowOptions)
            for name, row in RowOptions.__annotations__.items():
                yield option(name, row.__forward_arg__, "" if name == "sort" else None, texts[name])
        elif parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        elif parameter.default is not parameter.empty:
            yield option(parameter.name, kind, parameter.default, meanings.get(parameter.name, ""), source)
        elif positional and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            is_program = parameter.name in ("program", "command", "subject")
            metavar = METAVARS.get(parameter.name, parameter.name.upper())
            kind_of: Any = click.UNPROCESSED if is_program else str
            nargs = -1 if kind.startswith("tuple") else 1
            yield click.Argument([parameter.name], required=not is_program, metavar=metavar, type=kind_of, nargs=nargs)


def option(name: str, kind: str, default: Any, meaning: str, source: Callable[..., Any] | None = None) -> click.Option:
    """The option of an argument.

    Args:
        name: The argument.
        kind: Its annotation, as text.
        default: Its default.
        meaning: The help.
        source: The function that it belongs to, in whose module the annotation's names are.
    """
    names = vars(sys.modules[source.__module__]) if source else {}
    literals = [names[word] for word in re.findall(r"\w+", kind) if get_origin(names.get(word)) is Literal]
    choices = re.findall(r"'([^']+)'", kind) or [text for literal in literals for text in get_args(literal)]
    long = f"--{name.rstrip('_').replace('_', '-')}"
    declared = [name, *([f"-{LETTERS[name]}"] if name in LETTERS else []), long]
    settings: dict[str, Any] = {"help": meaning, "default": default}
    settings["show_default"] = default not in (None, False, "", ())
    if kind.startswith("bool"):
        if kind != "bool":
            declared[-1] = f"{long}/--no-{name.replace('_', '-')}"
        return click.Option(declared, is_flag=True, **settings)
    settings["multiple"] = "Sequence[" in kind or "tuple[" in kind or "Mapping[" in kind
    if choices:
        return click.Option(declared, type=click.Choice(choices), **settings)
    settings["metavar"] = METAVARS.get(name, "N" if kind.startswith(("int", "float")) else None)
    if kind.startswith("int"):
        settings["type"] = click.IntRange(min=int(name in POSITIVE))
    elif kind.startswith("float"):
        settings["type"] = click.FloatRange(min=0)
    if name == "measure":
        settings["is_flag"], settings["flag_value"] = False, "."
    if name == "peak":
        settings["callback"], settings["default"] = _peaks, ()
    return click.Option(declared, **settings)


def _peaks(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> dict[str, float]:
    return dict(map(parse_peak, texts))


def _description(function: Callable[..., Any]) -> str:
    """What a docstring says of the function, without its arguments, result and errors."""
    return re.split(r"\n\n(?:Args|Options|Returns|Raises):\n", inspect.getdoc(function) or "")[0].replace("``", "")


@functools.cache
def _meanings(documented: Callable[..., Any]) -> Mapping[str, str]:
    """What a docstring says of each argument; ``As in `other`.`` is what that function of the module says."""
    _, _, arguments = re.sub(
        "^(Attributes|Options):$", "Args:", inspect.getdoc(documented) or "", flags=re.M
    ).partition("Args:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", re.split(r"\n(?=\S)", arguments)[0], re.M)
    meanings = {name: " ".join(text.split()).replace("``", "") for name, text in entries}
    for name, text in meanings.items():
        if other := re.match(r"As in `(\w+)`", text):
            scope = vars(sys.modules[documented.__module__])
            class_name, dot, _ = documented.__qualname__.rpartition(".")
            meanings[name] = _meanings((vars(scope[class_name]) if dot else scope)[other[1]])[name]
    return meanings


SECTIONS = (CAPTURE, READ, COUNTERS, JOB, OUT) = tuple(
    map(Section, ("Capture", "Read", "Nsight Compute", "Job of several ranks", "Out"))
)
"""The sections of the help, in their order."""


# ---------------------------------------------------------------- where answers go

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
        matching = (name for suffix, name in by_suffix.items() if path is None or path.name.lower().endswith(suffix))
        chosen = data_format or next(matching, None)
        if chosen is None:
            option = ", or --format" if len(_forms(by_suffix)) > 1 else ""
            raise UsageError(f"{path}: no format has this suffix; needed one of {suffixes}{option}")
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
        sources = tuple(source for result in results for source in result.sources)
        answer = results[0] if len(results) == 1 else Several(tuple(results), sources=sources)
        if self.data_format == TABLE and self.path is None:
            from nvprof_kit._report.text.table import print_to

            with _stdout():
                print_to(sys.stdout, answer.parts())
                sys.stdout.flush()
        else:
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
                print("!", formats.title(warning), file=sys.stderr)
        except OSError:  # stderr is closed; the output is complete, so keep the exit status
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


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


def _forms(by_suffix: Mapping[str, str]) -> list[str]:
    """The formats that ``--format`` selects; there is no such option for one alone."""
    return [name for name in dict.fromkeys(by_suffix.values()) if name not in (*formats.PICTURES, "html")]


def output_options(by_suffix: Mapping[str, str]) -> list[click.Parameter]:
    """``-o`` and, if there are several formats, ``--format``, which make the `Output` of a verb together."""

    def output(context: click.Context, _: click.Parameter, path: str | None) -> Output:
        return Output.of(context.params.pop("data_format", None), Path(path) if path else None, by_suffix)

    forms = _forms(by_suffix)
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
    keep_freed_memory()
    if nsys:
        expect(path, NSYS, NEEDED_NSYS)
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
        yield lambda stage: bar.update(task, description=escape(stage))
