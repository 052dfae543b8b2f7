"""Which steps of a loop are recorded: one schedule for nsys, ncu and the embedded recorder.

A schedule says what to do in each step. `Windows` follows it through a loop and calls a sink (the recorder) to warm up,
start and stop. Neither depends on a particular profiler.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from nvprof_kit.errors import UsageError

SCHEDULE_VARIABLE = "NVPROF_KIT_SCHEDULE"
"""Environment variable that says which steps to record."""

_ON, _OFF = ("1", "on", "true", "yes"), ("", "0", "off", "false", "no")


class Action(Enum):
    """What to do during a step; the names are those of ``torch.profiler.ProfilerAction``."""

    NONE = "none"
    WARMUP = "warmup"
    RECORD = "record"
    RECORD_AND_SAVE = "record and save"

    @property
    def records(self) -> bool:
        """Whether the step is part of a window."""
        return self in (Action.RECORD, Action.RECORD_AND_SAVE)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Which steps of a loop to record, as in `torch.profiler.schedule`.

    Skip some steps, then `repeat` times: wait, warm up, record a window.

    ```
    skip_first | wait | warmup | active | wait | warmup | active | …
    ```

    Attributes:
        skip_first: Number of steps to skip once, at the start.
        wait: Number of steps to skip before each window.
        warmup: Number of steps before each window in which the recorder is set up but records nothing.
        active: Number of steps in a window, at least 1.
        repeat: Number of windows; 0 continues until the loop ends.

    Raises:
        UsageError: A number is negative, or `active` is 0.
    """

    skip_first: int = 0
    wait: int = 0
    warmup: int = 0
    active: int = 1
    repeat: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            minimum = 1 if name == "active" else 0
            if not isinstance(value, int) or value < minimum:
                raise UsageError(f"schedule: {name}={value!r} is not an integer >= {minimum}")

    def __call__(self, step: int) -> Action:
        """What to do during a step, counted from 0."""
        position = step - self.skip_first
        cycle = self.wait + self.warmup + self.active
        if position < 0 or (self.repeat and position >= cycle * self.repeat):
            return Action.NONE
        position %= cycle
        if position < self.wait:
            return Action.NONE
        if position < self.wait + self.warmup:
            return Action.WARMUP
        return Action.RECORD if position < cycle - 1 else Action.RECORD_AND_SAVE

    @property
    def last_step(self) -> int | None:
        """The last recorded step, or None if windows repeat until the loop ends."""
        cycle = self.wait + self.warmup + self.active
        return self.skip_first + cycle * self.repeat - 1 if self.repeat else None

    @classmethod
    def between(cls, first: int, end: int) -> Schedule:
        """Record the steps from `first` to `end` (exclusive), with one warm-up step before them unless `first` is 0.

        Raises:
            UsageError: The range is empty or negative.
        """
        if not (isinstance(first, int) and isinstance(end, int) and 0 <= first < end):
            raise UsageError(f"schedule: no step lies from {first} up to {end}; needed 0 <= first < end")
        warmup = min(first, 1)
        return cls(skip_first=first - warmup, warmup=warmup, active=end - first)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse a schedule: a preset (``early``, ``stable``, ``periodic``), ``4:10`` (as `between`), or
        ``skip_first=5,warmup=1,active=3`` (omitted fields keep their defaults).

        Raises:
            UsageError: The text has another form.
        """
        text = text.strip()
        if text in PRESETS:
            return PRESETS[text]
        try:
            if ":" in text:
                first, end = map(int, text.split(":"))
                return cls.between(first, end)
            numbers = {
                name.strip(): int(value) for name, value in (assignment.split("=") for assignment in text.split(","))
            }
        except ValueError:
            numbers = {"": 0}
        if not numbers.keys() <= {field.name for field in fields(cls)}:
            raise UsageError.of("schedule", text=text, presets=", ".join(PRESETS))
        return cls(**numbers)

    @classmethod
    def of(cls, requested: Switch = None) -> Schedule | None:
        """The schedule that a program was asked to record.

        Args:
            requested: A schedule in any form of `parse`, or a pair as of `between`; ``on`` or True for steps 6 to 8;
                ``off`` or False for none. None reads the environment variable ``NVPROF_KIT_SCHEDULE``, which defaults
                to off.

        Returns:
            The schedule, or None if nothing is to be recorded.

        Raises:
            UsageError: It is neither a switch nor a schedule.
        """
        if requested is None:
            requested = os.environ.get(SCHEDULE_VARIABLE, "off")
        if isinstance(requested, str):
            word = requested.strip().lower()
            if word not in (*_ON, *_OFF):
                return cls.parse(requested)
            requested = word in _ON
        if isinstance(requested, bool):
            return USUAL if requested else None
        if isinstance(requested, Schedule):
            return requested
        if isinstance(requested, tuple) and len(requested) == 2:
            return cls.between(*requested)
        raise UsageError(f"schedule={requested!r} is no schedule; needed a Schedule, a text such as '10:13', or a pair")

    @classmethod
    def add_argument(cls, parser: argparse.ArgumentParser) -> None:
        """Add the option ``--profiling [STEPS]`` to a program's parser.

        Pass its value, ``args.profiling``, to `of` or to `nvprof_kit.LayerProfiler`. It is None if the option is
        absent; then ``NVPROF_KIT_SCHEDULE`` decides.
        """

        def check(text: str) -> str:
            try:
                cls.of(text)
            except UsageError as error:
                raise argparse.ArgumentTypeError(str(error)) from None
            return text

        forms = "FIRST:END, early, stable, periodic, or skip_first=5,warmup=1,active=3 (taken where STEPS is left out)"
        text = f"profile some steps of the loop: {forms}; off by default"
        parser.add_argument("--profiling", nargs="?", const="on", type=check, metavar="STEPS", help=text)

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in vars(self).items())

    def for_torch(self) -> Callable[[int], Any]:
        """The same schedule for ``torch.profiler.profile(schedule=…)``."""
        from torch.profiler import ProfilerAction

        return lambda step: ProfilerAction[self(step).name]


PRESETS = {
    "early": Schedule(warmup=1, active=5),
    "stable": Schedule(skip_first=50, wait=5, warmup=2, active=10, repeat=2),
    "periodic": Schedule(skip_first=10, wait=5, warmup=2, active=3, repeat=5),
}
"""Schedules by name: the first steps, the steady state, a few steps periodically."""

USUAL = Schedule(skip_first=5, warmup=1, active=3)
"""The schedule of ``on``: three steps after warm-up."""

Switch = Schedule | str | tuple[int, int] | bool | None
"""A schedule, its text (`Schedule.parse`), a pair ``(first, end)``, ``on`` or ``off``, True or False, or None to read
``NVPROF_KIT_SCHEDULE``."""


@dataclass(frozen=True)
class Window:
    """Consecutive steps that are recorded together.

    Attributes:
        number: Number of the window in the schedule, from 0.
        first_step: Its first step.
        last_step: Its last step; -1 until it ends.
    """

    number: int
    first_step: int
    last_step: int = -1


class Sink:
    """A recorder; this one records nothing."""

    def warm_up(self, window: Window) -> None:
        """Get ready: the window starts in a few steps."""

    def start(self, window: Window) -> None:
        """Start recording a window; `warm_up` may have come before."""

    def stop(self, window: Window) -> None:
        """End the window that was started."""

    def cancel(self) -> None:
        """Discard a warm-up without a window, or a window without a step: the loop has ended."""


class Windows:
    """Follows a schedule through a loop: a context manager around the loop; call `step` at the end of each step.

    A window cut short by the end of the loop or by an exception is stopped like any other.

    Args:
        schedule: Which steps to record.
        sink: The recorder.

    Attributes:
        step_number: The current step, counted from 0.
        action: The action of the current step.
    """

    def __init__(self, schedule: Schedule, sink: Sink) -> None:
        self.schedule = schedule
        self.step_number = 0
        self.action = Action.NONE
        self._sink = sink
        self._window: Window | None = None
        self._next = 0
        self._process = os.getpid()

    def __enter__(self) -> Windows:
        self._process = os.getpid()
        try:
            self._move(self.schedule(self.step_number))
        except BaseException:
            self._window, self.action = None, Action.NONE
            with suppress(Exception):
                self._sink.cancel()
            raise
        return self

    def step(self) -> None:
        """End the current step and begin the next."""
        if self._process != os.getpid():
            return
        self.step_number += 1
        self._move(self.schedule(self.step_number))

    def __exit__(self, *exception: object) -> None:
        """End the loop; a running window ends with the last step. A forked child leaves this to its parent."""
        if self._process != os.getpid():
            return
        error = exception[0] if exception else None
        if self._window is not None and self._window.first_step == self.step_number > 0 and error is None:
            self._window = None  # the loop ended before the window's first step
            self._sink.cancel()
        elif self._window is not None:
            self._stop(max(self._window.first_step, self.step_number - 1))
        elif self.action is Action.WARMUP:
            self._sink.cancel()
        self.action = Action.NONE

    def _move(self, now: Action) -> None:
        before, self.action = self.action, now
        if before is Action.RECORD_AND_SAVE:
            self._stop(self.step_number - 1)
        if now is Action.WARMUP and before is not Action.WARMUP:
            self._sink.warm_up(Window(self._next, self.step_number + self.schedule.warmup))
        if now.records and self._window is None:
            self._window = Window(self._next, self.step_number)
            self._sink.start(self._window)
            self._next += 1

    def _stop(self, last_step: int) -> None:
        window, self._window = self._window, None
        if window is not None:
            self._sink.stop(Window(window.number, window.first_step, last_step))
