"""Cuts idle gaps into pieces with a single host activity each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nvprof_kit._analysis.attribution.nesting import NONE, Int64Array, Line
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
        done: The innermost call or operator of the thread, a position in `Doing.rows`, or `NONE`.
        range: The innermost range, or `NONE`.
    """

    wait: Int64Array
    tid: Int64Array
    start: Int64Array
    end: Int64Array
    done: Int64Array
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
    reach: Int64Array
    begins: Changes
    ends: Changes


class Callers:
    """Finds the thread of a process that is in the CUDA API or calls it next. Work moves between threads, for example
    from the main thread to an autograd thread and back.
    """

    def __init__(self, host: HostCalls, done: Doing) -> None:
        self._host, self._done = host, done
        pids = list(host.threads.values())
        self._of_pid = {pid: self._calls(pid) for pid in sorted({pid for pid in pids if pids.count(pid) > 1})}

    def elsewhere(self, waits: Waits) -> Int64Array:
        """The waits in which another thread may be in a call, or may call next. In most captures these are few."""
        found = [np.zeros(0, dtype=np.int64)]
        for pid, calls in self._of_pid.items():
            mine = np.flatnonzero(waits.pid == pid)
            start, tid = waits.start[mine], waits.tid[mine]
            begun = np.searchsorted(calls.start, start, side="right")
            following = np.searchsorted(calls.start, waits.end[mine], side="left")
            others = self._host.tid[calls.row[following]] != tid
            found.append(mine[(following > begun) | (calls.reach[begun - 1] > start) | others])
        return np.concatenate(found)

    def parts(self, waits: Waits) -> Waits:
        """Cut waits of processes with several threads where a call begins or ends, and assign each part its thread."""
        mine = [(calls, np.flatnonzero(waits.pid == pid)) for pid, calls in self._of_pid.items()]
        found = [self._of_process(calls, waits.of(rows)) for calls, rows in mine]
        return Waits(*(np.concatenate(columns) for columns in zip(*found, strict=True)))

    def _of_process(self, calls: _Calls, waits: Waits) -> Waits:
        host = self._host
        cuts = [edges.inside(waits.pid, waits.start, waits.end) for edges in (calls.begins, calls.ends)]
        of, start, end = _cut(waits.start, waits.end, *(np.concatenate(both) for both in zip(*cuts, strict=True)))
        latest = calls.row[np.searchsorted(calls.start, start, side="right") - 1]
        following = calls.row[np.searchsorted(calls.start, end, side="left")]
        call = np.where(host.end[latest] > start, latest, following)
        tid = np.where(call == NONE, waits.tid[of], host.tid[call])
        return waits.of(of, tid=tid, start=start, end=end, first=self._done.of_threads.changes.before(tid, start))

    def _calls(self, pid: int) -> _Calls:
        host = self._host
        row = host.of_process(pid, self._done.rows)
        start, end = host.start[row], host.end[row]
        reach = np.full(len(row) + 1, np.iinfo(np.int64).min)
        np.maximum.accumulate(end, out=reach[:-1])
        # calls that follow one another end in their order: for memory, as there are a million
        ends = reach[:-1] if np.array_equal(reach[:-1], end) else np.sort(end, kind="stable")
        return _Calls(np.append(row, NONE), start, reach, _moments(pid, start), _moments(pid, ends))


def _moments(lane: int, moments: Int64Array) -> Changes:
    """Sorted times in one lane."""
    if not len(moments):
        return Changes(np.zeros(0, dtype=np.int64), Line(0, 2), moments)
    origin = min(int(moments[0]), 0)  # 0 of nearly every capture, so that the times are their own keys: for memory
    return Changes(
        np.array([lane]), Line(origin, int(moments[-1]) - origin + 2), moments - origin if origin else moments
    )


def pieces_of(waits: Waits, done: Doing, callers: Callers) -> Pieces:
    """Cut waits into pieces. If no call, operator or layer is open on the launching thread, use the thread that calls
    the CUDA API next, if it was in a call, operator, layer or phase.
    """
    found = _of_threads(waits, done)
    rows = np.flatnonzero((found.done == NONE) & ~done.in_layer[found.range])
    wait = found.wait[rows]
    empty = waits.of(wait, gap=wait, start=found.start[rows], end=found.end[rows])
    chosen = callers.elsewhere(empty)
    if not len(chosen):
        return found
    parts = callers.parts(empty.of(chosen))
    others = _of_threads(parts, done)
    wait = parts.gap[others.wait]
    lacking, launcher = (others.done == NONE) & ~done.in_phase[others.range], waits.tid[wait]
    own = done.ranges.nesting.innermost(launcher, others.start)
    resolved = others._replace(
        wait=wait, tid=np.where(lacking, launcher, others.tid), range=np.where(lacking, own, others.range)
    )
    kept = np.ones(len(found.wait), dtype=bool)
    kept[rows[chosen]] = False
    both = zip(found.of(np.flatnonzero(kept)), resolved, strict=True)
    joined = Pieces(*(np.concatenate(columns) for columns in both))
    return joined.of(np.lexsort((joined.start, joined.wait)))


def _of_threads(waits: Waits, done: Doing) -> Pieces:
    timeline = done.of_threads
    row, start, state = timeline.pieces(waits.tid, waits.start, waits.end, waits.first)
    end = _ends(row, start, waits.end)
    cuts = [done.profiler.changes.inside(waits.pid[row], start, end)]
    if (waits.late_until > waits.start).any():
        until = waits.late_until[row]
        limited = np.flatnonzero((until > start) & (until < end))
        cuts.append((limited, until[limited]))
    of, moment = (np.concatenate(both) for both in zip(*cuts, strict=True))
    if len(of):
        of, start, end = _cut(start, end, of, moment)
        row, state = row[of], state[of]
    return Pieces(row, waits.tid[row], start, end, *(one[state] for one in timeline.states))


def _cut(
    start: Int64Array, end: Int64Array, row: Int64Array, moment: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Cut intervals at moments inside them: the interval, start and end of each part."""
    order = np.lexsort((moment, row))
    row, moment = row[order], moment[order]
    fresh = np.ones(len(row), dtype=bool)
    fresh[1:] = (row[1:] != row[:-1]) | (moment[1:] != moment[:-1])
    row, moment = row[fresh], moment[fresh]
    of = np.repeat(np.arange(len(start)), np.bincount(row, minlength=len(start)) + 1)
    begin = start[of]
    begin[row + 1 + np.arange(len(row))] = moment
    return of, begin, _ends(of, begin, end)


def _ends(of: Int64Array, start: Int64Array, end: Int64Array) -> Int64Array:
    """The ends of parts of intervals: the start of the next part, or the end of the interval."""
    following = np.append(start[1:], 0)[: len(of)]
    last = np.append(of[1:] != of[:-1], True)[: len(of)]
    return np.where(last, end[of], following)
