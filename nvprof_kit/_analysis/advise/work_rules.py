"""Rules over the work itself: copies, small kernels, chains that could be one, precision, recompute, unequal layers."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from nvprof_kit._analysis.advise.evidence import Evidence, Finding, ms, share
from nvprof_kit._analysis.kernels.classes import CLASSES
from nvprof_kit._trace.schema import OP_KINDS
from nvprof_kit.names import LAYER_CATEGORIES, NO_LAYER

SMALL_NS, STORM_COUNT, STORM_SHARE = 5_000, 50, 0.7
COPY_SHARE = 0.002
CHAIN_LENGTH, CHAIN_SHARE = 4, 0.02
FP32_SHARE, RECOMPUTE_SHARE = 0.01, 0.05
OUTLIER, SIBLINGS = 1.2, 4

_FP32 = re.compile(
    r"(?<!tf32_)\bsgemm|_sgemm_|simt_sgemm|simt_s884|f32f32_f32f32_f32(?!.*tf32)|gemmSN(?!.*(?:half|bfloat16))|"
    r"magma_sgemm",
    re.IGNORECASE,
)
_POINTWISE = tuple(list(CLASSES).index(name) for name in ("elementwise", "norm", "reduction", "copy", "softmax"))
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_LAYER_PHASES = tuple(category.value for category in LAYER_CATEGORIES)


def copies(found: Evidence) -> Iterator[Finding]:
    """Copies that go through pageable memory or block the host."""
    rows = found.times.copies
    bad = rows[(rows["memory"] == "pageable") | (rows["blocking"] > 0)]
    kind = found.trace.ops["kind"].to_numpy()
    moves = np.flatnonzero(np.isin(kind, [OP_KINDS.index("memcpy"), OP_KINDS.index("memset")]) & found.inside)
    spent = min(int(bad["exposed_ns"].sum()), found.busy_ns(moves))
    if not len(bad) or spent < COPY_SHARE * found.wall_ns:
        return
    worst = bad.iloc[0]
    pageable = bad[bad["memory"] == "pageable"]
    evidence = (
        f"{int(bad['ops'].sum())} copies ({int(pageable['ops'].sum())} through pageable memory), "
        f"{bad['bytes'].sum() / 1e6:.1f} MB, "
        f"{ms(spent)} exposed; {worst['copy']} in {worst['layer']} {worst['phase']} at {worst['gb_per_s']:.1f} GB/s"
    )
    pages = moves[(found.trace.ops["host_memory"].iloc[moves] == "pageable").to_numpy()]
    place = found.longest(pages if len(pages) else moves)
    advice = "DataLoader(pin_memory=True) and .to(device, non_blocking=True); copy the next batch on another stream"
    yield Finding("copies", "Copies that block", evidence, worst["layer"], worst["phase"], *place, spent, advice)


def small_kernels(found: Evidence) -> Iterator[Finding]:
    """A layer that is mostly a storm of small kernels."""
    ops, steps = found.ops, max(found.choice.count, 1)
    kernels = ops[(ops["kind"] == OP_KINDS.index("kernel")) & found.inside]
    small = kernels["ns"] < SMALL_NS
    table = kernels.assign(small=small, small_ns=kernels["ns"].where(small, 0)).groupby(
        ["layer", "phase"], observed=True
    )
    sums = table[["small", "small_ns", "ns"]].sum().join(table.size().rename("count"))
    storms = sums[(sums["small"] >= STORM_COUNT * steps) & (sums["small"] >= STORM_SHARE * sums["count"])]
    launches = found.times.launches.set_index(["layer", "phase"])["idle_ns"]
    for (layer, phase), row in storms.iterrows():
        mine = np.flatnonzero((ops["layer"] == layer) & (ops["phase"] == phase) & found.inside)
        short = kernels.index[small & (kernels["layer"] == layer) & (kernels["phase"] == phase)]
        lost = int(launches.get((layer, phase), 0)) + found.busy_ns(short.to_numpy())
        evidence = (
            f"{int(row['small']) // steps} of {int(row['count']) // steps} kernels per step are "
            f"shorter than {SMALL_NS // 1000} µs, "
            f"together {ms(row['small_ns'])}, and {ms(int(launches.get((layer, phase), 0)))} the GPU waits between"
        )
        start = int(ops["start_ns"].to_numpy()[mine].min())
        advice = (
            "torch.compile, a fused optimizer (fused=True or foreach=True), a CUDA graph, or a fused "
            "kernel for this layer"
        )
        end = int(ops["end_ns"].to_numpy()[mine[: max(len(mine) // steps, 1)]].max())
        yield Finding(
            "small-kernels", "A storm of small kernels", evidence, layer, phase, start, max(end, start), lost, advice
        )


def unfused_chains(found: Evidence) -> Iterator[Finding]:
    """Runs of elementwise, norm, reduction and copying kernels, one behind the other in one call of a layer."""
    ops = found.ops
    stream = found.trace.ops["stream"].to_numpy()
    order = np.lexsort(
        (ops["start_ns"].to_numpy(), stream, found.trace.ops["device"].to_numpy(), found.trace.ops["pid"].to_numpy())
    )
    light = np.isin(ops["code"].to_numpy(), _POINTWISE) & (ops["kind"].to_numpy() == OP_KINDS.index("kernel"))
    light &= found.inside
    layer, phase, same = (
        ops["layer"].cat.codes.to_numpy(),
        ops["phase"].cat.codes.to_numpy(),
        np.ones(len(ops), dtype=bool),
    )
    for values in (layer, phase, stream, found.attribution.layer_range):
        same[1:] &= values[order][1:] == values[order][:-1]
    fresh = ~(same & light[order] & np.concatenate(([False], light[order][:-1])))
    chain = np.cumsum(fresh)
    ns = ops["ns"].to_numpy()[order]
    length, spent = np.bincount(chain), np.bincount(chain, weights=ns)
    long = (length >= CHAIN_LENGTH) & (layer[order][np.append(0, np.flatnonzero(fresh))][: len(length)] >= 0)
    saved = np.where(long, spent * (1 - 1 / np.maximum(length, 1)), 0)  # one pass over memory instead of `length`
    names = ops["layer"].cat.categories
    outside = names.get_loc(NO_LAYER) if NO_LAYER in names else -1
    first = np.append(0, order[np.flatnonzero(fresh)])  # the operation that each chain begins with; chain 0 is empty
    saved[layer[first] == outside] = 0
    total = min(int(saved.sum()), found.busy_ns(order[(saved > 0)[chain]]))
    if total < CHAIN_SHARE * found.wall_ns:
        return
    phases = ops["phase"].cat.categories
    by_place = np.bincount(layer[first].astype(np.int64) * len(phases) + phase[first], weights=saved)
    place = int(by_place.argmax())
    name, where = str(names[place // len(phases)]), str(phases[place % len(phases)])
    worst = int(saved.argmax())
    start = int(ops["start_ns"].iloc[first[worst]])
    evidence = (
        f"{int((saved > 0).sum())} chains of {CHAIN_LENGTH} or more such kernels, "
        f"{ms(float(spent[saved > 0].sum()))} of GPU time; most in "
        f"{name} {where}; the longest has {int(length[saved > 0].max())} kernels"
    )
    advice = "torch.compile fuses them; or a fused norm, rotary embedding or activation from a library"
    end = int(ops["end_ns"].to_numpy()[order[chain == worst]].max())
    yield Finding(
        "unfused-chains", "Chains of small memory-bound kernels", evidence, name, where, start, end, total, advice
    )


def fp32_gemms(found: Evidence) -> Iterator[Finding]:
    """Matrix products that do not use the tensor cores."""
    names = found.trace.ops["name"].cat
    told = np.array([bool(_FP32.search(str(name))) for name in names.categories])
    rows = np.flatnonzero(told[names.codes.to_numpy()] & found.classes.is_a("gemm") & found.inside)
    spent = found.busy_ns(rows)
    if not len(rows) or spent < FP32_SHARE * found.wall_ns:
        return
    worst = rows[np.argmax(found.ops["ns"].to_numpy()[rows])]
    layer, phase = str(found.ops["layer"].iloc[worst]), str(found.ops["phase"].iloc[worst])
    evidence = (
        f"{len(rows)} kernels, {ms(spent)}, the longest in {layer} {phase}: "
        f"{str(names.categories[names.codes.iloc[worst]])[:70]}"
    )
    advice = (
        "autocast to bf16, or torch.set_float32_matmul_precision('high'); tensor cores have about 8 "
        "times the rate in TF32"
    )
    place = found.longest(rows)
    yield Finding("fp32-gemms", "Matrix products in fp32", evidence, layer, phase, *place, spent * 7 // 8, advice)


def recompute(found: Evidence) -> Iterator[Finding]:
    """What activation checkpointing costs."""
    rows = np.flatnonzero((found.ops["phase"] == "recompute") & found.inside)
    spent = int(found.ops["ns"].to_numpy()[rows].sum())
    total = int(found.ops["ns"].to_numpy()[found.inside].sum())
    if not len(rows) or spent < RECOMPUTE_SHARE * total:
        return
    by_layer = found.ops.iloc[rows].groupby("layer", observed=True)["ns"].sum()
    by_layer = by_layer.sort_values(ascending=False, kind="stable")
    evidence = (
        f"{ms(spent)} of GPU time ({share(spent, total)}) is forward work done again; most in "
        f"{by_layer.index[0]}: {ms(by_layer.iloc[0])}"
    )
    advice = "checkpoint fewer layers, or only what is cheap to compute and large to keep, if memory allows"
    place = found.longest(rows)
    layer, saves = str(by_layer.index[0]), found.busy_ns(rows)
    yield Finding("recompute", "Recomputed activations", evidence, layer, "recompute", *place, saves, advice)


def outlier_layers(found: Evidence) -> Iterator[Finding]:
    """A layer that takes much longer than the others of its kind."""
    work = found.inside & ~found.classes.is_a("comm")  # a collective waits for other ranks
    ops = found.ops[(found.ops["layer"] != NO_LAYER) & found.ops["phase"].isin(_LAYER_PHASES) & work]
    sums = ops.groupby(["layer", "phase"], observed=True)["ns"].sum().reset_index()
    sums["kind"] = [_INDEX.sub("N", str(layer)) for layer in sums["layer"]]
    for (_, phase), mine in sums[sums["kind"] != sums["layer"].astype(str)].groupby(["kind", "phase"], observed=True):
        values = mine["ns"].to_numpy()
        middle = float(np.median(values))
        spread = float(np.median(np.abs(values - middle)))
        if len(values) < SIBLINGS or values.max() <= max(OUTLIER * middle, middle + 5 * spread):
            continue
        layer = str(mine["layer"].iloc[int(values.argmax())])
        rows = np.flatnonzero((found.ops["layer"] == layer) & (found.ops["phase"] == phase) & work)
        evidence = (
            f"{ms(values.max())} of its own computing, while the median of its {len(values)} equals is {ms(middle)}"
        )
        advice = (
            "compare its kernels with a sister's (nvprof-kit summary --view kernel --by step): another "
            "shape, dtype or algorithm"
        )
        lost = min(int(values.max() - middle), found.busy_ns(rows))
        if lost < 0.002 * found.wall_ns:
            continue
        yield Finding(
            "outlier-layer",
            "A layer unlike its equals",
            evidence,
            layer,
            str(phase),
            *found.longest(rows),
            lost,
            advice,
        )
