"""Replays the job as a graph of collectives: its critical path across ranks, and what-if savings.

A rank's collective begins after the event that last gated its device (the end of a collective without overlapping
compute) plus the rank's own work since then, and after the previous collective in the communicator. It ends on all
ranks one transfer time after the last rank arrives. A sender or the root of a broadcast that ended before the last
arrival instead keeps its measured duration. Replaying the unmodified graph must reproduce the measured time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.intervals import NONE, Floats, Int64Array
from nvprof_kit._ranks.causes import segment_rows
from nvprof_kit._ranks.columns import COLUMNS
from nvprof_kit.errors import CaptureError
from nvprof_kit.names import NO_LAYER, NO_PHASE


@dataclass(frozen=True)
class Graph:
    """Members of matched collectives, by rank and index; shape ``(m,)`` each.

    Attributes:
        rank, instance, step, a, e: Rank, collective (a row of `instances`), step, aligned start and end of each member.
        ready: When it could have begun without the previous collective.
        gate: The member whose end last gated the rank before `ready`, or `NONE`.
        before: The previous member in its communicator that ended before it began, or `NONE`.
        low, high: The rank's rows of `segments` between gate and readiness.
        members_of: The members of each collective.
        segments: Segments of all ranks, by rank and segment.
        instances: The collectives by last arrival.
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
    members_of: list[Int64Array]
    segments: pd.DataFrame
    instances: pd.DataFrame


def build(points: pd.DataFrame, segments: pd.DataFrame, instances: pd.DataFrame) -> Graph:
    """The graph of a job.

    Args:
        points: See `nvprof_kit._trace.jobs.tables.JobTables.points`, of all ranks.
        segments: See `nvprof_kit._trace.jobs.tables.JobTables.segments`, of all ranks.
        instances: See `nvprof_kit._trace.jobs.tables.JobTables.instances`, all.
    """
    instances = instances.sort_values("arrival", kind="stable", ignore_index=True).reset_index(names="instance")
    columns = ["rank", "index", "c", "s", "k", "a", "e", "queued_ns", "gates", "ready_segment", "end_segment"]
    members = points[columns].merge(instances[["c", "s", "k", "step", "instance"]], on=["c", "s", "k"])
    members = members.sort_values(["rank", "index"], kind="stable", ignore_index=True)
    members = members.assign(ready=members["a"] - members["queued_ns"], member=members.index)
    gates = members[members["gates"]].rename(columns={"member": "gate"}).sort_values("e", kind="stable")
    gated = pd.merge_asof(
        members.sort_values("ready", kind="stable")[["rank", "ready", "member"]],
        gates[["rank", "e", "gate"]],
        left_on="ready",
        right_on="e",
        by="rank",
    ).set_index("member")
    gate = gated["gate"].sort_index().fillna(NONE).to_numpy(dtype=np.int64)
    end_segment = np.append(members["end_segment"].to_numpy(), NONE)
    low, high = segment_rows(segments, members["rank"], end_segment[gate], members["ready_segment"])
    columns_of = {name: members[name].to_numpy() for name in ("rank", "instance", "step", "a", "e", "ready")}
    before = members.groupby(["rank", "c"], sort=False)["member"].shift(1, fill_value=NONE).to_numpy()
    ended_before = (before >= 0) & (columns_of["e"][before] <= columns_of["a"])
    by_instance = np.argsort(columns_of["instance"], kind="stable")
    members_of = np.split(by_instance, np.flatnonzero(np.diff(columns_of["instance"][by_instance])) + 1)
    work = {"gate": gate, "before": np.where(ended_before, before, NONE), "low": low, "high": high}
    return Graph(**columns_of, **work, members_of=members_of, segments=segments, instances=instances)


def replay(graph: Graph, cut: Int64Array | int = 0, quicker: Int64Array | int = 0) -> Int64Array:
    """Replay the graph; returns the end of each member, shape ``(m,)``.

    Args:
        graph: The graph.
        cut: Reduction of each member's work between its gate and readiness, in ns.
        quicker: Reduction of its transfer time, in ns.
    """
    ends: Int64Array = graph.e.copy()
    gated = graph.gate >= 0
    work = graph.ready - np.where(gated, graph.e[graph.gate], 0) - cut
    unblocked = np.where(graph.before >= 0, np.maximum(graph.ready, graph.e[graph.before]), graph.ready)
    delay, saved = graph.a - unblocked, np.broadcast_to(quicker, len(ends))
    for members in graph.members_of:
        start = work[members] + np.where(gated[members], ends[graph.gate[members]], 0)
        previous = np.where(graph.before[members] >= 0, ends[graph.before[members]], start)
        start = np.maximum(start, previous) + delay[members]
        transfer = graph.e[members] - int(graph.a[members].max())
        waited = start.max() + np.maximum(transfer - saved[members], 0)
        ends[members] = np.where(transfer < 0, start + graph.e[members] - graph.a[members], waited)
    return ends


def part_of_work(graph: Graph, weight: Floats) -> Int64Array:
    """Weighted sum of the segments in each member's work, in ns; weights are from 0 to 1."""
    sums = np.concatenate(([0.0], np.cumsum(graph.segments["ns"].to_numpy() * weight)))
    return np.round(sums[graph.high] - sums[graph.low]).astype(np.int64)


def mean_step(graph: Graph, ends: Int64Array) -> float:
    """Mean time in ns from the end of one step's last collective to the next one's."""
    in_step = graph.step >= 0 if (graph.step >= 0).any() else np.ones(len(ends), dtype=bool)
    steps, step = np.unique(graph.step[in_step], return_inverse=True)
    last = np.full(len(steps), np.iinfo(np.int64).min)
    np.maximum.at(last, step, ends[in_step])
    return float(np.diff(last).mean()) if len(last) > 1 else float(last.max() - graph.a.min())


