"""The critical path of a step: the chain of dependencies that determines its duration.

The search goes backwards from the end of the last operation. An operation starts at its time for one of three reasons:
the previous operation on its stream ended last (the device was busy), an operation on another stream ended just then
(it waited for that one), or its launching call returned last (the host was late). If the host was late, the path
continues on the host back to the end of the last call in which the launching thread waited for the device, and from
there with the operation that the call waited for. Host time on the path gets the same causes as idle gaps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.attribution import Attribution, range_owners
from nvprof_kit._analysis.attribution.intervals import NONE, Bools
from nvprof_kit._analysis.attribution.steps import Windows, median_place
from nvprof_kit._analysis.breakdown.host import HostActivity, HostCalls, Stretch
from nvprof_kit._trace.schema import Trace

_GPU, _HOST, _WAIT = range(3)


class _Piece(NamedTuple):
    """A segment of the path: its kind, times, and its operation or thread."""

    sort: int
    start: int
    end: int
    op: int
    tid: int


def median_window(windows: Windows, is_shown: Bools) -> int:
    """The step of median duration, as an index of a window; the longest window if there are no steps.

    Args:
        windows: The steps.
        is_shown: The step instances to consider.
    """
    length = windows.end - windows.start
    steps = np.flatnonzero(np.append(is_shown, False)[windows.instance])
    if not len(steps):
        return int(length.argmax())
    return int(steps[median_place(length[steps])])


def critical_path(
    trace: Trace, attribution: Attribution, windows: Windows, host: HostCalls, window: int
) -> pd.DataFrame:
    """The critical path of one step on one device, by layer and phase, with its columns, the longest first.

    Args:
        trace: The capture, with the column ``stream`` and the table ``calls``.
        attribution: The owner of each operation.
        windows: The steps.
        host: The calls.
        window: The step, an index into `windows`.
    """
    path = _Walk(trace, windows, host, window).pieces()
    sort, start, end, op, tid = (np.array(column, dtype=np.int64) for column in zip(*path, strict=True))
    pid = windows.devices[int(windows.device[window])].pid
    # what the host does in its segments, cut as idle gaps are
    host_tid, host_start, host_end = (values[sort == _HOST] for values in (tid, start, end))
    activity = HostActivity(trace, host, attribution.ranges, (host_start, host_end), by_function=False)
    stretch = Stretch(activity, int(min(host_start, default=0)), int(max(host_end, default=0)))
    pieces = stretch.pieces(np.full(len(host_tid), pid), host_tid, host_start, host_end)
    pieces = pieces.of(np.argsort(pieces.interval, kind="stable"))
    layers, phases = range_owners(attribution.ranges)
    operator = stretch.operator[pieces.call]
    names = np.array(host.names, dtype=object)[host.name[operator]]
    on_host = pd.DataFrame(
        {
            "layer": np.asarray(layers)[stretch.range[pieces.state]],
            "phase": np.asarray(phases)[stretch.range[pieces.state]],
            "operator": np.where(operator == NONE, "", names),
            "sort": _HOST,
            "ns": pieces.end - pieces.start,
        }
    )
    rows = np.flatnonzero(sort != _HOST)
    layer, phase = (np.asarray(column[op[rows]]) for column in attribution.owners)
    frame = pd.DataFrame(
        {"layer": layer, "phase": phase, "operator": "", "sort": sort[rows], "ns": (end - start)[rows]}
    )
    frame = pd.concat([on_host, frame], ignore_index=True)
    for index, name in enumerate(("gpu_ns", "host_ns", "wait_ns")):
        frame[name] = frame["ns"].where(frame["sort"] == index, 0)
    frame = frame.drop(columns=["sort", "ns"])
    table = frame.groupby(["layer", "phase", "operator"], sort=False).sum()
    total = table.sum(axis=1)
    table["share"] = total / max(int(windows.end[window] - windows.start[window]), 1)
    return table.reset_index().sort_values("share", ascending=False, kind="stable", ignore_index=True)


class _Walk:
    """The backward search through one step; operations are indices into `Trace.ops`."""

    def __init__(self, trace: Trace, windows: Windows, host: HostCalls, window: int) -> None:
        start, end = trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
        self._low, self._high = int(windows.start[window]), int(windows.end[window])
        here = (windows.of_op == windows.device[window]) & (start < self._high) & (end > self._low)
        rows = np.flatnonzero(here & (end > start))  # an operation of zero length delays nothing and cannot go back
        self._ops = rows[np.argsort(end[rows], kind="stable")]
        self._start, self._end = start[self._ops], end[self._ops]
        self._stream = trace.ops["stream"].to_numpy()[self._ops]
        self._call = host.of_op[self._ops]
        order = np.lexsort((self._start, self._stream))
        follows = self._stream[order][1:] == self._stream[order][:-1]
        self._before = np.full(len(order), NONE, dtype=np.int64)  # the previous operation of each on its stream
        self._before[order[1:][follows]] = order[:-1][follows]
        self._host = host
        waits = np.flatnonzero(host.waits[:-1])
        waits = waits[np.argsort(host.start[waits], kind="stable")]
        self._waits = {tid: waits[host.tid[waits] == tid] for tid in np.unique(host.tid[self._call]).tolist()}

    def pieces(self) -> list[_Piece]:
        """The path from the end of the step back to its start, without gaps or overlaps."""
        pieces: list[_Piece] = []
        now = self._high
        op = self._ended_by(now)
        tid = int(self._host.tid[self._call[op]]) if op >= 0 else NONE
        if op < 0:
            return [_Piece(_HOST, self._low, now, NONE, tid)]
        if self._end[op] < now:  # the host continued after the last operation
            pieces.append(_Piece(_HOST, int(self._end[op]), now, NONE, tid))
            now = int(self._end[op])
        while now > self._low and op >= 0:
            start = max(int(self._start[op]), self._low)
            if start < now:
                pieces.append(_Piece(_GPU, start, now, int(self._ops[op]), NONE))
                now = start
            if now <= self._low:
                break
            op, now = self._back(op, now, pieces)
        if now > self._low:
            pieces.append(_Piece(_HOST, self._low, now, NONE, tid))
        return pieces

    def _ended_by(self, time_ns: int) -> int:
        """The operation that ended last at or before a time, or `NONE`."""
        return int(np.searchsorted(self._end, time_ns, side="right")) - 1

    def _back(self, op: int, now: int, pieces: list[_Piece]) -> tuple[int, int]:
        """The operation that the start of an operation waited for, and when it ended."""
        call, before = int(self._call[op]), int(self._before[op])
        launched = int(self._host.end[call]) if call >= 0 else self._low
        ended = min(int(self._end[before]), now) if before >= 0 else self._low
        other = self._ended_by(now)
        if other >= 0 and self._end[other] > max(ended, launched):  # another stream ended last
            before, ended = other, int(self._end[other])
        if ended >= launched or call < 0:
            if ended < now:
                pieces.append(_Piece(_WAIT, max(ended, self._low), now, int(self._ops[op]), NONE))
            return (before if ended > self._low else NONE), max(ended, self._low)
        launched = min(launched, now)
        if launched < now:
            pieces.append(_Piece(_WAIT, max(launched, self._low), now, int(self._ops[op]), NONE))
        # back along the thread to the last call in which it waited for the device
        launched, tid = max(launched, self._low), int(self._host.tid[call])
        waits, ended, awaited = self._waits[tid], self._low, NONE
        for wait in waits[: np.searchsorted(self._host.start[waits], launched)][::-1]:
            if self._host.end[wait] <= self._low:
                break
            other = self._ended_by(min(int(self._host.end[wait]), launched))
            if other >= 0 and self._end[other] > max(int(self._host.start[wait]), self._low):
                ended, awaited = int(self._end[other]), other
                break
        if ended < launched:
            pieces.append(_Piece(_HOST, ended, launched, NONE, tid))
        return awaited, ended
