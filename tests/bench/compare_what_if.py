"""Our replay beside ByteDance's what-if analysis, on the three traces that they published with their results.

    git clone https://github.com/ByteDance-Seed/StragglerAnalysis
    python tests/bench/compare_what_if.py StragglerAnalysis/data

The traces (Apache-2.0; "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI'25) hold the
operations of pipelines on 8, 64 and 128 GPUs: computing by micro-batch, sends and receives, and the collectives of the
data-parallel ranks. Here they become a graph of `nvprof_kit._ranks.replay`, in which what is computed between
two collectives is work. Their ideal is taken over: every computing operation takes the mean of its type, every
transfer the median of its type, and nothing is late to be launched. Printed are mean steps in seconds, and slowdowns:
the step without launch delays, or with one stage or one data-parallel rank as it was, over the ideal one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[2]))

from nvprof_kit._ranks.replay import Graph, build, mean_step, part_of_work, replay

TRACES = ("ST", "AR", "SE")
COMPUTES = ("forward-compute", "backward-compute", "optimizer", "layernorm-grads-all-reduce")
MESSAGES = {"forward-send": 0, "forward-recv": -1, "backward-send": 0, "backward-recv": 1}
"""Messages between stages, and how far from its own the stage is that sends."""


class Trace(NamedTuple):
    graph: Graph
    weight: npt.NDArray[np.float64]
    """Of each stretch of computing, the share that its type's mean would not take."""
    quicker: npt.NDArray[np.int64]
    stage: npt.NDArray[np.int64]
    replica: npt.NDArray[np.int64]
    """Of each rank: its pipeline stage and its data-parallel rank."""


