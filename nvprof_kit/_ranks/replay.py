"""Replays the job as a graph of collectives: its critical path across ranks, and what-if savings.

A rank's collective begins after the event that last gated its device (the end of a collective without overlapping
compute) plus the rank's own work since then, and after the previous collective in the communicator. It ends on all
ranks one transfer time after the last rank arrives. A sender or the root of a broadcast that ended before the last
arrival instead keeps its measured duration. Replaying the unmodified graph must reproduce the measured time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array
from nvprof_kit._result.column import Column, Columns
from nvprof_kit.errors import CaptureError
from nvprof_kit.names import NO_LAYER, NO_PHASE

if TYPE_CHECKING:
    import pandas as pd

PATH_COLUMNS: Columns = {
    "step": Column("step, -1 outside steps", fold="key"),
    "rank": Column("rank on the path", fold="key"),
    "layer": Column("layer, or `(none)`", kind="str"),
    "phase": Column("phase of that layer, or of the loop", kind="str"),
    "what": Column("`compute`, `copy`, `transfer`, or idle with its cause", kind="str"),
    "ns": Column("time of the path; the rows add up to the replayed time", "ns", kind="float"),
    "share": Column("`ns` divided by the replayed time", "share", kind="float"),
}
"""The columns of the critical path."""

WHAT_IF_COLUMNS: Columns = {
    "what": Column("what is changed to the median of its peers", kind="str"),
    "measured_ns": Column("measured step time, mean", "ns", kind="float"),
    "replayed_ns": Column("step time of the replay without changes, mean", "ns", kind="float"),
    "step_ns": Column("step time of the replay with the change, mean", "ns", kind="float"),
    "saved_ns": Column("saving per step: `replayed_ns` minus `step_ns`", "ns", kind="float"),
    "saved_share": Column("`saved_ns` divided by `replayed_ns`", kind="float"),
}
"""The columns of what-if."""


@dataclass(frozen=True)
class Graph:
    """Members of matched collectives, by time; shape ``(m,)`` each.

    Attributes:
        rank, instance, step, a, e: Rank, collective, step, aligned start and end of each member.
        ready: When it could have begun without the previous collective.
        gate: The member whose end last gated the rank before `ready`, or `NONE`.
        before: The previous member in its communicator that ended before it began, or `NONE`.
        low, high: The rank's rows of `segments` between gate and readiness.
        segments: Segments of all ranks, by rank and segment.
        order: The collectives by last arrival, as slices of `by_instance`.
    """

    rank: Int64Array
    instance: Int64Array
    step: Int64Array
    a: Int64Array
    e: Int64Array
    ready: Int64Array
    gate: Int64Array
    before: Int64Array
    low: Int64Array
    high: Int64Array
    segments: pd.DataFrame
    order: list[Int64Array]


def build(points: pd.DataFrame, segments: pd.DataFrame, instances: pd.DataFrame) -> Graph:
    """The graph of a job.

    Args:
        points: See `nvprof_kit._trace.jobs.tables.JobTables.points`, of all ranks.
        segments: See `nvprof_kit._trace.jobs.tables.JobTables.segments`, of all ranks.
        instances: See `nvprof_kit._trace.jobs.tables.JobTables.instances`, all.
    """
    in_order = instances.sort_values("arrival", kind="stable", ignore_index=True)
    in_order["instance"] = np.arange(len(in_order))
    members = points.drop(columns="step", errors="ignore").merge(
        in_order[["c", "s", "k", "step", "instance"]], on=["c", "s", "k"]
    )
    members = members.sort_values(["rank", "index"], kind="stable", ignore_index=True)
    rank, a, e = (members[name].to_numpy() for name in ("rank", "a", "e"))
    ready = a - members["queued_ns"].to_numpy()
    gate, before = np.full(len(a), NONE, dtype=np.int64), np.full(len(a), NONE, dtype=np.int64)
    low, high = np.zeros(len(a), dtype=np.int64), np.zeros(len(a), dtype=np.int64)
    at_rank, at_segment = segments["rank"].to_numpy(), segments["segment"].to_numpy()
    for number in np.unique(rank).tolist():
        of_rank = np.flatnonzero(rank == number)
        gates = of_rank[members["gates"].to_numpy()[of_rank]]
        gates = gates[np.argsort(e[gates], kind="stable")]
        last_gate = np.searchsorted(e[gates], ready[of_rank], side="right") - 1
        gate[of_rank] = np.where(last_gate >= 0, np.append(gates, NONE)[last_gate], NONE)
        rows = np.flatnonzero(at_rank == number)
        base = int(rows[0]) if len(rows) else 0
        since = np.where(gate[of_rank] >= 0, members["end_segment"].to_numpy()[gate[of_rank]], NONE)
        low[of_rank] = base + np.searchsorted(at_segment[rows], since, side="right")
        until = members["ready_segment"].to_numpy()[of_rank]
        high[of_rank] = np.maximum(base + np.searchsorted(at_segment[rows], until, side="right"), low[of_rank])
    positions = np.arange(len(a))
    last = members.assign(place=positions).groupby(["rank", "c"], sort=False)["place"].shift(1)
    before = last.fillna(NONE).astype("int64").to_numpy()
    before = np.where((before >= 0) & (e[before] <= a), before, NONE)
    instance = members["instance"].to_numpy()
    by_instance = np.argsort(instance, kind="stable")
    order = np.split(by_instance, np.flatnonzero(np.diff(instance[by_instance])) + 1)
    step = members["step"].to_numpy()
    return Graph(rank, instance, step, a, e, ready, gate, before, low, high, segments, order)


def replay(graph: Graph, cut: Int64Array | None = None, quicker: Int64Array | None = None) -> Int64Array:
    """Replay the graph; returns the end of each member, shape ``(m,)``.

    Args:
        graph: The graph.
        cut: Reduction of each member's work between its gate and readiness, in ns; None for no change.
        quicker: Reduction of its transfer time, in ns.
    """
    ends: Int64Array = graph.e.copy()
    nothing = np.zeros(len(ends), dtype=np.int64)
    cut, quicker = nothing if cut is None else cut, nothing if quicker is None else quicker
    gated = graph.gate >= 0
    work = graph.ready - np.where(gated, graph.e[graph.gate], 0) - cut
    unblocked = np.where(graph.before >= 0, np.maximum(graph.ready, graph.e[graph.before]), graph.ready)
    delay = graph.a - unblocked
    for members in graph.order:
        start = work[members] + np.where(gated[members], ends[graph.gate[members]], 0)
        previous = np.where(graph.before[members] >= 0, ends[graph.before[members]], start)
        start = np.maximum(start, previous) + delay[members]
        transfer = graph.e[members] - int(graph.a[members].max())
        waited = start.max() + np.maximum(transfer - quicker[members], 0)
        ends[members] = np.where(transfer < 0, start + graph.e[members] - graph.a[members], waited)
    return ends


def spent(graph: Graph, weight: npt.NDArray[np.float64]) -> Int64Array:
    """Weighted sum of the segments in each member's work, in ns; weights are from 0 to 1."""
    sums = np.concatenate(([0.0], np.cumsum(graph.segments["ns"].to_numpy() * weight)))
    totals: Int64Array = np.round(sums[graph.high] - sums[graph.low]).astype(np.int64)
    return totals


