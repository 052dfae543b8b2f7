"""Attributes each idle gap of a device to what the host did during it.

The device waits for the thread that launches the next operation, until that launch returns. The gap is cut where the
thread begins or ends a call, an operator or a range; each piece belongs to the innermost of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution, range_owners
from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array, Line, exact_sums, joined
from nvprof_kit._analysis.attribution.steps import Windows
from nvprof_kit._analysis.breakdown.activity import Gaps
from nvprof_kit._analysis.breakdown.causes import LAUNCH, LOADING, NAMES, PYTHON, UNKNOWN, doing
from nvprof_kit._analysis.breakdown.host import LONG_NS, SYNCHRONIZING_COPIES, HostCalls
from nvprof_kit._analysis.breakdown.pieces import Callers, Pieces, Waits, pieces_of
from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.schema import OP_KINDS, Trace

if TYPE_CHECKING:
    import pandas as pd

_BLOCK = 1 << 15
"""Gaps processed at a time, to limit memory."""

PLACE = ("layer", "phase", "operator", "call")
"""The columns that describe the place of idle time."""

Codes = npt.NDArray[np.integer[Any]]


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


def idle(trace: Trace, attribution: Attribution, windows: Windows, gaps: Gaps, host: HostCalls) -> Idle:
    """Find what the host did in every idle gap; without the table `calls` every cause is `other`.

    Raises:
        AssertionError: The parts of a gap do not add up to it: a bug in this package.
    """
    import pandas as pd

    splitter = _Splitter(trace, attribution, windows, gaps, host)
    blocks = [splitter.split(slice(low, low + _BLOCK)) for low in range(0, max(len(gaps.start), 1), _BLOCK)]
    names, categories = splitter.names, {"layer": splitter.layers.dtype, "phase": splitter.phases.dtype}
    del splitter
    parts, waits = (
        pd.DataFrame({name: np.concatenate([block[name] for block in of_kind]) for name in of_kind[0]}, copy=False)
        for of_kind in zip(*blocks, strict=True)
    )
    del blocks
    for table in (parts, waits):
        for name, dtype in categories.items():
            table[name] = pd.Categorical.from_codes(table[name], dtype=dtype)
        table["call"] = labels(table["call"].to_numpy(), names)
    parts["cause"] = pd.Categorical.from_codes(parts["cause"], categories=pd.Index(NAMES, dtype=object))
    parts["operator"] = labels(parts["operator"].to_numpy(), names)
    gap_table = pd.DataFrame({"window": gaps.window, "start_ns": gaps.start, "idle_ns": gaps.end - gaps.start})
    largest = _largest(parts["gap"].to_numpy(), parts["idle_ns"].to_numpy())
    for name in ("cause", *PLACE):
        gap_table[name] = parts[name].array[largest]
    return Idle(gap_table, parts, waits)


class _Splitter:
    """Splits the gaps, a block at a time."""

    def __init__(self, trace: Trace, attribution: Attribution, windows: Windows, gaps: Gaps, host: HostCalls) -> None:
        self._gaps, self._host = gaps, host
        self._call, self._graph = _following(trace, windows, gaps, host)
        launched = np.where(self._call == NONE, gaps.start, host.end[self._call])
        unlaunched = np.flatnonzero(launched > gaps.start)
        queued = np.flatnonzero((self._call != NONE) & (gaps.end - np.maximum(launched, gaps.start) >= LONG_NS))
        starts = np.concatenate((gaps.start[unlaunched], gaps.start[queued]))
        end = np.concatenate((np.minimum(launched, gaps.end)[unlaunched], gaps.end[queued]))
        self._doing = doing(host, attribution.ranges, trace.scheduled, (starts, end), trace.frames)
        self._event = np.append(self._doing.rows, NONE)
        self._callers = Callers(host, self._doing)
        self.layers, self.phases = range_owners(attribution.ranges)
        functions = self._doing.functions
        self.names = host.names if functions is None else [*host.names[:-1], *functions.names, ""]  # NONE is the last
        self._pid = np.array([device.pid for device in windows.devices], dtype=np.int64)[windows.device]
        self._is_copy = np.array([bool(SYNCHRONIZING_COPIES.search(name)) for name in host.names])[host.name]

    def split(self, block: slice) -> tuple[dict[str, Codes], dict[str, Codes]]:
        """The columns of `Idle.parts` and of `Idle.waits` of some gaps, names as codes."""
        host, activity = self._host, self._doing
        start, end, call = self._gaps.start[block], self._gaps.end[block], self._call[block]
        until = np.where(call != NONE, np.clip(host.end[call], start, end), start)
        waits, awaited = self._waits(np.flatnonzero(until > start), block, until)
        pieces = pieces_of(waits, activity, self._callers)
        early, queued = waits.gap[pieces.wait], np.flatnonzero(until < end)
        gap, piece_start = np.concatenate((early, queued)), np.concatenate((pieces.start, until[queued]))
        ns = np.concatenate((pieces.end, end[queued])) - piece_start
        if not np.array_equal(exact_sums(gap, ns, len(start)), end - start):
            raise AssertionError("the causes of idle time do not add up to it: please report this")
        nesting = activity.ranges.nesting
        range_ = np.concatenate((pieces.range, nesting.innermost(host.tid[call[queued]], host.start[call[queued]])))
        # a device that runs nothing while the launching thread is in a synchronizing copy waits for the host
        copy = self._event[activity.stack.innermost(host.tid[call[queued]], (until[queued] + end[queued]) // 2)]
        is_copy = (
            self._is_copy[copy] & host.waits[copy] & (call[queued] != NONE) & (end[queued] - until[queued] >= LONG_NS)
        )
        function = np.full(len(pieces.wait), NONE)
        if activity.functions is not None:  # outside calls, operators and layers
            function = activity.functions.at(pieces.tid, pieces.start, (end - start)[early])
            function = np.where((pieces.call != NONE) | activity.in_layer[pieces.range], NONE, function)
        cases = [is_copy, call[queued] == NONE, self._graph[block][queued]]
        of_queued = np.select(cases, [NAMES.index(name) for name in ("sync", "other", "graph")], NAMES.index("queued"))
        cause = np.concatenate((self._causes(pieces, waits, self._graph[block], function), of_queued))
        operator = activity.operator[pieces.call]
        named = np.where(operator == NONE, NONE, host.name[operator].astype(np.int64))
        named = np.where(function == NONE, named, len(host.names) - 1 + function)
        event = np.concatenate((self._event[pieces.call], np.where(is_copy, copy, NONE)))
        # a wait inside a gap: the device had already run dry, and runs dry whenever the host waits for it
        inside = np.flatnonzero(host.waits[self._event[pieces.call]])
        inside = inside[np.unique(early[inside], return_index=True)[1]]
        inside = inside[~np.isin(early[inside] + block.start, awaited["gap"])]
        dry = {
            "gap": early[inside] + block.start,
            "layer": self.layers.codes[pieces.range[inside]],
            "phase": self.phases.codes[pieces.range[inside]],
            "call": host.name[self._event[pieces.call[inside]]],
            "lost_ns": end[early[inside]] - pieces.start[inside],
        }
        awaited = {name: np.concatenate((values, dry[name])) for name, values in awaited.items()}
        keys = {
            "gap": gap + block.start,
            "cause": cause.astype(np.int8),
            "layer": self.layers.codes[range_],
            "phase": self.phases.codes[range_],
            "operator": np.append(named, np.full(len(queued), NONE)),
            "call": np.where((event != NONE) & ~host.operator[event], host.name[event], NONE),
        }
        # merge the parts of a gap with the same cause and place
        code = joined(list(keys.values()))
        assert code is not None, "a block has few gaps"
        order = np.lexsort((piece_start, code))
        first = np.flatnonzero(np.append(True, np.diff(code[order]) != 0)[: len(order)])
        parts = {name: values[order[first]] for name, values in keys.items()}
        parts["idle_ns"] = np.add.reduceat(ns[order], first) if len(first) else ns
        parts["start_ns"] = piece_start[order[first]]
        return parts, awaited

    def _waits(self, rows: Int64Array, block: slice, until: Int64Array) -> tuple[Waits, dict[str, Codes]]:
        """The parts of gaps before the launch that ends them returns, and the columns of `Idle.waits`."""
        host, timeline = self._host, self._doing.of_threads
        call, start, end = self._call[block][rows], self._gaps.start[block][rows], self._gaps.end[block][rows]
        first = timeline.changes.before(host.tid[call], start)
        event = self._event[timeline.states[0][first]]
        late_until = np.where(host.waits[event], 2 * host.end[event] - host.start[event], np.iinfo(np.int64).min)
        pid = self._pid[self._gaps.window[block][rows]]
        waits = Waits(rows, pid, host.tid[call], start, until[rows], first, late_until)
        waited = np.flatnonzero(late_until > start)
        event = event[waited]
        range_ = self._doing.ranges.nesting.innermost(host.tid[event], host.start[event])
        return waits, {
            "gap": rows[waited] + block.start,
            "layer": self.layers.codes[range_],
            "phase": self.phases.codes[range_],
            "call": host.name[event],
            "lost_ns": np.minimum(late_until, end)[waited] - start[waited],
        }

    def _causes(
        self, pieces: Pieces, waits: Waits, is_graph: npt.NDArray[np.bool_], function: Int64Array
    ) -> npt.NDArray[np.integer[Any]]:
        """The cause of each piece before a launch."""
        activity, start = self._doing, pieces.start
        is_system = self._host.system[self._event[pieces.call]]
        call_cause, of_range = activity.cause[pieces.call], activity.range_cause[pieces.range]
        cases: list[tuple[npt.NDArray[np.bool_], Any]] = [
            (activity.profiler.covers(waits.pid[pieces.wait], start), NAMES.index("profiler")),
            (call_cause != NONE, call_cause),
            (activity.prepares[pieces.call] | activity.loading.covers(pieces.tid, start), LOADING),
            (of_range != NONE, of_range),
            (activity.off_cpu(pieces.tid, start) | is_system, NAMES.index("off_cpu")),
            (start < waits.late_until[pieces.wait], NAMES.index("after_sync")),
            (is_graph[waits.gap[pieces.wait]], NAMES.index("graph")),
            ((pieces.call != NONE) | activity.in_phase[pieces.range], LAUNCH),
        ]
        if activity.functions is not None:
            loads_data = activity.functions.loads_data[function]
            cases.append((function != NONE, np.where(loads_data, NAMES.index("dataloader"), PYTHON)))
        return np.select([case for case, _ in cases], [cause for _, cause in cases], UNKNOWN)


def _following(trace: Trace, windows: Windows, gaps: Gaps, host: HostCalls) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """The call that launched what ends each gap, or `NONE`, and whether that is the replay of a CUDA graph after
    another replay.
    """
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
    call = np.append(host.of_op, NONE)
    is_graph = (trace.ops["graph_node"].to_numpy() >= 0) | (trace.ops["kind"].to_numpy() == OP_KINDS.index("graph"))
    is_graph = np.append(is_graph, False)
    return call[op], is_graph[op] & is_graph[before] & (call[op] != call[before])


def _largest(gap: Codes, idle_ns: Int64Array) -> Int64Array:
    """The row of the largest part of each gap, the first of equals; the parts of a gap are adjacent."""
    order = np.lexsort((np.arange(len(gap)), -idle_ns, gap))
    return order[np.flatnonzero(np.append(True, np.diff(gap[order]) != 0)[: len(order)])]
