"""How long the steps take without the profiler, and how long without some of their work.

The host and a GPU are run again by what they depend on. The host goes from one call that launches work to the next, and
waits in some calls for the GPU. An operation starts when its call has launched it and those before it are done. Of the
host's time, what a profiler adds is taken out.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import Int64Array
from nvprof_kit._analysis.breakdown.host import HostCalls

if TYPE_CHECKING:
    import pandas as pd

LAUNCH_NS = 3_000
"""A call that launches a kernel takes about this long where no profiler traces it."""

TRACED_LAUNCH_NS = 6_000
"""It takes about this long where one does; a host that takes longer is slower in all that it does, for others' work,
the profiler's among it.
"""

ON_THE_WAY_NS = 1_000_000
"""A host that makes no call for longer than this sleeps or reads, which is no slower under a profiler."""

RETURN_NS, START_NS = 5_000, 2_000
"""A wait returns so long after what it waits for; between two operations that are launched a GPU idles no longer."""

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
    """

    def __init__(self, host: HostCalls, ops: pd.DataFrame, skipped: Intervals) -> None:
        call = host.of_op[ops.index.to_numpy()]
        start, end = (ops[name].to_numpy().astype(float) for name in ("start_ns", "end_ns"))
        ready = np.maximum.accumulate(np.append(start[:1], end[:-1]))
        first_ns = min(start.min(), host.start[call[call >= 0]].min(initial=int(start.min())))
        calls, skipped_calls = _launches_and_waits(host, call, first_ns, end.max())
        self.calls = calls
        call_start, call_end = host.start[calls].astype(float), host.end[calls].astype(float)
        lengths = (call_end - call_start)[host.named("LaunchKernel", calls)]
        launch_ns = int(np.median(lengths)) if len(lengths) else 0
        # what tracing adds to each call, and how much slower the host is in all
        added_ns = max(launch_ns - LAUNCH_NS, 0)
        slower = max(launch_ns / TRACED_LAUNCH_NS, 1)
        between_ns = np.maximum(call_start - np.append(first_ns, call_end[:-1]) - added_ns * skipped_calls, 0)
        inside_ns = np.maximum(call_end - call_start - added_ns, np.minimum(call_end - call_start, LAUNCH_NS / 3))
        is_skipped = np.searchsorted(skipped[0], call_start, side="right") > np.searchsorted(skipped[1], call_start)
        self._between_ns = np.where(between_ns < ON_THE_WAY_NS, between_ns / slower, between_ns) * ~is_skipped
        self._inside_ns = np.where(inside_ns < ON_THE_WAY_NS, inside_ns / slower, inside_ns) * ~is_skipped
        self._first_ns, self._call_start, self._call_end = first_ns, call_start, call_end
        # an operation without a call was launched long ago
        self._launch = np.where(call >= 0, np.searchsorted(call_start, host.start[call], side="right") - 1, -1)
        launched = np.append(call_end, -np.inf)[self._launch]
        is_late = launched > ready
        self._alone_ns = np.maximum(end - np.maximum(ready, start), 0)
        usual_ns = float(np.median((start - launched)[is_late])) if is_late.any() else 0.0
        self._delay_ns = np.where(is_late, start - launched, min(usual_ns, START_NS))
        idle_ns = np.clip(start - ready, 0, None)
        between_ops_ns = float(np.median(idle_ns[~is_late])) if not is_late.all() else 0.0
        gap_ns = np.where(is_late, np.minimum(idle_ns, min(between_ops_ns, START_NS)), idle_ns)
        gap_ns[(self._launch >= 0) & ~is_late & (idle_ns > ON_THE_WAY_NS)] = START_NS
        self._work_ns = np.cumsum(self._alone_ns + gap_ns)
        self._waits = np.flatnonzero(host.waits[calls])
        self._waits_before = np.searchsorted(self._waits, self._launch).astype(np.int32)  # each launch
        self._copies = host.named("Memcpy.*Async", calls)
        wait_end = call_end[self._waits]
        last_done = np.searchsorted(np.maximum.accumulate(end), wait_end + START_NS / 2, side="right")
        self._launched_before = np.searchsorted(np.maximum.accumulate(self._launch), self._waits, side="right")
        self._awaited = np.minimum(last_done, self._launched_before) - 1
        awaited_end = np.append(end, -np.inf)[self._awaited]
        self._has_waited = awaited_end > call_start[self._waits]
        self._return_ns = np.where(self._has_waited, np.clip(wait_end - awaited_end, 0, 4 * RETURN_NS), RETURN_NS)
        self.gpu_ns = float(self._alone_ns.sum() + gap_ns.sum())

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
        return max(self.length_ns - self._run(np.isin(self.calls, waits), intervals), 0)

    def _run(self, is_gone: npt.NDArray[np.bool_], intervals: Intervals) -> float:
        between_ns, inside_ns = self._between_ns, self._inside_ns
        if len(intervals[0]):
            before = np.append(self._first_ns, self._call_end[:-1])
            start, end = (_outside(times, *intervals) for times in (self._call_start, self._call_end))
            left = np.append(_outside(before[:1], *intervals), end[:-1])
            between_ns = between_ns * (start - left) / np.maximum(self._call_start - before, 1)
            inside_ns = inside_ns * (end - start) / np.maximum(self._call_end - self._call_start, 1)
        reads = self._copies & np.append(is_gone[1:], False)  # what copies a number goes with the wait for it
        between_ns, inside_ns = np.where(reads, 0, between_ns), np.where(reads, 0, inside_ns)
        host_ns = np.cumsum(between_ns + inside_ns)  # when each call returns, if none waits
        work_ns, number = self._work_ns, self._waits_before
        earliest = np.append(host_ns, -np.inf)[self._launch] + self._delay_ns + self._alone_ns - work_ns
        end_ns, late_ns, latest, position = np.empty(len(work_ns)), np.zeros(len(self._waits) + 1), 0.0, 0
        for wait, stop in enumerate([*self._launched_before.tolist(), len(work_ns)]):
            if stop > position:
                rows = slice(position, stop)
                from_launch = earliest[rows] + late_ns[np.minimum(number[rows], wait)]
                from_launch[0] = max(from_launch[0], latest)
                end_ns[rows] = work_ns[rows] + np.maximum.accumulate(from_launch)
                latest, position = end_ns[stop - 1] - work_ns[stop - 1], stop
            if wait < len(self._waits):
                row, awaited = self._waits[wait], self._awaited[wait]
                arrived = host_ns[row] - inside_ns[row] + late_ns[wait]
                if is_gone[row]:
                    returned = arrived
                else:
                    own_ns = min(inside_ns[row], RETURN_NS) if self._has_waited[wait] else inside_ns[row]
                    returned = arrived + own_ns
                    if 0 <= awaited < position:
                        returned = max(returned, end_ns[awaited] + self._return_ns[wait])
                late_ns[wait + 1] = returned - host_ns[row]
        return float(max(end_ns[-1], host_ns[-1] + late_ns[-1]))


def _launches_and_waits(
    host: HostCalls, call: Int64Array, first_ns: float, last_ns: float
) -> tuple[Int64Array, Int64Array]:
    """The calls of a process between two times that launch or wait, none inside another, and how many others are before
    each.
    """
    calls = host.of_process(int(host.pid[call[call >= 0]][0]), np.arange(len(host.start) - 1))
    calls = calls[(host.end[calls] > first_ns) & (host.start[calls] < last_ns)]
    until = np.maximum.accumulate(np.append(first_ns, host.end[calls]))[:-1]
    calls = calls[host.start[calls] >= until]
    number = np.flatnonzero(host.waits[calls] | np.isin(calls, call))
    return calls[number], np.diff(number, prepend=-1) - 1


def _outside(times: Times, start: Int64Array, end: Int64Array) -> Times:
    """How much of the time before each moment lies outside of intervals."""
    number = np.searchsorted(start, times, side="right")
    before_ns = np.append(0, np.cumsum(end - start))[number]
    still_ns = np.maximum(np.append(0, end)[number] - times, 0) * (number > 0)
    outside: Times = times - before_ns + still_ns
    return outside
