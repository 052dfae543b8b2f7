"""Steps: which of them per-step figures include, and the window of time that each takes on every device.

What a step is, `nvprof_kit._analysis.attribution.ranges` defines. An operation belongs to the step that launched it;
operations that no step launched are *outside steps*: they count in no per-step figure and are listed separately.

**Choice.** Warm-up steps are left out unless the user asks for them, and named. A step is warm-up if loading CUDA
modules or libraries, compiling, autotuning or counting operations takes a notable share of it. The first step of the
capture is also warm-up if it took much longer than the median of the others: it includes profiler startup and one-time
initialization.

**Windows.** The time of every device is divided into steps without gaps or overlaps. A step on a device lasts from the
end of the previous step, but not before its own range began on the CPU, to the end of its last operation or of its
range, whichever is later. Waiting for a step's first kernel is therefore part of that step. Kernels that no step
launched (an evaluation, for example) can still run after the step's range began, because the CPU runs ahead; the step
then starts when they end. The first step of a pipelined engine starts with its first operation if its range had already
ended: the device was busy with work from before the capture. The time between two steps, before the first and after the
last is a window outside steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from nvprof_kit._analysis.attribution.attribution import Attribution
from nvprof_kit._analysis.attribution.intervals import (
    NONE,
    Bools,
    Cover,
    Int64Array,
    Integers,
    exact_sums,
    union_lengths,
)
from nvprof_kit._analysis.attribution.ranges import Ranges
from nvprof_kit._trace.annotations import engine_phase
from nvprof_kit._trace.joins import distinct_rows, few
from nvprof_kit._trace.schema import OP_KINDS, Trace
from nvprof_kit.errors import UsageError
from nvprof_kit.issues import Issue
from nvprof_kit.names import COUNTING

if TYPE_CHECKING:
    import pandas as pd

LOADING = 0.05
"""A step is warm-up if loading, compiling and tuning exceed this share of its duration."""

LONGER = 1.2
"""The first step is warm-up if it exceeds this multiple of the median of the others."""

ENOUGH = 3
"""Minimum number of steps in the capture to judge the first by its duration."""


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
        if first is not None and stop is not None and stop <= first:
            raise UsageError(f"--steps {steps}: the second number must be the larger, as in 5:20 (5 to 19)")
        return cls(first, stop if match[2] or first is None else first + 1)

    @property
    def selects(self) -> bool:
        """Whether the options select specific steps."""
        return self != StepOptions()


ALL_STEPS = StepOptions()
"""No selection: all steps but warm-up."""

WHOLE_CAPTURE = StepOptions(everything=True)
"""Every step, and what ran outside steps."""


def chosen_steps(options: StepOptions, number: Int64Array, path: str) -> Bools:
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


@dataclass(frozen=True)
class StepChoice:
    """The step instances that per-step figures include.

    Attributes:
        shown: The included instances, shape ``(i,)``.
        asked: Whether the user selected them; otherwise `shown` is all but warm-up.
        everything: Whether the user asked for the whole capture, with what ran outside steps.
        left_out: A sentence for each warm-up step that says which it is and why.
    """

    shown: Bools
    asked: bool = False
    everything: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Number of steps that per-step figures include."""
        return int(np.count_nonzero(self.shown))

    @property
    def is_whole(self) -> bool:
        """Whether what ran outside steps is included: it was asked for, or the capture has no steps."""
        return self.everything or not len(self.shown)

    def of_ops(self, attribution: Attribution) -> Bools:
        """Which operations are included, shape ``(n,)``."""
        return np.append(self.shown, self.is_whole)[attribution.step]


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
    times = _step_spans(trace, attribution)
    wall = times["wall_ns"].to_numpy()
    start = times["start_ns"].to_numpy()
    loading = _loading(trace, attribution.ranges, start, start + times["range_ns"].to_numpy())
    loads = loading > LOADING * np.maximum(wall, 1)
    others_wall = wall[1:][~loads[1:]]
    median = float(np.median(others_wall)) if len(others_wall) else float(np.median(wall))
    slow = np.zeros(len(wall), dtype=bool)
    if len(wall) >= ENOUGH and wall[0] > LONGER * median:
        # a phase that no other step has, such as a prefill before decoding, is no warm-up
        in_first, in_later = (
            np.bincount(attribution.phase[is_step], minlength=len(attribution.phases)) > 0
            for is_step in (attribution.step == 0, attribution.step > 0)
        )
        slow[0] = not (in_first & ~in_later).any()
    warm = loads | slow
    if warm.all():
        return StepChoice(chosen)
    median_ns = int(wall[~warm][median_place(wall[~warm])])  # a step's, as in breakdown and on the page
    left_out = [
        f"step {number[index]} took {wall[index] / 1e6:,.3f} ms where the median of the others is "
        f"{median_ns / 1e6:,.3f} ms"
        + (
            f", {loading[index] / 1e6:,.3f} ms of it loading or compiling code, or counting operations"
            if loads[index]
            else ""
        )
        for index in np.flatnonzero(warm).tolist()
    ]
    return StepChoice(~warm, left_out=tuple(left_out))


