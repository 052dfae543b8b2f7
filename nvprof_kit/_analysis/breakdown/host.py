"""What the host threads did: their calls, operators and ranges, and the causes of idle time that they stand for.

The innermost call, operator or range on the thread determines the cause. A call that loads code is one cause including
everything nested in it. Loading also takes time around the calls that show it: cuDNN builds a plan for a shape, or a
library unpacks its kernels, and then loads the result in microseconds. So loading extends to the thread's previous
and next call that launches, copies, allocates, frees or synchronizes, within the operator or range that contains the
call.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from nvprof_kit._analysis.attribution.attribution import Operations
from nvprof_kit._analysis.attribution.intervals import (
    NONE,
    Bools,
    Cover,
    Int64Array,
    Integers,
    Line,
    as_slice,
    inherit,
    moments_of,
    nest,
    touches,
)
from nvprof_kit._analysis.attribution.ranges import Ranges
from nvprof_kit._analysis.breakdown.columns import COLUMNS
from nvprof_kit._trace.frames import empty_frame
from nvprof_kit._trace.joins import few, launching_calls
from nvprof_kit._trace.schema import CALL_KINDS, Trace
from nvprof_kit.names import LAYER_CATEGORIES, Category

SYNCHRONIZING_COPIES = r"^(cu(da)?|hip)Mem(cpy|set)(?!.*Async)"
"""Copies that return only after the device has completed them, in any API's spelling, such as `hipMemcpyWithStream`."""

WAITS = rf"Synchronize|{SYNCHRONIZING_COPIES}"
"""Calls that return only after the device has completed work."""

ALLOCATIONS = r"(Malloc|MemAlloc|MemFree|HostAlloc|HostRegister|MemMap|MemCreate|^(cuda|hip)Free)"
"""Calls that allocate or free memory."""

LONG_NS = 100_000
"""A function lookup or an asynchronous copy returns immediately; one that takes this long loads code or waits."""

WAITING_SHARE, LAUNCHES_TO_JUDGE, AWAITED_NS = 0.9, 20, 3_000
"""Launches wait for their kernels if this share of a process's, and so many, return after the end of the kernel, and so
long after its start: a short kernel may also end before a slow call that waits for nothing.
"""

START_NS = 2_000
"""An operation starts no later than this after its launch, or after the one before it if it was launched by then."""


