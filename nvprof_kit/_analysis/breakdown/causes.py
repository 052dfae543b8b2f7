"""The causes of idle time, and how host activity maps to them.

The innermost call, operator or range on the thread determines the cause. A call that loads code is one cause including
everything nested in it. Loading also takes time around the calls that show it: cuDNN builds a plan for a shape, or a
library unpacks its kernels, and then loads the result in microseconds. So loading extends to the thread's previous
and next call that launches, copies, allocates, frees or synchronizes, within the operator or range that contains the
call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array, inherit, touches
from nvprof_kit._analysis.attribution.ranges import Ranges
from nvprof_kit._analysis.breakdown.host import LONG_NS, SYNCHRONIZING_COPIES, HostCalls
from nvprof_kit._analysis.breakdown.lookups import Changes, IntervalUnion, Stack, Timeline
from nvprof_kit.names import LAYER_CATEGORIES, Category

if TYPE_CHECKING:
    import pandas as pd

CAUSES: Mapping[str, str] = {
    "launch": "the host had not yet launched the next operation; it was in the named call, operator, layer or phase",
    "sync": "the host waited in a synchronizing call, copies that synchronize included",
    "after_sync": "the host launched late because it had waited for the device; at most as long as it had waited",
    "dataloader": "the host was fetching data",
    "allocation": "the host was in a call that allocates or frees memory",
    "loading": "the host loaded a library or module, compiled code, or autotuned for a shape",
    "copy": "the host was in an asynchronous copy call that took long",
    "gc": "Python's garbage collector ran",
    "off_cpu": "the launching thread was not on a CPU: it waited for a thread, a lock or a file, or was preempted",
    "profiler": "the profiler delayed the host; a run without a profiler lacks this time",
    "graph": "between two replays of CUDA graphs",
    "queued": "the next operation was already launched: the device's own gap between operations",
    "python": "the host ran Python outside layers: the named function",
    "unknown": "the host had not yet launched the next operation; what it did is unknown: Python, or another thread",
    "other": "no operation follows, or the capture lacks its launch",
}
"""The causes and what they mean."""

NAMES = tuple(CAUSES)
LAUNCH, LOADING, UNKNOWN, PYTHON = (NAMES.index(name) for name in ("launch", "loading", "unknown", "python"))

LONG_LAUNCH_NS = 1_000_000
"""The first launch of a kernel that takes this long while the device idles loads code."""

FIRST_NS, FIRST_TIMES, OTHERS = 1_000_000, 10, 2
"""An operator's first call is initialization (loading a library, building a plan for the shape) if its self time
reaches `FIRST_NS` and it takes `FIRST_TIMES` the median of all calls, of which there must be more than `OTHERS`.
"""

_LOADS = re.compile(
    r"^(cu(da)?|hip)(Module|Library)Load|^cuLink|^nvrtc|^nvJitLink|^nvPTXCompiler|^cu(blas|blasLt|dnn|sparse|solver\w*|fft)Create"
    r"|\(dynamo_timed\)$|CachingAutotuner|autotun",
    re.IGNORECASE,
)
_LOADS_AT_FIRST = re.compile(
    r"^cu(da)?(Func|Kernel|Module|Library)(Get|Set)|GetFuncBySymbol|GetSymbol|^cu(da)?Occupancy"
    r"|^cu(Module|Library)Unload"
)
"""Calls that load the queried function or module if it is not loaded yet."""

ALLOCATES = re.compile(
    r"(Malloc|MemAlloc|MemFree|HostAlloc|HostRegister|MemMap|MemCreate|^(cuda|hip)Free)", re.IGNORECASE
)
"""Calls that allocate or free memory."""

_COPIES = re.compile(r"^(cu(da)?|hip)(Memcpy|Memset)")
_SYNCHRONISES = re.compile(rf"Synchronize|{SYNCHRONIZING_COPIES.pattern}", re.IGNORECASE)
_COLLECTS = re.compile(r"^(Python GC|gc|gc\.collect|garbage[ _]collect\w*)\b", re.IGNORECASE)
_FETCHES = re.compile(r"^enumerate\(DataLoader\)")
_LOADING_OVERHEAD = re.compile(r"Lazy Function Loading|Module Loading", re.IGNORECASE)
_LAUNCHES = re.compile(r"^(cu(da)?|hip)(Ext|Module)?Launch")
_GIVES_WORK = re.compile(r"Launch|Memcpy|Memset|Malloc|MemAlloc|Free|Synchronize|HostAlloc")
_DATA_TEXTS = ("data", "dataloader")
_BUILT_IN = re.compile(r"^<built-in |\(\d+\): <")
_LOADS_DATA = re.compile(r"utils/data/|DataLoader|dataloader|\bcollate")


class Functions:
    """The calls of Python functions of a capture with stacks, by thread.

    Attributes:
        names: Their distinct names: file, line and function.
        loads_data: Which of the names belong to a data loader, with False for `NONE` appended.
        stack: The innermost call of each thread over time.
    """

    def __init__(self, frames: pd.DataFrame) -> None:
        tid, self._start, self._end = (frames[name].to_numpy() for name in ("tid", "start_ns", "end_ns"))
        self.stack, self._parent, _ = Stack.of(tid, self._start, self._end)
        self.names = [str(name) for name in frames["name"].cat.categories]
        self._name = np.append(frames["name"].cat.codes.to_numpy().astype(np.int64), NONE)
        unnamed = np.array([bool(_BUILT_IN.search(name)) for name in self.names], dtype=bool)
        self._unnamed = unnamed[self._name[:-1]] if len(unnamed) else np.zeros(0, dtype=bool)
        self.loads_data = np.array([*(bool(_LOADS_DATA.search(name)) for name in self.names), False], dtype=bool)

    def at(self, tid: Int64Array, time_ns: Int64Array, idle_ns: Int64Array) -> Int64Array:
        """The function that explains idle time at a moment, an index into `names` or `NONE`, shape ``(n,)``: the
        outermost call that took at most one and a half times as long as the gap, else the innermost; none that is
        built in.
        """
        call = self.stack.innermost(tid, time_ns)
        innermost, outermost = (np.full(len(call), NONE) for _ in range(2))
        while (rows := np.flatnonzero(call != NONE)).size:
            calls = call[rows]
            fits = ~self._unnamed[calls] & (2 * (self._end - self._start)[calls] <= 3 * idle_ns[rows])
            first = ~self._unnamed[calls] & (innermost[rows] == NONE)
            innermost[rows[first]], outermost[rows[fits]] = calls[first], calls[fits]
            call[rows] = self._parent[calls]
        return self._name[np.where(outermost == NONE, innermost, outermost)]


@dataclass(frozen=True)
class Doing:
    """Host activity by thread.

    Attributes:
        host: The calls.
        ranges: The ranges.
        rows: The calls and operators in `stack`, without profiler overhead.
        stack: Their nesting by thread; its indices are positions in `rows`.
        cause: Index into `NAMES` of each, inherited from the enclosing call if it has none of its own, else `NONE`.
        operator: The nearest operator of each, an index into the calls, or `NONE`.
        prepares: Whether each is an operator's first call that took much longer than its others.
        range_cause: Index into `NAMES` of each range, or `NONE`; an entry for range `NONE` is appended.
        in_layer: Whether each range is in a layer, likewise.
        in_phase: Whether it is in a layer or a phase.
        loading: Loading intervals by thread.
        profiler: Profiler overhead by process.
        on_cpu: Intervals in which each thread was scheduled on a CPU; None if the capture lacks them.
        watched: Start and end of the period that `on_cpu` covers.
        functions: The calls of Python functions; None if the capture lacks them.
    """

    host: HostCalls
    ranges: Ranges
    rows: Int64Array
    stack: Stack
    cause: npt.NDArray[np.int8]
    operator: Int64Array
    prepares: npt.NDArray[np.bool_]
    range_cause: npt.NDArray[np.int8]
    in_layer: npt.NDArray[np.bool_]
    in_phase: npt.NDArray[np.bool_]
    loading: IntervalUnion
    profiler: IntervalUnion
    on_cpu: IntervalUnion | None
    watched: tuple[int, int]
    functions: Functions | None = None

    @cached_property
    def of_threads(self) -> Timeline:
        """The innermost call (a position in `rows`) and range of each thread over time, cut also where loading or its
        presence on a CPU changes.
        """
        nesting = self.ranges.nesting
        ranges = Changes(nesting.threads, nesting.line, nesting.change)
        more_changes = [self.loading.changes]
        more_changes += [self.on_cpu.changes] if self.on_cpu is not None else []
        more_changes += [self.functions.stack.changes] if self.functions is not None else []
        return Timeline.of([(self.stack.changes, self.stack.owner), (ranges, nesting.owner)], more_changes)

    def off_cpu(self, tid: Int64Array, time_ns: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether a thread was not on a CPU, shape ``(n,)``."""
        if self.on_cpu is None:
            return np.zeros(len(tid), dtype=bool)
        first, last = self.watched
        watched = np.isin(tid, self.on_cpu.changes.lanes) & (time_ns >= first) & (time_ns < last)
        off: npt.NDArray[np.bool_] = watched & ~self.on_cpu.covers(tid, time_ns)
        return off