def left_out_warnings(choice: StepChoice) -> tuple[Issue, ...]:
    """One sentence for each step excluded from per-step figures."""
    return tuple(Issue.of("warm-up", step=reason) for reason in choice.left_out)


def _loading(trace: Trace, ranges: Ranges, start: Int64Array, end: Int64Array) -> Int64Array:
    """Time spent loading, compiling, tuning or counting operations in each interval, in ns."""
    is_counting = np.array([name.text == COUNTING for name in ranges.names], dtype=bool)[ranges.name]
    starts, ends = ranges.start[is_counting], ranges.end[is_counting]
    if trace.loads is not None:
        loads = (trace.loads[name].to_numpy() for name in ("start_ns", "end_ns"))
        starts, ends = (np.append(*edges) for edges in zip((starts, ends), loads, strict=True))
    return Cover(np.zeros(len(starts), dtype=np.int64), starts, ends).inside(
        np.zeros(len(start), dtype=np.int64), start, end
    )


# ---------------------------------------------------------------- windows


class Device(NamedTuple):
    """A GPU as one process sees it: process key, index of the process in the capture, and device ordinal."""

    pid: int
    process: int
    device: int


@dataclass(frozen=True)
class Windows:
    """Windows by device and start, shape ``(w,)`` each.

    Attributes:
        devices: The devices that ran operations.
        of_op: Device of each operation, an index into `devices`, shape ``(n,)``.
        device: Index into `devices`.
        step: Step number; 0 and unused outside steps.
        instance: The step instance, an index into `Ranges.steps`; `NONE` outside steps.
        start, end: In ns.
        first_start, last_end: Of the operations of each step instance, `_LATEST` and `_EARLIEST` if it has none.
    """

    devices: tuple[Device, ...]
    of_op: Int64Array
    device: Int64Array
    step: Int64Array
    instance: Int64Array
    start: Int64Array
    end: Int64Array
    first_start: Int64Array
    last_end: Int64Array

    @property
    def in_step(self) -> Bools:
        """Which windows are steps."""
        return self.instance >= 0


_WINDOWS: WeakKeyDictionary[Attribution, Windows] = WeakKeyDictionary()
"""What `step_windows` found: the parts of an answer ask for the same."""