def step_ends(graph: Graph, ends: Int64Array) -> Int64Array:
    """The last end of each step, in the order of steps."""
    steps, of = np.unique(graph.step, return_inverse=True)
    last = np.full(len(steps), np.iinfo(np.int64).min)
    np.maximum.at(last, of, ends)
    ends_of: Int64Array = last[steps >= 0] if (steps >= 0).any() else last
    return ends_of


def critical_path(graph: Graph) -> pd.DataFrame:
    """The critical path from the last collective's end back to the first arrival on it, with `PATH_COLUMNS`.

    Raises:
        CaptureError: A collective waits for itself, in damaged maps.
    """
    import pandas as pd

    rows: list[tuple[Any, ...]] = []
    names = {name: graph.segments[name].to_numpy() for name in ("layer", "phase", "doing", "ns")}
    at = int(graph.e.argmax())
    where = {int(members[0]): members for members in graph.order}
    first = {int(member): key for key, members in where.items() for member in members.tolist()}
    passed: set[int] = set()
    while at >= 0:
        members = where[first[at]]
        last = int(members[graph.a[members].argmax()])
        if last in passed:
            raise CaptureError(
                f"the maps of the ranks contradict themselves: a collective of rank {int(graph.rank[last])} waits for "
                "itself; map again"
            )
        passed.add(last)
        step, rank = int(graph.step[last]), int(graph.rank[last])
        rows.append((step, rank, NO_LAYER, NO_PHASE, "transfer", int(graph.e[at] - graph.a[last])))
        gate, before = int(graph.gate[last]), int(graph.before[last])
        if before >= 0 and graph.e[before] > graph.ready[last]:
            rows.append((step, rank, NO_LAYER, NO_PHASE, "launch", int(graph.a[last] - graph.e[before])))
            at = before
            continue
        rows.append((step, rank, NO_LAYER, NO_PHASE, "launch", int(graph.a[last] - graph.ready[last])))
        if gate >= 0:
            rows.extend(
                (step, rank, *(names[name][row] for name in ("layer", "phase", "doing")), int(names["ns"][row]))
                for row in range(int(graph.low[last]), int(graph.high[last]))
            )
        at = gate
    frame = pd.DataFrame.from_records(rows, columns=["step", "rank", "layer", "phase", "what", "ns"])
    table = frame.groupby(["step", "rank", "layer", "phase", "what"], sort=False)["ns"].sum().reset_index()
    table = table[table["ns"] > 0]
    shared = table.assign(share=table["ns"] / max(int(table["ns"].sum()), 1))
    ordered: pd.DataFrame = shared.sort_values("ns", ascending=False, kind="stable", ignore_index=True)
    return ordered


