"""The options of every reading verb that say what a capture's ranges and kernels mean."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

kernel_rules = click.option(
    "--kernel-rules",
    "rules_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="TOML file with rules for kernel classes, asked before the built-in ones.",
)

rules_option = click.option(
    "--rules",
    metavar="PRESET|FILE",
    help="How the program names its ranges: deepspeed, emit-nvtx, megatron-lm, nemo, sglang, tensorrt-llm, torch-nvtx, "
    "vllm, or a TOML file.",
)
"""Gives a verb ``--rules``, the name of a preset or of a file."""


def steps_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb ``--steps`` and ``--skip-steps``; it gets them as one
    `nvprof_kit._analysis.attribution.steps.StepOptions`, ``steps``.
    """

    @functools.wraps(verb)
    def parsed(*args: Any, numbers: str | None, skipped: int, **options: Any) -> None:
        from nvprof_kit._analysis.attribution.steps import StepOptions

        verb(*args, steps=StepOptions.parse(numbers, skipped), **options)

    decorated: Callable[..., None] = parsed
    for option in (_SKIP_STEPS, _STEPS):
        decorated = option(decorated)
    return decorated


_STEPS = click.option(
    "--steps",
    "numbers",
    metavar="FIRST:STOP",
    help="Only steps with these numbers: 5:20 is 5 to 19, 5: all from 5 on, 7 one. [default: all, and of figures per "
    "step all but warm-up]",
)
_SKIP_STEPS = click.option(
    "--skip-steps",
    "skipped",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Leave the first N steps of the capture out.",
)
