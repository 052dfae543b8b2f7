"""Whether a program profiles itself, and which steps: set by an argument or by the environment."""

from __future__ import annotations

import argparse
import os

from nvprof_kit._instrument.loop.schedule import AnySchedule, Schedule, schedule_of

VARIABLE = "NVPROF_KIT_PROFILING"

USUAL = Schedule(skip_first=5, warmup=1, active=3)
"""The default of ``--profiling`` without steps: three steps after warm-up."""

_ON, _OFF = ("1", "on", "true", "yes"), ("", "0", "off", "false", "no")

Switch = AnySchedule | bool | None
"""A schedule in any form, ``on`` or ``off``, True or False, or None to read the environment."""


def profiling_schedule(asked: Switch = None) -> Schedule | None:
    """Resolve a profiling switch to a schedule.

    Args:
        asked: A schedule in any form of `Schedule.parse`; ``on`` or True for steps 6 to 8; ``off`` or False for none.
            None reads the environment variable ``NVPROF_KIT_PROFILING``, which defaults to off.

    Returns:
        The schedule, or None if nothing is to be profiled.

    Raises:
        UsageError: The text is neither a switch nor a schedule.
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
    """Add the option ``--profiling [STEPS]`` to a parser.

    Pass its value, ``args.profiling``, to `nvprof_kit.LayerProfiler`. It is None if the option is absent; then
    ``NVPROF_KIT_PROFILING`` decides.

    Args:
        parser: The program's parser.
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
    """The text, if it is valid; otherwise argparse prints the message."""
    from nvprof_kit.errors import UsageError

    try:
        profiling_schedule(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
