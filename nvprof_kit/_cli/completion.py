"""Shell completion with click, extended with possible values of arguments.

``eval "$(_NVPROF_KIT_COMPLETE=bash_source nvprof-kit)"``, or ``zsh_source``, or ``fish_source``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class, shell_complete, split_arg_string

_VARIABLE = "_NVPROF_KIT_COMPLETE"
_CAPTURES = (".sqlite", ".sqlite.xz", ".nsys-rep", ".nsys-rep.xz", ".json", ".json.gz", ".json.xz")
_SPECIAL = re.compile(r"""([\s\\'"`$&|;<>()*?!#\[\]{}])""")
_ESCAPED = r"\\\1"
_REPORTS = (".csv", ".csv.xz", ".ncu-rep", ".ncu-rep.xz")

if TYPE_CHECKING:  # generic since click 8.3
    _Text = click.ParamType[str]
else:
    _Text = click.ParamType

Values = Callable[[click.Context, str], list[CompletionItem]]


class _Completed(_Text):
    """A text parameter with completion."""

    name = "text"

    def __init__(self, values: Values) -> None:
        self._values = values

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The values that start with the typed text."""
        return self._values(ctx, incomplete)


class _Bash(BashComplete):
    """Completion for bash, which inserts words as they are, and a space behind folders too."""

    source_template = BashComplete.source_template.replace("read type value", "read -r type value").replace(
        "COMPREPLY+=($value)", "COMPREPLY+=($value)\n            [[ $value != */ ]] || compopt -o nospace"
    )

    def format_completion(self, item: CompletionItem) -> str:
        """A word as bash reads it: characters that end words or have a meaning are escaped, if it is not quoted."""
        words = os.environ.get("COMP_WORDS", "").split("\n")
        quoted = words[-1].startswith(("'", '"'))
        return f"{item.type},{item.value if quoted else _SPECIAL.sub(_ESCAPED, item.value)}"


def complete_if_requested(group: click.Group) -> int | None:
    """Handle a completion request of the shell; returns the exit status, or None if there is no request."""
    instruction = os.environ.get(_VARIABLE)
    if not instruction:
        return None
    add_completion_class(_Bash)
    for command in _commands(group):
        for param in command.params:
            values = _values_of(command, param)
            if values is not None:
                param.type = _Completed(values)
    return shell_complete(group, {}, "nvprof-kit", _VARIABLE, instruction)


def _commands(command: click.Command) -> Iterator[click.Command]:
    yield command
    for below in command.commands.values() if isinstance(command, click.Group) else ():
        yield from _commands(below)


def _values_of(command: click.Command, param: click.Parameter) -> Values | None:
    """The possible values of a parameter, by its name and its placeholder in the help."""
    metavar, options = param.metavar or "", set(param.opts)
    choices: tuple[tuple[bool, Values], ...] = (
        ("--preset" in options, _files_of("nsys/presets", "")),
        ("--set" in options and command.name == "profile", _files_of("ncu/sets", ".txt")),
        ("--layer" in options or "--where" in options, _layers),
        ("--capture" in options or "CAPTURE" in metavar, _paths(_CAPTURES)),
        (metavar.startswith("REPORT"), _paths(_REPORTS)),
        ("PROGRAM" in metavar or metavar == "FILE", _paths(())),
    )
    return next((values for applies, values in choices if applies), None)


def _paths(suffixes: tuple[str, ...]) -> Values:
    """Files with one of these suffixes, or all files; and folders, to descend into."""

    def values(_: click.Context, incomplete: str) -> list[CompletionItem]:
        folder, _slash, begun = incomplete.rpartition("/")
        place = Path(f"{folder}/" if _slash else ".").expanduser()
        try:
            found = sorted(place.iterdir())
        except OSError:
            return []
        items = []
        for path in found:
            if not path.name.startswith(begun) or (path.name.startswith(".") and not begun):
                continue
            if path.is_dir():
                items.append(CompletionItem(f"{folder}{_slash}{path.name}/"))
            elif not suffixes or path.name.endswith(suffixes):
                items.append(CompletionItem(f"{folder}{_slash}{path.name}"))
        return items

    return values


def _files_of(folder: str, suffix: str) -> Values:
    """The names in a recipes folder, and the user's files."""

    def values(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from nvprof_kit._capture.recipes import recipes_folder

        names = sorted(path.name.removesuffix(suffix) for path in (recipes_folder() / folder).iterdir())
        items = [CompletionItem(name) for name in names if name.startswith(incomplete) and name != "base"]
        return items or _paths(())(ctx, incomplete)

    return values


def _layers(_: click.Context, incomplete: str) -> list[CompletionItem]:
    """The layers of the captures on the command line, else of the newest capture in the working directory."""
    from nvprof_kit._trace.layer_names import layer_names

    # click passes no arguments if the line ends in an option without its value
    words = split_arg_string(os.environ.get("COMP_WORDS", ""))
    captures = [Path(word).expanduser() for word in words if word.endswith(_CAPTURES)]
    if not captures:
        newest = sorted(Path().glob("*.sqlite"), key=lambda path: path.stat().st_mtime)
        captures = newest[-1:]
    names = sorted({name for capture in captures for name in layer_names(capture)})
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
