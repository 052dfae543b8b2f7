"""Who owns a GPU nanosecond: the layer, phase and step of every operation, and how each was told.

An operation belongs to the innermost range that holds its launching API call on the launching thread, joined by process and
correlation id. An operation of a CUDA-graph replay belongs to the range that held the creation of its node when the graph was captured,
and to the step that launched the replay. What an autograd thread launches outside every range takes phase and step from the range that
is open on the other threads of its process at that moment, where exactly one is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit.analysis.nesting import NONE, Int64Array, nest
from nvprof_kit.analysis.ranges import Ranges, understand
from nvprof_kit.names import NO_PHASE, PHASE_CATEGORIES
from nvprof_kit.trace.schema import Trace

HOW = ("launch", "graph node", "other thread", "none")
"""How an operation was attributed; values of `Attribution.how`."""

_LAUNCH, _GRAPH_NODE, _OTHER_THREAD, _UNTOLD = range(4)


@dataclass(frozen=True)
class Attribution:
    """The owner of every operation (shape ``(n,)`` each, in the order of `Trace.ops`).

    Attributes:
        ranges: What the ranges mean.
        layer_range: The range of the layer that owns it, or `NONE`.
        phase: Index into `phases`: the layer's phase, or outside layers the phase range's text or ``other``.
        phases: The distinct phases.
        step: Index into `Ranges.steps`, or `NONE`.
        how: Index into `HOW`.
        replay: Launch of the CUDA-graph replay that ran it, an index of `Trace.api`, where its owner comes from the graph; else `NONE`.
        unlaunched: Number of operations whose launching call is not in the capture.
        uncreated: Number of replayed operations whose node's creation is not in the capture.
    """

    ranges: Ranges
    layer_range: Int64Array
    phase: npt.NDArray[np.int64]
    phases: tuple[str, ...]
    step: Int64Array
    how: npt.NDArray[np.int8]
    replay: Int64Array
    unlaunched: int
    uncreated: int


def attribute(trace: Trace) -> Attribution:
    """Find the owner of every operation of a capture. See the module's text for the rules."""
    ranges = understand(trace)
    pid = trace.ops["pid"].to_numpy()
    call = _launching_call(pid, trace.ops["correlation"].to_numpy(), trace.ops["start_ns"].to_numpy(), trace)
    launch = _Moments(pid, *_at(call, trace.api))
    owner = ranges.nesting.innermost(launch.tid, launch.time)
    layer_range, phase_range, how = _owners(ranges, launch, owner)
    replayed = np.flatnonzero(trace.ops["graph_node"].to_numpy() >= 0)
    created = _creation_of(trace, replayed)
    replay = np.full(len(pid), NONE, dtype=np.int64)
    if len(replayed):
        creation = _Moments(pid[replayed], *_at(created, trace.graph_nodes))
        owners = _owners(ranges, creation, ranges.nesting.innermost(creation.tid, creation.time))
        told = owners[1] >= 0
        rows = replayed[told]
        layer_range[rows], phase_range[rows] = owners[0][told], owners[1][told]
        how[rows], replay[rows] = _GRAPH_NODE, call[rows]
    phases, phase_of_range = np.unique(np.append(ranges.phase, NO_PHASE).astype(object), return_inverse=True)
    return Attribution(
        ranges=ranges,
        layer_range=layer_range,
        phase=phase_of_range[phase_range],  # NONE finds the last, NO_PHASE
        phases=tuple(str(phase) for phase in phases),
        step=_steps(ranges, launch, owner),
        how=how,
        replay=replay,
        unlaunched=int((call < 0).sum()),
        uncreated=int((created < 0).sum()),
    )


class _Moments(NamedTuple):
    """Something that a thread did at a moment, operation by operation; the thread is `NONE` where the capture does not tell."""

    pid: Int64Array
    tid: Int64Array
    time: Int64Array


def _at(rows: Int64Array, table: Any) -> tuple[Int64Array, Int64Array]:
    """Thread and moment of these rows of a table (`Trace.api`, `Trace.graph_nodes`); row `NONE` gives thread `NONE`."""
    return np.append(table["tid"].to_numpy(), NONE)[rows], np.append(table["start_ns"].to_numpy(), 0)[rows]


def _owners(ranges: Ranges, moments: _Moments, owner: Int64Array) -> tuple[Int64Array, Int64Array, npt.NDArray[np.int8]]:
    """The layer's range around each moment (at which `owner` is innermost), the range that gives the phase, and how that was told."""
    layer_range = np.append(ranges.layer_range, NONE)[owner]  # NONE finds the last, NONE
    phase_range = np.where(layer_range >= 0, layer_range, np.append(ranges.phase_range, NONE)[owner])
    how = np.full(len(owner), _LAUNCH, dtype=np.int8)
    untold = np.flatnonzero(phase_range == NONE)
    if len(untold):
        found = only_other(ranges, ranges.is_one_of(PHASE_CATEGORIES), *(values[untold] for values in moments))
        phase_range[untold] = found
        how[untold] = np.where(found >= 0, _OTHER_THREAD, _UNTOLD)
    return layer_range, phase_range, how


def _steps(ranges: Ranges, launch: _Moments, owner: Int64Array) -> Int64Array:
    """The step of each launch: of the range around it, else the one step that another thread of the process is in."""
    step = ranges.step_at(owner)
    untold = np.flatnonzero(step == NONE)
    if len(untold):
        found = only_other(ranges, ranges.step >= 0, *(values[untold] for values in launch))
        step[untold] = np.append(ranges.step, NONE)[found]
    return step


# ---------------------------------------------------------------- launches


