"""Attributes each idle gap of a device to what the host did during it.

The device waits for the thread that launches the next operation, until that launch returns. The gap is cut where the
thread begins or ends a call, an operator or a range; each piece belongs to the innermost of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution, range_owners
from nvprof_kit._analysis.attribution.intervals import exact_sums, joined
from nvprof_kit._analysis.attribution.nesting import NONE, Int64Array, Line
from nvprof_kit._analysis.attribution.windows import Windows
from nvprof_kit._analysis.breakdown.activity import Activity, Gaps
from nvprof_kit._analysis.breakdown.causes import LAUNCH, LOADING, NAMES, PYTHON, UNKNOWN, Doing, doing
from nvprof_kit._analysis.breakdown.host import LONG_NS, SYNCHRONIZING_COPIES, HostCalls
from nvprof_kit._analysis.breakdown.pieces import Callers, Pieces, Waits, pieces_of
from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.schema import OP_KINDS, Trace

if TYPE_CHECKING:
    import pandas as pd

_BLOCK = 1 << 15
"""Gaps processed at a time, to limit memory."""

_THREADS = 2
"""Threads that share the blocks: NumPy's sorts and searches, which take most of the time, do not hold the GIL."""

_Found = TypeVar("_Found")

PLACE = ("layer", "phase", "operator", "call")
"""The columns that describe the place of idle time."""


@dataclass(frozen=True)
class Idle:
    """The idle gaps of a capture.

    Attributes:
        gaps: One row per gap: window (index), start_ns, idle_ns; cause, layer, phase, operator and call of its largest
            part.
        parts: One row per gap, cause and place: gap (row of `gaps`), cause, layer, phase, operator, call, idle_ns, and
            start_ns, the start of its first piece. The parts of a gap add up to it.
        waits: One row per gap that began while the host waited for the device: gap, layer, phase and call of the wait,
            and lost_ns, how much of the gap the host was late because of the wait, whatever it did then.
    """

    gaps: pd.DataFrame
    parts: pd.DataFrame
    waits: pd.DataFrame

    def by_window(self, cause: str, windows: int) -> Int64Array:
        """Time of one cause by window, in ns."""
        has_cause = (self.parts["cause"] == cause).to_numpy()
        window = self.gaps["window"].to_numpy()[self.parts["gap"].to_numpy()[has_cause]]
        return exact_sums(window, self.parts["idle_ns"].to_numpy()[has_cause], windows)


class _Next(NamedTuple):
    """What ends each gap: the launching call, or `NONE`; whether it launches a graph; and whether that is a different
    replay from the operation before the gap.
    """

    call: Int64Array
    graph: npt.NDArray[np.bool_]


class _Parts(NamedTuple):
    """Time by gap, cause and place, the place as codes; shape ``(n,)`` each."""

    gap: npt.NDArray[np.integer[Any]]
    cause: npt.NDArray[np.int8]
    layer: npt.NDArray[np.integer[Any]]
    phase: npt.NDArray[np.integer[Any]]
    operator: npt.NDArray[np.integer[Any]]
    call: npt.NDArray[np.integer[Any]]
    idle_ns: Int64Array
    start_ns: Int64Array


class _Largest(NamedTuple):
    """Cause and place of the largest part of each gap, as codes; shape ``(g,)`` each."""

    cause: npt.NDArray[np.int8]
    layer: npt.NDArray[np.integer[Any]]
    phase: npt.NDArray[np.integer[Any]]


class _Cut(NamedTuple):
    """Some gaps in pieces: those of waits, by gap and time, then those of gaps that last after their launch returned.

    Attributes:
        waits: The waits, their gaps as indices into these.
        pieces: Their pieces.
        call, graph: As in `_Next`.
        gap, start, ns: Of each piece.
    """

    waits: Waits
    pieces: Pieces
    call: Int64Array
    graph: npt.NDArray[np.bool_]
    gap: Int64Array
    start: Int64Array
    ns: Int64Array


class _Waits(NamedTuple):
    """The columns of `Idle.waits`; the name of the call as a code."""

    gap: Int64Array
    layer: Any
    phase: Any
    call: npt.NDArray[np.int32]
    lost_ns: Int64Array


def idle(trace: Trace, attribution: Attribution, windows: Windows, active: Activity, host: HostCalls) -> Idle:
    """Find what the host did in every idle gap; without the table `calls` every cause is `other`.

    Raises:
        AssertionError: The parts of a gap do not add up to it: a bug in this package.
    """
    splitter = _Splitter(trace, attribution, windows, active.gaps, host)
    parts = _over_blocks(splitter.parts, len(active.gap_start), _grown)
    splitter.finish()
    return splitter.named(parts)


