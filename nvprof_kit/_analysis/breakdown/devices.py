"""What devices did over time: computing, else communicating, else copying, else idle; and why they were idle.

A compute kernel hides communication and copies that overlap with it; the rest of them is exposed. A device is therefore
in exactly one state at any time, and the states of a time window add up to its length exactly.

In an idle gap the device waits for the thread that launches the next operation, until that launch returns. The gap is
cut where the thread begins or ends a call, an operator or a range; each piece belongs to the innermost of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from nvprof_kit._analysis.attribution.attribution import Attribution, range_owners
from nvprof_kit._analysis.attribution.intervals import NONE, Bools, Cover, Int64Array, Line, exact_sums, joined, touches
from nvprof_kit._analysis.attribution.steps import Windows
from nvprof_kit._analysis.breakdown.host import (
    CODE,
    LONG_NS,
    SYNCHRONIZING_COPIES,
    HostActivity,
    HostCalls,
    Pieces,
    Stretch,
)
from nvprof_kit._analysis.kernels.classes import KernelClasses
from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.joins import distinct, distinct_rows
from nvprof_kit._trace.schema import OP_KINDS, Trace

STATES = ("idle", "compute", "exposed_comm", "exposed_copy")
IDLE, COMPUTE, COMM, COPY = range(4)

_BITS = 20
"""Bits per counter of concurrent operations of one sort."""

_MOMENTS = 1 << 15
"""Moments processed at a time, to limit memory."""


class Gaps(NamedTuple):
    """The idle gaps of devices, by device and start, shape ``(g,)`` each.

    Attributes:
        window: Window of each.
        start, idle_ns: Its start and length in ns.
    """

    window: Codes
    start: Int64Array
    idle_ns: Int64Array

    @property
    def end(self) -> Int64Array:
        """When each ends, in ns."""
        return self.start + self.idle_ns


@dataclass(frozen=True)
class Activity:
    """Activity of the devices.

    Attributes:
        state_ns: Time by window and state in ns, shape ``(w, 4)``; a row adds up to the window's length.
        comm: Time by window with communication running, hidden or not, in ns, shape ``(w,)``.
        copy: The same for copies.
        sort: `COMPUTE`, `COMM` or `COPY` of each operation, shape ``(n,)``.
        gaps: The idle gaps.
    """

    state_ns: Int64Array
    comm: Int64Array
    copy: Int64Array
    sort: np.ndarray
    gaps: Gaps


def activity(trace: Trace, classes: KernelClasses, windows: Windows) -> Activity:
    """The activity of the devices in every window, and the idle gaps."""
    sort = op_sorts(trace, classes)
    intervals = windows.of_op, trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
    counter = np.left_shift(np.int64(1), _BITS * (sort.astype(np.int64) - 1))
    count = len(windows.start)
    state_ns, comm, copy = np.zeros(4 * count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
    gaps: list[tuple[Any, ...]] = [(np.zeros(0, dtype=np.int32), *(np.zeros(0, dtype=np.int64),) * 2)]
    for window, start, length, level in levels((windows.device, windows.start, windows.end), intervals, counter):
        runs = [(level >> (_BITS * number)) & ((1 << _BITS) - 1) > 0 for number in range(3)]
        state = np.select(runs, [COMPUTE, COMM, COPY], IDLE)
        state_ns += exact_sums(window * 4 + state, length, 4 * count)
        comm += exact_sums(window[runs[1]], length[runs[1]], count)
        copy += exact_sums(window[runs[2]], length[runs[2]], count)
        idle_rows = np.flatnonzero(state == IDLE)
        gaps.append((window[idle_rows].astype(np.int32), start[idle_rows], length[idle_rows]))
    columns = (np.concatenate(column) for column in zip(*gaps, strict=True))
    return Activity(state_ns.reshape(count, 4), comm, copy, sort, Gaps(*columns))


Intervals = tuple[Int64Array, Int64Array, Int64Array]
"""Lane, start and end of each."""


def levels(
    windows: Intervals, intervals: Intervals, weight: npt.NDArray[np.integer[Any]]
) -> Iterator[tuple[Int64Array, Int64Array, Int64Array, Int64Array]]:
    """The sum of the weights of the open intervals over time, in blocks.

    Args:
        windows: Stretches of lanes, by lane and start, that do not overlap.
        intervals: Intervals in these lanes.
        weight: What each interval adds while it is open.

    Yields:
        Window, start, length and sum of each stretch in which the sum does not change.
    """
    line = Line.over((windows[1], intervals[1]), (windows[2], intervals[2]))
    opens, closes = (line.at(windows[0], edge) for edge in windows[1:])
    positions = np.concatenate((*(line.at(intervals[0], edge) for edge in intervals[1:]), opens, closes))
    change = np.concatenate((weight, -weight, np.zeros(2 * len(opens), dtype=weight.dtype)))
    order = np.argsort(positions, kind="stable")
    total = np.int64(0)
    for low in range(0, len(positions) - 1, _MOMENTS):
        rows = order[low : low + _MOMENTS + 1]
        start, level = positions[rows], total + np.cumsum(change[rows[:-1]])
        length, start, total = np.diff(start), start[:-1], level[-1]
        edges = np.searchsorted(start, opens)
        window = np.arange(-1, len(opens)).repeat(np.diff(edges, prepend=0, append=len(start)))
        inside = np.flatnonzero((length > 0) & (window >= 0) & (start < np.append(closes, 0)[window]))
        yield window[inside], line.time_at(start[inside]), length[inside], level[inside]


def exposed(trace: Trace, windows: Windows, active: Activity) -> Int64Array:
    """The part of each operation's duration that no compute on its device overlaps, shape ``(n,)``; 0 for compute."""
    start, end = trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
    exposed_ns = np.zeros(len(start), dtype=np.int64)
    other = np.flatnonzero(active.sort != COMPUTE)
    if not len(other):
        return exposed_ns
    computes = np.flatnonzero(active.sort == COMPUTE)
    # on any device: what hides none of them need not be joined
    computes = computes[touches((start[other], end[other]), start[computes], end[computes])]
    cover = Cover(windows.of_op[computes], start[computes], end[computes])
    hidden = cover.inside(windows.of_op[other], start[other], end[other])
    exposed_ns[other] = end[other] - start[other] - hidden
    return exposed_ns


