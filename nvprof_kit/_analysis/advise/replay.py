"""How long the steps take without the profiler, and how long without some of their work.

The host and a GPU are run again: the host makes one call after another, and waits in some of them for the GPU; an
operation starts when its call has launched it and those before it are done. What a profiler adds to the host's time is
taken out.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import Cover, Int64Array
from nvprof_kit._analysis.breakdown.host import HostCalls

if TYPE_CHECKING:
    import pandas as pd

LAUNCH_NS = 3_000
"""A call that launches a kernel takes about this long where no profiler traces it."""

TRACED_LAUNCH_NS = 6_000
"""It takes about this long where one does; a host that takes longer is slowed by the profiler, or by other programs,
in all that it does.
"""

ASLEEP_NS = 1_000_000
"""A host that makes no call for longer than this sleeps or reads, which is no slower under a profiler."""

RETURN_NS = 5_000
"""A wait returns so long after what it waits for."""

START_NS = 2_000
"""A GPU idles no longer than this between two operations that are launched."""

Times = npt.NDArray[np.float64]
Intervals = tuple[Int64Array, Int64Array]


class Replay:
    """The operations of one process on one GPU, and the calls of that process.

    Args:
        host: The calls of the capture.
        ops: Those operations, rows of `Program.ops`, by their start.
        skipped: Start and end in ns of the steps between them that are not looked at.

    Attributes:
        calls: The calls that launch or wait, rows of `HostCalls`, none inside another, by their start.
        gpu_ns: How long the operations take if all are launched in time.
    """

    def __init__(self, host: HostCalls, ops: pd.DataFrame, skipped: Intervals) -> None:
        call = host.of_op[ops.index.to_numpy()]
        start, end = (ops[name].to_numpy().astype(float) for name in ("start_ns", "end_ns"))
        self._first_ns = min(start.min(), host.start[call[call >= 0]].min(initial=int(start.min())))
        self.calls, calls_between = _launches_and_waits(host, call, self._first_ns, end.max())
        self._call_start, self._call_end = (times[self.calls].astype(float) for times in (host.start, host.end))
        self._between_ns, self._inside_ns = self._unprofiled(host, calls_between, skipped)
        self._is_copy = host.named("Memcpy.*Async", self.calls)
        # the position in `calls` of what launched each operation; without a call it was launched long ago
        launch = np.searchsorted(self._call_start, host.start[call], side="right") - 1
        self._launch = np.where(call >= 0, launch, -1)
        self._time_operations(start, end)
        # each wait waits for the last operation that is launched before it and ends before it returns
        self._waits = np.flatnonzero(host.waits[self.calls])
        self._waits_before = np.searchsorted(self._waits, self._launch).astype(np.int32)  # the launch of an operation
        self._ops_before = np.searchsorted(np.maximum.accumulate(self._launch), self._waits, side="right")
        returned = self._call_end[self._waits]
        ended = np.searchsorted(np.maximum.accumulate(end), returned + START_NS / 2, side="right")
        self._awaited = np.minimum(ended, self._ops_before) - 1
        awaited_end = np.append(end, -np.inf)[self._awaited]
        self._has_waited = awaited_end > self._call_start[self._waits]
        self._return_ns = np.where(self._has_waited, np.clip(returned - awaited_end, 0, 4 * RETURN_NS), RETURN_NS)

    def _unprofiled(self, host: HostCalls, calls_between: Int64Array, skipped: Intervals) -> tuple[Times, Times]:
        """How long the host takes before each call and in it without the profiler; nothing in skipped steps."""
        start, end = self._call_start, self._call_end
        length_ns = end - start
        launches_ns = length_ns[host.named("LaunchKernel", self.calls)]
        launch_ns = int(np.median(launches_ns)) if len(launches_ns) else 0
        added_ns, slowdown = max(launch_ns - LAUNCH_NS, 0), max(launch_ns / TRACED_LAUNCH_NS, 1)
        before_ns = np.maximum(start - np.append(self._first_ns, end[:-1]) - added_ns * calls_between, 0)
        inside_ns = np.maximum(length_ns - added_ns, np.minimum(length_ns, LAUNCH_NS / 3))
        is_skipped = np.searchsorted(skipped[0], start, side="right") > np.searchsorted(skipped[1], start)
        before_ns, inside_ns = (
            np.where(times < ASLEEP_NS, times / slowdown, times) * ~is_skipped for times in (before_ns, inside_ns)
        )
        return before_ns, inside_ns

    def _time_operations(self, start: Times, end: Times) -> None:
        """How long each operation occupies the GPU, and starts after its launch or after the operation before."""
        launched = np.append(self._call_end, -np.inf)[self._launch]
        free = np.maximum.accumulate(np.append(start[:1], end[:-1]))  # when those before each are done
        is_late = launched > free
        self._busy_ns = np.maximum(end - np.maximum(free, start), 0)  # those that overlap count once
        usual_ns = float(np.median((start - launched)[is_late])) if is_late.any() else 0.0
        self._start_ns = np.where(is_late, start - launched, min(usual_ns, START_NS))
        idle_ns = np.clip(start - free, 0, None)
        usual_ns = float(np.median(idle_ns[~is_late])) if not is_late.all() else 0.0
        gap_ns = np.where(is_late, np.minimum(idle_ns, min(usual_ns, START_NS)), idle_ns)
        gap_ns[(self._launch >= 0) & ~is_late & (idle_ns > ASLEEP_NS)] = START_NS
        self._back_to_back_ns = np.cumsum(self._busy_ns + gap_ns)  # when each ends if all are launched in time
        self.gpu_ns = float(self._busy_ns.sum() + gap_ns.sum())

    @cached_property
    def length_ns(self) -> float:
        """How long it all takes without the profiler."""
        return self._run(np.zeros(len(self.calls), dtype=bool), (np.empty(0, np.int64), np.empty(0, np.int64)))

    def saved_ns(self, waits: Int64Array, intervals: Intervals) -> float:
        """How much shorter it is without some of it.

        Args:
            waits: Calls, rows of `HostCalls`, in which the host no longer waits.
            intervals: Start and end in ns of the host's time that vanishes, in order, none in another.
        """
        is_gone = np.isin(self.calls, waits)
        if not is_gone.any() and not len(intervals[0]):
            return 0.0
        return max(self.length_ns - self._run(is_gone, intervals), 0)

    def _run(self, is_gone: npt.NDArray[np.bool_], intervals: Intervals) -> float:
        """How long it takes if these of `calls` do not wait, and the host's time in these intervals vanishes."""
        between_ns, inside_ns = self._between_ns, self._inside_ns
        if len(intervals[0]):
            cover, lane = Cover(np.zeros_like(intervals[0]), *intervals), np.zeros_like(self.calls)
            before = np.append(self._first_ns, self._call_end[:-1]).astype(np.int64)
            start, end = self._call_start.astype(np.int64), self._call_end.astype(np.int64)
            remaining_ns = start - before - cover.inside(lane, before, start)
            between_ns = between_ns * remaining_ns / np.maximum(start - before, 1)
            inside_ns = inside_ns * (end - start - cover.inside(lane, start, end)) / np.maximum(end - start, 1)
        reads = self._is_copy & np.append(is_gone[1:], False)  # what copies a number goes with the wait for it
        between_ns, inside_ns = np.where(reads, 0, between_ns), np.where(reads, 0, inside_ns)
        host_ns = np.cumsum(between_ns + inside_ns)  # when each call returns, if none waits
        delay_ns = np.zeros(len(self._waits) + 1)  # by how much the waits up to each delay the host
        planned = self._back_to_back_ns
        # by how much later than planned each operation ends for its launch, if the host never waits
        late_ns = np.append(host_ns, -np.inf)[self._launch] + self._start_ns + self._busy_ns - planned
        end_ns, latest_ns, position = np.empty(len(planned)), 0.0, 0
        for wait, stop in enumerate([*self._ops_before.tolist(), len(planned)]):
            if stop > position:  # the operations that are launched before this wait
                rows = slice(position, stop)
                behind_ns = late_ns[rows] + delay_ns[np.minimum(self._waits_before[rows], wait)]
                behind_ns[0] = max(behind_ns[0], latest_ns)
                end_ns[rows] = planned[rows] + np.maximum.accumulate(behind_ns)
                latest_ns, position = end_ns[stop - 1] - planned[stop - 1], stop
            if wait == len(self._waits):
                break
            row, awaited = self._waits[wait], self._awaited[wait]
            returned = host_ns[row] - inside_ns[row] + delay_ns[wait]
            if not is_gone[row]:
                returned += min(inside_ns[row], RETURN_NS) if self._has_waited[wait] else inside_ns[row]
                if 0 <= awaited < position:
                    returned = max(returned, end_ns[awaited] + self._return_ns[wait])
            delay_ns[wait + 1] = returned - host_ns[row]
        return float(max(end_ns[-1], host_ns[-1] + delay_ns[-1]))


def _launches_and_waits(
    host: HostCalls, call: Int64Array, first_ns: float, last_ns: float
) -> tuple[Int64Array, Int64Array]:
    """The calls of a process between two times that launch or wait, none inside another, and how many others are before
    each.
    """
    calls = host.of_process(int(host.pid[call[call >= 0]][0]), np.arange(len(host.start) - 1))
    calls = calls[(host.end[calls] > first_ns) & (host.start[calls] < last_ns)]
    previous_end = np.maximum.accumulate(np.append(first_ns, host.end[calls]))[:-1]
    calls = calls[host.start[calls] >= previous_end]
    positions = np.flatnonzero(host.waits[calls] | np.isin(calls, call))
    return calls[positions], np.diff(positions, prepend=-1) - 1