def largest_parts(
    trace: Trace, attribution: Attribution, windows: Windows, gaps: Gaps, host: HostCalls
) -> pd.DataFrame:
    """The columns window, start_ns, idle_ns, cause, layer and phase of `Idle.gaps`, without all else of `idle`: most
    gaps have several parts, and to keep them takes as long as to find them.

    Raises:
        AssertionError: The parts of a gap do not add up to it: a bug in this package.
    """
    splitter = _Splitter(trace, attribution, windows, gaps, host)
    return splitter.named_gaps(_over_blocks(splitter.largest, len(gaps.start), _joined))


def _over_blocks(split: Callable[[slice], _Found], count: int, join: Callable[[Iterable[_Found]], _Found]) -> _Found:
    """Split all gaps, a block at a time."""
    blocks = [slice(low, low + _BLOCK) for low in range(0, max(count, 1), _BLOCK)]
    if len(blocks) == 1:
        return join(map(split, blocks))
    with ThreadPoolExecutor(max_workers=_THREADS) as pool:
        return join(pool.map(split, blocks))


def _joined(blocks: Iterable[_Largest]) -> _Largest:
    return _Largest(*(np.concatenate(columns) for columns in zip(*blocks, strict=True)))


def _grown(blocks: Iterable[_Parts]) -> _Parts:
    """The blocks in one; each is copied at once, so that its memory is free for the next."""
    grown: list[Any] = []
    count = 0
    for block in blocks:
        grown = grown or [np.empty(0, dtype=column.dtype) for column in block]
        length = len(block.gap)
        for column, values in zip(grown, block, strict=True):
            column.resize(count + length, refcheck=False)  # in place: realloc can move the memory without a copy
            column[count : count + length] = values
        count += length
    return _Parts(*grown)


