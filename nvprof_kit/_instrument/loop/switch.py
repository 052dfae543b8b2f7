"""Whether a program profiles itself, and which steps: told by an argument, by the environment, or not at all."""

from __future__ import annotations

import argparse
import os

from nvprof_kit._instrument.loop.schedule import AnySchedule, Schedule, schedule_of

VARIABLE = "NVPROF_KIT_PROFILING"

USUAL = Schedule(skip_first=5, warmup=1, active=3)
"""The steps that ``--profiling`` means where it names none: three, when the loop has warmed up."""

_ON, _OFF = ("1", "on", "true", "yes"), ("", "0", "off", "false", "no")

Switch = AnySchedule | bool | None
"""What is taken for a switch: a schedule in any form, ``on`` or ``off``, True or False, or None for the environment."""


def profiling_schedule(asked: Switch = None) -> Schedule | None:
    """The schedule to profile by, None where nothing is to be profiled.

    Args:
        asked: A schedule (`Schedule.parse` says in which forms), ``on`` or True for `USUAL`, ``off`` or False for
            nothing; None takes it from the environment's ``NVPROF_KIT_PROFILING``, which is off where it is not set.

    Raises:
        UsageError: A text is neither a switch nor a schedule.
    """
    if asked is None:
        asked = os.environ.get(VARIABLE, "off")
    if isinstance(asked, str):
        word = asked.strip().lower()
        asked = True if word in _ON else False if word in _OFF else asked
    if isinstance(asked, bool):
        return USUAL if asked else None
    return schedule_of(asked)


def add_profiling_argument(parser: argparse.ArgumentParser) -> None:
    """Give a program's parser the option ``--profiling [STEPS]``.

    Its value, ``args.profiling``, is what `nvprof_kit.LayerProfiler` takes: None where the option was not given, which
    leaves it to ``NVPROF_KIT_PROFILING``.
    """
    parser.add_argument(
        "--profiling",
        nargs="?",
        const="on",
        type=_checked,
        metavar="STEPS",
        help="profile some steps of the loop: FIRST:END, early, stable, periodic, or skip_first=5,warmup=1,active=3 "
        "(taken where STEPS is left out); off by default",
    )


def _checked(text: str) -> str:
    """The text, if it says which steps; argparse prints the message otherwise."""
    from nvprof_kit.errors import UsageError

    try:
        profiling_schedule(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
