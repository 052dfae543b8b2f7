"""What a device does at every moment: computing, else communicating, else copying, else nothing.

A kernel that computes hides communication and copies that run beside it; what it does not hide is exposed. So at
every moment a device is in one state, and the states of a stretch of time add up to its length exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nvprof_kit._analysis.attribution.intervals import exact_sums
from nvprof_kit._analysis.attribution.nesting import Int64Array
from nvprof_kit._analysis.attribution.windows import Windows
from nvprof_kit._analysis.kernels.classes import KernelClasses
from nvprof_kit._trace.schema import OP_KINDS, Trace

STATES = ("idle", "compute", "exposed_comm", "exposed_copy")
IDLE, COMPUTE, COMM, COPY = range(4)

_BITS = 20
"""Bits for the number of operations of one sort that run at once."""


@dataclass(frozen=True)
class Activity:
    """What the devices do.

    Attributes:
        spent: Time by window and state in ns, shape ``(w, 4)``; a row adds up to the window's length.
        comm: Time by window in which some communication runs, hidden or not, shape ``(w,)``.
        copy: The same of copies.
        sort: `COMPUTE`, `COMM` or `COPY` of each operation, shape ``(n,)``.
        gap_window: Window of each idle gap, by device and start, shape ``(g,)``.
        gap_start, gap_end: In ns.
    """

    spent: Int64Array
    comm: Int64Array
    copy: Int64Array
    sort: np.ndarray
    gap_window: Int64Array
    gap_start: Int64Array
    gap_end: Int64Array


def activity(trace: Trace, classes: KernelClasses, windows: Windows) -> Activity:
    """What the devices do in every window, and the gaps in which they do nothing."""
    sort = op_sorts(trace, classes)
    start, end = trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
    origin = int(min(windows.start.min(initial=0), start.min(initial=0)))
    span = int(max(windows.end.max(initial=0), end.max(initial=0))) - origin + 1
    unit = np.left_shift(np.int64(1), _BITS * (sort.astype(np.int64) - 1))
    opens = windows.device * span + (windows.start - origin)
    closes = windows.device * span + (windows.end - origin)
    lane = windows.of_op * span - origin
    moment = np.concatenate((lane + start, lane + end, opens, closes))
    change = np.concatenate((unit, -unit, np.zeros(2 * len(opens), dtype=np.int64)))
    order = np.argsort(moment, kind="stable")
    moment = moment[order]
    running = np.cumsum(change[order])[:-1]
    length = np.diff(moment)
    window = np.searchsorted(opens, moment[:-1], side="right") - 1
    real = (length > 0) & (window >= 0)
    real[real] = moment[:-1][real] < closes[window[real]]
    moment, length, running, window = moment[:-1][real], length[real], running[real], window[real]
    mask = (1 << _BITS) - 1
    busy = [(running >> (_BITS * place)) & mask for place in range(3)]
    state = np.select([one > 0 for one in busy], [COMPUTE, COMM, COPY], IDLE)
    count = len(windows.start)
    idle = state == IDLE
    began = moment[idle] - windows.device[window[idle]] * span + origin
    return Activity(
        spent=exact_sums(window * 4 + state, length, count * 4).reshape(count, 4),
        comm=exact_sums(window[busy[1] > 0], length[busy[1] > 0], count),
        copy=exact_sums(window[busy[2] > 0], length[busy[2] > 0], count),
        sort=sort,
        gap_window=window[idle],
        gap_start=began,
        gap_end=began + length[idle],
    )


def op_sorts(trace: Trace, classes: KernelClasses) -> np.ndarray:
    """`COMPUTE`, `COMM` or `COPY` of each operation; a kernel that copies computes, a copy is a memcpy or memset."""
    kind = trace.ops["kind"].to_numpy()
    copies = np.isin(kind, [OP_KINDS.index("memcpy"), OP_KINDS.index("memset")])
    return np.select([copies, classes.is_a("comm")], [COPY, COMM], COMPUTE).astype(np.int8)
