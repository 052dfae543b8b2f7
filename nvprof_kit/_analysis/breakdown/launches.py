"""Whether the host keeps the device busy: launches by layer, and the queue of launched operations that wait.

An operation is queued from the return of its launching call to its start. If the queue is empty, the device idles as
soon as its current work is done; if it is full, the host is far ahead.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.attribution import Attribution
from nvprof_kit._analysis.attribution.intervals import Bools, as_slice, exact_sums, median
from nvprof_kit._analysis.attribution.steps import Windows
from nvprof_kit._analysis.breakdown.columns import COLUMNS
from nvprof_kit._analysis.breakdown.devices import Intervals, levels
from nvprof_kit._analysis.breakdown.host import HostCalls
from nvprof_kit._trace.joins import distinct_rows
from nvprof_kit._trace.schema import Trace

_BOUND = 0.1
_LATE = ("launch", "unknown")


def launch_table(
    trace: Trace, attribution: Attribution, host: HostCalls, parts: pd.DataFrame, *, is_counted: Bools, of_parts: Bools
) -> pd.DataFrame:
    """Launches of the `counted` operations by layer and phase, with its columns; the longest idle first.

    Args:
        trace: The capture.
        attribution: The owner of each operation.
        host: The calls.
        parts: `nvprof_kit._analysis.breakdown.devices.Idle.parts`.
        is_counted: The operations to include, shape ``(n,)``.
        of_parts: The parts to include.
    """
    rows = as_slice(np.flatnonzero((host.of_op >= 0) & is_counted))  # with the launching call in the capture
    call, start, end = host.of_op[rows], *(trace.ops[name].to_numpy()[rows] for name in ("start_ns", "end_ns"))
    of_call = np.bincount(host.of_op[host.of_op >= 0], minlength=len(host.tid))  # operations of a graph share theirs
    call_ns = (host.end[call] - host.start[call]) // of_call[call]
    owners = [owner[rows] for owner in attribution.owners]
    codes, group = distinct_rows(*(owner.codes.astype(np.int64) for owner in owners))
    names = [owner.categories[code] for owner, code in zip(owners, codes, strict=True)]
    columns = {
        "ops": (count := np.bincount(group, minlength=len(codes[0]))),
        "gpu_ns": exact_sums(group, end - start, len(count)),
        "call_ns": exact_sums(group, call_ns, len(count)),
        "short_ops": np.bincount(group[end - start < call_ns], minlength=len(count)),
    }
    del call_ns  # to limit memory
    delay_ns = np.maximum(start - host.end[call], 0)[np.argsort(group, kind="stable")]
    by_group = np.split(delay_ns, np.cumsum(count)[:-1])
    columns["delay_ns"] = np.array([int(median(part)) for part in by_group if len(part)], dtype=np.int64)
    table = pd.DataFrame(columns, pd.MultiIndex.from_arrays(names, names=["layer", "phase"]))
    launch_gaps = parts.loc[parts["cause"].isin(_LATE) & of_parts, ["layer", "phase", "idle_ns"]]
    idle = launch_gaps.groupby(["layer", "phase"], observed=True, sort=False)["idle_ns"].sum()
    for each in (table, idle):
        each.index = pd.MultiIndex.from_frame(each.index.to_frame().astype(str))
    table = table.join(idle[idle > 0], how="outer").fillna(0).astype("int64")
    table["launch_bound"] = table["idle_ns"] > _BOUND * table["gpu_ns"]
    return table.reset_index().sort_values(["idle_ns", "gpu_ns"], ascending=False, kind="stable", ignore_index=True)


SLICES = 100
"""Number of equal slices of a step."""


def queue_by_window(trace: Trace, windows: Windows, host: HostCalls) -> pd.DataFrame:
    """The queue of the device, one row per window with its columns; averages are over the window's duration."""
    op, start, end = _queued(trace, host)
    return _depths((windows.device, windows.start, windows.end), (windows.of_op[op], start, end))


def queue_over_time(trace: Trace, windows: Windows, host: HostCalls, window: int) -> pd.DataFrame:
    """The queue of every stream through one window in `SLICES` slices, with its columns.

    Args:
        trace: The capture, with the column ``stream`` and the table ``calls``.
        windows: The steps.
        host: The calls.
        window: The step, an index into `windows`.
    """
    low, high, device = (int(values[window]) for values in (windows.start, windows.end, windows.device))
    runs = (trace.ops["start_ns"].to_numpy() < high) & (trace.ops["end_ns"].to_numpy() > low)
    stream = trace.ops["stream"].to_numpy()
    streams = np.unique(stream[(windows.of_op == device) & runs])
    op, start, end = _queued(trace, host)
    is_here = (windows.of_op[op] == device) & np.isin(stream[op], streams) & (start < high) & (end > low)
    edges = np.unique(np.linspace(low, high, SLICES + 1).round().astype(np.int64))
    lane = np.repeat(np.arange(len(streams)), len(edges) - 1)
    starts, ends = (np.tile(edge, len(streams)) for edge in (edges[:-1], edges[1:]))
    queued = np.searchsorted(streams, stream[op[is_here]]), start[is_here], end[is_here]
    table = _depths((lane, starts, ends), queued).assign(
        step=pd.array([int(windows.step[window]) if windows.in_step[window] else None] * len(lane), dtype="Int64"),
        process=windows.devices[device].process,
        device=windows.devices[device].device,
        stream=streams[lane],
        start_ns=starts,
        end_ns=ends,
    )
    return table[list(COLUMNS["queue"])]


def _queued(trace: Trace, host: HostCalls) -> Intervals:
    """The operations that are queued, with start and end of that time in ns."""
    start, end = host.end[host.of_op], trace.ops["start_ns"].to_numpy()
    op = np.flatnonzero((host.of_op >= 0) & (end > start))
    return op, start[op], end[op]


def _depths(windows: Intervals, queued: Intervals) -> pd.DataFrame:
    """Mean and maximum depth, and share of time with an empty queue, in each window."""
    count, window_ns = len(windows[0]), np.maximum(windows[2] - windows[1], 1)
    total, maximum, empty_ns = (np.zeros(count, dtype=np.int64) for _ in range(3))
    for window, _, length, depth in levels(windows, queued, np.ones(len(queued[0]), dtype=np.int8)):
        total += exact_sums(window, depth * length, count)
        np.maximum.at(maximum, window, depth)
        empty_ns += exact_sums(window[depth == 0], length[depth == 0], count)
    return pd.DataFrame({"queue_mean": total / window_ns, "queue_max": maximum, "queue_empty": empty_ns / window_ns})