class HostCalls:
    """The calls of a capture, in table order; shape ``(c + 1,)`` each, with an entry for `NONE` appended.

    Attributes:
        pid, tid, start, end: Process, thread and times of each call; the last entries are `NONE` and 0, but that of
            `pid` is the process if there is only one.
        overhead, operator, system: Whether it is profiler overhead, a PyTorch operator, or a call of the operating
            system.
        names: The distinct names.
        name: Index into `names`; the last name is ''.
        threads: The threads with calls, and the process of each.
        of_op: The call that launched each operation, or `NONE`, shape ``(n,)``.
    """

    def __init__(self, trace: Trace) -> None:
        frame = empty_frame("calls") if trace.calls is None else trace.calls
        self._ops = trace.ops
        self.tid, self.start, self.end = (
            _shared(frame, name, of_none) for name, of_none in (("tid", NONE), ("start_ns", 0), ("end_ns", 0))
        )
        pid = frame["pid"].to_numpy()
        is_one = pid.strides == (0,) and len(pid) > 0  # which takes no memory for each row
        self.pid = np.broadcast_to(pid[0], len(self.tid)) if is_one else _shared(frame, "pid", NONE)
        self.overhead, self.operator, self.system = (
            np.append(frame["kind"].to_numpy() == CALL_KINDS.index(kind), False)
            for kind in ("overhead", "operator", "system")
        )
        self.names: list[str] = [*map(str, frame["name"].cat.categories), ""]
        narrow = np.int16 if len(self.names) <= np.iinfo(np.int16).max else np.int32
        self.name = np.append(frame["name"].cat.codes.to_numpy().astype(narrow), narrow(len(self.names) - 1))
        switches = np.flatnonzero(self.tid[:-1] != self.tid[1:])  # the last call of a thread before one of another
        tids, first = np.unique(self.tid[switches], return_index=True)
        self.threads: dict[int, int] = dict(zip(tids.tolist(), self.pid[switches[first]].tolist(), strict=True))
        correlation = frame["correlation"].to_numpy()
        rows = np.flatnonzero((correlation >= 0) & ~(self.overhead | self.operator)[:-1])
        chosen = as_slice(rows)
        calls = {"pid": self.pid[chosen], "correlation": correlation[chosen], "start_ns": self.start[chosen]}
        call = launching_calls(calls, self._ops)
        is_call = isinstance(chosen, slice) and not chosen.start
        self.of_op: Int64Array = call if is_call else np.append(rows, NONE)[call]

    def named(self, pattern: str, calls: Integers | slice = slice(None)) -> Bools:
        """Which calls have a name that matches a regular expression, in any case; all calls by default."""
        matches, name = np.array([bool(re.search(pattern, name, re.I)) for name in self.names]), self.name[calls]
        of_calls: Bools = matches.take(name) if matches.any() else np.zeros(len(name), dtype=bool)
        return of_calls

    @cached_property
    def launched(self) -> Int64Array:
        """When each call has done its own work: its end, but of launches that wait for their kernel, as all do with
        CUDA_LAUNCH_BLOCKING=1, the time of the launch, shape ``(c + 1,)``.
        """
        launched, call = self.end, self.of_op
        pid, starts, ends = (self._ops[name].to_numpy() for name in ("pid", "start_ns", "end_ns"))
        is_launch, is_waiting = self.named(_LAUNCHES, call), self.end[call] >= np.maximum(ends, starts + AWAITED_NS)
        for process in few(pid).tolist():
            of_process = is_launch & (pid == process)
            if of_process.sum() >= LAUNCHES_TO_JUDGE and is_waiting[of_process].mean() >= WAITING_SHARE:
                rows = np.flatnonzero(of_process & is_waiting)
                row, launched = call[rows], launched.copy()
                launched[row] = np.clip(starts[rows] - START_NS, self.start[row] + 1, self.end[row])
        return launched

    @cached_property
    def waits(self) -> Bools:
        """Calls that return only after the device has completed work: synchronizations, synchronizing copies,
        asynchronous copies of pageable memory that took `LONG_NS` or more, and launches that wait for their kernel,
        shape ``(c + 1,)``.
        """
        waits: Bools = self.named(WAITS) & ~(self.overhead | self.operator)
        if "host_memory" in self._ops:
            pageable = self.of_op[(self._ops["host_memory"] == "pageable").to_numpy()]
            waits[pageable[(self.end - self.start)[pageable] >= LONG_NS]] = True
            waits[NONE] = False
        waits[self.launched < self.end] = True
        return waits

    @cached_property
    def first_launches(self) -> Int64Array:
        """The call that launched each kernel for the first time, by process."""
        ops = self._ops
        start, pid = ops["start_ns"].to_numpy(), ops["pid"].to_numpy()
        names = len(ops["name"].cat.categories) + 1
        pids, process = np.unique(pid, return_inverse=True)
        key = process * names + ops["name"].cat.codes.to_numpy() + 1
        del process
        earliest = np.full(len(pids) * names, np.iinfo(np.int64).max)
        np.minimum.at(earliest, key, start)
        rows = np.flatnonzero(start == earliest[key])
        rows = rows[np.unique(key[rows], return_index=True)[1]]  # of those that start at once, the first in the table
        return self.of_op[rows]

    @cached_property
    def own_cause(self) -> npt.NDArray[np.int8]:
        """The cause of each call and operator by itself, an index into `NAMES`, or `NONE`, shape ``(c + 1,)``."""
        of_name, of_long = (
            np.array([_cause_of(name, patterns) for name in self.names], dtype=np.int8)
            for patterns in (_OF_NAMES, _OF_LONG_CALLS)
        )
        cause: npt.NDArray[np.int8] = of_name[self.name]
        long = np.flatnonzero(self.end - self.start >= LONG_NS)
        long = long[(of_long[self.name[long]] != NONE) & (cause[long] == NONE)]
        is_launch = self.named(_LAUNCHES, long)
        launches = long[is_launch]
        launches = launches[(self.end - self.start)[launches] >= LONG_LAUNCH_NS]
        if len(launches):  # few captures have one, and to find the first launches takes a while
            launches = launches[np.isin(launches, self.first_launches)]
        long = np.append(long[~is_launch], launches)
        cause[long] = of_long[self.name[long]]
        copies = np.flatnonzero(cause == CODE["copy"])
        cause[copies[self.waits[copies]]] = CODE["sync"]
        return cause

    @cached_property
    def first_calls(self) -> Int64Array:
        """The operators' first calls in each process that took much longer than their others."""
        operators = np.flatnonzero(self.operator[:-1])
        operators = operators[np.argsort(self.start[operators], kind="stable")]
        ns = pd.Series(self.end[operators] - self.start[operators])
        groups = ns.groupby([self.pid[operators], self.name[operators]])
        is_first = (groups.cumcount() == 0) & (groups.transform("size") > OTHERS) & (ns >= FIRST_NS)
        first: Int64Array = operators[(is_first & (ns >= FIRST_TIMES * groups.transform("median"))).to_numpy()]
        return first

    def of_process(self, pid: int, is_chosen: Bools) -> npt.NDArray[np.int32]:
        """A process's API calls among the chosen ones, by start, shape ``(m,)``."""
        is_call = is_chosen & (self.pid == pid) & ~(self.overhead | self.operator | self.system)
        calls = np.flatnonzero(is_call[:-1]).astype(np.int32)  # half the memory
        starts = self.start[as_slice(calls)]
        return calls if (starts[1:] >= starts[:-1]).all() else calls[np.argsort(starts, kind="stable")]


