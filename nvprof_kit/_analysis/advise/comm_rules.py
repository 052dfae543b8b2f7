"""Rules about communication: exposed, waiting for other ranks, and the rank that the others wait for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nvprof_kit._analysis.advise.program import Program, at, matching, share
from nvprof_kit._findings import Finding

if TYPE_CHECKING:
    import pandas as pd

_REDUCTIONS = re.compile("AllReduce|ReduceScatter")
SEVERAL_PASSES = 1.5
EXPOSED_SHARE, IN_TURNS_SHARE, HIDDEN_SHARE, WAITING_SHARE = 0.05, 0.02, 0.1, 0.05


def exposed_collectives(program: Program) -> Iterator[Finding]:
    """Communication beside which nothing computes, without what may be waiting, is 5 % or more, or is 2 % and hardly
    any is hidden; says whether it runs on the stream that computes, and in serving whether it is the all-reduce of
    tensor parallelism.

    Saves: That time; where gradients are reduced in several backward passes of a step, only what all but one take.
    """
    rows, steps = program.times.communication, program.steps
    comm_ns, exposed_ns = int(steps["comm_ns"].sum()), int(steps["exposed_comm_ns"].sum())
    waiting_ns = min(int(rows["waiting_ns"].sum()) + program.waited_ns, exposed_ns)
    alone_ns, moving_ns = exposed_ns - waiting_ns, max(comm_ns - waiting_ns, 1)
    in_turns = alone_ns >= IN_TURNS_SHARE * program.wall_ns and alone_ns >= (1 - HIDDEN_SHARE) * moving_ns
    if not len(rows) or not (in_turns or alone_ns >= EXPOSED_SHARE * program.wall_ns):
        return
    worst = rows.iloc[int((rows["exposed_ns"] - rows["waiting_ns"]).to_numpy().argmax())]
    moved = ""
    if str(worst["bytes"]) not in ("<NA>", "nan"):
        moved = f", {worst['bytes'] / 1e6:,.1f} MB at {worst['algorithm_gb_per_s']:,.1f} GB/s"
    evidence = (
        f"{program.of_wall(alone_ns)} the GPU moves data between ranks and computes nothing; most in "
        f"{worst['collective']} of {worst['layer']} {worst['phase']}: {program.ms(worst['exposed_ns'])} of "
        f"{program.ms(worst['gpu_ns'])} exposed{moved}"
    )
    if waiting_ns:
        evidence += f"; {program.ms(waiting_ns)} more may be waiting for other ranks"
    title = "Exposed communication"
    fix = "use smaller or earlier buckets (bucket_cap_mb), or prefetch the next layer's shards"
    kernels, collectives, stream = program.kernels, _collectives(program), ["lane", "stream"]
    computing = kernels[kernels["kernel_class"] != "comm"].groupby(stream).size()
    is_shared = collectives.set_index(stream).index.isin(computing.index[computing > 1])
    shares_stream = 2 * collectives["ns"][is_shared].sum() > collectives["ns"].sum()
    if in_turns or shares_stream:
        evidence += f"; {share(moving_ns - alone_ns, moving_ns)} of the transfer time is overlapped by compute"
    if shares_stream:
        title = "Communication and compute share a stream"
        evidence += "; the collectives run on the stream that computes, where nothing can overlap them"
        fix = "issue collectives on a stream of their own (async_op=True), and wait where their result is used"
    elif in_turns:
        title = "Communication and compute do not overlap"
        fix = (
            "launch collectives asynchronously on their own stream, or let DDP or FSDP do it (without "
            "find_unused_parameters, and with no synchronization in between)"
        )
    passes = reducing_passes(program)
    saves = alone_ns * (1 - 1 / passes if passes >= SEVERAL_PASSES else 1)
    if passes >= SEVERAL_PASSES:
        title = "Gradients are reduced in each backward pass"
        evidence += f"; {passes:.1f} backward passes of a step reduce gradients"
        fix = "run all but the last in model.no_sync() (FSDP: set_requires_gradient_sync(False))"
    refuted_by = "the collectives take as long by themselves (nccl-tests), or get shorter with a faster slowest rank"
    if program.mode != "training":
        title = "All-reduces of tensor parallelism" if str(worst["collective"]).lower() == "allreduce" else title
        fix = (
            "each layer needs the result at once, so nothing hides it: use the engine's own or fused all-reduce "
            "(one-shot over NVLink, in the switch), fewer ranks of tensor parallelism, or more tokens per step"
        )
        refuted_by = "one rank less of tensor parallelism makes the step no shorter"
    yield program.finding_in_ops(
        "exposed-collectives", title, evidence, _collectives(program, worst), saves=saves, fix=fix,
        confidence="low" if rows["bytes"].isna().any() or waiting_ns > alone_ns else "medium", refuted_by=refuted_by,
    )  # fmt: skip


def reducing_passes(program: Program) -> float:
    """In how many backward passes of a step gradients are reduced: 1 unless it accumulates those of several batches."""
    ops = program.ops.iloc[program.by_start]
    is_reduction = matching(ops["name"], _REDUCTIONS) & (ops["kernel_class"] == "comm")
    if program.mode != "training" or not program.choice.count or (is_reduction & (ops["phase"] == "forward")).any():
        return 1.0  # tensor parallelism reduces activations
    is_reduction &= ops["phase"] == "backward"
    passes = 0
    for lane in ops["lane"].unique():
        is_there = ops["lane"] == lane
        phase, reduces = ops["phase"][is_there], is_reduction[is_there]
        is_forward = phase.where(phase.isin(("forward", "backward"))).ffill().eq("forward")
        number = (is_forward & ~is_forward.shift(fill_value=False)).cumsum()
        passes += number[reduces].nunique()
    return passes / program.parts


def _collectives(program: Program, row: Any = None) -> pd.DataFrame:
    """The collectives of these steps, or only those in the layer and phase of a row."""
    ops: pd.DataFrame = program.ops[program.ops["kernel_class"] == "comm"]
    return ops if row is None else at(ops, row["layer"], row["phase"])


def rank_waits(program: Program) -> Iterator[Finding]:
    """Exposed communication beyond the fastest similar collective is 5 % or more.

    Saves: Nothing on this rank.
    """
    rows = program.times.communication
    waiting_ns = int(rows["waiting_ns"].sum())
    if waiting_ns >= WAITING_SHARE * program.wall_ns:
        worst = rows.iloc[int(rows["waiting_ns"].to_numpy().argmax())]
        evidence = (
            f"{program.of_wall(waiting_ns)} is exposed communication beyond the fastest similar collective; most in "
            f"{worst['collective']} of {worst['layer']} {worst['phase']}: {program.ms(worst['waiting_ns'])}"
        )
        yield program.finding_in_ops(
            "rank-wait", "This rank may be waiting for others", evidence, _collectives(program, worst), saves=0,
            fix="find the slowest rank with nvprof-kit ranks, or advise, on the captures of all ranks; fix it there",
            refuted_by="the other ranks' collectives take as long in these steps",
        )  # fmt: skip


def slowest_first(program: Program, slowest: Finding, findings: list[Finding]) -> list[Finding]:
    """The captures of all ranks are given, and [ranks](ranks.md) finds one that the others wait for: always first. An
    outlier layer at the same place is merged into it, and waiting for ranks is no finding beside it.

    Saves: Their waiting time.
    """
    same = [
        finding
        for finding in findings
        if (finding.rule, finding.layer, finding.phase) == ("outlier-layer", slowest.layer, slowest.phase)
    ]
    collectives = _collectives(program)
    if len(collectives):
        longest = collectives.iloc[int(collectives["ns"].to_numpy().argmax())]
        slowest = replace(slowest, start_ns=int(longest["start_ns"]), end_ns=int(longest["end_ns"]))
    evidence = "; ".join([slowest.evidence, *(f"{finding.title.lower()}: {finding.evidence}" for finding in same)])
    slowest = replace(slowest, evidence=evidence, saves_ns=min(program.waited_ns, program.wall_ns))
    return [slowest, *(finding for finding in findings if finding not in same and finding.rule != "rank-wait")]
