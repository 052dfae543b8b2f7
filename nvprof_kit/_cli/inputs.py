"""Options shared by the reading verbs: rules, rows and steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from nvprof_kit._result.selection import Selection


class Number(click.FloatRange):
    """A finite number in a range: nan is in none, though no comparison says so."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or the error of a wrong option."""
        number = float(super().convert(value, param, ctx))
        return number if math.isfinite(number) else self.fail(f"{value!r} is not a finite number.", param, ctx)


kernel_rules = click.option(
    "--kernel-rules",
    "rules_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="TOML file with rules that classify kernels; they take precedence over the built-in rules.",
)

rules_option = click.option(
    "--rules",
    metavar="PRESET|FILE",
    help="How the program names its ranges: deepspeed, emit-nvtx, megatron-lm, nemo, sglang, tensorrt-llm, torch-nvtx, "
    "vllm, or a TOML file.",
)
"""Adds ``--rules`` to a verb: a preset name or a file."""

model_option = click.option(
    "--model",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The model's config.json (Hugging Face): checks the number of blocks and names those found by structure.",
)


def row_options(
    top: str = "", *, where: bool = True, sort: bool = True, fold: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options that choose rows, named as in `nvprof_kit._result.selection.RowOptions`.

    Args:
        top: The help of ``--top``; '' for none.
        where: Whether the rows have layers.
        sort: Whether to add ``--sort``.
        fold: Whether equal blocks can be folded into one row.
    """

    def decorate(verb: Callable[..., Any]) -> Callable[..., Any]:
        limit = click.option("--top", type=click.IntRange(min=1), metavar="N", help=top)
        for option, offered in ((_FOLD, fold), (limit, bool(top)), (_SORT, sort), (_WHERE, where)):
            verb = option(verb) if offered else verb
        return verb

    return decorate


def selecting(
    *, where: bool = True, sort: bool = True, top: str = "", fold: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add row selection options to a verb; they are passed as one `nvprof_kit._result.selection.Selection`, ``select``.

    Args:
        where: Whether the rows have layers.
        sort: Whether to add ``--sort``.
        top: The help of ``--top``; '' if the verb defines that option itself or has none.
        fold: Whether equal blocks can be folded into one row.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def parsed(*args: Any, **options: Any) -> None:
            names = ("where", "sort", "most", "fold")
            values = {{"most": "top"}.get(name, name): options.pop(name) for name in names if name in options}
            verb(*args, select=Selection(**values), **options)

        decorated: Callable[..., None] = parsed
        offered = (fold, bool(top), sort, where)
        for option, is_offered in zip((_FOLD, _top(top), _SORT, _WHERE), offered, strict=True):
            decorated = option(decorated) if is_offered else decorated
        return decorated

    return decorate


def top_option(default: int, help_text: str) -> Callable[..., Any]:
    """``--top`` of a verb with several tables or paragraphs, passed as ``top``.

    Args:
        default: The maximum number of rows without the option.
        help_text: What it counts.
    """
    return click.option("--top", type=click.IntRange(min=1), default=default, show_default=True, help=f"{help_text}.")


def _top(text: str) -> Callable[..., Any]:
    return click.option("--top", "most", type=click.IntRange(min=1), metavar="N", help=text)


LINES = "Rows to print, the costliest first. [default: all]"
"""Help of ``--top`` for tables with a row per layer."""

_WHERE = click.option(
    "--where",
    multiple=True,
    metavar="GLOB",
    help="Only layers that match, such as 'model.layers.3.*'; * matches any text. Repeatable.",
)
_SORT = click.option(
    "--sort",
    default="",
    metavar="COLUMN",
    help="Column to sort by, named as in csv, with or without the unit; numbers in descending order.",
)
_FOLD = click.option(
    "--fold/--no-fold",
    default=None,
    help="Equal blocks as one line, `layers.0-79 x80`; csv and json keep all rows and add the column folded_into. "
    "[default: in the printed table, if 8 or more blocks are equal]",
)


def step_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--steps`` and ``--skip-steps``, named as the arguments of the questions."""
    return _STEPS(_SKIP_STEPS(verb))


def steps_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Add ``--steps`` and ``--skip-steps`` to a verb; they are passed as one
    `nvprof_kit._analysis.attribution.steps.StepOptions`, ``steps``.
    """

    @functools.wraps(verb)
    def parsed(*args: Any, steps: str | None, skip_steps: int, **options: Any) -> None:
        from nvprof_kit._analysis.attribution.steps import StepOptions

        verb(*args, steps=StepOptions.parse(steps, skip_steps), **options)

    decorated: Callable[..., None] = parsed
    for option in (_SKIP_STEPS, _STEPS):
        decorated = option(decorated)
    return decorated


_STEPS = click.option(
    "--steps",
    metavar="FIRST:STOP",
    help="Only steps with these numbers: 5:20 is 5 to 19, 5: is 5 and later, 7 is one step; all is the whole capture, "
    "with warm-up and what ran outside steps. [default: all steps but warm-up]",
)
_SKIP_STEPS = click.option(
    "--skip-steps",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Leave out the first N steps of the capture.",
)