def host_of(operations: Operations) -> HostCalls:
    """The calls of a capture. In the last question, what joins them to the operations is freed, to limit memory; not if
    collectives or samples still need it.
    """
    trace, _, host = operations.trace, operations.attribution, HostCalls(operations.trace)
    if not any(table is not None and len(table) for table in (trace.collectives, trace.samples)):
        joining = ["correlation"]
        operations.forget(calls=joining, ops=joining, api=["start_ns", "tid", *joining])
    return host


def _shared(frame: pd.DataFrame, name: str, of_none: int) -> Int64Array:
    """A column of a table with an entry for `NONE` appended; the table's own column becomes a part of it, to limit
    memory.
    """
    values = np.append(frame[name].to_numpy(), of_none)
    frame[name] = pd.Series(values[:-1], frame.index, copy=False)
    return values


CAUSES: Mapping[str, str] = {
    name.removeprefix("idle_").removesuffix("_ns"): column.meaning.removeprefix("idle: ")
    for name, column in COLUMNS["steps"].items()
    if column.meaning.startswith("idle: ")
}
"""The causes of idle time and what they mean."""

OTHER_CAUSES = ("dataloader", "allocation", "loading", "gc", "off_cpu", "profiler", "python")
"""Causes of idle time other than launching late, waiting, and the device's own."""

NAMES = tuple(CAUSES)
CODE = {name: code for code, name in enumerate(NAMES)}
"""Index of each cause in `NAMES`."""

LONG_LAUNCH_NS = 1_000_000
"""The first launch of a kernel that takes this long while the device idles loads code."""

FIRST_NS, FIRST_TIMES, OTHERS = 1_000_000, 10, 2
"""An operator's first call is initialization (loading a library, building a plan for the shape) if its self time
reaches `FIRST_NS` and it takes `FIRST_TIMES` the median of all calls, of which there must be more than `OTHERS`.
"""

_OF_NAMES = {
    "loading": r"^(cu(da)?|hip)(Module|Library)Load|^cuLink|^nvrtc|^nvJitLink|^nvPTXCompiler|\(dynamo_timed\)$"
    r"|^cu(blas|blasLt|dnn|sparse|solver\w*|fft)Create|CachingAutotuner|autotun|StreamEndCapture|GraphInstantiate",
    "allocation": ALLOCATIONS,
    "sync": WAITS,
    "gc": r"^(Python GC|gc|gc\.collect|garbage[ _]collect\w*)\b",
    "dataloader": r"^enumerate\(DataLoader\)",
}
"""The cause that a call, operator or range has by its name: the first that matches."""

_OF_LONG_CALLS = {
    "copy": r"^(cu(da)?|hip)(Memcpy|Memset)",
    "loading": r"^(cu(da)?|hip)(Ext|Module)?Launch|^cu(da)?(Func|Kernel|Module|Library)(Get|Set)|GetFuncBySymbol"
    r"|GetSymbol|^cu(da)?Occupancy|^cu(Module|Library)Unload",
}
"""The same of calls that return at once, unless they wait, or load the function or module that they name."""

_BRIEF_NS = 1_000_000
"""A call that takes longer is found as open by itself, not by its start."""

