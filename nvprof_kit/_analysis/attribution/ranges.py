"""What the ranges of a capture mean: layer, phase and step ranges, and how they nest.

A **step** is one execution of a range of the category `step` that is not nested in another such range on its thread.
A range with the same number that is open on another thread or process at the same time is the same step: the ranks of
one capture run it together. If a number repeats, because each epoch counts from 0 or a validation loop has its own
numbers, each execution is a separate step, and "per step" divides by these *instances*, not by distinct numbers. A step
range nested in another one (micro-batches in an optimizer step) is part of the outer step. Instances are ordered by
start time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import NONE, Bools, Int64Array, Nesting, cut, inherit, nest
from nvprof_kit._trace.schema import SOUGHT, Trace
from nvprof_kit.names import (
    LAYER_CATEGORIES,
    LAYER_PHASES,
    NO_PHASE,
    PHASE_CATEGORIES,
    Category,
    RangeName,
    parse_range,
    step_number,
)

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.foreign.rules import Rules

_NO_PAYLOAD = int(np.iinfo(np.int64).min)


@dataclass(frozen=True)
class Ranges:
    """What the ranges of a capture mean, one entry per range (shape ``(r,)`` each).

    A range that crosses others has several entries: its pieces from `nvprof_kit._analysis.attribution.intervals.cut`.

    Attributes:
        start, end, tid, pid: As in the trace.
        first: Whether it is a whole range or the first piece of one.
        nesting: Which range encloses which.
        names: The distinct texts and categories.
        name: Index into `names`.
        layer_range: The nearest layer range (itself or an enclosing one), or `NONE`.
        phase_range: The nearest phase range, or `NONE`.
        step_range: The nearest step range, or `NONE`.
        phases: The distinct phases, sorted; those of layers and `NO_PHASE` are always among them.
        phase: Index into `phases`: ``forward``, ``backward`` or ``recompute`` for a layer range, the text for a phase
            range, else `NO_PHASE`.
        step: The step instance of a step range, an index into `steps`, else `NONE`.
        steps: The step number of each instance, by start time; a number can repeat.
        crossing: Whether some ranges crossed others.
    """

    start: Int64Array
    end: Int64Array
    tid: Int64Array
    pid: Int64Array
    first: Bools
    nesting: Nesting
    names: tuple[RangeName, ...]
    name: npt.NDArray[np.intp]
    layer_range: Int64Array
    phase_range: Int64Array
    step_range: Int64Array
    phases: tuple[str, ...]
    phase: npt.NDArray[np.intp]
    step: Int64Array
    steps: Int64Array
    crossing: bool = False

    @property
    def phase_text(self) -> npt.NDArray[Any]:
        """The phase of each range as text, shape ``(r,)``."""
        return np.array(self.phases, dtype=object)[self.phase]

    @property
    def whole_end(self) -> Int64Array:
        """The end of each range (for a piece, of its whole range), shape ``(r,)``; pieces of a range are adjacent."""
        return _whole_end(self.end, self.first)

    def is_one_of(self, categories: tuple[Category, ...]) -> Bools:
        """Which ranges have one of these categories, shape ``(r,)``."""
        return _is_one_of(self.names, self.name, categories)

    def step_at(self, ranges: Int64Array) -> Int64Array:
        """The step instance that contains each of these ranges, or `NONE`; range `NONE` is in no step."""
        steps: Int64Array = np.append(self.step, NONE)[np.append(self.step_range, NONE)[ranges]]
        return steps


def _whole_end(end: Int64Array, first: Bools) -> Int64Array:
    first_pieces = np.flatnonzero(first)
    if len(first_pieces) == len(end):
        return end
    ends: Int64Array = np.maximum.reduceat(end, first_pieces)[np.cumsum(first) - 1]
    return ends


def _is_one_of(names: tuple[RangeName, ...], name: npt.NDArray[np.intp], categories: tuple[Category, ...]) -> Bools:
    is_of_name: Bools = np.array([named.category in categories for named in names], dtype=bool)
    return is_of_name[name]


def translated(trace: Trace, rules: Rules | None = None) -> Trace:
    """The capture with the ranges that its program's rules, its operators or the order of its kernels tell.

    Args:
        trace: The capture as it was read.
        rules: How its program names its ranges; None if it follows this package's naming.
    """
    if trace.info.evidence != SOUGHT and rules is None and trace.operators is None:
        return trace
    from nvprof_kit._analysis.foreign.translate import translate

    return translate(trace, rules)


def understand(trace: Trace) -> Ranges:
    """Classify the ranges of a capture as layer, phase and step ranges. Includes the backward ranges that
    `nvprof_kit._analysis.foreign.translate` derives from operators, if the capture has them.
    """
    import pandas as pd

    frame = translated(trace).ranges
    start, end, tid = (frame[column].to_numpy() for column in ("start_ns", "end_ns", "tid"))
    first = np.ones(len(frame), dtype=bool)
    nesting = nest(start, end, tid)
    crossing = nesting.crossing
    if crossing:
        pieces = cut(start, end, tid)
        frame, start, end, first = frame.iloc[pieces.range], pieces.start, pieces.end, pieces.first
        tid = frame["tid"].to_numpy()
        nesting = nest(start, end, tid)
    names, name = _names(frame)
    row_numbers = np.arange(len(frame))
    is_layer, is_phase, is_step = (
        _is_one_of(names, name, kinds) for kinds in (LAYER_CATEGORIES, PHASE_CATEGORIES, (Category.STEP,))
    )
    is_backward = _is_one_of(names, name, (Category.BACKWARD,))
    in_backward = inherit(np.where(is_backward, row_numbers, NONE), nesting) >= 0
    is_recompute = in_backward & _is_one_of(names, name, (Category.FORWARD,))
    phases = np.unique([*map(_phase_of, names), *LAYER_PHASES, NO_PHASE])
    phase = np.searchsorted(phases, [*map(_phase_of, names), Category.RECOMPUTE.value])
    phase = np.where(is_recompute, phase[-1], phase[name])
    step_range, pid = inherit(np.where(is_step, row_numbers, NONE), nesting), frame["pid"].to_numpy()
    rows = np.flatnonzero(is_step)
    numbers = _step_numbers(frame, names, name, rows)
    whole_end = _whole_end(end, first)
    columns = {"is_first": first, "start": start, "end": whole_end, "tid": tid}
    of_steps = pd.DataFrame({"row": rows, "number": numbers} | {name: of[rows] for name, of in columns.items()})
    step = np.full(len(frame), NONE, dtype=np.int64)
    steps, step[rows] = _step_instances(of_steps, step_range, nesting)
    return Ranges(
        start=start,
        end=end,
        tid=tid,
        pid=pid,
        first=first,
        nesting=nesting,
        names=names,
        name=name,
        layer_range=inherit(np.where(is_layer, row_numbers, NONE), nesting),
        phase_range=inherit(np.where(is_phase, row_numbers, NONE), nesting),
        step_range=step_range,
        phases=tuple(phases.tolist()),
        phase=phase,
        step=step,
        steps=steps,
        crossing=crossing,
    )


def _phase_of(name: RangeName) -> str:
    """The phase of ranges with a name, as far as the name tells it."""
    if name.category in LAYER_CATEGORIES:
        return name.category.value
    return (name.category in PHASE_CATEGORIES and name.text) or NO_PHASE


def _names(frame: Any) -> tuple[tuple[RangeName, ...], npt.NDArray[np.intp]]:
    """The distinct (text, category) pairs, parsed, and the index of each range into them."""
    text, category = frame["text"].cat, frame["category"].cat
    texts, categories = text.categories.tolist(), category.categories.tolist()
    width = max(len(categories), 1)
    both = text.codes.to_numpy().astype(np.int64) * width + category.codes.to_numpy()
    distinct, name = np.unique(both, return_inverse=True)
    parsed = (parse_range(texts[code // width], categories[code % width] or None) for code in distinct.tolist())
    return tuple(parsed), name


def _step_numbers(frame: Any, names: tuple[RangeName, ...], name: npt.NDArray[np.intp], rows: Int64Array) -> Int64Array:
    """The number of each of these step ranges: its payload, else the number in its text, else its position in time."""
    by_time = np.argsort(frame["start_ns"].to_numpy()[rows], kind="stable")
    # pieces of one range are adjacent and share its row
    row = frame.index.to_numpy()[rows[by_time]]
    numbers = np.zeros(len(rows), dtype=np.int64)
    numbers[by_time] = np.cumsum(np.append(False, row[1:] != row[:-1])[: len(row)])
    of_names = (step_number(named.text) for named in names)
    written = np.array([_NO_PAYLOAD if of is None else of for of in of_names], dtype=np.int64)[name[rows]]
    payload = frame["payload"].to_numpy(dtype=np.int64, na_value=_NO_PAYLOAD)[rows]
    for source in (written, payload):
        numbers = np.where(source == _NO_PAYLOAD, numbers, source)
    return numbers


def _step_instances(steps: pd.DataFrame, step_range: Int64Array, nesting: Nesting) -> tuple[Int64Array, Int64Array]:
    """The step number of each step instance, by start time, and the instance of each step range. See the module
    docstring for the definition.

    Args:
        steps: The step ranges, every piece of a range that was cut: columns row (the range), is_first (whether it is
            the first piece), number (of the step), start, end (of the whole range) and tid.
        step_range: For every range, the nearest step range (itself or an enclosing one), or `NONE`, shape ``(r,)``.
        nesting: The nesting of all ranges.
    """
    names = ("row", "is_first", "number", "start", "end", "tid")
    row, is_first, number, start, end, tid = (steps[name].to_numpy() for name in names)
    # the first piece of the outermost step range around each, as an index into `steps`
    index_of_range = np.full(len(step_range) + 1, NONE, dtype=np.int64)
    index_of_range[row] = np.arange(len(row))
    first_piece = np.flatnonzero(is_first)[np.cumsum(is_first) - 1] if len(row) else row
    enclosing = index_of_range[np.append(step_range, NONE)[nesting.parent[row[first_piece]]]]
    enclosing = np.append(first_piece, NONE)[enclosing]
    # a range that outlasts the range it began in is not nested in it
    enclosing = np.where((enclosing >= 0) & (np.append(end, 0)[enclosing] >= end), enclosing, NONE)
    outermost = first_piece
    while ((above := np.append(enclosing, NONE)[outermost]) >= 0).any():
        outermost = np.where(above >= 0, above, outermost)
    tops = np.flatnonzero(is_first & (outermost == np.arange(len(row))))
    # those that begin together by thread, so that the order of rows in the file does not matter
    tops = tops[np.lexsort((tid[tops], start[tops]))]
    # a range that begins while its number is open on other threads, and not yet on its own, joins that instance
    current: dict[int, tuple[int, int, set[int]]] = {}
    instance_of_row = np.full(len(row), NONE, dtype=np.int64)
    numbers: list[int] = []
    for top in tops.tolist():
        instance, latest_end, threads = current.get(number[top], (NONE, start[top], set()))
        if start[top] >= latest_end or tid[top] in threads:
            instance, latest_end, threads = len(numbers), end[top], set()
            numbers.append(number[top])
        current[number[top]] = instance, max(latest_end, end[top]), threads | {tid[top]}
        instance_of_row[top] = instance
    return np.array(numbers, dtype=np.int64), instance_of_row[outermost]


class Elsewhere:
    """Ranges open on the other threads of a process.

    Args:
        ranges: The ranges of the capture.
        chosen: The ranges to consider, shape ``(r,)``.
    """

    def __init__(self, ranges: Ranges, chosen: Bools) -> None:
        rows = np.flatnonzero(chosen)
        self._by_thread = []
        for thread in np.unique(ranges.tid[rows]):
            on_thread = rows[ranges.tid[rows] == thread]
            nesting = nest(ranges.start[on_thread], ranges.end[on_thread], ranges.tid[on_thread])
            self._by_thread.append((thread, ranges.pid[on_thread[0]], nesting, np.append(on_thread, NONE)))

    def open_at(self, pid: Int64Array, tid: Int64Array, time: Int64Array) -> Int64Array:
        """The innermost chosen range open on another thread of the process, if exactly one other thread has one.

        Args:
            pid: Processes, shape ``(n,)``.
            tid: Threads, shape ``(n,)``; for `NONE` the result is `NONE`.
            time: Times in ns, shape ``(n,)``.

        Returns:
            Indices of ranges, or `NONE`, shape ``(n,)``.
        """
        open_range = np.full(len(tid), NONE, dtype=np.int64)
        hits = np.zeros(len(tid), dtype=np.int64)
        for thread, process, nesting, on_thread in self._by_thread:
            other = (tid != thread) & (tid != NONE) & (pid == process)
            inner = on_thread[np.where(other, nesting.innermost(np.full(len(tid), thread), time), NONE)]
            open_range = np.where(inner >= 0, inner, open_range)
            hits += inner >= 0
        return np.where(hits == 1, open_range, NONE)


class Owners(NamedTuple):
    """Who owns what happens on a thread at a time, shape ``(n,)`` each.

    Attributes:
        range: The innermost range open there, or `NONE`.
        layer: The innermost layer range open there, or `NONE`.
        phase: The range that gives the phase: that of the layer, else the innermost phase range open there, else the
            one open on another thread of the process; or `NONE`.
        step: The step instance open there, else on another thread, or `NONE`.
        is_elsewhere: Whether the phase is that of another thread.
    """

    range: Int64Array
    layer: Int64Array
    phase: Int64Array
    step: Int64Array
    is_elsewhere: Bools


class OwnerLookup:
    """Finds the owners of moments.

    Args:
        ranges: The ranges of the capture.
    """

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        phase = np.where(ranges.layer_range >= 0, ranges.layer_range, ranges.phase_range)
        step = ranges.step_at(np.arange(len(phase)))
        self._layer, self._phase, self._step = (np.append(of, NONE) for of in (ranges.layer_range, phase, step))
        self._phases = Elsewhere(ranges, ranges.is_one_of(PHASE_CATEGORIES))
        self._steps = Elsewhere(ranges, ranges.step >= 0)

    def at(self, pid: Int64Array, tid: Int64Array, time: Int64Array) -> Owners:
        """The owners at these times in ns on these threads of these processes, shape ``(n,)`` each."""
        inner = self._ranges.nesting.innermost(tid, time)
        # NONE indexes the appended NONE
        layer, phase, step = self._layer[inner], self._phase[inner], self._step[inner]
        unowned = np.flatnonzero(phase == NONE)
        phase[unowned] = self._phases.open_at(pid[unowned], tid[unowned], time[unowned])
        is_elsewhere = np.zeros(len(inner), dtype=bool)
        is_elsewhere[unowned] = phase[unowned] >= 0
        outside = np.flatnonzero(step == NONE)
        open_steps = self._steps.open_at(pid[outside], tid[outside], time[outside])
        step[outside] = np.append(self._ranges.step, NONE)[open_steps]
        return Owners(inner, layer, phase, step, is_elsewhere)


def steps_around(ranges: Ranges, range_rows: Int64Array) -> Int64Array:
    """The step instance that contains each of these ranges, or `NONE`: the enclosing step on its thread, else the step
    open on another thread when it begins.
    """
    step = ranges.step_at(range_rows)
    unattributed = np.flatnonzero(step == NONE)
    rows = range_rows[unattributed]
    step_ranges = Elsewhere(ranges, ranges.step >= 0).open_at(ranges.pid[rows], ranges.tid[rows], ranges.start[rows])
    step[unattributed] = np.append(ranges.step, NONE)[step_ranges]
    return step
