"""``nvprof-kit profile``, ``launch``, ``start``, ``stop`` and ``status``: the nsys recipes as verbs."""

from __future__ import annotations

from collections.abc import Callable

from nvprof_kit._capture.recipe_options import become_recipe, report_name
from nvprof_kit._cli.verbs.capture.recipe_verb import Given, recipe_verb, recipe_words


def _profile(given: Given, words: list[str]) -> None:
    if words and "--output" not in given:
        given = {**given, "--output": report_name(words)}
    become_recipe("nsys/profile.sh", recipe_words(given, words), "nvprof-kit profile")


def _same(verb: str) -> Callable[[Given, list[str]], None]:
    def run(given: Given, words: list[str]) -> None:
        become_recipe(f"nsys/{verb}.sh", recipe_words(given, words), f"nvprof-kit {verb}")

    return run


profile = recipe_verb(
    "profile",
    ["nsys/profile.sh"],
    _profile,
    """Profile a program with nsys, from start to end or for some steps.

    nvprof-kit profile --step 12 -- python train.py leaves train-TIME.nsys-rep, for the Nsight Systems GUI, and
    train-TIME.sqlite, and prints the command that reads it. The exit status is the program's; 1 where nothing was
    captured.
    """,
)

launch = recipe_verb(
    "launch",
    ["nsys/launch.sh"],
    _same("launch"),
    """Start a program in an nsys session that captures nothing yet.

    nvprof-kit start and nvprof-kit stop, from another terminal, then capture stretches of it, as many as are wanted.
    """,
)

start = recipe_verb(
    "start", ["nsys/start.sh"], _same("start"), """Start capturing the program that launch started.""", program=False
)

stop = recipe_verb(
    "stop",
    ["nsys/stop.sh"],
    _same("stop"),
    """Stop the capture and write its report; the program continues.""",
    program=False,
)

status = recipe_verb(
    "status",
    ["nsys/status.sh"],
    _same("status"),
    """List the nsys sessions of this machine and their states.""",
    program=False,
)
