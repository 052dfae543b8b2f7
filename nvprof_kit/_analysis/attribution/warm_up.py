"""Detects warm-up steps, which per-step figures exclude and list by name.

A step is warm-up if loading CUDA modules or libraries, compiling or autotuning on the host takes a notable share of
it. The first step of the capture is also warm-up if it took much longer than the median of the others: it includes
profiler startup and one-time initialization.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution
from nvprof_kit._analysis.attribution.intervals import Cover
from nvprof_kit._analysis.attribution.nesting import Int64Array
from nvprof_kit._analysis.attribution.steps import StepOptions, chosen_steps
from nvprof_kit._analysis.attribution.windows import median_place, step_times
from nvprof_kit._trace.schema import Trace
from nvprof_kit.issues import Issue

LOADING = 0.05
"""A step is warm-up if loading, compiling and tuning exceed this share of its duration."""

LONGER = 1.2
"""The first step is warm-up if it exceeds this multiple of the median of the others."""

ENOUGH = 3
"""Minimum number of steps in the capture to judge the first by its duration."""


@dataclass(frozen=True)
class StepChoice:
    """The step instances that per-step figures include.

    Attributes:
        shown: The included instances, shape ``(i,)``.
        asked: Whether the user selected them; otherwise `shown` is all but warm-up.
        everything: Whether the user asked for the whole capture, with what ran outside steps.
        left_out: A sentence for each warm-up step that says which it is and why.
    """

    shown: npt.NDArray[np.bool_]
    asked: bool = False
    everything: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Number of steps that per-step figures include."""
        return int(np.count_nonzero(self.shown))

    def of_ops(self, attribution: Attribution) -> npt.NDArray[np.bool_]:
        """Which operations belong to the included steps, shape ``(n,)``; all if the capture has no steps."""
        if self.everything or not len(self.shown):
            return np.ones(len(attribution.step), dtype=bool)
        is_included: npt.NDArray[np.bool_] = np.append(self.shown, False)[attribution.step]
        return is_included


def choose_steps(trace: Trace, attribution: Attribution, options: StepOptions | None = None) -> StepChoice:
    """The selected steps, by default all but warm-up; all if only warm-up steps exist.

    Args:
        trace: The capture; without its table ``loads`` only the duration of the first step indicates warm-up.
        attribution: Its steps.
        options: The user's selection.

    Raises:
        UsageError: None of the selected steps is in the capture.
    """
    options = options or StepOptions()
    number = attribution.ranges.steps
    chosen = chosen_steps(options, number, trace.info.path)
    if options.selects or len(number) < 2:
        return StepChoice(chosen, options.selects, options.everything)
    times = step_times(trace, attribution)
    wall = times["wall_ns"].to_numpy()
    loading = _loading(trace, times["start_ns"].to_numpy(), times["start_ns"].to_numpy() + times["range_ns"].to_numpy())
    loads = loading > LOADING * np.maximum(wall, 1)
    others_wall = wall[1:][~loads[1:]]
    median = float(np.median(others_wall)) if len(others_wall) else float(np.median(wall))
    slow = np.zeros(len(wall), dtype=bool)
    if len(wall) >= ENOUGH and wall[0] > LONGER * median:
        # a phase that no other step has, such as a prefill before decoding, is no warm-up
        first = attribution.phase[attribution.step == 0]
        slow[0] = not np.setdiff1d(first, attribution.phase[attribution.step > 0]).size
    warm = loads | slow
    if warm.all():
        return StepChoice(chosen)
    median_ns = int(wall[~warm][median_place(wall[~warm])])  # a step's, as in breakdown and on the page
    left_out = [
        f"step {number[index]} took {wall[index] / 1e6:,.3f} ms where the median of the others is "
        f"{median_ns / 1e6:,.3f} ms"
        + (f", {loading[index] / 1e6:,.3f} ms of it loading or compiling code" if loads[index] else "")
        for index in np.flatnonzero(warm).tolist()
    ]
    return StepChoice(~warm, left_out=tuple(left_out))


def left_out_warnings(choice: StepChoice) -> tuple[Issue, ...]:
    """One sentence for each step excluded from per-step figures."""
    return tuple(
        Issue("warm-up", "note", 1.0, f"{reason}: warm-up, left out; --steps all includes it")
        for reason in choice.left_out
    )


def _loading(trace: Trace, start: Int64Array, end: Int64Array) -> Int64Array:
    """Time spent loading, compiling or tuning in each interval, in ns."""
    if trace.loads is None or not len(trace.loads):
        return np.zeros(len(start), dtype=np.int64)
    starts, ends = (trace.loads[name].to_numpy() for name in ("start_ns", "end_ns"))
    lane = np.zeros(len(starts), dtype=np.int64)
    return Cover(lane, starts, ends).inside(np.zeros(len(start), dtype=np.int64), start, end)