def op_sorts(trace: Trace, classes: KernelClasses) -> np.ndarray:
    """`COMPUTE`, `COMM` or `COPY` of each operation; a copy is a memcpy or memset, a kernel that copies is compute."""
    kind = trace.ops["kind"].to_numpy()
    copies = np.isin(kind, [OP_KINDS.index("memcpy"), OP_KINDS.index("memset")])
    return np.select([copies, classes.is_a("comm")], [COPY, COMM], COMPUTE).astype(np.int8)


# ---------------------------------------------------------------- why they were idle

_GAPS = 1 << 14
"""Gaps processed at a time: their pieces fit in the cache of a CPU."""

PLACE = ("layer", "phase", "operator", "call")
"""The columns that describe the place of idle time."""

Codes = npt.NDArray[np.integer[Any]]

_LONG_AGO = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Idle:
    """The idle gaps of a capture.

    Attributes:
        gaps: One row per gap: window (index), start_ns, idle_ns; cause, layer, phase, operator and call of its largest
            part.
        parts: The parts of gaps, which add up to them: one of each cause and place in a gap. A row adds up those of one
            window, cause and place in some gaps that follow each other: window (index), cause, layer, phase, operator,
            call, gaps, idle_ns; longest_ns, start_ns and rank of the longest, by gap, cause and place.
        waits: One row per gap that began while the host waited for the device: gap, layer, phase and call of the wait,
            lost_ns, how much of the gap the host was late because of the wait, whatever it did then; and its row in
            the table of calls.
    """

    gaps: pd.DataFrame
    parts: pd.DataFrame
    waits: pd.DataFrame


