"""Cuts idle gaps into pieces with a single host activity each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nvprof_kit._analysis.attribution.lanes import Line
from nvprof_kit._analysis.attribution.nesting import NONE, Int64Array
from nvprof_kit._analysis.breakdown.causes import Doing
from nvprof_kit._analysis.breakdown.host import HostCalls
from nvprof_kit._analysis.breakdown.lookups import Changes


class Waits(NamedTuple):
    """Parts of gaps in which the device waits for a thread, shape ``(n,)`` each.

    Attributes:
        gap: Index of the gap.
        pid, launcher: Process and thread of the launch that ends the gap.
        tid: The thread to which the time is attributed.
        start, end: In ns; `end` is after `start`.
        late_until: Until when the thread is late because it waited for the device before.
    """

    gap: Int64Array
    pid: Int64Array
    launcher: Int64Array
    tid: Int64Array
    start: Int64Array
    end: Int64Array
    late_until: Int64Array

    def of(self, rows: Int64Array, **other: Int64Array) -> Waits:
        """Select waits, with other starts or ends."""
        return Waits(
            **{name: other[name] if name in other else values[rows] for name, values in self._asdict().items()}
        )


class Pieces(NamedTuple):
    """Pieces of waits, by gap and time, and the activity of their thread, shape ``(m,)`` each.

    Attributes:
        wait: The wait of each.
        done: The innermost call or operator, a position in `Doing.rows`, or `NONE`.
        range: The innermost range, or `NONE`.
    """

    wait: Waits
    done: Int64Array
    range: Int64Array


class Callers:
    """Finds the thread of a process that is in the CUDA API or calls it next. Work moves between threads, for example
    from the main thread to an autograd thread and back.
    """

    def __init__(self, host: HostCalls, done: Doing) -> None:
        self._host, self._rows = host, done.rows
        self._known: dict[int, tuple[Int64Array, Changes, Changes]] = {}
        pids = list(host.threads.values())
        self._several = sorted({pid for pid in pids if pids.count(pid) > 1})
        for pid in self._several:  # now, so that two threads do not find the same at once
            self._calls(pid)

    def parts(self, waits: Waits) -> Waits:
        """Cut waits where a thread of their process begins or ends a call, and assign each part its thread."""
        found = [waits.of(np.flatnonzero(~np.isin(waits.pid, self._several)))]
        for pid in self._several:
            mine = np.flatnonzero(waits.pid == pid)
            if len(mine) == len(waits.pid):  # most captures are of one process
                return self._of_process(pid, waits)
            if len(mine):
                found.append(self._of_process(pid, waits.of(mine)))
        return _joined(found)

    def _of_process(self, pid: int, waits: Waits) -> Waits:
        (calls, begins, ends), host = self._calls(pid), self._host
        start = begins.keys
        cuts = [edges.inside(waits.pid, waits.start, waits.end) for edges in (begins, ends)]
        row, moment = (np.concatenate(both) for both in zip(*cuts, strict=True))
        parts, _ = _cut(waits, (row, moment))
        before = np.searchsorted(start, parts.start, side="right") - 1
        latest = calls[before]
        following = calls[np.searchsorted(start, parts.end, side="left")]
        call = np.where(host.end[latest] > parts.start, latest, following)
        return parts._replace(tid=np.where(call == NONE, parts.launcher, host.tid[call]))

    def _calls(self, pid: int) -> tuple[Int64Array, Changes, Changes]:
        """The calls of a process by start, with `NONE` appended, and the moments at which one begins and ends."""
        if pid not in self._known:
            calls, host = self._host.of_process(pid, self._rows), self._host
            edges = _moments(pid, host.start[calls]), _moments(pid, np.sort(host.end[calls], kind="stable"))
            self._known[pid] = (np.append(calls, NONE), *edges)
        return self._known[pid]


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
    empty = (found.done == NONE) & ~done.in_layer[found.range]
    rows = np.flatnonzero(empty)
    if not len(rows):
        return found
    parts = callers.parts(found.wait.of(rows))
    others = _of_threads(parts, done)
    lacking = (others.done == NONE) & ~done.in_phase[others.range]
    launcher = others.wait.launcher
    own = done.ranges.nesting.innermost(launcher, others.wait.start)
    resolved = others.wait._replace(tid=np.where(lacking, launcher, others.wait.tid))
    wait = _joined([found.wait, resolved])
    chosen = np.flatnonzero(np.concatenate((~empty, np.ones(len(lacking), dtype=bool))))
    chosen = chosen[np.lexsort((wait.start[chosen], wait.gap[chosen]))]
    return Pieces(
        wait.of(chosen),
        np.concatenate((found.done, others.done))[chosen],
        np.concatenate((found.range, np.where(lacking, own, others.range)))[chosen],
    )


def _of_threads(waits: Waits, done: Doing) -> Pieces:
    timeline = done.of_threads
    row, start, state = timeline.pieces(waits.tid, waits.start, waits.end)
    wait = waits.of(row, start=start, end=_ends(row, start, waits.end))
    cuts = [done.profiler.changes.inside(wait.pid, wait.start, wait.end)]
    limited = np.flatnonzero((wait.late_until > wait.start) & (wait.late_until < wait.end))
    cuts.append((limited, wait.late_until[limited]))
    of, moment = (np.concatenate(both) for both in zip(*cuts, strict=True))
    if len(of):
        wait, within = _cut(wait, (of, moment))
        state = state[within]
    return Pieces(wait, *(one[state] for one in timeline.states))


def _cut(waits: Waits, cuts: tuple[Int64Array, Int64Array]) -> tuple[Waits, Int64Array]:
    """Cut waits at times inside them; also the wait that each part is of."""
    order = np.lexsort(cuts[::-1])
    row, moment = (column[order] for column in cuts)
    fresh = np.ones(len(row), dtype=bool)
    fresh[1:] = (row[1:] != row[:-1]) | (moment[1:] != moment[:-1])
    row, moment = row[fresh], moment[fresh]
    of = np.repeat(np.arange(len(waits.start)), np.bincount(row, minlength=len(waits.start)) + 1)
    start = waits.start[of]
    start[row + 1 + np.arange(len(row))] = moment
    return waits.of(of, start=start, end=_ends(of, start, waits.end)), of


def _ends(of: Int64Array, start: Int64Array, end: Int64Array) -> Int64Array:
    """The ends of parts of intervals: the start of the next part, or the end of the interval."""
    following = np.append(start[1:], 0)[: len(of)]
    last = np.append(of[1:] != of[:-1], True)[: len(of)]
    return np.where(last, end[of], following)


def _joined(parts: list[Waits]) -> Waits:
    return Waits(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
