"""Device state over time: computing, else communicating, else copying, else idle.

A compute kernel hides communication and copies that overlap with it; the rest of them is exposed. A device is therefore
in exactly one state at any time, and the states of a time window add up to its length exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nvprof_kit._analysis.attribution.intervals import Int64Array, Line, exact_sums
from nvprof_kit._analysis.attribution.steps import Windows
from nvprof_kit._analysis.kernels.classes import KernelClasses
from nvprof_kit._trace.schema import OP_KINDS, Trace

STATES = ("idle", "compute", "exposed_comm", "exposed_copy")
IDLE, COMPUTE, COMM, COPY = range(4)

_BITS = 20
"""Bits per counter of concurrent operations of one sort."""


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
    start, end = trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
    line = Line.over((windows.start, start), (windows.end, end))
    change_time, change = _changes(windows, sort, (start, end), line)
    opens, closes = (line.at(windows.device, edge) for edge in (windows.start, windows.end))
    count = len(windows.start)
    state_ns, comm, copy = (np.zeros(length_of_sums, dtype=np.int64) for length_of_sums in (4 * count, count, count))
    gaps, running, mask = [], np.int64(0), (1 << _BITS) - 1
    for low in range(0, len(change_time) - 1, _BLOCK):
        block_start, length = change_time[low : low + _BLOCK], np.diff(change_time[low : low + _BLOCK + 1])
        depth = running + np.cumsum(change[low : low + _BLOCK])
        running = depth[-1]
        block_start, depth = block_start[: len(length)], depth[: len(length)]
        window = np.searchsorted(opens, block_start, side="right") - 1
        real = (length > 0) & (window >= 0)
        real[real] = block_start[real] < closes[window[real]]
        block_start, length, depth, window = block_start[real], length[real], depth[real], window[real]
        busy = [(depth >> (_BITS * bit)) & mask > 0 for bit in range(3)]
        state = np.select(busy, [COMPUTE, COMM, COPY], IDLE)
        state_ns += exact_sums(window * 4 + state, length, 4 * count)
        comm += exact_sums(window[busy[1]], length[busy[1]], count)
        copy += exact_sums(window[busy[2]], length[busy[2]], count)
        idle = state == IDLE
        gap_begin = line.moment(block_start[idle])
        gaps.append((window[idle], gap_begin, gap_begin + length[idle]))
    none = [np.zeros(0, dtype=np.int64)] * 3
    columns = (np.concatenate(column) for column in zip(none, *gaps, strict=True))
    return Activity(state_ns.reshape(count, 4), comm, copy, sort, Gaps(*columns))


_BLOCK = 1 << 18
"""Changes processed at a time, to limit memory."""


def _changes(
    windows: Windows, sort: np.ndarray, times: tuple[Int64Array, Int64Array], line: Line
) -> tuple[Int64Array, Int64Array]:
    """Start and end times of operations and windows, by device, and the change in the number of running operations of
    each sort, packed in `_BITS` bits each.
    """
    unit = np.left_shift(np.int64(1), _BITS * (sort.astype(np.int64) - 1))
    edges = (line.at(windows.device, edge) for edge in (windows.start, windows.end))
    change_time = np.concatenate((*(line.at(windows.of_op, edge_ns) for edge_ns in times), *edges))
    change = np.concatenate((unit, -unit, np.zeros(2 * len(windows.start), dtype=np.int64)))
    order = np.argsort(change_time, kind="stable")
    return change_time[order], change[order]


def op_sorts(trace: Trace, classes: KernelClasses) -> np.ndarray:
    """`COMPUTE`, `COMM` or `COPY` of each operation; a copy is a memcpy or memset, a kernel that copies is compute."""
    kind = trace.ops["kind"].to_numpy()
    copies = np.isin(kind, [OP_KINDS.index("memcpy"), OP_KINDS.index("memset")])
    return np.select([copies, classes.is_a("comm")], [COPY, COMM], COMPUTE).astype(np.int8)
