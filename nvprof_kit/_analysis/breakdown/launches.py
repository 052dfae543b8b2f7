"""Whether the host keeps the device busy: launches by layer, and the queue of launched operations that wait.

An operation is queued from the return of its launching call to its start. If the queue is empty, the device idles as
soon as its current work is done; if it is full, the host is far ahead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution, op_owners
from nvprof_kit._analysis.attribution.intervals import Int64Array, Line, exact_sums
from nvprof_kit._analysis.attribution.steps import Windows
from nvprof_kit._analysis.breakdown.host import HostCalls
from nvprof_kit._result.column import Column, Columns
from nvprof_kit._trace.schema import Trace

if TYPE_CHECKING:
    import pandas as pd

LAUNCH_COLUMNS: Columns = {
    "layer": Column("module path, or `(none)`", kind="str"),
    "phase": Column("phase of the layer or of the loop", kind="str"),
    "ops": Column("its own operations whose launching call is in the capture"),
    "gpu_ns": Column("sum of their durations", "ns"),
    "call_ns": Column(
        "sum of the durations of the launching calls; a graph launch is divided among its operations", "ns"
    ),
    "short_ops": Column("number of operations shorter than the call that launched them"),
    "delay_ns": Column(
        "median time from the return of the launching call to the start of the operation; 0 if it started before",
        "ns",
        fold="mean",
    ),
    "idle_ns": Column(
        "time in which the device was idle because the host, in this layer, had not launched the next operation", "ns"
    ),
    "launch_bound": Column("True if `idle_ns` exceeds a tenth of `gpu_ns`", kind="bool", fold="key"),
}
"""The columns of the launch analysis."""

_BOUND = 0.1
_LATE = ("launch", "unknown")


def launch_table(
    trace: Trace,
    attribution: Attribution,
    host: HostCalls,
    parts: pd.DataFrame,
    *,
    is_counted: npt.NDArray[np.bool_],
    of_parts: npt.NDArray[np.bool_],
) -> pd.DataFrame:
    """Launches of the `counted` operations by layer and phase, with `LAUNCH_COLUMNS`; the longest idle first.

    Args:
        trace: The capture.
        attribution: The owner of each operation.
        host: The calls.
        parts: `nvprof_kit._analysis.breakdown.idle.Idle.parts`.
        is_counted: The operations to include, shape ``(n,)``.
        of_parts: The parts to include.
    """
    import pandas as pd

    rows = np.flatnonzero((host.of_op >= 0) & is_counted)
    group, places = _places(attribution, rows)
    count = len(places)
    long = (trace.ops["end_ns"].to_numpy() - trace.ops["start_ns"].to_numpy())[rows]
    sharing = np.bincount(
        host.of_op[host.of_op >= 0], minlength=len(host.tid)
    )  # operations of a graph share their call
    call_ns = ((host.end - host.start) // np.maximum(sharing, 1))[host.of_op[rows]]
    columns = {
        "ops": np.bincount(group, minlength=count),
        "gpu_ns": exact_sums(group, long, count),
        "call_ns": exact_sums(group, call_ns, count),
        "short_ops": np.bincount(group[long < call_ns], minlength=count),
    }
    delay = np.maximum(trace.ops["start_ns"].to_numpy()[rows] - host.end[host.of_op[rows]], 0)
    table = pd.DataFrame(columns, index=places)
    table["delay_ns"] = pd.Series(delay).groupby(group).median().astype("int64").to_numpy()
    launch_gaps = parts.loc[parts["cause"].isin(_LATE) & of_parts, ["layer", "phase", "idle_ns"]]
    idle = launch_gaps.groupby(["layer", "phase"], observed=True, sort=False)["idle_ns"].sum()
    idle.index = pd.MultiIndex.from_frame(idle.index.to_frame().astype(str))
    table = table.join(idle[idle > 0], how="outer").fillna(0).astype("int64")
    table["launch_bound"] = table["idle_ns"] > _BOUND * table["gpu_ns"]
    plain = table.reset_index()
    ranked: pd.DataFrame = plain.sort_values(["idle_ns", "gpu_ns"], ascending=False, kind="stable", ignore_index=True)
    return ranked


def _places(attribution: Attribution, rows: Int64Array) -> tuple[Int64Array, pd.MultiIndex]:
    """Layer and phase of some operations, as an index into the distinct pairs, and these in order of appearance."""
    import pandas as pd

    layer, phase = op_owners(attribution)
    phases = len(phase.categories)
    group, pairs = pd.factorize(layer.codes[rows] * np.int64(phases) + phase.codes[rows])
    codes = zip((layer, phase), np.divmod(pairs, phases), strict=True)
    texts = [categorical.categories.to_numpy()[code].astype(str).astype(object) for categorical, code in codes]
    places: pd.MultiIndex = pd.MultiIndex.from_arrays(texts, names=["layer", "phase"])
    return group, places


QUEUE_COLUMNS: Columns = {
    "queue_mean": Column("mean number of launched operations that have not begun", kind="float"),
    "queue_max": Column("their maximum number"),
    "queue_empty": Column("share of the time in which none was queued", "share", kind="float"),
}
"""The columns that `queue_by_window` computes for each step."""

QUEUE_TIME_COLUMNS: Columns = {
    "step": Column("step number, missing if none"),
    "process": Column("index of the process in the capture"),
    "device": Column("device ordinal in the process"),
    "stream": Column("the stream"),
    "start_ns": Column("start of the interval, in ns since the start of the capture", "ns"),
    "end_ns": Column("end of the interval", "ns"),
    "queue_mean": Column("mean number of operations of the stream that are launched but have not begun", kind="float"),
    "queue_max": Column("their maximum number"),
}
"""The columns of `queue_over_time`."""

_BLOCK = 1 << 18
"""Moments processed at a time, to limit memory."""

SLICES = 100
"""Number of equal slices of a step."""


class _Waiting(NamedTuple):
    """Intervals in which operations are queued: row in `Trace.ops`, start and end in ns, shape ``(n,)`` each."""

    op: Int64Array
    start: Int64Array
    end: Int64Array


class _Lanes(NamedTuple):
    """Windows by lane and start: lane (other lanes' intervals do not count), start and end in ns."""

    lane: Int64Array
    start: Int64Array
    end: Int64Array


def queue_by_window(trace: Trace, windows: Windows, host: HostCalls) -> pd.DataFrame:
    """The queue of the device, one row per window with `QUEUE_COLUMNS`; averages are over the window's duration."""
    import pandas as pd

    lanes = _Lanes(windows.device, windows.start, windows.end)
    mean, maximum, empty = _depths(_Edges.of(windows.of_op, _waiting(trace, host), lanes), lanes)
    frame: pd.DataFrame = pd.DataFrame({"queue_mean": mean, "queue_max": maximum, "queue_empty": empty})
    return frame


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
    overlaps = (waiting.start < high) & (waiting.end > low)
    waiting = _Waiting(*(values[overlaps] for values in waiting))
    overlaps = (windows.of_op[waiting.op] == device) & np.isin(stream[waiting.op], streams)
    waiting = _Waiting(*(values[overlaps] for values in waiting))
    edges = np.unique(np.linspace(low, high, SLICES + 1).round().astype(np.int64))
    slices = len(edges) - 1
    lanes = _Lanes(
        np.repeat(np.arange(len(streams)), slices), np.tile(edges[:-1], len(streams)), np.tile(edges[1:], len(streams))
    )
    of_op = np.zeros(len(stream), dtype=np.int64)
    of_op[waiting.op] = np.searchsorted(streams, stream[waiting.op])
    mean, maximum, _ = _depths(_Edges.of(of_op, waiting, lanes), lanes)
    numbers = np.full(len(mean), windows.step[window], dtype=np.int64)
    columns = {
        "step": pd.arrays.IntegerArray(numbers, np.full(len(mean), not windows.in_step[window])),
        "process": windows.devices[device].process,
        "device": windows.devices[device].device,
        "stream": streams[lanes.lane],
        "start_ns": lanes.start,
        "end_ns": lanes.end,
        "queue_mean": mean,
        "queue_max": maximum,
    }
    frame: pd.DataFrame = pd.DataFrame({name: columns[name] for name in QUEUE_TIME_COLUMNS})
    return frame


def _waiting(trace: Trace, host: HostCalls) -> _Waiting:
    call = host.of_op
    op = np.flatnonzero(call >= 0)
    start, end = host.end[call[op]], trace.ops["start_ns"].to_numpy()[op]
    waits = end > start
    return _Waiting(op[waits], start[waits], end[waits])


class _Edges(NamedTuple):
    """Starts and ends of queued intervals, each sorted, and the line of lanes that they are on."""

    line: Line
    start: Int64Array
    end: Int64Array

    @classmethod
    def of(cls, lane: Int64Array, waiting: _Waiting, windows: _Lanes) -> _Edges:
        """The edges of queued intervals; `lane` is that of every operation."""
        line = Line.over((windows.start, waiting.start), (windows.end, waiting.end))
        edges = [line.at(lane[waiting.op], edge) for edge in (waiting.start, waiting.end)]
        for edge in edges:
            edge.sort()
        return cls(line, *edges)


def _depths(edges: _Edges, windows: _Lanes) -> tuple[npt.NDArray[np.float64], Int64Array, npt.NDArray[np.float64]]:
    """Mean depth, maximum depth and share of time with an empty queue in each window, shape ``(w,)`` each."""
    line, starts, ends = edges
    opens, closes = (line.at(windows.lane, edge) for edge in (windows.start, windows.end))
    times = np.concatenate((starts, ends, opens, closes))
    times.sort()
    count, window_ns = len(opens), np.maximum(windows.end - windows.start, 1)
    total, maximum, dry = (np.zeros(count, dtype=np.int64) for _ in range(3))
    for low in range(0, max(len(times) - 1, 0), _BLOCK):
        time_ns, length = times[low : low + _BLOCK], np.diff(times[low : low + _BLOCK + 1])
        time_ns = time_ns[: len(length)]
        window = np.searchsorted(opens, time_ns, side="right") - 1
        inside = (length > 0) & (window >= 0)
        inside[inside] = time_ns[inside] < closes[window[inside]]
        time_ns, length, window = time_ns[inside], length[inside], window[inside]
        depth = np.searchsorted(starts, time_ns, side="right") - np.searchsorted(ends, time_ns, side="right")
        total += exact_sums(window, depth * length, count)
        np.maximum.at(maximum, window, depth)
        dry += exact_sums(window[depth == 0], length[depth == 0], count)
    return total / window_ns, maximum, dry / window_ns
