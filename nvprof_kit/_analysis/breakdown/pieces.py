"""Cuts idle gaps into pieces with a single host activity each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array, Line
from nvprof_kit._analysis.breakdown.causes import Doing
from nvprof_kit._analysis.breakdown.host import HostCalls
from nvprof_kit._analysis.breakdown.lookups import Changes


class Waits(NamedTuple):
    """Parts of gaps in which the device waits for a thread, shape ``(n,)`` each.

    Attributes:
        gap: Index of the gap.
        pid, tid: Process and thread of the launch that ends the gap.
        start, end: In ns; `end` is after `start`.
        first: What the thread does at the start, an index into the states of `Doing.of_threads`.
        late_until: Until when the thread is late because it waited for the device before.
    """

    gap: Int64Array
    pid: Int64Array
    tid: Int64Array
    start: Int64Array
    end: Int64Array
    first: Int64Array
    late_until: Int64Array

    def of(self, rows: Int64Array, **other: Int64Array) -> Waits:
        """Select waits, with other values in some columns."""
        return Waits(
            **{name: other[name] if name in other else values[rows] for name, values in self._asdict().items()}
        )


class Pieces(NamedTuple):
    """Pieces of waits, by wait and time, shape ``(m,)`` each.

    Attributes:
        wait: The wait of each, an index into the waits.
        tid: The thread to which its time is attributed.
        start, end: In ns.
        call: The innermost call or operator of the thread, a position in `Doing.rows`, or `NONE`.
        range: The innermost range, or `NONE`.
    """

    wait: Int64Array
    tid: Int64Array
    start: Int64Array
    end: Int64Array
    call: Int64Array
    range: Int64Array

    def of(self, rows: Int64Array) -> Pieces:
        """Select pieces."""
        return Pieces(*(column[rows] for column in self))


class _Calls(NamedTuple):
    """The calls of a process by start, with `NONE` appended; their starts; until when one of each and those before it
    is open, with the earliest time appended; and the moments at which one begins and ends.
    """

    row: Int64Array
    start: Int64Array
    latest_end: Int64Array
    starts: Changes
    ends: Changes


class Callers:
    """Finds the thread of a process that is in the CUDA API or calls it next. Work moves between threads, for example
    from the main thread to an autograd thread and back.
    """

    def __init__(self, host: HostCalls, activity: Doing) -> None:
        self._host, self._activity = host, activity
        pids = list(host.threads.values())
        self._of_pid = {pid: self._calls(pid) for pid in sorted({pid for pid in pids if pids.count(pid) > 1})}

    def elsewhere(self, waits: Waits) -> Int64Array:
        """The waits in which another thread may be in a call, or may call next. In most captures these are few."""
        rows = [np.zeros(0, dtype=np.int64)]
        for pid, calls in self._of_pid.items():
            of_process = np.flatnonzero(waits.pid == pid)
            start, tid = waits.start[of_process], waits.tid[of_process]
            begun = np.searchsorted(calls.start, start, side="right")
            following = np.searchsorted(calls.start, waits.end[of_process], side="left")
            of_other_threads = self._host.tid[calls.row[following]] != tid
            rows.append(of_process[(following > begun) | (calls.latest_end[begun - 1] > start) | of_other_threads])
        return np.concatenate(rows)

    def parts(self, waits: Waits) -> Waits:
        """Cut waits of processes with several threads where a call begins or ends, and assign each part its thread."""
        of_processes = [(calls, np.flatnonzero(waits.pid == pid)) for pid, calls in self._of_pid.items()]
        parts = [self._of_process(calls, waits.of(rows)) for calls, rows in of_processes]
        return Waits(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def _of_process(self, calls: _Calls, waits: Waits) -> Waits:
        host = self._host
        cuts = [edges.inside(waits.pid, waits.start, waits.end) for edges in (calls.starts, calls.ends)]
        of, start, end = _cut(waits.start, waits.end, *(np.concatenate(both) for both in zip(*cuts, strict=True)))
        latest = calls.row[np.searchsorted(calls.start, start, side="right") - 1]
        following = calls.row[np.searchsorted(calls.start, end, side="left")]
        call = np.where(host.end[latest] > start, latest, following)
        tid = np.where(call == NONE, waits.tid[of], host.tid[call])
        return waits.of(of, tid=tid, start=start, end=end, first=self._activity.of_threads.changes.before(tid, start))

    def _calls(self, pid: int) -> _Calls:
        host = self._host
        row = host.of_process(pid, self._activity.rows)
        start, end = host.start[row], host.end[row]
        latest_end = np.full(len(row) + 1, np.iinfo(np.int64).min)
        np.maximum.accumulate(end, out=latest_end[:-1])
        # calls that follow one another end in their order: for memory, as there are a million
        ends = latest_end[:-1] if np.array_equal(latest_end[:-1], end) else np.sort(end, kind="stable")
        return _Calls(np.append(row, NONE), start, latest_end, _moments(pid, start), _moments(pid, ends))


def _moments(lane: int, times: Int64Array) -> Changes:
    """Sorted times in one lane."""
    if not len(times):
        return Changes(np.zeros(0, dtype=np.int64), Line(0, 2), times)
    origin = min(int(times[0]), 0)  # 0 of nearly every capture, so that the times are their own keys: for memory
    return Changes(np.array([lane]), Line(origin, int(times[-1]) - origin + 2), times - origin if origin else times)


def pieces_of(waits: Waits, activity: Doing, callers: Callers) -> Pieces:
    """Cut waits into pieces. If no call, operator or layer is open on the launching thread, use the thread that calls
    the CUDA API next, if it was in a call, operator, layer or phase.
    """
    pieces = _of_threads(waits, activity)
    rows = np.flatnonzero((pieces.call == NONE) & ~activity.in_layer[pieces.range])
    wait = pieces.wait[rows]
    empty = waits.of(wait, gap=wait, start=pieces.start[rows], end=pieces.end[rows])
    chosen = callers.elsewhere(empty)
    if not len(chosen):
        return pieces
    parts = callers.parts(empty.of(chosen))
    of_callers = _of_threads(parts, activity)
    wait = parts.gap[of_callers.wait]
    lacking, launcher = (of_callers.call == NONE) & ~activity.in_phase[of_callers.range], waits.tid[wait]
    launcher_range = activity.ranges.nesting.innermost(launcher, of_callers.start)
    resolved = of_callers._replace(
        wait=wait,
        tid=np.where(lacking, launcher, of_callers.tid),
        range=np.where(lacking, launcher_range, of_callers.range),
    )
    is_kept = np.ones(len(pieces.wait), dtype=bool)
    is_kept[rows[chosen]] = False
    both = zip(pieces.of(np.flatnonzero(is_kept)), resolved, strict=True)
    joined = Pieces(*(np.concatenate(columns) for columns in both))
    return joined.of(np.lexsort((joined.start, joined.wait)))


def _of_threads(waits: Waits, activity: Doing) -> Pieces:
    timeline = activity.of_threads
    row, start, state = timeline.pieces(waits.tid, waits.start, waits.end, waits.first)
    end = _ends(row, start, waits.end)
    cuts = [activity.profiler.changes.inside(waits.pid[row], start, end)]
    if (waits.late_until > waits.start).any():
        until = waits.late_until[row]
        limited = np.flatnonzero((until > start) & (until < end))
        cuts.append((limited, until[limited]))
    of, cut_time = (np.concatenate(both) for both in zip(*cuts, strict=True))
    if len(of):
        of, start, end = _cut(start, end, of, cut_time)
        row, state = row[of], state[of]
    return Pieces(row, waits.tid[row], start, end, *(states[state] for states in timeline.states))


def _cut(
    start: Int64Array, end: Int64Array, row: Int64Array, cut_time: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Cut intervals at moments inside them: the interval, start and end of each part."""
    order = np.lexsort((cut_time, row))
    row, cut_time = row[order], cut_time[order]
    is_first = np.ones(len(row), dtype=bool)
    is_first[1:] = (row[1:] != row[:-1]) | (cut_time[1:] != cut_time[:-1])
    row, cut_time = row[is_first], cut_time[is_first]
    of = np.repeat(np.arange(len(start)), np.bincount(row, minlength=len(start)) + 1)
    piece_start = start[of]
    piece_start[row + 1 + np.arange(len(row))] = cut_time
    return of, piece_start, _ends(of, piece_start, end)


def _ends(of: Int64Array, start: Int64Array, end: Int64Array) -> Int64Array:
    """The ends of parts of intervals: the start of the next part, or the end of the interval."""
    following = np.append(start[1:], 0)[: len(of)]
    last = np.append(of[1:] != of[:-1], True)[: len(of)]
    return np.where(last, end[of], following)
