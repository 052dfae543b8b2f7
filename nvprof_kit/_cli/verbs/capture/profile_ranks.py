"""``nvprof-kit ranks profile``: selected ranks of a job under nsys, with one report per rank."""

from __future__ import annotations

from nvprof_kit._capture.recipe_options import become_recipe, program_name
from nvprof_kit._cli.verbs.capture.recipe_verb import Given, recipe_verb, recipe_words


def _profile(given: Given, words: list[str]) -> None:
    if words and "--output" not in given:
        given = {**given, "--output": program_name(words)}  # ranks.sh adds host, rank and time
    become_recipe("nsys/ranks.sh", recipe_words(given, words), "nvprof-kit ranks profile")


profile = recipe_verb(
    "profile",
    ["nsys/ranks.sh", "nsys/profile.sh"],
    _profile,
    """Profile some ranks of a job with nsys, and run the others without a profiler.

    It stands between the launcher and the program, on every rank: torchrun --nproc-per-node 8 --no-python nvprof-kit
    ranks profile --ranks 0,7 -- python train.py. Reports are named PROGRAM-HOST-rankR-TIME.
    """,
)