_LAUNCHES = r"^(cu(da)?|hip)(Ext|Module)?Launch"
_LOADING_OVERHEAD = r"Lazy Function Loading|Module Loading"
_GIVES_WORK = r"Launch|Memcpy|Memset|Malloc|MemAlloc|Free|Synchronize|HostAlloc"
_BUILT_IN = re.compile(r"^<built-in |\(\d+\): <")
_LOADS_DATA = re.compile(r"utils/data/|DataLoader|dataloader|\bcollate")


class Functions:
    """The calls of Python functions of a capture with stacks, by thread.

    Attributes:
        names: Their distinct names: file, line and function.
        loads_data: Which of the names belong to a data loader, with False for `NONE` appended.
        nesting: Which call encloses which.
    """

    def __init__(self, frames: pd.DataFrame) -> None:
        tid, start, end = (frames[name].to_numpy() for name in ("tid", "start_ns", "end_ns"))
        self.nesting, self._length = nest(start, end, tid, shorten=True), end - start
        self.names = [str(name) for name in frames["name"].cat.categories]
        self._name = np.append(frames["name"].cat.codes.to_numpy().astype(np.int64), NONE)
        self._is_named = np.array([not _BUILT_IN.search(name) for name in self.names], dtype=bool)[self._name[:-1]]
        self.loads_data = np.array([*(bool(_LOADS_DATA.search(name)) for name in self.names), False], dtype=bool)

    def at(self, tid: Int64Array, time_ns: Int64Array, idle_ns: Int64Array) -> Int64Array:
        """The function that explains idle time at a moment, an index into `names` or `NONE`, shape ``(n,)``: the
        outermost call that took at most one and a half times as long as the gap, else the innermost; none that is
        built in.
        """
        call = self.nesting.innermost(tid, time_ns)
        innermost, outermost = (np.full(len(call), NONE) for _ in range(2))
        while (rows := np.flatnonzero(call != NONE)).size:
            calls = call[rows]
            fits = self._is_named[calls] & (2 * self._length[calls] <= 3 * idle_ns[rows])
            first = self._is_named[calls] & (innermost[rows] == NONE)
            innermost[rows[first]], outermost[rows[fits]] = calls[first], calls[fits]
            call[rows] = self.nesting.parent[calls]
        return self._name[np.where(outermost == NONE, innermost, outermost)]


class Pieces(NamedTuple):
    """Pieces of intervals, in each of which a thread does one thing, shape ``(p,)`` each.

    Attributes:
        interval: The interval that it is a piece of.
        start, end: In ns.
        call: Its innermost call or operator, a position in `Stretch.rows`, or `NONE`.
        state: What else holds on its thread, an index into `Stretch.tid` and others.
    """

    interval: Int64Array
    start: Int64Array
    end: Int64Array
    call: Int64Array
    state: Int64Array

    def of(self, rows: Int64Array) -> Pieces:
        """Some of the pieces."""
        return Pieces(*(column[rows] for column in self))


class NestedCalls:
    """Some calls and operators, without profiler overhead, and which of them encloses which.

    Attributes:
        rows: The calls and operators; `NONE` is appended.
        nesting: Which encloses which.
        cause: Index into `NAMES` of each, inherited from the enclosing call if it has none of its own, else `NONE`.
        operator: The nearest operator of each, an index into the calls of the capture, or `NONE`.
    """

    def __init__(self, host: HostCalls, rows: Int64Array) -> None:
        self.nesting = nest(host.start[rows], host.end[rows], host.tid[rows], shorten=True)
        inside = np.flatnonzero(host.system[rows] & (self.nesting.parent != NONE))
        inside = inside[~host.operator[rows[self.nesting.parent[inside]]]]
        if len(inside):  # CUDA's calls wait in the operating system's
            rows = np.delete(rows, inside)
            self.nesting = nest(host.start[rows], host.end[rows], host.tid[rows], shorten=True)
        self.rows = np.append(rows, NONE)
        operators = np.where(host.operator[rows], rows, NONE)
        self.operator = np.append(inherit(operators, self.nesting) if (operators >= 0).any() else operators, NONE)
        own_cause = host.own_cause[rows]
        is_loading = inherit(np.where(own_cause == CODE["loading"], own_cause, NONE), self.nesting) != NONE
        cause = np.where(is_loading, np.int8(CODE["loading"]), inherit(own_cause, self.nesting))
        self.cause = np.append(cause, np.int8(NONE))