def doing(
    host: HostCalls,
    ranges: Ranges,
    scheduled: pd.DataFrame | None,
    gaps: tuple[Int64Array, Int64Array],
    frames: pd.DataFrame | None = None,
) -> Doing:
    """Host activity while the devices wait for the host.

    Args:
        host: The calls.
        ranges: The ranges.
        scheduled: The table ``scheduled``, if the capture has it.
        gaps: Starts and ends of the idle gaps on all devices; calls that overlap none of them are left out.
        frames: The table ``frames``, to name Python functions; None not to.
    """
    rows = np.flatnonzero(~host.overhead[:-1] & touches(gaps, host.start[:-1], host.end[:-1]))
    stack, parent, depth = Stack.of(host.tid[rows], host.start[rows], host.end[rows])
    inner = host.system[rows] & ~host.operator[np.where(parent == NONE, NONE, rows[parent])] & (parent != NONE)
    if inner.any():  # CUDA's calls wait in the operating system's
        rows = rows[~inner]
        stack, parent, depth = Stack.of(host.tid[rows], host.start[rows], host.end[rows])
    cause, operator = _own_causes(host, rows), np.where(host.operator[rows], rows, NONE)
    for level in range(1, int(depth.max(initial=0)) + 1):
        here = np.flatnonzero(depth == level)
        parents = parent[here]
        taken = (cause[here] == NONE) | (cause[parents] == LOADING)
        cause[here[taken]] = cause[parents[taken]]
        lacking = operator[here] == NONE
        operator[here[lacking]] = operator[parents[lacking]]
    fetches = ranges.is_one_of((Category.DATA,)) | np.isin(ranges.phase_text, _DATA_TEXTS)
    collecting = [code for code, name in enumerate(ranges.names) if _COLLECTS.search(name.text)]
    collects = np.isin(ranges.name, collecting) & ~ranges.is_one_of(LAYER_CATEGORIES)
    range_cause = np.select([collects, fetches], [NAMES.index("gc"), NAMES.index("dataloader")], NONE)
    in_layer = np.append(ranges.layer_range >= 0, False)
    activity = Doing(
        host,
        ranges,
        rows,
        stack,
        np.append(cause, np.int8(NONE)),
        np.append(operator, NONE),
        np.append(_prepares(host, rows, parent), False),
        np.append(inherit(range_cause, ranges.nesting), NONE).astype(np.int8),
        in_layer,
        in_layer | np.append(ranges.phase_range >= 0, False),
        IntervalUnion(*np.zeros((3, 0), dtype=np.int64)),
        _profiler(host),
        *_on_cpu(scheduled),
        Functions(frames) if frames is not None and len(frames) else None,
    )
    return Doing(**{**vars(activity), "loading": _loading(activity, np.flatnonzero(cause == LOADING))})