def read(path: Path) -> Trace:
    """A published trace as a graph."""
    ops = pd.read_parquet(path)
    stages = int(ops["stage"].max()) + 1
    ops["optype"] = ops["optype"].astype(str)
    ops["worker"] = ops["dp_rank"].astype(np.int64) * stages + ops["stage"].astype(np.int64)
    begin = (ops["start_ts"].astype(np.float64) * 1e9).round().astype(np.int64)
    length = (ops["duration"].astype(np.float64) * 1e9).round().astype(np.int64)
    whole = (begin + length).groupby(ops["step"]).max()
    ops["a"] = begin + ops["step"].map(whole.cumsum() - whole)
    ops["e"] = ops["a"] + length
    work = ops[ops["optype"].isin(COMPUTES)].sort_values(["worker", "a"], ignore_index=True)
    work["ideal"] = (work["e"] - work["a"]).groupby(work["optype"]).transform("mean")
    members = _members(ops, stages)
    points, segments = _points(members, work)
    instances = members.groupby("k", as_index=False).agg(step=("step", "first"), arrival=("a", "max"))
    graph = build(points, segments, instances.assign(c=0, s=0))
    took = segments["whole"].to_numpy()
    weight = np.where(took > 0, 1 - segments["ideal"].to_numpy() / np.maximum(took, 1), 0.0)
    return Trace(graph, weight, _quicker(graph, members), np.arange(graph.rank.max() + 1) % stages,
                 np.arange(graph.rank.max() + 1) // stages)  # fmt: skip


def _members(ops: pd.DataFrame, stages: int) -> pd.DataFrame:
    """Each worker's part in each message or collective; what was sent and received in one batch is one."""
    comm = ops[~ops["optype"].isin([*COMPUTES, "gc"])].copy()
    sender = comm["stage"] + comm["optype"].map(MESSAGES).fillna(0)
    passed = comm["optype"].isin(MESSAGES)
    direction = comm["optype"].str.split("-").str[0]
    message = direction + " " + comm["dp_rank"].astype(str) + " " + sender.astype(int).astype(str)
    together = comm["optype"].where(
        comm["optype"] != "embedding-grads-all-reduce", "embedding" + comm["dp_rank"].astype(str)
    )
    together = together.where(~comm["optype"].isin(["params-all-gather", "grads-reduce-scatter"]),
                              comm["optype"] + comm["stage"].astype(str))  # fmt: skip
    name = message.where(passed, together) + " " + comm["seq_id"].astype(str) + " " + comm["step"].astype(str)
    comm["name"] = pd.factorize(name)[0]
    batches = comm.groupby(["worker", "a", "e"], sort=False)
    comm["k"] = _joined(comm["name"].to_numpy(), batches.ngroup().to_numpy())
    kinds = batches["optype"].agg(lambda kinds: "+".join(sorted(kinds))).rename("kind").reset_index()
    one = comm.drop_duplicates(["worker", "a", "e"]).merge(kinds, on=["worker", "a", "e"])
    one = one.drop_duplicates(["worker", "k"])
    columns = ["worker", "step", "k", "a", "e", "kind"]
    return one[columns].sort_values(["worker", "a", "e"], ignore_index=True)


def _joined(names: npt.NDArray[np.int64], batches: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """One number for all messages that some worker sends or receives in one batch."""
    of = np.arange(names.max() + 1)
    while True:
        lowest = np.full(batches.max() + 1, len(of))
        np.minimum.at(lowest, batches, of[names])
        fresh = of.copy()
        np.minimum.at(fresh, names, lowest[batches])
        if (fresh == of).all():
            return of[names]
        of = fresh


def _points(members: pd.DataFrame, work: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Members and stretches of computing as `build` takes them."""
    points, segments = [], []
    for worker, mine in members.groupby("worker"):
        done = work[work["worker"] == worker]
        begins, ends = done["a"].to_numpy(), done["e"].to_numpy()
        a, e = mine["a"].to_numpy(), mine["e"].to_numpy()
        at = np.searchsorted(begins, e, side="left") - 1
        gates = (at < 0) | (ends[np.maximum(at, 0)] <= e + 20_000)
        cuts = np.unique(np.concatenate((a, e[gates])))
        points.append(pd.DataFrame({
            "rank": worker, "index": np.arange(len(mine)), "c": 0, "s": 0, "k": mine["k"].to_numpy(), "a": a, "e": e,
            "ready_segment": np.searchsorted(cuts, a, side="right") - 1,
            "end_segment": np.searchsorted(cuts, e, side="right") - 1, "gates": gates, "queued_ns": 0,
        }))  # fmt: skip
        segments += list(_pieces(int(str(worker)), done, cuts))
    return pd.concat(points, ignore_index=True), pd.DataFrame(segments)


def _pieces(worker: int, work: pd.DataFrame, cuts: npt.NDArray[np.int64]) -> Iterator[dict[str, object]]:
    """The stretches of computing of a worker, cut."""
    columns = (work[name].to_numpy() for name in ("a", "e", "ideal", "optype"))
    for begin, end, ideal, kind in zip(*columns, strict=True):
        inside = cuts[np.searchsorted(cuts, begin, side="right") : np.searchsorted(cuts, end, side="left")]
        edges = [begin, *inside.tolist(), end]
        for low, high in itertools.pairwise(edges):
            yield {
                "rank": worker, "segment": int(np.searchsorted(cuts, low, side="right")), "step": 0, "layer": kind,
                "phase": "", "doing": "compute", "collective": -1, "ns": int(high - low), "ops": 1,
                "ideal": ideal, "whole": float(end - begin),
            }  # fmt: skip


def _quicker(graph: Graph, members: pd.DataFrame) -> npt.NDArray[np.int64]:
    """How much longer each transfer took than the median of its kind."""
    table = pd.DataFrame({"rank": graph.rank, "a": graph.a, "e": graph.e, "instance": graph.instance})
    table = table.merge(members.rename(columns={"worker": "rank"})[["rank", "a", "e", "kind"]], on=["rank", "a", "e"])
    took = table["e"] - table.groupby("instance")["a"].transform("max")
    return (took - took.groupby(table["kind"]).transform("median")).round().to_numpy("int64")


def slowdowns(trace: Trace) -> dict[str, Any]:
    """What our replay says: mean steps in seconds, the slowdown, and those of each stage and data-parallel rank."""
    graph = trace.graph
    gated = graph.gate >= 0
    work = np.where(gated, graph.ready - graph.e[graph.gate], 0)
    delays = np.maximum(work - part_of_work(graph, np.ones(len(trace.weight))), 0)
    less = part_of_work(graph, trace.weight)
    prompt = mean_step(graph, replay(graph, delays))
    ideal = mean_step(graph, replay(graph, delays + less, trace.quicker))

    def kept(which: npt.NDArray[np.bool_]) -> float:
        mine = which[graph.rank]
        cut = np.where(mine, delays, delays + less)
        return mean_step(graph, replay(graph, cut, np.where(mine, 0, trace.quicker))) / ideal

    return {
        "measured": mean_step(graph, graph.e) / 1e9, "replayed": mean_step(graph, replay(graph)) / 1e9,
        "prompt": prompt / 1e9, "ideal": ideal / 1e9, "slowdown": prompt / ideal,
        "stage": {int(one): kept(trace.stage == one) for one in np.unique(trace.stage)},
        "dp_rank": {int(one): kept(trace.replica == one) for one in np.unique(trace.replica)},
    }  # fmt: skip


def compare(folder: Path, name: str) -> None:
    ours = slowdowns(read(folder / f"trace-{name}.parquet"))
    theirs = json.loads((folder / f"result-{name}.json").read_text())
    means = {key: float(np.mean(list(theirs[f"step_t_{key}"].values()))) for key in ("base", "nodelay", "noblk")}
    print(f"{name}: {theirs['job_meta']['world_size']} GPUs, {len(theirs['step_t_base'])} steps")
    rows = [
        ("step as measured", ours["measured"], means["base"]),
        ("unchanged graph replayed", ours["replayed"], means["base"]),
        ("nothing late to be launched", ours["prompt"], means["nodelay"]),
        ("ideal", ours["ideal"], means["noblk"]),
        ("slowdown", ours["slowdown"], theirs["blocking_slowdown"]),
    ]
    for kind in ("stage", "dp_rank"):
        said = {int(key): value for key, value in theirs[f"blocking_decompose_by_{kind}"].items()}
        for one in sorted(said, key=lambda key: -said[key])[:4]:
            rows.append((f"{kind} {one} as it was", ours[kind][one], said[one]))
    for what, mine, its in rows:
        print(f"  {what:30} ours {mine:8.4f}  theirs {its:8.4f}  {mine / its - 1:+7.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for one in TRACES:
        compare(parser.parse_args().folder, one)