def step_windows(trace: Trace, attribution: Attribution) -> Windows:
    """Divide the time of every device into steps; a single window outside steps if the capture has none."""
    if (known := _WINDOWS.get(attribution)) is not None:
        return known
    ranges, step = attribution.ranges, attribution.step
    start, end = trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
    is_kernel = trace.ops["kind"].to_numpy() == OP_KINDS.index("kernel")
    rows = np.flatnonzero((ranges.step >= 0) & ranges.first)
    # when each process ran each instance: from the first start to the last end of its ranges there
    (pid, *of_instance), run = distinct_rows(ranges.pid[rows], ranges.step[rows])
    runs = (*of_instance, *_bounds(run.astype(np.int64), ranges.start[rows], ranges.whole_end[rows], len(pid)))
    devices, of_op = devices_of(trace)
    first_start, last_end = _bounds(rows[:0], start[:0], end[:0], len(ranges.steps))
    windows = []
    for number, device in enumerate(devices):
        ops = np.flatnonzero(of_op == number) if len(devices) > 1 else slice(None)
        of_device: dict[str, Any] = {"start": start[ops], "end": end[ops], "step": step[ops]}
        bounds = _bounds(step[ops], start[ops], end[ops], len(ranges.steps) + 1)  # the last are those of `NONE`
        first_start, last_end = np.minimum(first_start, bounds[0][:-1]), np.maximum(last_end, bounds[1][:-1])
        of_device |= {"is_kernel": is_kernel[ops], "first_start": bounds[0][:-1], "last_end": bounds[1][:-1]}
        windows.append(_device_windows([of[pid == device.pid] for of in runs], ranges, **of_device))
    nothing = np.zeros(0, dtype=np.int64)
    instance, start, end = (np.concatenate([nothing, *(columns[index] for columns in windows)]) for index in range(3))
    device_of_window = np.repeat(np.arange(len(devices)), [len(columns[0]) for columns in windows])
    number = np.append(ranges.steps, 0)[instance]
    of_windows = (device_of_window, number, instance, start, end)
    _WINDOWS[attribution] = Windows(devices, of_op, *of_windows, first_start, last_end)
    return _WINDOWS[attribution]


