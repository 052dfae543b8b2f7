"""Queue depth: launched operations that wait for the device, per step, and by stream over one step.

An operation is queued from the return of its launching call to its start. If the queue is empty, the device idles as
soon as its current work is done; if it is full, the host is far ahead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import exact_sums
from nvprof_kit._analysis.attribution.lanes import Line
from nvprof_kit._analysis.attribution.nesting import Int64Array
from nvprof_kit._analysis.attribution.windows import Windows
from nvprof_kit._analysis.breakdown.host import HostCalls
from nvprof_kit._trace.schema import Trace

if TYPE_CHECKING:
    import pandas as pd

QUEUE_COLUMNS = {
    "queue_mean": "mean number of launched operations that have not begun",
    "queue_max": "their maximum number",
    "queue_empty": "share of the time in which none was queued",
}
"""The columns that `queue_by_window` computes for each step."""

QUEUE_TIME_COLUMNS = {
    "step": "step number, missing if none",
    "process": "index of the process in the capture",
    "device": "device ordinal in the process",
    "stream": "the stream",
    "start_ns": "start of the interval, in ns since the start of the capture",
    "end_ns": "end of the interval",
    "queue_mean": "mean number of operations of the stream that are launched but have not begun",
    "queue_max": "their maximum number",
}
"""The columns of `queue_over_time`."""

SLICES = 100
"""Number of equal slices of a step."""


class _Waiting(NamedTuple):
    """Intervals in which operations are queued: row in `Trace.ops`, start and end in ns, shape ``(n,)`` each."""

    op: Int64Array
    begin: Int64Array
    end: Int64Array


class _Lanes(NamedTuple):
    """Windows by lane and start: lane (other lanes' intervals do not count), start and end in ns."""

    lane: Int64Array
    start: Int64Array
    end: Int64Array


def queue_by_window(trace: Trace, windows: Windows, host: HostCalls) -> pd.DataFrame:
    """The queue of the device, one row per window with `QUEUE_COLUMNS`; averages are over the window's duration."""
    import pandas as pd

    waiting = _waiting(trace, host)
    lanes = _Lanes(windows.device, windows.start, windows.end)
    mean, most, empty = _depths(windows.of_op[waiting.op], waiting, lanes)
    made: pd.DataFrame = pd.DataFrame({"queue_mean": mean, "queue_max": most, "queue_empty": empty})
    return made


def queue_over_time(trace: Trace, windows: Windows, host: HostCalls, window: int) -> pd.DataFrame:
    """The queue of every stream through one window in `SLICES` slices, with `QUEUE_TIME_COLUMNS`.

    Args:
        trace: The capture, with the column ``stream`` and the table ``calls``.
        windows: The steps.
        host: The calls.
        window: The step, an index into `windows`.
    """
    import pandas as pd

    low, high, device = (int(values[window]) for values in (windows.start, windows.end, windows.device))
    start, end = trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
    here = (windows.of_op == device) & (start < high) & (end > low)
    stream = trace.ops["stream"].to_numpy()
    streams = np.unique(stream[here])
    waiting = _waiting(trace, host)
    mine = (windows.of_op[waiting.op] == device) & np.isin(stream[waiting.op], streams)
    waiting = _Waiting(*(values[mine] for values in waiting))
    edges = np.unique(np.linspace(low, high, SLICES + 1).round().astype(np.int64))
    slices = len(edges) - 1
    lanes = _Lanes(
        np.repeat(np.arange(len(streams)), slices), np.tile(edges[:-1], len(streams)), np.tile(edges[1:], len(streams))
    )
    mean, most, _ = _depths(np.searchsorted(streams, stream[waiting.op]), waiting, lanes)
    numbers = np.full(len(mean), windows.step[window], dtype=np.int64)
    columns = {
        "step": pd.arrays.IntegerArray(numbers, np.full(len(mean), not windows.in_step[window])),
        "process": windows.devices[device].process,
        "device": windows.devices[device].device,
        "stream": streams[lanes.lane],
        "start_ns": lanes.start,
        "end_ns": lanes.end,
        "queue_mean": mean,
        "queue_max": most,
    }
    made: pd.DataFrame = pd.DataFrame({name: columns[name] for name in QUEUE_TIME_COLUMNS})
    return made


def _waiting(trace: Trace, host: HostCalls) -> _Waiting:
    call = host.of_op
    op = np.flatnonzero(call >= 0)
    begin, end = host.end[call[op]], trace.ops["start_ns"].to_numpy()[op]
    waits = end > begin
    return _Waiting(op[waits], begin[waits], end[waits])


def _depths(
    lane: Int64Array, waiting: _Waiting, windows: _Lanes
) -> tuple[npt.NDArray[np.float64], Int64Array, npt.NDArray[np.float64]]:
    """Mean depth, maximum depth and share of time with an empty queue in each window, shape ``(w,)`` each.

    Args:
        lane: Lane of each queued interval, shape ``(n,)``.
        waiting: The queued intervals.
        windows: The windows.
    """
    line = Line.over((windows.start, waiting.begin), (windows.end, waiting.end))
    opens, closes = (line.at(windows.lane, edge) for edge in (windows.start, windows.end))
    moment = np.concatenate((line.at(lane, waiting.begin), line.at(lane, waiting.end), opens, closes))
    change = np.repeat(np.array([1, -1, 0], dtype=np.int8), [len(lane), len(lane), 2 * len(opens)])
    order = np.argsort(moment, kind="stable")
    moment = moment[order]
    change = change[order]
    del order
    rows = np.flatnonzero(moment[1:] > moment[:-1])  # intervals of nonzero length
    depth, length, moment = np.cumsum(change, dtype=np.int64)[rows], moment[rows + 1] - moment[rows], moment[rows]
    window = np.searchsorted(opens, moment, side="right") - 1
    keep = window >= 0
    keep[keep] = moment[keep] < closes[window[keep]]
    depth, length, window = depth[keep], length[keep], window[keep]
    count, whole = len(opens), np.maximum(windows.end - windows.start, 1)
    most = np.zeros(count, dtype=np.int64)
    np.maximum.at(most, window, depth)
    dry = depth == 0
    return exact_sums(window, depth * length, count) / whole, most, exact_sums(window[dry], length[dry], count) / whole