def critical_path(graph: Graph) -> pd.DataFrame:
    """The critical path from the last collective's end back to the first arrival on it.

    Raises:
        CaptureError: A collective waits for itself, in damaged maps.
    """
    rows: list[tuple[Any, ...]] = []
    columns = [graph.segments[name].to_numpy() for name in ("layer", "phase", "doing", "ns")]
    member = int(graph.e.argmax())
    passed: set[int] = set()
    while member >= 0:
        members = graph.members_of[graph.instance[member]]
        last = int(members[graph.a[members].argmax()])
        step, rank = int(graph.step[last]), int(graph.rank[last])
        if last in passed:
            raise CaptureError.of("maps-contradict", rank=rank)
        passed.add(last)
        rows.append((step, rank, NO_LAYER, NO_PHASE, "transfer", graph.e[member] - graph.a[last]))
        gate, before = int(graph.gate[last]), int(graph.before[last])
        if before >= 0 and graph.e[before] > graph.ready[last]:
            rows.append((step, rank, NO_LAYER, NO_PHASE, "launch", graph.a[last] - graph.e[before]))
            member = before
            continue
        rows.append((step, rank, NO_LAYER, NO_PHASE, "launch", graph.a[last] - graph.ready[last]))
        if gate >= 0:
            work = slice(graph.low[last], graph.high[last])
            rows += [(step, rank, *segment) for segment in zip(*(column[work] for column in columns), strict=True)]
        member = gate
    path = pd.DataFrame.from_records(rows, columns=list(COLUMNS["critical-path"])[:-1])
    sums = path.groupby(["step", "rank", "layer", "phase", "what"], sort=False)["ns"].sum().reset_index()
    sums = sums[sums["ns"] > 0].sort_values("ns", ascending=False, kind="stable", ignore_index=True)
    return sums.assign(share=sums["ns"] / max(int(sums["ns"].sum()), 1))


def what_if(graph: Graph, layers: pd.DataFrame, rank: int | None, layer: str | None) -> pd.DataFrame:
    """The step time if transfers, data loaders, a rank or one of its layers were as fast as their median, with
    the columns `what-if`.

    Args:
        graph: The graph.
        layers: See `nvprof_kit._ranks.stages.layer_table`.
        rank: The rank; None for none.
        layer: One of its layers; None for none.
    """
    replays = {
        "every transfer": replay(graph, quicker=transfer_excess(graph)),
        "every data loader": replay(graph, part_of_work(graph, loader_weights(graph.segments))),
    }
    if rank is not None:
        for of_layer in dict.fromkeys((None, layer)):
            name = f"rank {rank}" + (f" in {of_layer}" if of_layer else "")
            replays[name] = replay(graph, part_of_work(graph, rank_weights(graph.segments, layers, rank, of_layer)))
    measured, unchanged = mean_step(graph, graph.e), mean_step(graph, replay(graph))
    rows = []
    for name, ends in replays.items():
        step = mean_step(graph, ends)
        saved = unchanged - step
        rows.append((name, round(measured), round(unchanged), round(step), round(saved), saved / max(unchanged, 1)))
    return pd.DataFrame.from_records(rows, columns=list(COLUMNS["what-if"]))


def error(graph: Graph) -> float:
    """Difference between the replay of the unmodified graph and the measurement, as a share of the step time."""
    measured = mean_step(graph, graph.e)
    return abs(mean_step(graph, replay(graph)) - measured) / max(measured, 1.0)


def transfer_excess(graph: Graph) -> Int64Array:
    """Time of each member's transfer, in ns, beyond the median of transfers of its kind, size and ranks."""
    durations = graph.instances["ended"] - graph.instances["arrival"]
    usual = durations.groupby([graph.instances[name] for name in ("sort", "bytes", "n")]).transform("median")
    excess: Int64Array = np.maximum((durations - usual).to_numpy(), 0).astype(np.int64)[graph.instance]
    return excess


def rank_weights(segments: pd.DataFrame, layers: pd.DataFrame, rank: int, layer: str | None) -> Floats:
    """Share of each segment that a rank (in one layer) would save at the median of its equals."""
    keys = ["layer", "phase"]
    measured = layers[(layers["rank"] == rank) & ((layers["layer"] == layer) if layer else True)].set_index(keys)
    equals = layers[layers["stage"].isin(measured["stage"]) & (layers["rank"] != rank)]
    usual = equals.groupby(keys)[["median_ns", "idle_ns"]].median().reindex(measured.index)
    excess = {
        kind: 1 - usual[name].fillna(measured[peers]) / measured[name].clip(lower=1)
        for kind, name, peers in (("compute", "median_ns", "peers_ns"), ("idle", "idle_ns", "peers_idle_ns"))
    }
    weight = pd.concat(excess, names=["kind"]).clip(lower=0).rename("weight")
    of_rank = segments[segments["rank"] == rank]
    kind = of_rank["doing"].where(of_rank["doing"].isin(["compute", "copy", "communication"]), "idle")
    weights = np.zeros(len(segments))
    weights[segments["rank"] == rank] = of_rank.assign(kind=kind).join(weight, on=["kind", *keys])["weight"].fillna(0.0)
    return weights


def loader_weights(segments: pd.DataFrame) -> Floats:
    """Share of each segment saved if every rank's data loader took the median time."""
    loads = segments["doing"] == "dataloader"
    steps = segments.assign(ns=segments["ns"].where(loads, 0)).groupby(["step", "rank"])["ns"]
    usual = steps.sum().groupby("step").median().reindex(segments["step"]).to_numpy()
    return np.where(loads, (1 - usual / steps.transform("sum").clip(lower=1)).clip(lower=0), 0.0)
