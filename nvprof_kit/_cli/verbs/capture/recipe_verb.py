"""Verbs that run a shell recipe, with options parsed from the recipe's help."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from nvprof_kit._capture.recipe_options import RecipeOption, recipe_options
from nvprof_kit.errors import ToolError

Given = Mapping[str, Any]
"""Given options by long name (``--output``): a string, True, or several strings."""


def recipe_verb(
    name: str, scripts: Sequence[str], run: Callable[[Given, list[str]], None], text: str, program: bool = True
) -> click.Command:
    """Create a command with the options of recipes.

    Args:
        name: Name of the verb.
        scripts: The recipes, as paths in the recipes folder.
        run: Called with the given options and the program's command line.
        text: The help text.
        program: Whether a program follows the options.
    """
    options = _options(scripts)

    def callback(words: tuple[str, ...] = (), **values: Any) -> None:
        given = {f"--{key.replace('_', '-')}": value for key, value in values.items() if value not in (None, False, ())}
        run(given, list(words))

    params: list[click.Parameter] = [_click_option(option) for option in options]
    if program:
        params.append(click.Argument(["words"], metavar="-- PROGRAM [ARGUMENT]...", nargs=-1, type=click.UNPROCESSED))
    settings: dict[str, Any] = {"allow_interspersed_args": False} if program else {}
    return click.Command(name, callback=callback, params=params, help=text, context_settings=settings)


def recipe_words(given: Given, words: Sequence[str]) -> list[str]:
    """The command line of the recipe."""
    line: list[str] = []
    for name, value in given.items():
        if value is True:
            line.append(name)
        else:
            line += [f"{name}={one}" for one in ([value] if isinstance(value, str) else value)]
    return [*line, "--", *words] if words else line


def _options(scripts: Sequence[str]) -> tuple[RecipeOption, ...]:
    try:
        return recipe_options(*scripts)
    except ToolError:
        return ()  # reported when the verb runs; other verbs work without recipes


def _click_option(option: RecipeOption) -> click.Option:
    names = [name for name in (option.short, option.name) if name]
    if not option.value:
        return click.Option(names, is_flag=True, help=option.help)
    return click.Option(names, metavar=option.value, multiple=option.repeated, help=option.help)
