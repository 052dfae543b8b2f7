"""Defines a step; every table and plot of the package uses this definition.

A **step** is one execution of a range of the category `step` that is not nested in another such range on its thread.
A range with the same number that is open on another thread or process at the same time is the same step: the ranks of
one capture run it together. If a number repeats, because each epoch counts from 0 or a validation loop has its own
numbers, each execution is a separate step, and "per step" divides by these *instances*, not by distinct numbers. A step
range nested in another one (micro-batches in an optimizer step) is part of the outer step.

Instances are ordered by start time. An operation belongs to the instance that launched it. Operations that no step
launched are *outside steps*: they count in no per-step figure and are listed separately. For the duration of a step see
`nvprof_kit._analysis.attribution.windows`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.nesting import NONE, Int64Array, Nesting
from nvprof_kit.errors import UsageError


@dataclass(frozen=True)
class StepOptions:
    """Which steps to include: by default all but warm-up.

    Attributes:
        first: Smallest step number, None for no limit.
        stop: First step number after the range (exclusive), None for no limit.
        skip: Number of step instances to leave out at the start of the capture.
        everything: The whole capture: every step, warm-up too, and what ran outside steps.
    """

    first: int | None = None
    stop: int | None = None
    skip: int = 0
    everything: bool = False

    @classmethod
    def of(cls, steps: StepOptions | int | str | range | None) -> StepOptions:
        """The options for a step, a range of steps, or a text.

        Args:
            steps: ``5:20`` (5 to 19), ``5:``, ``:20``, ``7``, ``+3:`` (all but the first three) or ``all``.

        Raises:
            UsageError: The text has another form, or the range another step than 1.
        """
        if isinstance(steps, StepOptions):
            return steps
        if isinstance(steps, range):
            if steps.step != 1 or not steps:
                raise UsageError(f"steps={steps}: needed consecutive steps, such as range(3, 5)")
            return cls(steps.start, steps.stop)
        text = "" if steps is None else str(steps).strip().lower()
        if steps is None or text == "all":
            return cls(everything=text == "all")
        match = re.fullmatch(r"(-?\d+)?(?:(:)(-?\d+)?)?|\+(\d+):", text)
        if match is None or text in ("", ":"):
            raise UsageError(f"--steps {steps}: not a range of steps; needed 5:20 (5 to 19), 5:, :20, 7, +3:, or all")
        if match[4]:
            return cls(skip=int(match[4]))
        first, stop = (int(bound) if bound else None for bound in match.group(1, 3))
        return cls(first, stop if match[2] or first is None else first + 1)

    @property
    def selects(self) -> bool:
        """Whether the options select specific steps."""
        return self != StepOptions()


ALL_STEPS = StepOptions()
"""No selection: all steps but warm-up."""

WHOLE_CAPTURE = StepOptions(everything=True)
"""Every step, and what ran outside steps."""


def chosen_steps(options: StepOptions, number: Int64Array, path: str) -> npt.NDArray[np.bool_]:
    """Select step instances by their step number.

    Raises:
        UsageError: The options select steps, and none of them is in the capture.
    """
    if options.everything:
        return np.ones(len(number), dtype=bool)
    is_chosen = np.arange(len(number)) >= options.skip
    if options.first is not None:
        is_chosen &= number >= options.first
    if options.stop is not None:
        is_chosen &= number < options.stop
    if options.selects and not is_chosen.any():
        sentence = f"{len(number)} steps, {number.min()} to {number.max()}" if len(number) else "no steps"
        raise UsageError(f"{path}: none of the requested steps is in it; it has {sentence}")
    return is_chosen


class StepRanges(NamedTuple):
    """The step ranges, shape ``(s,)`` each.

    Attributes:
        rows: Indices of the ranges, ascending; every piece of a range that was cut.
        first: Whether each is a whole range or the first piece of one.
        number: Step number of each.
        start, end: Times of the whole range, in ns.
        tid, pid: Its thread and process.
    """

    rows: Int64Array
    first: npt.NDArray[np.bool_]
    number: Int64Array
    start: Int64Array
    end: Int64Array
    tid: Int64Array
    pid: Int64Array


class Instances(NamedTuple):
    """The instances of steps.

    Attributes:
        number: The step number of each instance, by start time, shape ``(i,)``.
        of_rows: The instance of each step range, shape ``(s,)``.
    """

    number: Int64Array
    of_rows: Int64Array


def step_instances(ranges: StepRanges, step_range: Int64Array, nesting: Nesting) -> Instances:
    """Find the step instances. See the module docstring for the definition.

    Args:
        ranges: The step ranges.
        step_range: For every range, the nearest step range (itself or an enclosing one), or `NONE`, shape ``(r,)``.
        nesting: The nesting of all ranges.
    """
    outermost = _outermost(ranges, step_range, nesting)
    tops = np.flatnonzero(ranges.first & (outermost == np.arange(len(ranges.rows))))
    # those that begin together by thread, so that the order of rows in the file does not matter
    tops = tops[np.lexsort((ranges.tid[tops], ranges.start[tops]))]
    # a range that begins while its number is open on other threads, and not yet on its own, joins that instance
    current: dict[int, tuple[int, int, set[int]]] = {}
    of_top: list[int] = []
    first_tops: list[int] = []
    columns = (values[tops].tolist() for values in (ranges.number, ranges.start, ranges.end, ranges.tid))
    for top, (number, start, end, tid) in enumerate(zip(*columns, strict=True)):
        instance, latest_end, threads = current.get(number, (NONE, start, set()))
        if start >= latest_end or tid in threads:
            instance, latest_end, threads = len(first_tops), end, set()
            first_tops.append(top)
        threads.add(tid)
        current[number] = instance, max(latest_end, end), threads
        of_top.append(instance)
    instance_of_row = np.full(len(ranges.rows), NONE, dtype=np.int64)
    instance_of_row[tops] = of_top
    return Instances(ranges.number[tops[first_tops]], instance_of_row[outermost])


def _outermost(ranges: StepRanges, step_range: Int64Array, nesting: Nesting) -> Int64Array:
    """For each step range, the first piece of the outermost enclosing step range, as an index into `ranges.rows`."""
    index_of_range = np.full(len(step_range) + 1, NONE, dtype=np.int64)
    index_of_range[ranges.rows] = np.arange(len(ranges.rows))
    first_piece = np.flatnonzero(ranges.first)[np.cumsum(ranges.first) - 1] if len(ranges.rows) else ranges.rows
    enclosing = index_of_range[np.append(step_range, NONE)[nesting.parent[ranges.rows[first_piece]]]]
    enclosing = np.append(first_piece, NONE)[enclosing]
    # a range that outlasts the range it began in is not nested in it
    enclosing = np.where((enclosing >= 0) & (np.append(ranges.end, 0)[enclosing] >= ranges.end), enclosing, NONE)
    current = first_piece
    while ((above := np.append(enclosing, NONE)[current]) >= 0).any():
        current = np.where(above >= 0, above, current)
    return current
