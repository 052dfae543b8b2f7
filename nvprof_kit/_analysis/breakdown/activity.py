"""Device state over time: computing, else communicating, else copying, else idle.

A compute kernel hides communication and copies that overlap with it; the rest of them is exposed. A device is therefore
in exactly one state at any time, and the states of a time window add up to its length exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import Cover, Int64Array, Line, exact_sums, touches
from nvprof_kit._analysis.attribution.steps import Windows
from nvprof_kit._analysis.kernels.classes import KernelClasses
from nvprof_kit._trace.schema import OP_KINDS, Trace

STATES = ("idle", "compute", "exposed_comm", "exposed_copy")
IDLE, COMPUTE, COMM, COPY = range(4)

_BITS = 20
"""Bits per counter of concurrent operations of one sort."""

_BLOCK = 1 << 18
"""Moments processed at a time, to limit memory."""


class Gaps(NamedTuple):
    """The idle gaps of devices, by device and start, shape ``(g,)`` each.

    Attributes:
        window: Window of each.
        start, end: In ns.
    """

    window: Int64Array
    start: Int64Array
    end: Int64Array


@dataclass(frozen=True)
class Activity:
    """Activity of the devices.

    Attributes:
        state_ns: Time by window and state in ns, shape ``(w, 4)``; a row adds up to the window's length.
        comm: Time by window with communication running, hidden or not, in ns, shape ``(w,)``.
        copy: The same for copies.
        sort: `COMPUTE`, `COMM` or `COPY` of each operation, shape ``(n,)``.
        gaps: The idle gaps.
    """

    state_ns: Int64Array
    comm: Int64Array
    copy: Int64Array
    sort: np.ndarray
    gaps: Gaps


def activity(trace: Trace, classes: KernelClasses, windows: Windows) -> Activity:
    """The activity of the devices in every window, and the idle gaps."""
    sort = op_sorts(trace, classes)
    intervals = windows.of_op, trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
    counter = np.left_shift(np.int64(1), _BITS * (sort.astype(np.int64) - 1))
    count = len(windows.start)
    state_ns, comm, copy = np.zeros(4 * count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
    gaps = [(np.zeros(0, dtype=np.int64),) * 3]
    for window, start, length, level in levels((windows.device, windows.start, windows.end), intervals, counter):
        runs = [(level >> (_BITS * number)) & ((1 << _BITS) - 1) > 0 for number in range(3)]
        state = np.select(runs, [COMPUTE, COMM, COPY], IDLE)
        state_ns += exact_sums(window * 4 + state, length, 4 * count)
        comm += exact_sums(window[runs[1]], length[runs[1]], count)
        copy += exact_sums(window[runs[2]], length[runs[2]], count)
        is_idle = state == IDLE
        gaps.append((window[is_idle], start[is_idle], (start + length)[is_idle]))
    columns = (np.concatenate(column) for column in zip(*gaps, strict=True))
    return Activity(state_ns.reshape(count, 4), comm, copy, sort, Gaps(*columns))


Intervals = tuple[Int64Array, Int64Array, Int64Array]
"""Lane, start and end of each."""


def levels(
    windows: Intervals, intervals: Intervals, weight: npt.NDArray[np.integer[Any]]
) -> Iterator[tuple[Int64Array, Int64Array, Int64Array, Int64Array]]:
    """The sum of the weights of the open intervals over time, in blocks.

    Args:
        windows: Stretches of lanes, by lane and start, that do not overlap.
        intervals: Intervals in these lanes.
        weight: What each interval adds while it is open.

    Yields:
        Window, start, length and sum of each stretch in which the sum does not change.
    """
    line = Line.over((windows[1], intervals[1]), (windows[2], intervals[2]))
    opens, closes = (line.at(windows[0], edge) for edge in windows[1:])
    positions = np.concatenate((*(line.at(intervals[0], edge) for edge in intervals[1:]), opens, closes))
    change = np.concatenate((weight, -weight, np.zeros(2 * len(opens), dtype=weight.dtype)))
    order = np.argsort(positions, kind="stable")
    positions, change, total = positions[order], change[order], np.int64(0)
    for low in range(0, len(positions) - 1, _BLOCK):
        length = np.diff(positions[low : low + _BLOCK + 1])
        start, level = positions[low : low + len(length)], total + np.cumsum(change[low : low + len(length)])
        total = level[-1]
        window = np.searchsorted(opens, start, side="right") - 1
        inside = (length > 0) & (window >= 0)
        inside[inside] = start[inside] < closes[window[inside]]
        yield window[inside], line.moment(start[inside]), length[inside], level[inside]


def exposed(trace: Trace, windows: Windows, active: Activity) -> Int64Array:
    """The part of each operation's duration that no compute on its device overlaps, shape ``(n,)``; 0 for compute."""
    start, end = trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
    exposed_ns = np.zeros(len(start), dtype=np.int64)
    other = np.flatnonzero(active.sort != COMPUTE)
    if not len(other):
        return exposed_ns
    computes = np.flatnonzero(active.sort == COMPUTE)
    # on any device: what hides none of them need not be joined
    computes = computes[touches((start[other], end[other]), start[computes], end[computes])]
    cover = Cover(windows.of_op[computes], start[computes], end[computes])
    hidden = cover.inside(windows.of_op[other], start[other], end[other])
    exposed_ns[other] = end[other] - start[other] - hidden
    return exposed_ns


def op_sorts(trace: Trace, classes: KernelClasses) -> np.ndarray:
    """`COMPUTE`, `COMM` or `COPY` of each operation; a copy is a memcpy or memset, a kernel that copies is compute."""
    kind = trace.ops["kind"].to_numpy()
    copies = np.isin(kind, [OP_KINDS.index("memcpy"), OP_KINDS.index("memset")])
    return np.select([copies, classes.is_a("comm")], [COPY, COMM], COMPUTE).astype(np.int8)