def _own_causes(host: HostCalls, rows: Int64Array) -> npt.NDArray[np.int8]:
    """The cause of each call and operator by itself, without inheritance."""
    kinds = {"loading": _LOADS, "allocation": ALLOCATES, "sync": _SYNCHRONISES, "gc": _COLLECTS, "dataloader": _FETCHES}
    of_name, of_long = (np.full(len(host.names), NONE, dtype=np.int8) for _ in range(2))
    launches = np.zeros(len(host.names), dtype=bool)
    for code, text in enumerate(host.names):
        causes = [cause for cause, pattern in kinds.items() if pattern.search(text)]
        copies, launches[code] = _COPIES.search(text), bool(_LAUNCHES.search(text))
        if causes:
            of_name[code] = NAMES.index(causes[0])
        elif copies or launches[code] or _LOADS_AT_FIRST.search(text):
            of_long[code] = NAMES.index("copy" if copies else "loading")
    name, length = host.name[rows], host.end[rows] - host.start[rows]
    long = (length >= LONG_NS) & (of_long[name] != NONE)
    launching = np.flatnonzero(long & launches[name])
    long[launching] = False
    launching = launching[length[launching] >= LONG_LAUNCH_NS]
    if len(launching):  # few captures have one, and to find the first launches takes a while
        long[launching] = np.isin(rows[launching], host.first_launches)
    cause_of_text: npt.NDArray[np.int8] = np.where(long, of_long[name], of_name[name])
    cause_of_text[(cause_of_text == NAMES.index("copy")) & host.waits[rows]] = NAMES.index("sync")
    return cause_of_text