def idle(trace: Trace, attribution: Attribution, windows: Windows, gaps: Gaps, host: HostCalls) -> Idle:
    """Find what the host did in every idle gap; without the table `calls` every cause is `other`.

    Raises:
        AssertionError: The parts of a gap do not add up to it: a bug in this package.
    """
    op, call, is_graph = _following(trace, windows, gaps, host)
    launch_range = np.where(call == NONE, np.int32(NONE), attribution.launch_range[op])
    del op  # to limit memory, as below
    end = gaps.end
    until = np.where(call == NONE, gaps.start, np.clip(host.end[call], gaps.start, end))
    launching, waiting = until > gaps.start, (call != NONE) & (end - until >= LONG_NS)
    starts = np.concatenate((gaps.start[launching], gaps.start[waiting]))
    ends = np.concatenate((until[launching], end[waiting]))
    on_host = HostActivity(trace, host, attribution.ranges, (starts, ends))
    del starts, ends, end, launching, waiting
    functions = on_host.functions
    names = host.names if functions is None else [*host.names[:-1], *functions.names, ""]  # the last is of `NONE`
    layers, phases = range_owners(attribution.ranges)
    (layer, phase), owner = distinct_rows(layers.codes.astype(np.int64), phases.codes.astype(np.int64))
    pid = np.array([device.pid for device in windows.devices], dtype=np.int64)[windows.device]
    columns = {**gaps._asdict(), "call": call, "is_graph": is_graph, "until": until, "launch_range": launch_range}
    begun = gaps.start if len(call) else np.zeros(1, dtype=np.int64)  # without gaps one stretch of none
    edges = np.sort(begun)[:: _GAPS * max(len(windows.devices), 1)].copy()
    stretch_of_gap = (np.searchsorted(edges, gaps.start, side="right") - 1).astype(np.int32)
    latest = edges.copy()
    np.maximum.at(latest, stretch_of_gap, gaps.end)
    # blocks of gaps that follow each other on a device and begin in the same stretch of time
    bounds = [0, *(np.flatnonzero(np.diff(stretch_of_gap)) + 1).tolist(), len(call)]
    stretch_of_block = np.append(stretch_of_gap, 0)[bounds[:-1]]
    splits: list[Any] = [None] * len(stretch_of_block)
    stretch, index = None, NONE
    for block in np.argsort(stretch_of_block, kind="stable").tolist():
        if stretch is None or index != stretch_of_block[block]:
            index = int(stretch_of_block[block])
            stretch = Stretch(on_host, int(edges[index]), int(latest[index]))
        low, rows = bounds[block], slice(*bounds[block : block + 2])
        of_block = {name: values[rows] for name, values in columns.items()}
        of_block |= {"pid": pid[of_block["window"]], "tid": host.tid[of_block["call"]]}
        of_block |= {"end": of_block["start"] + of_block["idle_ns"]}
        splits[block] = _split(of_block, stretch, owner)
        splits[block][1]["rank"] += low << 32
        splits[block][2]["gap"] += low
    del on_host, stretch, functions, columns, call, is_graph, until, launch_range, stretch_of_gap
    known: tuple[Table, ...] = {"window": gaps.window, "start_ns": gaps.start, "idle_ns": gaps.idle_ns}, {}, {}
    tables = [
        pd.DataFrame(of | {name: np.concatenate([x.pop(name) for x in table]) for name in [*table[0]]}, copy=False)
        for of, *table in zip(known, *splits, strict=True)
    ]
    causes = pd.Index([*CODE], dtype=object)
    for frame in tables:
        code = frame.pop("owner").to_numpy()
        frame["layer"] = pd.Categorical.from_codes(layer[code], dtype=layers.dtype)
        frame["phase"] = pd.Categorical.from_codes(phase[code], dtype=phases.dtype)
        for name in {"operator", "call"} & {*frame}:
            frame[name] = labels(frame[name].to_numpy(), names)
        if "cause" in frame:
            frame["cause"] = pd.Categorical.from_codes(frame["cause"], categories=causes)
    return Idle(*tables)


Table = dict[str, npt.NDArray[Any]]
"""Columns of equal length, by name."""


