"""``nvprof-kit ncu profile``: hardware counters of a layer, of selected kernels, or for a roofline."""

from __future__ import annotations

import click

from nvprof_kit._capture.profile import report_name
from nvprof_kit._capture.recipe_options import become_recipe, recipe_options
from nvprof_kit._cli.verbs.capture.recipe_verb import Given, recipe_verb, recipe_words
from nvprof_kit.errors import UsageError

_COMMON = "ncu/common.bash"
_BY_OPTION = {"--kernel": "ncu/kernels.sh", "--capture": "ncu/top.sh", "--layer": "ncu/layer.sh"}
_ROOFLINE = "ncu/roofline.sh"


def _profile(given: Given, words: list[str]) -> None:
    chosen = [name for name in _BY_OPTION if name in given]
    roofline = "--roofline" in given
    if not chosen and not roofline:
        raise UsageError(
            "nothing to measure; needed --layer PATH, --kernel NAME, --capture run.sqlite (its costliest kernels) "
            "or --roofline"
        )
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} exclude each other: each says what to measure")
    script = _ROOFLINE if roofline else _BY_OPTION[chosen[0]]
    passed = {name: value for name, value in given.items() if name != "--roofline"}
    known = {option.name for option in recipe_options(script, _COMMON)}
    for name in passed:
        if name not in known:
            raise UsageError(f"{name} does not go with {'--roofline' if roofline else chosen[0]}")
    if words and "--output" not in passed:
        passed["--output"] = report_name(words)
    become_recipe(script, recipe_words(passed, words), "nvprof-kit ncu profile")


profile = recipe_verb(
    "profile",
    ["ncu/layer.sh", "ncu/kernels.sh", "ncu/top.sh", _ROOFLINE, _COMMON],
    _profile,
    """Measure a layer, kernels, or the data of a roofline with ncu.

    One of --layer PATH, --kernel NAME, --capture run.sqlite and --roofline says what: the kernels that a layer
    launches, those of a name, the costliest of an nsys capture, or operations, bytes and peaks.
    """,
)
profile.params.insert(
    0, click.Option(["--roofline"], is_flag=True, help="What a roofline needs, of one --layer or of every launch.")
)
