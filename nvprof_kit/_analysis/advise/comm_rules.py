"""Rules about communication: exposed, waiting for other ranks, and the rank that the others wait for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pandas as pd

from nvprof_kit._analysis.advise.findings import share
from nvprof_kit._analysis.advise.program import Program, at, largest
from nvprof_kit._analysis.advise.replay import SLOWS, matching
from nvprof_kit._findings import Finding
from nvprof_kit.names import LAYER_PHASES, NO_LAYER

_REDUCTIONS, _GATHERS = re.compile("AllReduce|ReduceScatter"), re.compile("AllGather")
_BUFFERS = re.compile("split_with_sizes_copy|chunk_cat|multi_tensor_apply")
"""Kernels that FSDP runs in forward and backward passes to fill and empty the buffers of its collectives."""
SEVERAL_PASSES = 1.5
TURNS_PART = 0.3
"""How much of the time of collectives beside which nothing computes is saved if most of it is hidden: then they take
1.4 to 2 times as long, slow what computes beside them by a third of that, and the last ones stay exposed. Of 4.2 ms
with DDP on two H200s 1.2 ms were saved, of 8.7 ms with FSDP nothing.
"""
EXPOSED_SHARE, IN_TURNS_SHARE, HIDDEN_SHARE, WAITING_SHARE = 0.05, 0.02, 0.1, 0.05


def exposed_collectives(program: Program) -> Iterator[Finding]:
    """Communication beside which nothing computes, without what may be waiting, is 5 % or more, or is 2 % and hardly
    any is hidden; says whether it runs on the stream that computes, and in serving whether it is the all-reduce of
    tensor parallelism. In training, what is gathered outside layers, their passes and the optimizer, which gathers the
    parameters that it shards, is a finding of its own if it takes 2 % or more.

    Saves: That time; of gathers outside layers also their launches, in steps run again as in `sync`; in training, where
    hardly any is hidden, 30 % of it, as hidden collectives take longer and slow what computes beside them; where
    gradients are reduced or shards gathered in several passes of a step, what all but one take and slow, and the copies
    into their buffers and out.
    """
    rows = program.times.communication
    rows = rows.assign(alone_ns=rows["exposed_ns"] - rows["waiting_ns"]).nlargest(len(rows), "alone_ns")
    comm_ns, exposed_ns = (int(program.steps[name].sum()) for name in ("comm_ns", "exposed_comm_ns"))
    waiting_ns = min(_waiting_ns(program) + program.waited_ns, exposed_ns)
    alone_ns, moving_ns = exposed_ns - waiting_ns, max(comm_ns - waiting_ns, 1)
    is_outside = (rows["layer"] == NO_LAYER) & ~rows["phase"].isin((*LAYER_PHASES, "optimizer"))
    gathers = rows[is_outside & rows["collective"].isin(("AllGather", "Broadcast")) & (program.mode == "training")]
    gathers_ns = int(gathers["alone_ns"].sum())
    if gathers_ns >= IN_TURNS_SHARE * program.wall_ns:
        rows, alone_ns, moving_ns = rows.drop(gathers.index), alone_ns - gathers_ns, max(moving_ns - gathers_ns, 1)
        evidence = f"{program.of_wall(gathers_ns)} in {program.number(gathers['ops'].sum(), 'gather')} outside layers, "
        evidence += f"beside which nothing computes; most in {gathers['collective'].iloc[0]} of {NO_LAYER} "
        evidence += f"{gathers['phase'].iloc[0]}: {program.ms(gathers['alone_ns'].iloc[0])}"
        ops = [_collectives(program, row) for _, row in gathers.iterrows()]
        yield program.finding_in_ops(
            "exposed-collectives:outside", evidence, ops[0], saves=max(gathers_ns, program.without_ns(pd.concat(ops)))
        )
    in_turns = alone_ns >= IN_TURNS_SHARE * program.wall_ns and alone_ns >= (1 - HIDDEN_SHARE) * moving_ns
    if not len(rows) or not (in_turns or alone_ns >= EXPOSED_SHARE * program.wall_ns):
        return
    worst, evidence = rows.iloc[0], f"{program.of_wall(alone_ns)} the GPU moves data between ranks and computes nothing"
    evidence += f"; most in {worst['collective']} of {worst['layer']} {worst['phase']}: "
    evidence += f"{program.ms(worst['exposed_ns'])} of {program.ms(worst['gpu_ns'])} exposed"
    if not pd.isna(worst["bytes"]):
        evidence += f", {worst['bytes'] / 1e6:,.1f} MB at {worst['algorithm_gb_per_s']:,.1f} GB/s"
    evidence += f"; {program.ms(waiting_ns)} more may be waiting for other ranks" * bool(waiting_ns)
    kernels, collectives, stream = program.kernels, _collectives(program), ["lane", "stream"]
    computing = kernels[kernels["kernel_class"] != "comm"].groupby(stream).size()
    is_shared = collectives.set_index(stream).index.isin(computing.index[computing > 1])
    shares_stream = 2 * collectives["ns"][is_shared].sum() > collectives["ns"].sum()
    if in_turns or shares_stream:
        evidence += f"; {share(moving_ns - alone_ns, moving_ns)} of the transfer time is overlapped by compute"
    cases = ["exposed-collectives:in turns"] if in_turns else ["exposed-collectives"]
    if shares_stream:
        cases = ["exposed-collectives:one stream"]
        evidence += "; the collectives run on the stream that computes, where nothing can overlap them"
    passes, saves = repeated_passes(program), alone_ns
    if program.mode == "training" and (in_turns or shares_stream):
        saves, evidence = round(TURNS_PART * alone_ns), f"{evidence}; hidden they take longer, and slow what computes"
    if passes >= SEVERAL_PASSES:
        buffers = kernels[matching(kernels["phase"], LAYER_PHASES) & matching(kernels["name"], _BUFFERS)]
        of_passes = pd.concat([collectives[matching(collectives["phase"], LAYER_PHASES)], buffers])
        saves = program.without_ns(of_passes, 1 / passes, 1 / passes)
        saves += round((SLOWS * (comm_ns - exposed_ns) - waiting_ns) * (1 - 1 / passes))
        cases.append("exposed-collectives:passes")
        evidence += (
            f"; {passes:.1f} times in a step the same gradients are reduced or shards gathered; with what they slow "
            f"beside them{', and copies into their buffers and out' * bool(len(buffers))}, {program.shorter(saves)}"
        )
    if program.mode != "training":
        cases.append("exposed-collectives:serving")
        if str(worst["collective"]).lower() == "allreduce":
            cases.append("exposed-collectives:all-reduce")
    confidence = "low" if rows["bytes"].isna().any() or waiting_ns > alone_ns else "medium"
    yield program.finding_in_ops(cases, evidence, _collectives(program, worst), saves=saves, confidence=confidence)


def _waiting_ns(program: Program) -> int:
    """Exposed communication beyond the fastest similar collective. If that is much, also what is exposed since it ran
    late, behind a collective that waited beside computation: no longer than that waited, and without the last reduction
    of each backward pass, which is exposed anyway.
    """
    rows, ops = program.times.communication, _collectives(program)
    waiting_ns, exposed_ns = int(rows["waiting_ns"].sum()), int(rows["exposed_ns"].sum())
    if waiting_ns < WAITING_SHARE * program.wall_ns:
        return waiting_ns
    hidden_ns = (rows["waiting_ns"] * (rows["gpu_ns"] / rows["exposed_ns"].clip(lower=1) - 1)).sum()
    last = ops[ops["phase"] == "backward"].sort_values("start_ns").groupby(["lane", "step"], dropna=False)["ns"].last()
    return waiting_ns + max(min(int(hidden_ns), exposed_ns - waiting_ns - int(last.sum())), 0)


def repeated_passes(program: Program) -> float:
    """How many times in a step the same gradients are reduced, or the same shards gathered: 1 unless it accumulates
    gradients of several batches, with communication in each of their passes.
    """
    ops = program.ops.iloc[program.by_start]
    is_comm, phase = (ops["kernel_class"] == "comm") & matching(ops["phase"], LAYER_PHASES), ops["phase"]
    reduces, gathers = (is_comm & matching(ops["name"], like) for like in (_REDUCTIONS, _GATHERS))
    if program.mode != "training" or not program.choice.count or (reduces & (phase == "forward")).any():
        return 1.0  # tensor parallelism reduces activations
    reductions, gathered, times = 0, 0, 0.0
    for lane in ops["lane"].unique():
        is_there = ops["lane"] == lane
        is_forward = phase[is_there].where(phase[is_there].isin(("forward", "backward"))).ffill().eq("forward")
        number = (is_forward & ~is_forward.shift(fill_value=False)).cumsum()
        reductions += number[(reduces & (phase == "backward"))[is_there]].nunique()
        in_forward = (gathers & (phase == "forward"))[is_there]
        gathered += number[in_forward].nunique()
        times += gathers[is_there].sum() * number[in_forward].nunique() / max(in_forward.sum(), 1)
    return max(reductions, times if gathered >= SEVERAL_PASSES * program.parts else 0) / program.parts


def _collectives(program: Program, row: Any = None) -> pd.DataFrame:
    """The collectives of these steps, or only those in the layer and phase of a row."""
    ops: pd.DataFrame = program.ops[program.ops["kernel_class"] == "comm"]
    return ops if row is None else at(ops, row["layer"], row["phase"])


def rank_waits(program: Program) -> Iterator[Finding]:
    """Exposed communication beyond the fastest similar collective is 5 % or more.

    Saves: That time, and that of collectives which such a wait delays, if the ranks that it waits for are as fast.
    """
    rows = program.times.communication
    waiting_ns, saves = int(rows["waiting_ns"].sum()), _waiting_ns(program)
    if waiting_ns >= WAITING_SHARE * program.wall_ns:
        worst = largest(rows, "waiting_ns")
        evidence = f"{program.of_wall(waiting_ns)} is exposed communication beyond the fastest similar collective; "
        evidence += f"most in {worst['collective']} of {worst['layer']} {worst['phase']}: "
        evidence += f"{program.ms(worst['waiting_ns'])}"
        if saves > waiting_ns:
            evidence += f"; others run late and exposed behind one that waits: {program.shorter(saves)} without"
        yield program.finding_in_ops("rank-wait", evidence, _collectives(program, worst), saves=saves)


def slowest_first(program: Program, slowest: Finding, findings: list[Finding]) -> list[Finding]:
    """The captures of all ranks are given, and [ranks](ranks.md) finds one that the others wait for: always first. An
    outlier layer at the same place is merged into it, and waiting for ranks is no finding beside it.

    Saves: Their waiting time.
    """
    outlier = "outlier-layer", slowest.layer, slowest.phase
    same = [finding for finding in findings if (finding.rule, finding.layer, finding.phase) == outlier]
    collectives = _collectives(program)
    if len(collectives):
        longest = largest(collectives, "ns")
        slowest = replace(slowest, start_ns=int(longest["start_ns"]), end_ns=int(longest["end_ns"]))
    evidence = "; ".join([slowest.evidence, *(f"{finding.title.lower()}: {finding.evidence}" for finding in same)])
    slowest = replace(slowest, evidence=evidence, saves_ns=min(program.waited_ns, program.wall_ns))
    return [slowest, *(finding for finding in findings if finding not in same and finding.rule != "rank-wait")]
