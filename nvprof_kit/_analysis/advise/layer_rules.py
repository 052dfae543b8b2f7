"""Rules that compare layers: work that they do again, and what one of equal layers takes longer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from nvprof_kit._analysis.advise.comm_rules import SEVERAL_PASSES
from nvprof_kit._analysis.advise.findings import share
from nvprof_kit._analysis.advise.program import BLOCK, FUSED, SIBLINGS, Program, at, costliest, kinds, placed
from nvprof_kit._analysis.advise.replay import SLOWS, matching
from nvprof_kit._analysis.attribution.intervals import Cover, exact_sums
from nvprof_kit._findings import Finding
from nvprof_kit.issues import listing, plural
from nvprof_kit.names import LAYER_PHASES, NO_LAYER

OUTLIER, RECOMPUTE_SHARE, FEW_PASSES = 1.2, 0.05, 2.5


def recompute(program: Program) -> Iterator[Finding]:
    """Forward work done again is 5 % of the GPU time or more; or most layers run backward more often than forward; or
    layers that are not trained run forward more often than those that are, as a teacher, and take 5 %: perhaps
    on the same inputs; or blocks run more often than most of their kind, or trained layers up to 2.5 times forward for
    each backward pass.

    Saves: That time and its launches, in steps run again as in `sync`; or of the backward passes all but one for each
    forward pass, or the other way round, or of layers that are not trained all but as many as of those that are, and of
    blocks as of others.
    """
    ops, total_ns = program.ops[program.ops["phase"] == "recompute"], program.ops["ns"].sum()
    calls = program.ops[["phase", "layer", "call_of_layer"]].drop_duplicates("call_of_layer")
    calls = calls[calls["call_of_layer"] >= 0].groupby(["phase", "layer"], observed=True).size().unstack("phase")
    calls = calls.reindex(columns=["forward", "backward"])
    complete = calls - int(not program.choice.count)  # without steps, a capture may begin or end within a pass
    passes, is_frozen = (calls["backward"] / calls["forward"]).median(), calls["backward"].isna()
    if (complete["backward"] / calls["forward"]).median() >= SEVERAL_PASSES:
        backward = program.ops[program.ops["phase"] == "backward"]
        saves = program.without_ns(backward, 1 / passes, 1 / passes)
        evidence = f"layers run backward {passes:.1f} times for each forward pass; in these "
        evidence += f"{program.of_wall(program.busy_ns(backward))}; with one for each {program.shorter(saves)}"
        yield program.finding_in_ops("recompute:backward", evidence, backward, saves=saves, confidence="high")
    if passes >= 1 / FEW_PASSES and (complete["forward"] / calls["backward"]).median() >= SEVERAL_PASSES:
        forward = program.ops[program.ops["phase"] == "forward"]
        saves = program.without_ns(forward, passes, passes)
        evidence = f"layers run forward {1 / passes:.1f} times for each backward pass; in these "
        evidence += f"{program.of_wall(program.busy_ns(forward))}; with one for each {program.shorter(saves)}"
        yield program.finding_in_ops("recompute:forward", evidence, forward, saves=saves, confidence="low")
    times = complete["forward"][is_frozen] / calls["forward"][~is_frozen].median()
    trained = [str(layer) for layer in calls.index[~is_frozen]]  # a layer around such may only add in its forward pass
    frozen = [name for name in times.index if not any(layer.startswith(f"{name}.") for layer in trained)]
    times = times[frozen][lambda times: times >= SEVERAL_PASSES]
    repeated = program.ops[matching(program.ops["layer"], {*times.index}) & (program.ops["phase"] == "forward")]
    if (busy_ns := program.busy_ns(repeated)) >= RECOMPUTE_SHARE * total_ns > 0:
        saves = program.without_ns(repeated, 1 / times.median(), 1 / times.median())
        layers = plural(len(times), "layer", "that is not trained and runs/that are not trained and run")
        evidence = f"{program.of_wall(busy_ns)} in {layers} {times.median():.1f} times for each forward pass of those "
        evidence += f"that are; with one {program.shorter(saves)}"
        yield program.finding_in_ops("recompute:frozen", evidence, repeated, saves=saves, confidence="low")
    blocks = program.ops[["block", "block_kind"]].drop_duplicates("block").set_index("block")["block_kind"]
    times = calls["forward"][calls.index.isin(blocks.index)]
    usual = times.groupby(blocks.reindex(times.index), observed=True).transform("median")
    times = complete["forward"][times.index] / usual
    if len(times := times[times >= SEVERAL_PASSES]):
        of_blocks = program.ops[matching(program.ops["block"], {*times.index}) & (program.ops["phase"] == "forward")]
        left = 1 / of_blocks["block"].astype(str).map(times)
        evidence = f"{listing([str(name) for name in times.index], 4)} run {times.median():.1f} times for each time "
        evidence += f"that blocks like them do; {program.of_wall(program.busy_ns(of_blocks))}"
        saves = program.without_ns(of_blocks, left, left)
        yield program.finding_in_ops("recompute:again", evidence, of_blocks, saves=saves, confidence="low")
    again_ns = ops["ns"].sum()
    if not len(ops) or again_ns < RECOMPUTE_SHARE * total_ns:
        return
    layer, _ = costliest(ops, "ns")
    saves = program.without_ns(ops)
    evidence = f"{program.ms(again_ns)} of GPU time{program.per_step} ({share(again_ns, total_ns)}) is recomputed "
    evidence += f"forward work; most in {layer}: {program.ms(ops['ns'][ops['layer'] == layer].sum())}"
    evidence += f"{program.with_launches(ops, saves)}"
    is_sure = saves <= 2 * program.busy_ns(ops)
    yield program.finding_in_ops("recompute", evidence, ops, saves=saves, confidence="high" if is_sure else "medium")


def outlier_layers(program: Program) -> Iterator[Finding]:
    """Of four or more layers that differ only in their number, one computes 1.2 times the median and five median
    deviations more, even without 30 % of the time that collectives run beside it; all parts and phases of a block are
    one finding. Blocks count as a whole where torch.compile fused most of them, but not all. If it is one part
    of the first or last block, the confidence is `low`: it may hold what runs before or after the blocks.

    Saves: What it computes above it.
    """
    kernels = program.kernels
    fused = kernels["layer"][matching(kernels["name"], FUSED)].unique()
    blocks = kernels.loc[~kernels["block"].duplicated() & (kernels["block"] != ""), ["block_kind", "block"]]
    compiled = blocks["block"].isin(fused).groupby(blocks["block_kind"], observed=True).mean()
    if len(partly := compiled.index[(compiled > 1 / 2) & (compiled < 1)]):
        is_partly = matching(kernels["block_kind"], {*partly})
        kernels = kernels.assign(layer=kernels["layer"].astype(str).mask(is_partly, kernels["block"].astype(str)))
    # a collective's time includes waiting for other ranks
    is_of_layer = (kernels["kernel_class"] != "comm") & (kernels["layer"] != NO_LAYER)
    is_of_layer &= matching(kernels["phase"], LAYER_PHASES)
    place, index = placed(kernels)
    lanes, starts, ends = (kernels[name].to_numpy() for name in ("lane", "start_ns", "end_ns"))
    is_comm = (kernels["kernel_class"] == "comm").to_numpy()
    beside_ns = Cover(lanes[is_comm], starts[is_comm], ends[is_comm]).inside(lanes, starts, ends)
    values, is_counted = {"ns": kernels["ns"].to_numpy(), "beside_ns": beside_ns}, is_of_layer.to_numpy()
    columns = {name: exact_sums(place, ns * is_counted, len(index)) for name, ns in values.items()}
    times = pd.DataFrame(columns, index)
    sums = times[np.bincount(place, is_of_layer, len(index)) > 0].reset_index().astype({"layer": str, "phase": str})
    sums = sums.assign(layer_kind=kinds(sums["layer"]))
    outliers = []
    for _, peers in sums[sums["layer_kind"].str.contains("*", regex=False)].groupby(["layer_kind", "phase"]):
        usual_ns, worst = float(peers["ns"].median()), peers[peers["ns"] == peers["ns"].max()][:1]
        least_ns = float(worst["ns"].iloc[0]) - SLOWS * float(worst["beside_ns"].iloc[0])
        if len(peers) >= SIBLINGS and least_ns > unusual_ns(peers["ns"]):
            number = peers["layer"].str.extract(r"(?:^|\.)(\d+)(?:\.|$)", expand=False).astype(int)
            is_edge = number[worst.index[0]] in (number.min(), number.max())
            excess_ns = worst["ns"] - usual_ns
            outliers.append(worst.assign(usual_ns=usual_ns, excess_ns=excess_ns, peers=len(peers), is_edge=is_edge))
    if not outliers:
        return
    table = pd.concat(outliers).sort_values("excess_ns", ascending=False, kind="stable")
    for block, places in table.groupby(table["layer"].str.extract(BLOCK, expand=False), sort=False):
        worst, in_places = places.iloc[0], [kernels[name].isin(places[name]) for name in ("layer", "phase")]
        of_block = kernels[is_of_layer & in_places[0] & in_places[1]]
        evidence = f"{worst['layer']} {worst['phase']}: {program.ms(worst['ns'])} of its own compute{program.per_step}"
        evidence += f", while the median of the {int(worst['peers'])} layers like it is {program.ms(worst['usual_ns'])}"
        if len(places) > 1:
            slower = listing([f"{row.layer} {row.phase}" for row in places.iloc[1:].itertuples()], 4)
            evidence += f"; {block} also takes longer in {len(places) - 1} more: {slower}"
        yield program.finding_in_ops(
            "outlier-layer", evidence, at(of_block, worst["layer"], worst["phase"]),
            saves=min(int(places["excess_ns"].sum()), program.busy_ns(of_block)),
            confidence="low" if len(places) == 1 and worst["is_edge"] else "high",
        )  # fmt: skip


def unusual_ns(times: pd.Series[Any]) -> float:
    """What takes longer than this is an outlier among times of equal layers."""
    usual_ns = times.median()
    return float(max(OUTLIER * usual_ns, usual_ns + 5 * (times - usual_ns).abs().median()))