def _split(gaps: Table, on_host: Stretch, owner: Codes) -> tuple[Table, Table, Table]:
    """The rows of `Idle.gaps` (as `parts_of`), `Idle.parts` and `Idle.waits` of some gaps, names as codes.

    Args:
        gaps: The gaps.
        on_host: What the host did.
        owner: The code of the layer and phase of each range.
    """
    host, functions = on_host.activity.host, on_host.activity.functions
    start, end, until, tid = (gaps[name] for name in ("start", "end", "until", "tid"))
    launching = np.flatnonzero(until > start)
    # of what the launching thread did as the gap began: a wait for the device makes it late for as long
    event = on_host.rows[on_host.call_at(tid[launching], start[launching])]
    late_until = np.full(len(start), _LONG_AGO)
    late_until[launching] = np.where(host.waits[event], 2 * host.end[event] - host.start[event], _LONG_AGO)
    is_cut = (start < late_until) & (late_until < until)
    cut = np.flatnonzero(is_cut)
    interval = np.concatenate((launching, cut))
    starts = np.concatenate((start[launching], late_until[cut]))
    ends = np.concatenate((np.where(is_cut, late_until, until)[launching], until[cut]))
    pieces = on_host.pieces(gaps["pid"][interval], tid[interval], starts, ends)
    pieces = pieces._replace(interval=interval[pieces.interval])
    gaps = {**gaps, "late_until": late_until}
    function, operator = np.full(len(pieces.call), NONE), on_host.operator_name[pieces.call]
    if functions is not None:  # outside calls, operators and layers
        function = functions.at(on_host.tid[pieces.state], pieces.start, (end - start)[pieces.interval])
        function[(pieces.call != NONE) | on_host.activity.in_layer[on_host.range][pieces.state]] = NONE
        operator = np.where(function == NONE, operator, len(host.names) - 1 + function)
    cause = _causes(gaps, pieces, on_host, function)
    queued = np.flatnonzero(until < end)
    call, launcher = gaps["call"][queued], tid[queued]
    # a device that runs nothing while the launching thread is in a synchronizing copy waits for the host
    rows = np.flatnonzero((call != NONE) & ((end - until)[queued] >= LONG_NS))
    middle = ((until + end) // 2)[queued[rows]]
    copy = on_host.rows[on_host.call_at(launcher[rows], middle)]
    is_copy = host.waits[copy] & host.named(SYNCHRONIZING_COPIES, copy)
    of_queued = np.where(gaps["is_graph"][queued], CODE["graph"], CODE["queued"]).astype(np.int8)
    of_queued[call == NONE] = CODE["other"]
    of_queued[rows[is_copy]] = CODE["sync"]
    in_copy = np.full(len(queued), NONE, dtype=host.name.dtype)
    in_copy[rows[is_copy]] = host.name[copy[is_copy]]
    owners = owner[on_host.range][pieces.state], owner[gaps["launch_range"][queued]]
    starts = np.concatenate((pieces.start, until[queued]))
    idle_ns = np.concatenate((pieces.end, end[queued])) - starts
    keys: Table = {
        "cause": np.concatenate((cause, of_queued)),
        "owner": np.concatenate(owners),
        "operator": np.concatenate((operator, np.full(len(queued), NONE, dtype=operator.dtype))),
        "call": np.concatenate((on_host.call_name[pieces.call], in_copy)),
    }
    gap = np.concatenate((pieces.interval, queued))
    return *parts_of(gaps, gap, starts, idle_ns, keys), _waits(gaps, pieces, on_host, owner)


def parts_of(gaps: Table, gap: Int64Array, starts: Int64Array, idle_ns: Int64Array, keys: Table) -> tuple[Table, Table]:
    """The rows of `Idle.gaps`, without window, start and length, and of `Idle.parts`.

    Args:
        gaps: The gaps.
        gap: The gap of each piece of them, shape ``(p,)``.
        starts: Its start.
        idle_ns: Its length.
        keys: Its cause and place.
    """
    start, end = gaps["start"], gaps["end"]
    place_code = joined([*keys.values()])
    code = None if place_code is None else joined([gap, place_code])
    assert place_code is not None and code is not None, "a program has few names"
    order = np.lexsort((starts, code))
    code = code[order]
    first = np.flatnonzero(np.append(True, code[1:] != code[:-1])[: len(order)])
    until = np.append(0, np.cumsum(idle_ns[order]))
    if not np.array_equal(until[np.cumsum(np.bincount(gap, minlength=len(start)))], np.cumsum(end - start)):
        raise AssertionError("the causes of idle time do not add up to it: please report this")
    rows, part_ns = order[first], np.diff(until[np.append(first, len(order))])
    gap = gap[rows]
    longest = longest_of(gap, part_ns, len(start))
    of_gaps = {name: values[rows[longest]] for name, values in keys.items()}
    window = gaps["window"][gap]
    place_code = joined([window, place_code[rows]])
    assert place_code is not None, "places and windows are few"
    codes, group = distinct(place_code)
    longest = longest_of(group, part_ns, len(codes))
    sums = {"gaps": np.bincount(group, minlength=len(codes)), "idle_ns": exact_sums(group, part_ns, len(codes))}
    parts = {"window": window[longest], "rank": longest, "longest_ns": part_ns[longest], **sums}
    parts |= {name: values[rows[longest]] for name, values in {**keys, "start_ns": starts}.items()}
    return of_gaps, parts


def longest_of(group: Codes, values: Int64Array, groups: int) -> Int64Array:
    """The row with the largest value of each group, the first of equals; every group has one."""
    largest, row = np.zeros(groups, dtype=np.int64), np.empty(groups, dtype=np.int64)
    np.maximum.at(largest, group, values)
    rows = np.flatnonzero(values == largest[group])[::-1]
    row[group[rows]] = rows
    return row


def _waits(gaps: Table, pieces: Pieces, on_host: Stretch, owner: Codes) -> Table:
    """The rows of `Idle.waits`: a wait as a gap begins, or inside it: the device had already run dry, and runs dry
    whenever the host waits for it.
    """
    host, start, end, late_until = on_host.activity.host, *(gaps[name] for name in ("start", "end", "late_until"))
    awaited = np.flatnonzero(late_until > start)
    event = on_host.rows[on_host.call_at(gaps["tid"][awaited], start[awaited])]
    range_ = on_host.activity.ranges.nesting.innermost(host.tid[event], host.start[event])
    inside = pieces.of(np.flatnonzero(host.waits[on_host.rows][pieces.call]))
    inside = inside.of(np.lexsort((inside.start, inside.interval)))
    is_first = np.diff(inside.interval, prepend=NONE) > 0
    inside = inside.of(np.flatnonzero(is_first & ~np.isin(inside.interval, awaited)))
    event = np.concatenate((event, on_host.rows[inside.call]))
    range_ = np.concatenate((range_, on_host.range[inside.state]))
    gap = np.concatenate((awaited, inside.interval))
    lost_ns = (np.minimum(late_until, end) - start)[awaited], end[inside.interval] - inside.start
    return {
        "gap": gap,
        "owner": owner[range_],
        "call": host.name[event],
        "lost_ns": np.concatenate(lost_ns),
        "row": event,
    }


def _causes(gaps: Table, pieces: Pieces, on_host: Stretch, function: Int64Array) -> npt.NDArray[np.int8]:
    """The cause of each piece before a launch."""
    (gap, start, _, call, state), activity = pieces, on_host.activity
    is_launch = (call != NONE) | activity.in_phase[on_host.range][state]
    cause = np.where(is_launch, np.int8(CODE["launch"]), np.int8(CODE["unknown"]))
    if activity.functions is not None:
        functions = np.flatnonzero((cause == CODE["unknown"]) & (function != NONE))
        loads_data = activity.functions.loads_data[function[functions]]
        cause[functions] = np.where(loads_data, CODE["dataloader"], CODE["python"])
    # each of these comes before the ones above
    cause[gaps["is_graph"][gap]] = CODE["graph"]
    cause[start < gaps["late_until"][gap]] = CODE["after_sync"]
    is_off_cpu = on_host.is_off_cpu[state] & activity.is_watched(start)
    cause[is_off_cpu | activity.host.system[on_host.rows][call]] = CODE["off_cpu"]
    of_state, of_call = on_host.state_cause[state], on_host.cause[call]
    np.copyto(cause, of_state, where=of_state != NONE)
    np.copyto(cause, of_call, where=(of_call != NONE) & (of_state != CODE["profiler"]))
    return cause


def _following(trace: Trace, windows: Windows, gaps: Gaps, host: HostCalls) -> tuple[Int64Array, Int64Array, Bools]:
    """The operation that ends each gap and the call that launched it, or `NONE`, and whether it is the replay of a CUDA
    graph after another replay.
    """
    call = np.append(host.of_op, NONE)
    start = trace.ops["start_ns"].to_numpy()
    line = Line.over((start, gaps.start), (start, gaps.end))
    key = line.at(windows.of_op, start)
    order = np.argsort(key, kind="stable")
    neighbours = np.concatenate(([NONE], order, [NONE]))
    lane = windows.device[gaps.window]
    position = np.searchsorted(key[order], line.at(lane, gaps.end))
    before, op = (
        np.where(np.append(windows.of_op, NONE)[neighbour] == lane, neighbour, NONE)
        for neighbour in (neighbours[position], neighbours[position + 1])
    )
    is_graph = (trace.ops["graph_node"].to_numpy() >= 0) | (trace.ops["kind"].to_numpy() == OP_KINDS.index("graph"))
    is_graph = np.append(is_graph, False)
    is_graph = is_graph[op] & is_graph[before]
    is_graph[is_graph] = call[op[is_graph]] != call[before[is_graph]]
    return op, call[op], is_graph