def _launching_call(pid: Int64Array, correlation: Int64Array, start: Int64Array, trace: Trace) -> Int64Array:
    """The API call that launched each operation, as an index of `Trace.api`; `NONE` where the capture lacks it.

    A correlation id is unique within a process and a collected window. Where windows repeat it, the last call before the operation is it.
    """
    api_pid, api_correlation = trace.api["pid"].to_numpy(), trace.api["correlation"].to_numpy()
    call = np.full(len(pid), NONE, dtype=np.int64)
    for process in np.unique(api_pid):
        mine, calls = _rows(pid == process), _rows(api_pid == process)
        found = _matching(correlation[mine], start[mine], api_correlation[calls], trace.api["start_ns"].to_numpy()[calls])
        call[mine] = np.where(found >= 0, np.arange(len(api_pid))[calls][found], NONE)
    return call


def _rows(keep: npt.NDArray[np.bool_]) -> slice | Int64Array:
    """The rows to keep, as a slice where that is all of them, so that nothing is copied."""
    return slice(None) if keep.all() else np.flatnonzero(keep)


def _matching(wanted: Int64Array, moment: Int64Array, ids: Int64Array, starts: Int64Array) -> Int64Array:
    """For each id wanted the place at which `ids` holds it, `NONE` where it does not."""
    low, high = int(ids.min()), int(ids.max())
    if high - low > 64 * len(ids) + 1024:
        return _matching_by_search(wanted, moment, ids, starts)
    here = np.arange(len(ids), dtype=np.int32)
    place = np.full(high - low + 1, NONE, dtype=np.int32)
    place[ids - low] = here
    if not np.array_equal(place[ids - low], here):  # an id stands twice
        return _matching_by_search(wanted, moment, ids, starts)
    within = (wanted >= low) & (wanted <= high)
    return place[wanted - low] if within.all() else np.where(within, place[np.clip(wanted, low, high) - low], np.int32(NONE))


def _matching_by_search(wanted: Int64Array, moment: Int64Array, ids: Int64Array, starts: Int64Array) -> Int64Array:
    """The same for ids that are sparse or repeat: of several calls with one id, the last that began before the operation did."""
    order = np.lexsort((starts, ids))
    first = np.searchsorted(ids[order], wanted, side="left")
    behind = np.searchsorted(ids[order], wanted, side="right")
    place = behind - 1
    later = (place > first) & (starts[order][np.maximum(place, 0)] > moment)
    while later.any():
        place = np.where(later, place - 1, place)
        later = (place > first) & (starts[order][np.maximum(place, 0)] > moment)
    return np.where(behind > first, order[np.maximum(place, 0)], NONE)


# ---------------------------------------------------------------- CUDA graphs


def _creation_of(trace: Trace, replayed: Int64Array) -> Int64Array:
    """For each replayed operation the row of `Trace.graph_nodes` at which its node was first created, or `NONE`."""
    if not len(trace.graph_nodes):
        return np.full(len(replayed), NONE, dtype=np.int64)
    roots, created = _creations(trace.graph_nodes)
    pid, node = trace.ops["pid"].to_numpy()[replayed], trace.ops["graph_node"].to_numpy()[replayed]
    rows = np.full(len(replayed), NONE, dtype=np.int64)
    for process in np.unique(pid).tolist():
        mine = np.flatnonzero(pid == process)
        nodes, which = np.unique(node[mine], return_inverse=True)
        keys = [(process, one) for one in nodes.tolist()]
        rows[mine] = np.array([created.get(roots.get(key, key), NONE) for key in keys], dtype=np.int64)[which]
    return rows


def _creations(nodes: Any) -> tuple[dict[tuple[int, int], tuple[int, int]], dict[tuple[int, int], int]]:
    """For each node the node it goes back to through any number of copies, and for each first node the row of its creation."""
    pids, ids, originals = (nodes[column].to_numpy().tolist() for column in ("pid", "node", "original"))
    copied_from = {(pid, node): (pid, original) for pid, node, original in zip(pids, ids, originals, strict=True) if original >= 0}
    created: dict[tuple[int, int], int] = {}
    for row, (pid, node, original) in enumerate(zip(pids, ids, originals, strict=True)):
        if original < 0:
            created.setdefault((pid, node), row)
    roots = {}
    for key in copied_from:
        root, seen = key, {key}
        while root in copied_from and copied_from[root] not in seen:
            root = copied_from[root]
            seen.add(root)
        roots[key] = root
    return roots, created


# ---------------------------------------------------------------- other threads


def only_other(ranges: Ranges, chosen: npt.NDArray[np.bool_], pid: Int64Array, tid: Int64Array, time: Int64Array) -> Int64Array:
    """The innermost chosen range that is open on another thread of the process at a moment, where exactly one other thread has one.

    Args:
        ranges: The ranges of the capture.
        chosen: Which of them count, shape ``(r,)``.
        pid, tid, time: Process, thread and moment of each question, shape ``(n,)``; thread `NONE` gets no answer.

    Returns:
        Indices of ranges, or `NONE`, shape ``(n,)``.
    """
    found = np.full(len(tid), NONE, dtype=np.int64)
    hits = np.zeros(len(tid), dtype=np.int64)
    which = np.flatnonzero(chosen)
    for thread in np.unique(ranges.tid[which]):
        there = which[ranges.tid[which] == thread]
        nesting = nest(ranges.start[there], ranges.end[there], ranges.tid[there], ranges.nested[there])
        asked = np.flatnonzero((tid != thread) & (tid != NONE) & (pid == ranges.pid[there[0]]))
        inner = nesting.innermost(np.full(len(asked), thread), time[asked])
        hit = asked[inner >= 0]
        found[hit] = there[inner[inner >= 0]]
        hits[hit] += 1
    return np.where(hits == 1, found, NONE)