def _device_windows(
    runs: Sequence[Int64Array],
    ranges: Ranges,
    *,
    start: Int64Array,
    end: Int64Array,
    step: Integers,
    is_kernel: Bools,
    first_start: Int64Array,
    last_end: Int64Array,
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Instance, start and end of the windows of a device, from the same of what its process ran, from the first start
    and the last end of the operations of each instance, and from the operations.
    """
    instance, run_start, run_end = runs
    first, last = int(start.min()), int(end.max())
    step_end = np.maximum.accumulate(np.maximum(run_end, last_end[instance]))
    step_start = np.maximum(run_start, np.concatenate((run_start[:1], step_end[:-1])))
    # kernels of no step that began before its first operation
    other = np.flatnonzero((step < 0) & is_kernel)
    other = other[np.argsort(start[other], kind="stable")]
    latest_end = np.concatenate(([_EARLIEST], np.maximum.accumulate(end[other])))
    before = latest_end[np.searchsorted(start[other], first_start, side="left")]
    others_end = np.where(first_start < _LATEST, np.minimum(before, first_start), _EARLIEST)
    step_start = np.maximum(step_start, np.minimum(others_end[instance], step_end))
    if len(instance):  # an engine's step that is before all else on the device, and had ended on the CPU by then
        row = int(np.flatnonzero(ranges.step == instance[0])[0])
        is_engine = engine_phase(ranges.names[ranges.name[row]].text) is not None
        if is_engine and step[np.argmin(start)] == instance[0] and run_end[0] < first:
            step_start[0] = first
    # outside steps: before the first, between, after the last
    gap_start = np.append(min(first, int(step_start[:1].min(initial=first))), step_end)
    gap_end = np.append(step_start, max(last, int(step_end[-1:].max(initial=last))))
    window_start, window_end = np.concatenate((step_start, gap_start)), np.concatenate((step_end, gap_end))
    order = np.argsort(window_start, kind="stable")
    order = order[window_end[order] > window_start[order]]
    instances = np.concatenate((instance, np.full(len(gap_start), NONE)))
    return instances[order], window_start[order], window_end[order]


def devices_of(trace: Trace) -> tuple[tuple[Device, ...], Int64Array]:
    """The devices by process and ordinal, and the device of each operation. Keyed by process because the same ordinal
    can be different GPUs in two processes.
    """
    pid, device = trace.ops["pid"].to_numpy(), trace.ops["device"].to_numpy()
    if len(pid) and len(few(pid)) == len(few(device)) == 1:  # most captures
        return (Device(int(pid[0]), 0, int(device[0])),), np.broadcast_to(np.int64(0), len(pid))
    (pids, ordinals), number = distinct_rows(pid, device)
    process = np.searchsorted(np.unique(pids), pids)
    devices = zip(pids.tolist(), process.tolist(), ordinals.tolist(), strict=True)
    return tuple(Device(*numbers) for numbers in devices), number.astype(np.int64)


def step_times(trace: Trace, attribution: Attribution) -> pd.DataFrame:
    """One row per step instance, in order, indexed by instance; all times int64 ns.

    Returns:
        step: step number; range_ns: how long its range was open on the CPU; gpu_ns: sum of the durations of its
        operations; busy_ns: length of their union, summed over devices; span_ns: from the start of its first operation
        to the end of its last, 0 if it has none; wall_ns: duration of its window
        (`nvprof_kit._analysis.attribution.steps`), the longest if several devices ran it; start_ns, end_ns: first
        start and last end of its ranges and operations.
    """
    count = len(attribution.ranges.steps)
    is_inside = attribution.step >= 0
    inside: Any = slice(None) if is_inside.all() else np.flatnonzero(is_inside)
    columns = (*(trace.ops[name].to_numpy() for name in ("start_ns", "end_ns")), devices_of(trace)[1])
    start, end, device = (column[inside] for column in columns)
    instance = attribution.step[inside].astype(np.int64)
    sums = {
        "gpu_ns": exact_sums(instance, end - start, count),
        "busy_ns": union_lengths(start, end, device, instance, count),
    }
    times = _step_spans(trace, attribution).assign(**sums)
    return times[["step", "range_ns", *sums, "span_ns", "wall_ns", "start_ns", "end_ns"]]


def _step_spans(trace: Trace, attribution: Attribution) -> pd.DataFrame:
    """The columns of `step_times` that are no sums of operations."""
    import pandas as pd

    count, ranges = len(attribution.ranges.steps), attribution.ranges
    rows = np.flatnonzero(ranges.step >= 0)  # those of an instance overlap if several processes run it
    starts, ends = _bounds(ranges.step[rows], ranges.start[rows], ranges.end[rows], count)
    windows = step_windows(trace, attribution)
    first, last = windows.first_start, windows.last_end
    ran = first < _LATEST
    walls = ends - starts
    if count and len(trace.ops):
        in_steps = np.flatnonzero(windows.in_step)
        walls = np.zeros(count, dtype=np.int64)
        np.maximum.at(walls, windows.instance[in_steps], (windows.end - windows.start)[in_steps])
    return pd.DataFrame(
        {
            "step": attribution.ranges.steps,
            "range_ns": ends - starts,
            "span_ns": np.where(ran, last - first, 0),
            "wall_ns": walls,
            "start_ns": np.where(ran, np.minimum(starts, first), starts),
            "end_ns": np.where(ran, np.maximum(ends, last), ends),
        }
    )


_EARLIEST, _LATEST = int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)


def _bounds(instance: Integers, start: Int64Array, end: Int64Array, count: int) -> tuple[Int64Array, Int64Array]:
    """The first start and the last end in each instance, `_LATEST` and `_EARLIEST` where nothing is."""
    first, last = np.full(count, _LATEST), np.full(count, _EARLIEST)
    if len(instance):  # what is in order of instances is first reduced run by run
        runs = np.flatnonzero(np.append(True, instance[1:] != instance[:-1]))
        np.minimum.at(first, instance[runs], np.minimum.reduceat(start, runs))
        np.maximum.at(last, instance[runs], np.maximum.reduceat(end, runs))
    return first, last


def median_place(lengths: Int64Array) -> int:
    """Index of the median length: the lower median, and the first of equals.

    Args:
        lengths: At least one length, shape ``(n,)``.
    """
    return int(np.argsort(lengths, kind="stable")[(len(lengths) - 1) // 2])


def typical_step(times: pd.DataFrame) -> int | None:
    """The instance with the median `wall_ns`, None if there is no step."""
    return int(times.index[median_place(times["wall_ns"].to_numpy())]) if len(times) else None


def slowest_step(times: pd.DataFrame) -> int | None:
    """The instance with the largest `wall_ns`, the last of equals; None if there is no step."""
    return int(times.index[np.argsort(times["wall_ns"].to_numpy(), kind="stable")[-1]]) if len(times) else None