class _Splitter:
    """Splits the gaps, a block at a time."""

    def __init__(self, trace: Trace, attribution: Attribution, windows: Windows, gaps: Gaps, host: HostCalls) -> None:
        self._windows, self._gaps, self._host = windows, gaps, host
        self._following = _following(trace, windows, gaps, host)
        ranges = attribution.ranges
        launched = host.end[self._following.call]
        launched_late = np.flatnonzero((self._following.call != NONE) & (launched > gaps.start))
        queued_ns = gaps.end - np.maximum(launched, gaps.start)
        queued = np.flatnonzero((self._following.call != NONE) & (queued_ns >= LONG_NS))
        launcher_waits = (
            np.concatenate((gaps.start[launched_late], gaps.start[queued])),
            np.concatenate((np.minimum(launched, gaps.end)[launched_late], gaps.end[queued])),
        )
        self._doing: Doing = doing(host, ranges, trace.scheduled, launcher_waits, trace.frames)
        self._event = np.append(self._doing.rows, NONE)
        # one after the other, for memory; the timeline now, so that two threads do not make it at once
        self._doing.of_threads  # noqa: B018
        self._callers = Callers(host, self._doing)
        self._layers, self._phases = range_owners(ranges)
        self._layer, self._phase = (names.codes.astype(np.int32) for names in (self._layers, self._phases))
        functions = self._doing.functions
        self._names = (
            host.names if functions is None else [*host.names[:-1], *functions.names, ""]
        )  # NONE selects the last
        names = max(len(self._layers.categories), len(self._phases.categories), len(self._names))
        self._narrow = np.int16 if names <= np.iinfo(np.int16).max else np.int32  # a million parts: for memory
        self._pids = np.array([device.pid for device in windows.devices], dtype=np.int64)
        self._is_wait = host.waits
        self._is_copy = np.array([bool(SYNCHRONIZING_COPIES.search(name)) for name in host.names])[host.name]
        self._waited: dict[int, tuple[Int64Array, Int64Array, Int64Array]] = {}

    def largest(self, block: slice) -> _Largest:
        """Cause and place of the largest part of each of some gaps, and of the first of equals.

        A piece of more than half of a gap is of its largest part, so only the other gaps need the parts.
        """
        cut = self._cut(block)
        gap_ns = self._gaps.end[block] - self._gaps.start[block]
        piece = np.full(len(gap_ns), NONE)
        dominant = np.flatnonzero(2 * cut.ns > gap_ns[cut.gap])
        piece[cut.gap[dominant]] = dominant
        shared = np.flatnonzero(piece[cut.gap] == NONE)
        parts = self._described(cut, shared)
        rows, part_ns = _summed(parts)
        largest = shared[rows[_largest(parts.gap[rows], part_ns)]]
        piece[cut.gap[largest]] = largest
        cause, range_ = self._causes(cut, piece)
        return _Largest(cause, self._layer[range_], self._phase[range_])

    def parts(self, block: slice) -> _Parts:
        """The parts of some gaps, by gap."""
        cut = self._cut(block)
        after_waits = np.flatnonzero(cut.waits.late_until > cut.waits.start)
        gap, start = cut.waits.gap[after_waits], cut.waits.start[after_waits]
        late_ns = np.minimum(cut.waits.late_until[after_waits], self._gaps.end[block][gap]) - start
        waited = self._event[self._doing.of_threads.states[0][cut.waits.first[after_waits]]]
        self._waited[block.start] = (gap + block.start, waited, late_ns)
        parts = self._described(cut, np.arange(len(cut.gap)))
        parts = parts._replace(gap=parts.gap + block.start)
        return _selected(parts, *_summed(parts), self._narrow)

    def _cut(self, block: slice) -> _Cut:
        """The pieces of some gaps.

        Raises:
            AssertionError: They do not add up to a gap: a bug in this package.
        """
        start, end = self._gaps.start[block], self._gaps.end[block]
        call, graph = self._following.call[block], self._following.graph[block]
        until = np.where(call != NONE, np.clip(self._host.end[call], start, end), start)
        queued = np.flatnonzero(until < end)
        waits = self._waits_of(np.flatnonzero(until > start), start, until, call, block)
        pieces = pieces_of(waits, self._doing, self._callers)
        gap = np.concatenate((waits.gap[pieces.wait], queued))
        piece_start = np.concatenate((pieces.start, until[queued]))
        ns = np.concatenate((pieces.end, end[queued])) - piece_start
        if not np.array_equal(exact_sums(gap, ns, len(start)), end - start):
            raise AssertionError("the causes of idle time do not add up to it: please report this")
        return _Cut(waits, pieces, call, graph, gap, piece_start, ns)

    def _waits_of(
        self, rows: Int64Array, start: Int64Array, until: Int64Array, call: Int64Array, block: slice
    ) -> Waits:
        host, timeline = self._host, self._doing.of_threads
        tid, wait_start = host.tid[call[rows]], start[rows]
        first = timeline.changes.before(tid, wait_start)
        at = self._event[timeline.states[0][first]]
        late_until = np.full(len(rows), np.iinfo(np.int64).min)
        waited = np.flatnonzero(self._is_wait[at])
        late_until[waited] = 2 * host.end[at[waited]] - host.start[at[waited]]
        device = self._windows.device[self._gaps.window[block][rows]]
        return Waits(rows, self._pids[device], tid, wait_start, until[rows], first, late_until)

    def _described(self, cut: _Cut, rows: Int64Array) -> _Parts:
        """Some pieces, those of one gap by start, with cause and place; the gap as an index into the block."""
        cause, range_ = self._causes(cut, rows)
        operator, call = self._operators_and_calls(cut, rows)
        layer, phase = self._layer[range_], self._phase[range_]
        return _Parts(cut.gap[rows], cause, layer, phase, operator, call, cut.ns[rows], cut.start[rows])

    def _causes(self, cut: _Cut, rows: Int64Array) -> tuple[npt.NDArray[np.int8], Int64Array]:
        """The cause and the range of some pieces."""
        activity, launched = self._doing, rows >= len(cut.pieces.wait)
        cause, range_ = np.empty(len(rows), dtype=np.int8), np.empty(len(rows), dtype=np.int64)
        queued, early = np.flatnonzero(launched), np.flatnonzero(~launched)
        gap = cut.gap[rows[queued]]
        call = cut.call[gap]
        names = [NAMES.index(name) for name in ("other", "graph", "queued")]
        cause[queued] = np.select([call == NONE, cut.graph[gap]], names[:2], names[2])
        cause[queued[self._copies_meanwhile(cut, rows[queued]) != NONE]] = NAMES.index("sync")
        range_[queued] = activity.ranges.nesting.innermost(self._host.tid[call], self._host.start[call])
        pieces = cut.pieces.of(rows[early])
        cause[early], range_[early] = self._causes_of(pieces, cut), pieces.range
        return cause, range_

    def _copies_meanwhile(self, cut: _Cut, rows: Int64Array) -> Int64Array:
        """The synchronizing copy call that the launching thread is in while the device has work but runs none, for
        pieces of `LONG_NS` or more, else `NONE`.
        """
        call = cut.call[cut.gap[rows]]
        calls = self._event[self._doing.stack.innermost(self._host.tid[call], cut.start[rows] + cut.ns[rows] // 2)]
        copies = self._is_copy[calls] & self._is_wait[calls] & (call != NONE) & (cut.ns[rows] >= LONG_NS)
        return np.where(copies, calls, NONE)

    def _causes_of(self, pieces: Pieces, cut: _Cut) -> npt.NDArray[np.integer[Any]]:
        activity, start = self._doing, pieces.start
        call_cause, of_range = activity.cause[pieces.call], activity.range_cause[pieces.range]
        located = (pieces.call != NONE) | activity.in_phase[pieces.range]
        chosen: list[tuple[npt.NDArray[np.bool_], Any]] = [
            (activity.profiler.covers(cut.waits.pid[pieces.wait], start), NAMES.index("profiler")),
            (call_cause != NONE, call_cause),
            (activity.prepares[pieces.call] | activity.loading.covers(pieces.tid, start), LOADING),
            (of_range != NONE, of_range),
            (activity.off_cpu(pieces.tid, start), NAMES.index("off_cpu")),
            (start < cut.waits.late_until[pieces.wait], NAMES.index("after_sync")),
            (cut.graph[cut.waits.gap[pieces.wait]], NAMES.index("graph")),
            (located, LAUNCH),
        ]
        codes: list[Any] = [code for _, code in chosen]
        causes: npt.NDArray[np.integer[Any]] = np.select([mask for mask, _ in chosen], codes, UNKNOWN)
        unknown = np.flatnonzero(causes == UNKNOWN)
        if activity.functions is not None and len(unknown):
            function = self._functions(pieces.of(unknown), cut)
            function_cause = np.where(activity.functions.loads_data[function], NAMES.index("dataloader"), PYTHON)
            causes[unknown] = np.where(function != NONE, function_cause, UNKNOWN)
        return causes

    def _functions(self, pieces: Pieces, cut: _Cut) -> Int64Array:
        """The Python function of each piece outside calls, operators and layers, or `NONE`."""
        activity = self._doing
        if activity.functions is None:
            return np.full(len(pieces.wait), NONE)
        gap_ns = np.bincount(cut.gap, weights=cut.ns).astype(np.int64)[cut.waits.gap[pieces.wait]]
        function = activity.functions.at(pieces.tid, pieces.start, gap_ns)
        return np.where((pieces.call != NONE) | activity.in_layer[pieces.range], NONE, function)

    def _operators_and_calls(self, cut: _Cut, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Codes of the names of operator (or Python function) and API call of some pieces, or `NONE`."""
        host = self._host
        call = np.append(cut.pieces.call, NONE)[np.minimum(rows, len(cut.pieces.call))]
        operator = self._doing.operator[call]
        event = self._event[call]  # that of `NONE` has the name ''
        launched = np.flatnonzero(rows >= len(cut.pieces.wait))
        event[launched] = self._copies_meanwhile(cut, rows[launched])
        is_call = (event != NONE) & ~host.operator[event]
        name = np.where(operator == NONE, NONE, host.name[operator].astype(np.int64))
        early = np.flatnonzero(rows < len(cut.pieces.wait))
        function = self._functions(cut.pieces.of(rows[early]), cut)
        name[early] = np.where(function == NONE, name[early], len(host.names) - 1 + function)
        return name, np.where(is_call, host.name[event], NONE)

    def finish(self) -> None:
        """Free the memory that only splitting needs."""
        waited = [self._waited[first] for first in sorted(self._waited)]
        gap, call, late_ns = (np.concatenate(columns) for columns in zip(*waited, strict=True))
        range_ = self._doing.ranges.nesting.innermost(self._host.tid[call], self._host.start[call])
        self._gap_waits = _Waits(gap, self._layers[range_], self._phases[range_], self._host.name[call], late_ns)
        del self._doing, self._event, self._callers, self._following, self._waited

    def named_gaps(self, largest: _Largest) -> pd.DataFrame:
        """The gaps as a table."""
        import pandas as pd

        gaps = self._gaps
        columns = {
            "window": gaps.window,
            "start_ns": gaps.start,
            "idle_ns": gaps.end - gaps.start,
            **self._places(largest),
        }
        frame: pd.DataFrame = pd.DataFrame(columns, copy=False)
        return frame

    def _places(self, parts: _Parts | _Largest) -> dict[str, Any]:
        import pandas as pd

        return {
            "cause": pd.Categorical.from_codes(parts.cause, categories=pd.Index(NAMES, dtype=object)),
            "layer": pd.Categorical.from_codes(parts.layer, dtype=self._layers.dtype),
            "phase": pd.Categorical.from_codes(parts.phase, dtype=self._phases.dtype),
        }

    def named(self, parts: _Parts) -> Idle:
        """The parts and gaps as tables."""
        import pandas as pd

        names = self._names
        columns = {
            "gap": parts.gap,
            **self._places(parts),
            "operator": labels(parts.operator, names),
            "call": labels(parts.call, names),
            "idle_ns": parts.idle_ns,
            "start_ns": parts.start_ns,
        }
        table = pd.DataFrame(columns, copy=False)
        start, end = self._gaps.start, self._gaps.end
        largest = _largest(parts.gap, parts.idle_ns)
        gaps = pd.DataFrame({"window": self._gaps.window, "start_ns": start, "idle_ns": end - start}, copy=False)
        for name in ("cause", *PLACE):
            gaps[name] = table[name].array[largest]
        return Idle(gaps, table, self._named_waits())

    def _named_waits(self) -> pd.DataFrame:
        import pandas as pd

        waits = self._gap_waits
        columns = {
            "gap": waits.gap,
            "layer": waits.layer,
            "phase": waits.phase,
            "call": labels(waits.call, self._host.names),
            "lost_ns": waits.lost_ns,
        }
        frame: pd.DataFrame = pd.DataFrame(columns, copy=False)
        return frame


def _following(trace: Trace, windows: Windows, gaps: Gaps, host: HostCalls) -> _Next:
    call = np.append(host.of_op, NONE)  # first: finding it takes memory
    starts = trace.ops["start_ns"].to_numpy()
    line = Line.over((starts, gaps.start), (starts, gaps.end))
    key = line.at(windows.of_op, starts)
    order = np.argsort(key, kind="stable")
    key = key[order]
    neighbours = np.concatenate(([NONE], order, [NONE]))
    del order
    of_op = np.append(windows.of_op, NONE)
    is_graph = (trace.ops["graph_node"].to_numpy() >= 0) | (trace.ops["kind"].to_numpy() == OP_KINDS.index("graph"))
    is_graph = np.append(is_graph, False)
    following = _Next(np.empty(len(gaps.end), dtype=np.int64), np.empty(len(gaps.end), dtype=bool))
    for low in range(0, len(gaps.end), _BLOCK):
        block = slice(low, low + _BLOCK)
        lane = windows.device[gaps.window[block]]
        position = np.searchsorted(key, line.at(lane, gaps.end[block]))
        before, op = (
            np.where(of_op[neighbour] == lane, neighbour, NONE)
            for neighbour in (neighbours[position], neighbours[position + 1])
        )
        following.call[block] = call[op]
        following.graph[block] = is_graph[op] & is_graph[before] & (call[op] != call[before])
    return following


def _summed(parts: _Parts) -> tuple[Int64Array, Int64Array]:
    """Merge the parts of each gap with the same cause and place: the first row of each, by gap and place, and its time.

    Args:
        parts: The parts, those of one gap by start.
    """
    keys: list[Any] = list(parts[:6])
    code = joined(keys)
    order = np.lexsort(keys[::-1]) if code is None else np.argsort(code, kind="stable")
    columns = [column[order] for column in (keys if code is None else [code])]
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    first = np.flatnonzero(is_first)
    part_ns = np.add.reduceat(parts.idle_ns[order], first) if len(first) else parts.idle_ns
    return order[first], part_ns


def _selected(parts: _Parts, rows: Int64Array, part_ns: Int64Array, narrow: type[np.integer[Any]]) -> _Parts:
    """Some rows with these times; the codes of the place become `narrow`."""
    kinds: list[Any] = [np.int32, np.int8, narrow, narrow, narrow, narrow]
    codes: list[Any] = [column[rows].astype(kind) for column, kind in zip(parts[:6], kinds, strict=True)]
    return _Parts._make([*codes, part_ns, parts.start_ns[rows]])


def _largest(gap: npt.NDArray[np.integer[Any]], idle_ns: Int64Array) -> Int64Array:
    """The row of the largest part of each gap, the first of equals."""
    if not len(gap):
        return np.zeros(0, dtype=np.int64)
    # the first part of each gap; every gap has one, and its parts are adjacent
    firsts = np.flatnonzero(np.concatenate(([True], gap[1:] != gap[:-1]))[: len(gap)])
    largest_ns = np.repeat(np.maximum.reduceat(idle_ns, firsts), np.diff(firsts, append=len(gap)))
    rows = np.flatnonzero(idle_ns == largest_ns)
    return rows[np.concatenate(([True], gap[rows][1:] != gap[rows][:-1]))]