class HostActivity:
    """What the host threads do while the devices wait for them.

    Args:
        trace: The capture.
        host: Its calls.
        ranges: Its ranges.
        gaps: Starts and ends of the idle gaps on all devices; calls that overlap none of them are left out.
        by_function: Whether to name Python functions, if the capture has them.

    Attributes:
        prepares: The operators' first calls that took much longer than their others.
        range_cause: Index into `NAMES` of each range, or `NONE`; an entry for range `NONE` is appended.
        in_layer: Whether each range is in a layer, likewise.
        in_phase: Whether it is in a layer or a phase.
        loading: Loading by thread.
        profiler: Profiler overhead by process.
        functions: The calls of Python functions; None without.
        threads: All threads, and `NONE`.
    """

    def __init__(
        self,
        trace: Trace,
        host: HostCalls,
        ranges: Ranges,
        gaps: tuple[Int64Array, Int64Array],
        by_function: bool = True,
    ) -> None:
        self.host, self.ranges, (starts, ends) = host, ranges, gaps
        is_touched = touches((starts, ends), host.start[:-1], host.end[:-1])
        is_near = ~host.overhead[:-1] & is_touched
        rows = np.flatnonzero(is_near).astype(np.int32)  # half the memory
        self._rows = rows[np.argsort(host.start[rows], kind="stable")]
        self._long = self._rows[(host.end - host.start)[self._rows] > _BRIEF_NS]
        collecting = [bool(re.search(_OF_NAMES["gc"], name.text, re.IGNORECASE)) for name in ranges.names]
        collects = np.array(collecting, dtype=bool)[ranges.name] & ~ranges.is_one_of(LAYER_CATEGORIES)
        fetches = ranges.is_one_of((Category.DATA,)) | np.isin(ranges.phase_text, ("data", "dataloader"))
        of_ranges = np.select([collects, fetches], [CODE["gc"], CODE["dataloader"]], NONE).astype(np.int8)
        self.range_cause = np.append(inherit(of_ranges, ranges.nesting), np.int8(NONE))
        self.in_layer = np.append(ranges.layer_range >= 0, False)
        self.in_phase = self.in_layer | np.append(ranges.phase_range >= 0, False)
        frames = trace.frames if by_function else None
        self.functions = Functions(frames) if frames is not None and len(frames) else None
        overhead = np.flatnonzero(host.overhead)
        is_noted = host.named(_LOADING_OVERHEAD, overhead)
        noted, overhead = overhead[is_noted], overhead[~is_noted]
        overhead = overhead[is_touched[overhead]]
        self.profiler = Cover(host.pid[overhead], host.start[overhead], host.end[overhead])
        loads = is_near & (host.own_cause[:-1] == CODE["loading"])
        first = host.first_calls if host.operator.any() else np.zeros(0, dtype=np.int64)
        causing = np.concatenate((np.flatnonzero(loads), first, noted))
        until = np.where(host.overhead[causing], host.start[causing] + 1, host.end[causing])
        is_near &= loads | touches((host.start[causing], until), host.start[:-1], host.end[:-1])
        calls = NestedCalls(host, np.flatnonzero(is_near))
        del is_near, rows, loads  # to limit memory
        self.prepares = self._prepares(first, calls)
        tid, *loading = self._loading(noted, calls)
        # of a thread that gives the device no more work it has no end
        start, end = (np.clip(edge, starts.min(initial=0), ends.max(initial=0)) for edge in loading)
        self.loading = Cover(tid, start, end)
        changes = [ranges.nesting.changes(), (tid, start), (tid, end)]
        scheduled = empty_frame("scheduled") if trace.scheduled is None else trace.scheduled
        tid, start, end = (scheduled[name].to_numpy() for name in ("tid", "start_ns", "end_ns"))
        self._on_cpu, self._scheduled = Cover(tid, start, end), few(np.sort(tid))
        self._watched = int(start.min(initial=np.iinfo(np.int64).max)), int(end.max(initial=0))
        changes += [(tid, start), (tid, end)]
        if self.functions is not None:
            changes.append(self.functions.nesting.changes())
        for thread, pid in host.threads.items():
            rows = overhead[host.pid[overhead] == pid]
            changes += [(np.full(len(rows), thread), times[rows]) for times in (host.start, host.end)]
        tids, times = (np.concatenate(column) for column in zip(*changes, strict=True))
        order = np.argsort(times, kind="stable")
        self._changes = tids[order], times[order]  # of anything but calls
        self.threads = np.unique(np.append(few(self._changes[0]), np.array([NONE, *host.threads], dtype=np.int64)))

    @cached_property
    def _of_process(self) -> dict[int, npt.NDArray[np.int32]]:
        """The API calls, by start, of each process with several threads."""
        host, rows = self.host, self._rows
        shared = [pid for pid, threads in Counter(host.threads.values()).items() if threads > 1]
        is_api = ~(host.overhead | host.operator | host.system)[rows]
        return {pid: rows[is_api & (host.pid[rows] == pid)] for pid in shared}

    def _begun(self, rows: npt.NDArray[np.int32], time_ns: int) -> int:
        """How many of some calls, by start, begin until a time."""
        return bisect.bisect_right(rows, time_ns, key=self.host.start.__getitem__)

    def calls(self, low: int, high: int) -> Int64Array:
        """The calls that are open between two times, ascending, and some others."""
        low -= _BRIEF_NS  # a call of rounded times may outlast the one that encloses it, which is to be among them
        earliest = low - _BRIEF_NS
        brief = self._rows[self._begun(self._rows, earliest) : self._begun(self._rows, high)]
        is_open = (self.host.start[self._long] <= earliest) & (self.host.end[self._long] >= low)
        return np.sort(np.concatenate((self._long[is_open], brief)), kind="stable").astype(np.int64)

    def calls_of_processes(self, low: int, high: int) -> dict[int, Int64Array]:
        """The API calls between two times, the one before and the one after, with `NONE` appended, by start, of each
        process with several threads.
        """
        return {
            pid: np.append(rows[max(self._begun(rows, low) - 1, 0) : self._begun(rows, high) + 1], NONE)
            for pid, rows in self._of_process.items()
        }

    def changes(self, low: int, high: int) -> tuple[Int64Array, Int64Array]:
        """Threads and times between two times at which anything but a call begins or ends, and the first of the two on
        each thread.
        """
        tid, time = self._changes
        inside = slice(*np.searchsorted(time, (low, high + 1)))
        return np.append(self.threads, tid[inside]), np.append(np.full(len(self.threads), low), time[inside])

    def states(self, tid: Int64Array, time_ns: Int64Array) -> tuple[Int64Array, npt.NDArray[np.int8], Bools]:
        """Of threads at some times the innermost range, or `NONE`; the cause, an index into `NAMES` or `NONE`, that
        this range is, or loading, or profiler overhead; and whether they are on no CPU; shape ``(n,)`` each.
        """
        ranges, process = self.ranges.nesting.innermost(tid, time_ns), self.host.threads
        pid = np.array([process.get(thread, NONE) for thread in self.threads.tolist()], dtype=np.int64)
        is_profiler = self.profiler.contains(pid[np.searchsorted(self.threads, tid)], time_ns)
        is_loading, is_on_cpu = (cover.contains(tid, time_ns) for cover in (self.loading, self._on_cpu))
        cause = np.where(is_loading, np.int8(CODE["loading"]), self.range_cause[ranges])
        cause[is_profiler] = CODE["profiler"]
        return ranges, cause, np.isin(tid, self._scheduled) & ~is_on_cpu

    def is_watched(self, time_ns: Int64Array) -> Bools:
        """Whether it was recorded which threads are on a CPU, shape ``(n,)``."""
        return (time_ns >= self._watched[0]) & (time_ns < self._watched[1])

    def _prepares(self, first: Int64Array, calls: NestedCalls) -> Int64Array:
        """Which of the operators' long first calls took long themselves."""
        rows, parent = calls.rows[:-1], calls.nesting.parent
        length = self.host.end[rows] - self.host.start[rows]
        inner = np.flatnonzero(parent != NONE)
        self_ns = length - np.bincount(parent[inner], weights=length[inner], minlength=len(rows)).astype(np.int64)
        prepares: Int64Array = rows[np.isin(rows, first) & (self_ns >= FIRST_NS)]
        return prepares

    def _loading(self, noted: Int64Array, calls: NestedCalls) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The loading intervals: thread, start and end.

        Args:
            noted: The profiler overhead that tells of loading.
            calls: All calls that load, and those open as they or `noted` begin.
        """
        host, ranges, rows = self.host, self.ranges, calls.rows[np.flatnonzero(calls.cause == CODE["loading"])]
        # what is recorded as profiler overhead is on each thread in a call at its start
        thread, overhead = (side.ravel() for side in np.meshgrid(calls.nesting.threads, noted, indexing="ij"))
        is_in_call = calls.nesting.innermost(thread, host.start[overhead]) != NONE
        loads = np.concatenate((rows, overhead[is_in_call]))
        if not len(loads):
            return loads, loads, loads
        tid = np.concatenate((host.tid[rows], thread[is_in_call]))
        start, end = host.start[loads], host.end[loads]
        # no loading goes on beyond a call that gives the device work, unless that call encloses it
        work = np.flatnonzero(host.named(_GIVES_WORK) & ~host.overhead & ~host.operator)
        earliest, latest = np.iinfo(np.int64).min, np.iinfo(np.int64).max
        captures, is_capture = np.flatnonzero(host.named("StreamBeginCapture")), host.named("StreamEndCapture", loads)
        low, high = np.full(len(tid), earliest), np.full(len(tid), latest)
        for thread_id in np.unique(tid).tolist():
            rows, of_thread = np.flatnonzero(tid == thread_id), work[host.tid[work] == thread_id]
            of_thread = of_thread[np.argsort(host.start[of_thread], kind="stable")]
            starts, ends = np.append(host.start[of_thread], latest), np.append(host.end[of_thread], earliest)
            before = np.searchsorted(starts, start[rows], side="right") - 1
            high[rows] = starts[np.searchsorted(starts, end[rows], side="left")]
            for _ in range(3):  # driver API calls nest in runtime API calls
                encloses = (before >= 0) & (ends[before] >= end[rows])
                high[rows] = np.where(encloses, ends[before], high[rows])
                before = np.where(encloses, before - 1, before)
            low[rows] = np.where(before >= 0, ends[before], earliest)
            capture_ns = np.append(np.sort(host.start[captures[host.tid[captures] == thread_id]]), latest)
            begun_ns = capture_ns[np.searchsorted(capture_ns, start[rows]) - 1]
            low[rows] = np.where(is_capture[rows] & (begun_ns < start[rows]), begun_ns, low[rows])
        range_ = ranges.nesting.innermost(tid, start)
        low = np.maximum(low, np.append(ranges.start, earliest)[range_])
        high = np.minimum(high, np.append(ranges.end, latest)[range_])
        operator = calls.operator[calls.nesting.innermost(tid, start)]
        low = np.where(operator == NONE, low, np.maximum(low, host.start[operator]))
        high = np.where(operator == NONE, high, np.minimum(high, host.end[operator]))
        return tid, np.minimum(low, start), np.maximum(high, end)


class Stretch(NestedCalls):
    """What the host threads do in a stretch of time.

    Args:
        activity: What they do in the whole capture.
        low, high: The stretch.

    Attributes:
        activity: As given.
        operator_name: The name of the nearest operator of each call and operator, an index into those of the calls of
            the capture, or `NONE`.
        call_name: The name of each call, likewise; `NONE` for operators.
        tid: The thread of each state.
        range, state_cause, is_off_cpu: What holds on it but calls, as `HostActivity.states`.
    """

    def __init__(self, activity: HostActivity, low: int, high: int) -> None:
        super().__init__(activity.host, activity.calls(low, high))
        self.activity, self._calls = activity, activity.calls_of_processes(low, high)
        self.cause[np.isin(self.rows, activity.prepares) & (self.cause == NONE)] = CODE["loading"]
        name, operator = activity.host.name, activity.host.operator[self.rows]
        self.operator_name = np.where(self.operator == NONE, name.dtype.type(NONE), name[self.operator])
        self.call_name = np.where((self.rows == NONE) | operator, name.dtype.type(NONE), name[self.rows])
        line = self.nesting.line if len(self.rows) > 1 else Line(low, 0)
        origin = min(low, line.origin)
        self._line = Line(origin, max(high + 2, line.origin + line.span) - origin)
        tid, time = activity.changes(low, high)
        order = np.argsort(self._at(tid, time), kind="stable")
        self.tid, time = tid[order], time[order]
        positions = np.concatenate((self.nesting.changes_on(self._line, activity.threads), self._at(self.tid, time)))
        owners = self.nesting.owner, np.arange(len(time))
        self._moments, (self._call_at, self._state_at) = moments_of(positions, owners)
        self.range, self.state_cause, self.is_off_cpu = activity.states(self.tid, time)

    def pieces(self, pid: Int64Array, tid: Int64Array, start: Int64Array, end: Int64Array) -> Pieces:
        """Cut intervals in which a device waits for a thread into pieces with a single host activity each. If no call,
        operator or layer is open on that thread, the piece is that of the thread of its process that is in the CUDA
        API, or calls it next: work moves between threads, from the main thread to an autograd thread and back.

        Args:
            pid: Process of each interval, shape ``(n,)``.
            tid: Its thread.
            start: Its start in ns.
            end: Its end.
        """
        pieces, host = self._of_threads(np.arange(len(tid)), tid, start, end), self.activity.host
        is_empty = (pieces.call == NONE) & ~self.activity.in_layer[self.range][pieces.state]
        is_moved, parts = np.zeros(len(is_empty), dtype=bool), [pieces]
        for process, calls in self._calls.items():
            starts = host.start[calls[:-1]]
            of_process = np.flatnonzero(is_empty & (pid[pieces.interval] == process))
            is_moved[of_process] = True
            empty = pieces.of(of_process)
            row, start, end, _ = _cut(starts, empty.start, empty.end)
            latest = calls[np.searchsorted(starts, start, side="right") - 1]
            following = calls[np.searchsorted(starts, end, side="left")]
            until, row = np.clip(host.end[latest], start, end), row.repeat(2)
            start, end, call = (
                np.column_stack(two).ravel() for two in ((start, until), (until, end), (latest, following))
            )
            moved_to = np.where(call == NONE, tid[empty.interval[row]], host.tid[call])
            lasts = np.flatnonzero(end > start)
            moved = self._of_threads(empty.interval[row[lasts]], moved_to[lasts], start[lasts], end[lasts])
            is_lost = (moved.call == NONE) & ~self.activity.in_phase[self.range][moved.state]
            lost_at = self._at(tid[moved.interval[is_lost]], moved.start[is_lost])
            moved.state[is_lost] = self._state_at[np.searchsorted(self._moments, lost_at, side="right") - 1]
            parts.append(moved)
        parts[0] = pieces.of(np.flatnonzero(~is_moved))
        return Pieces(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def call_at(self, tid: Int64Array, time_ns: Int64Array) -> Int64Array:
        """The innermost call or operator on a thread at a time in a gap, a position in `rows` or `NONE`."""
        return self._call_at[np.searchsorted(self._moments, self._at(tid, time_ns), side="right") - 1]

    def _at(self, tid: Int64Array, time_ns: Int64Array) -> Int64Array:
        """Times of threads, on one line."""
        return self._line.at(np.searchsorted(self.activity.threads, tid), time_ns)

    def _of_threads(self, interval: Int64Array, tid: Int64Array, start: Int64Array, end: Int64Array) -> Pieces:
        """Cut intervals where the activity of their threads changes."""
        opens = self._at(tid, start)
        row, starts, ends, state = _cut(self._moments, opens, self._at(tid, end))
        shift = (start - opens)[row]
        starts += shift
        ends += shift
        return Pieces(interval[row], starts, ends, self._call_at[state], self._state_at[state])


def _cause_of(name: str, patterns: Mapping[str, str]) -> int:
    """The first cause whose pattern matches a name, or `NONE`."""
    return next((CODE[cause] for cause, pattern in patterns.items() if re.search(pattern, name, re.I)), NONE)


def _cut(cuts: Int64Array, start: Int64Array, end: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Cut intervals at sorted moments inside them: the interval, start and end of each part, and the last moment until
    its start, or `NONE`.
    """
    low = np.searchsorted(cuts, start, side="right")
    counts = np.maximum(np.searchsorted(cuts, end, side="left") - low, 0) + 1
    row = np.repeat(np.arange(len(start)), counts)
    last = np.cumsum(counts) - 1
    first = last - counts + 1
    of_part = np.arange(-1, len(row) - 1) + (low - first)[row]
    starts = cuts.take(of_part, mode="clip") if len(cuts) else start[row]
    starts[first] = start
    ends = np.append(starts[1:], 0)[: len(row)]
    ends[last] = end
    return row, starts, ends, of_part