def _prepares(host: HostCalls, rows: Int64Array, parent: Int64Array) -> npt.NDArray[np.bool_]:
    """Which calls in a stack are the long first call of an operator."""
    import pandas as pd

    operators = np.flatnonzero(host.operator[:-1])
    if not len(operators):
        return np.zeros(len(rows), dtype=bool)
    operators = operators[np.argsort(host.start[operators], kind="stable")]
    duration_ns = host.end[operators] - host.start[operators]
    calls = pd.DataFrame({"pid": host.pid(operators), "name": host.name[operators], "ns": duration_ns})
    groups = calls.groupby(["pid", "name"])["ns"]
    usual, calls_of_name = groups.transform("median").to_numpy(), groups.transform("size").to_numpy()
    is_first = ~calls.duplicated(["pid", "name"]).to_numpy()
    first = operators[is_first & (calls_of_name > OTHERS) & (duration_ns >= FIRST_TIMES * usual)]
    length = host.end[rows] - host.start[rows]
    inner = np.flatnonzero(parent != NONE)
    self_ns = length - np.bincount(parent[inner], weights=length[inner], minlength=len(rows)).astype(np.int64)
    prepares: npt.NDArray[np.bool_] = np.isin(rows, first) & (self_ns >= FIRST_NS)
    return prepares


def _profiler(host: HostCalls) -> IntervalUnion:
    loads = np.array([bool(_LOADING_OVERHEAD.search(name)) for name in host.names])[host.name]
    chosen = np.flatnonzero((host.overhead & ~loads)[:-1])
    return IntervalUnion(host.pid(chosen), host.start[chosen], host.end[chosen])


def _on_cpu(scheduled: pd.DataFrame | None) -> tuple[IntervalUnion | None, tuple[int, int]]:
    if scheduled is None or not len(scheduled):
        return None, (0, 0)
    tid, start, end = (scheduled[name].to_numpy() for name in ("tid", "start_ns", "end_ns"))
    return IntervalUnion(tid, start, end), (int(start.min()), int(end.max()))


def _loading(activity: Doing, loads: Int64Array) -> IntervalUnion:
    """The loading intervals, by thread."""
    host, calls = activity.host, activity.rows[loads]
    # what is recorded as profiler overhead is on each thread in a call at its start
    is_noted = np.array([bool(_LOADING_OVERHEAD.search(name)) for name in host.names])[host.name] & host.overhead
    noted, threads = np.flatnonzero(is_noted[:-1]), activity.stack.changes.lanes
    thread, overhead = np.repeat(threads, len(noted)), np.tile(noted, len(threads))
    in_call = activity.stack.innermost(thread, host.start[overhead]) != NONE
    tid, calls = np.append(host.tid[calls], thread[in_call]), np.append(calls, overhead[in_call])
    start, end = host.start[calls], host.end[calls]
    operator, range_ = (
        activity.operator[activity.stack.innermost(tid, start)],
        activity.ranges.nesting.innermost(tid, start),
    )
    is_work = np.array([bool(_GIVES_WORK.search(name)) for name in host.names])[host.name[:-1]]
    work = np.flatnonzero(is_work & ~host.overhead[:-1] & ~host.operator[:-1])
    low, high = _between_work(host, work, tid, start, end)
    ends = np.append(activity.ranges.end, np.iinfo(np.int64).max)
    starts = np.append(activity.ranges.start, np.iinfo(np.int64).min)
    low, high = np.maximum(low, starts[range_]), np.minimum(high, ends[range_])
    inside = operator != NONE
    low = np.where(inside, np.maximum(low, host.start[operator]), low)
    high = np.where(inside, np.minimum(high, host.end[operator]), high)
    return IntervalUnion(tid, np.minimum(low, start), np.maximum(high, end))


def _between_work(
    host: HostCalls, work: Int64Array, tid: Int64Array, start: Int64Array, end: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """The interval around each given one without a call of `work` on its thread; includes a call that encloses it."""
    earliest, latest = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    low, high = np.full(len(tid), earliest), np.full(len(tid), latest)
    for thread in np.unique(tid).tolist():
        rows_of_thread, its = np.flatnonzero(tid == thread), work[host.tid[work] == thread]
        its = its[np.argsort(host.start[its], kind="stable")]
        starts, ends = host.start[its], np.append(host.end[its], earliest)
        before = np.searchsorted(starts, start[rows_of_thread], side="right") - 1
        enclosing = np.full(len(rows_of_thread), NONE)
        for _ in range(3):  # driver API calls nest in runtime API calls
            holds = (before >= 0) & (ends[before] >= end[rows_of_thread])
            enclosing = np.where(holds, before, enclosing)
            before = np.where(holds, before - 1, before)
        low[rows_of_thread] = np.where(before >= 0, ends[before], earliest)
        after = np.append(starts, latest)[np.searchsorted(starts, end[rows_of_thread], side="left")]
        high[rows_of_thread] = np.where(enclosing >= 0, ends[enclosing], after)
    return low, high