def what_if(graph: Graph, changes: dict[str, tuple[Int64Array | None, Int64Array | None]]) -> pd.DataFrame:
    """The step time with each change, with `WHAT_IF_COLUMNS`.

    Args:
        graph: The graph.
        changes: By name, the reductions of work and transfer time of each member; see `replay`.
    """
    import pandas as pd

    measured, base = _mean_step(graph, graph.e), _mean_step(graph, replay(graph))
    rows = []
    for name, (cut, quicker) in changes.items():
        step = _mean_step(graph, replay(graph, cut, quicker))
        rows.append((name, round(measured), round(base), round(step), round(base - step), (base - step) / max(base, 1)))
    table: pd.DataFrame = pd.DataFrame.from_records(rows, columns=list(WHAT_IF_COLUMNS))
    return table


def _mean_step(graph: Graph, ends: Int64Array) -> float:
    """Mean time from the end of one step's last collective to the next one's."""
    last = step_ends(graph, ends)
    return float(np.diff(last).mean()) if len(last) > 1 else float(last.max() - graph.a.min())


def error(graph: Graph) -> float:
    """Difference between the replay of the unmodified graph and the measurement, as a share of the step time."""
    measured = _mean_step(graph, graph.e)
    return abs(_mean_step(graph, replay(graph)) - measured) / max(measured, 1.0)


def rank_weights(graph: Graph, layers: pd.DataFrame, rank: int, layer: str | None = None) -> npt.NDArray[np.float64]:
    """Share of each segment that a rank (in one layer) would save at the median of its equals."""
    import pandas as pd

    keys = ["layer", "phase"]
    of_rank = layers[(layers["rank"] == rank) & ((layers["layer"] == layer) if layer else True)].set_index(keys)
    same = layers["stage"].isin(of_rank["stage"]) & (layers["rank"] != rank)
    of_peers = layers[same].groupby(keys)[["median_ns", "idle_ns"]].median().reindex(of_rank.index)
    parts = [
        pd.DataFrame({"kind": kind, "own": of_rank[name], "usual": of_peers[name].fillna(of_rank[peers])}).reset_index()
        for kind, name, peers in (("compute", "median_ns", "peers_ns"), ("idle", "idle_ns", "peers_idle_ns"))
    ]
    table = pd.concat(parts, ignore_index=True)
    table["weight"] = (1 - table["usual"] / table["own"].clip(lower=1)).clip(lower=0)
    segments = graph.segments[["rank", "layer", "phase", "doing"]]
    kind = segments["doing"].where(segments["doing"].isin(["compute", "copy", "communication"]), "idle")
    segment_weights = (
        segments.assign(kind=kind).merge(table, on=["kind", "layer", "phase"], how="left")["weight"].fillna(0.0)
    )
    weights: npt.NDArray[np.float64] = np.where(segments["rank"] == rank, segment_weights.to_numpy(), 0.0)
    return weights


def loader_weights(graph: Graph) -> npt.NDArray[np.float64]:
    """Share of each segment saved if every rank's data loader took the median time."""
    segments = graph.segments
    loads = segments["doing"] == "dataloader"
    sums = segments["ns"].where(loads, 0).groupby([segments["step"], segments["rank"]]).sum()
    usual = sums.groupby("step").transform("median")
    weight = (1 - usual / sums.clip(lower=1)).clip(lower=0).rename("weight").reset_index()
    segment_weights = segments[["step", "rank"]].merge(weight, on=["step", "rank"], how="left")["weight"].fillna(0.0)
    weights: npt.NDArray[np.float64] = np.where(loads, segment_weights.to_numpy(), 0.0)
    return weights


def network_cut(graph: Graph, instances: pd.DataFrame) -> Int64Array:
    """Time that each transfer would save at the median of its kind, size and ranks."""
    in_order = instances.sort_values("arrival", kind="stable", ignore_index=True)
    durations = in_order["ended"] - in_order["arrival"]
    usual = durations.groupby([in_order["sort"], in_order["bytes"], in_order["n"]]).transform("median")
    cut: Int64Array = np.maximum((durations - usual).to_numpy(), 0).astype(np.int64)[graph.instance]
    return cut
