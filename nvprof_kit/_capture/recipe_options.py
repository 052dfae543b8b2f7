"""The options of the shell recipes, and how a verb runs one.

A recipe's help text is the only list of its options: both the recipe and the command line verb parse it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, NoReturn

from nvprof_kit._capture.recipes import recipes_folder
from nvprof_kit.errors import ToolError

_HELP = re.compile(r"<<'HELP'\n(.*?)\nHELP$", re.DOTALL | re.MULTILINE)
_OPTION = re.compile(r"^  (?:(-[A-Za-z]), |    )(--[a-z-]+)(?: ([A-Z][A-Z:]*))?(?: +(.*))?$")
_CONTINUED = re.compile(r"^ {16,}(\S.*)$")


class RecipeOption(NamedTuple):
    """One option of a recipe.

    Attributes:
        short: Short name, ``-o``, or ''.
        name: Long name, ``--output``.
        value: Placeholder of its value in the help: ``NAME``; '' for a flag.
        help: Description.
    """

    short: str
    name: str
    value: str
    help: str

    @property
    def repeated(self) -> bool:
        """Whether the option can be repeated."""
        return "may be given again" in self.help


@cache
def recipe_options(*scripts: str) -> tuple[RecipeOption, ...]:
    """The distinct options of recipes, in help order, without ``--help``.

    Args:
        scripts: Paths in the recipes folder: ``nsys/profile.sh``; shared files have a help text too.

    Raises:
        ToolError: The installation has no recipes.
    """
    options: dict[str, RecipeOption] = {}
    for script in scripts:
        text = (recipes_folder() / script).read_text(encoding="utf-8")
        for option in _parsed("\n".join(_HELP.findall(text))):
            options.setdefault(option.name, option)
    options.pop("--help", None)
    return tuple(options.values())


def _parsed(text: str) -> list[RecipeOption]:
    options: list[RecipeOption] = []
    for line in text.splitlines():
        begun, continued = _OPTION.match(line), _CONTINUED.match(line)
        if begun:
            options.append(RecipeOption(begun[1] or "", begun[2], begun[3] or "", (begun[4] or "").strip()))
        elif continued and options:
            last = options.pop()
            options.append(last._replace(help=f"{last.help} {continued[1]}"))
    return options


def become_recipe(script: str, words: Sequence[str], verb: str) -> NoReturn:
    """Replace this process with a recipe, so that signals, terminal and exit status are the recipe's.

    Args:
        script: Path in the recipes folder.
        words: Its options, and the program after ``--``.
        verb: The name to show in its messages: ``nvprof-kit profile``.

    Raises:
        ToolError: bash or the recipes are not installed.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise ToolError("no bash on PATH; the recipes need bash 4.4 or newer")
    path = recipes_folder() / script
    sys.stdout.flush()
    os.execve(bash, ["bash", str(path), *words], {**os.environ, "NVPROF_KIT_VERB": verb})
