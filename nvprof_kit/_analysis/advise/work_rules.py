"""Rules about the work itself: copies, small kernels, unfused chains, precision, recomputation, outlier layers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from nvprof_kit._analysis.advise.evidence import FEW_TOKENS_NS, POINTWISE, Evidence, share
from nvprof_kit._analysis.attribution.intervals import Int64Array
from nvprof_kit._findings import Finding
from nvprof_kit._trace.schema import OP_KINDS
from nvprof_kit.names import LAYER_CATEGORIES, NO_LAYER

if TYPE_CHECKING:
    import pandas as pd

SMALL_NS, STORM_COUNT, STORM_SHARE, WAITS_SHARE = 5_000, 50, 0.7, 0.05
COPY_SHARE, PINNED_SHARE = 0.002, 0.05
ATTENTION_SHARE = 0.02
OPTIMIZER_KERNELS, OPTIMIZER_SHARE = 150, 0.02
CHAIN_LENGTH, CHAIN_SHARE, LAYOUT_SHARE = 4, 0.02, 0.2
FP32_SHARE, RECOMPUTE_SHARE = 0.01, 0.05
OUTLIER, SIBLINGS, OUTLIER_SHARE = 1.2, 4, 0.002

_FP32 = re.compile(
    r"(?<!tf32_)\bsgemm|_sgemm_|simt_sgemm|simt_s884|f32f32_f32f32_f32(?!.*tf32)|gemmSN(?!.*(?:half|bfloat16))|"
    r"magma_sgemm",
    re.IGNORECASE,
)
_CASTS = re.compile(r"copy_kernel")
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_LOGITS = re.compile(r"(^|\.)(lm_head|embed_out|output|output_layer|logits?)$")
LOGITS_TIMES, LOGITS_SHARE = 4, 0.02
"""Logits of all tokens take this many times as long to read as the activations of all tokens: there are more of them
than a token has activations. Those of each sequence's last token take less.
"""
_MANY_PARAMETERS = re.compile("multi_tensor_apply")
LIMIT_SHARE, LIMIT_TIMES, LIMIT_KINDS = 0.05, 2.0, 2
"""Layers that take twice what their work needs, and a twentieth of the time more; so many kinds of them are named."""
_LAYOUT = re.compile(r"nchwToNhwc|nhwcToNchw")
_LAYER_PHASES = tuple(category.value for category in LAYER_CATEGORIES)


def copies(facts: Evidence) -> Iterator[Finding]:
    """Copies that use pageable memory or block the host; and copies of pinned memory that nothing hides."""
    rows = facts.times.copies
    blocking = rows[(rows["memory"] == "pageable") | (rows["blocking"] > 0)]
    kind = facts.trace.ops["kind"].to_numpy()
    moves = np.flatnonzero(np.isin(kind, [OP_KINDS.index("memcpy"), OP_KINDS.index("memset")]) & facts.inside)
    exposed = min(int(blocking["exposed_ns"].sum()), facts.busy_ns(moves))
    host_ns = int(facts.around_copies["idle_ns"].sum())
    # where the host's work on their data takes longer than the copies, that is outside the layers
    first = (blocking["layer"] == NO_LAYER) if host_ns > exposed else blocking["exposed_ns"]
    blocking = blocking.iloc[np.argsort(-first.to_numpy().astype(np.int64), kind="stable")]
    if len(blocking) and exposed + host_ns >= COPY_SHARE * facts.wall_ns:
        worst = blocking.iloc[0]
        pageable = blocking[blocking["memory"] == "pageable"]
        figures = (
            f"{int(blocking['ops'].sum())} copies ({int(pageable['ops'].sum())} through pageable memory), "
            f"{blocking['bytes'].sum() / 1e6:.1f} MB, {facts.ms(exposed)} exposed{facts.per_step}; {worst['copy']} in "
            f"{worst['layer']} {worst['phase']} at {worst['gb_per_s']:.1f} GB/s"
        )
        advice = (
            "use DataLoader(pin_memory=True) and .to(device, non_blocking=True); copy the next batch on another stream"
        )
        if host_ns:
            figures += f"; the GPU idles {facts.ms(host_ns)} more while the host works on their data"
        if "DtoH" in str(worst["copy"]):
            advice = "keep it on the GPU, or copy it to pinned memory with non_blocking=True and read it a step later"
        yield Finding(
            "copies", "Blocking copies", figures, worst["layer"], worst["phase"], *_longest_copy(facts, moves, worst),
            exposed + host_ns, advice, "high",
            "the copies take as long from pinned memory and still overlap with nothing",
        )  # fmt: skip
    pinned = rows[(rows["memory"] == "pinned") & (rows["blocking"] == 0) & (rows["exposed_ns"] > 0)]
    exposed = min(int(pinned["exposed_ns"].sum()), facts.busy_ns(moves))
    if not len(pinned) or exposed < PINNED_SHARE * facts.wall_ns:
        return
    worst = pinned.iloc[0]
    gpu_ns = int(pinned["gpu_ns"].sum())
    figures = (
        f"{int(pinned['ops'].sum())} copies of pinned memory, {pinned['bytes'].sum() / 1e9:.2f} GB, {facts.ms(gpu_ns)}"
        f"{facts.per_step}, of which {facts.ms(exposed)} ({share(exposed, gpu_ns)}) run beside nothing; most in "
        f"{worst['copy']} in {worst['layer']} {worst['phase']}: {facts.ms(worst['exposed_ns'])} at "
        f"{worst['gb_per_s']:.1f} GB/s"
    )
    yield Finding(
        "copies", "Copies that nothing hides", figures, worst["layer"], worst["phase"],
        *_longest_copy(facts, moves, worst), exposed,
        "copy what the next layer needs on a stream of its own while this one computes, or keep more of it on the GPU",
        "high", "the step takes as long with these tensors kept on the GPU",
    )  # fmt: skip


def _longest_copy(facts: Evidence, moves: Int64Array, row: Any) -> tuple[int, int]:
    """Start and end of the longest of some copies that a row of the copies' table holds."""
    ops, trace = facts.ops.iloc[moves], facts.trace.ops.iloc[moves]
    same = (ops["layer"] == row["layer"]) & (ops["phase"] == row["phase"]) & (trace["name"] == row["copy"])
    return facts.longest(moves[(same & (trace["host_memory"] == row["memory"])).to_numpy()])


def small_kernels(facts: Evidence) -> Iterator[Finding]:
    """Layers and phases that consist mostly of many small kernels."""
    ops, steps = facts.ops, max(facts.choice.count, 1)
    kernels = ops[(ops["kind"] == OP_KINDS.index("kernel")) & facts.inside]
    small = kernels["ns"] < SMALL_NS
    table = kernels.assign(small=small, small_ns=kernels["ns"].where(small, 0)).groupby(
        ["layer", "phase"], observed=True
    )
    sums = table[["small", "small_ns", "ns"]].sum().join(table.size().rename("count"))
    storms = sums[(sums["small"] >= STORM_COUNT * steps) & (sums["small"] >= STORM_SHARE * sums["count"])]
    if not len(storms):
        return
    launches = facts.times.launches.set_index(["layer", "phase"])["idle_ns"]
    storms = storms.assign(idle_ns=[int(launches.get(layer_and_phase, 0)) for layer_and_phase in storms.index])
    order = (storms["idle_ns"] + storms["small_ns"]).sort_values(ascending=False, kind="stable").index
    storms = storms.loc[order]
    (layer, phase), worst = storms.index[0], storms.iloc[0]
    pairs = _places(kernels).isin(storms.index.tolist())
    short = kernels.index[small.to_numpy() & pairs].to_numpy()
    saves = int(storms["idle_ns"].sum()) + facts.busy_ns(short)
    figures = (
        f"in {layer} {phase} {int(worst['small']) // steps} of {int(worst['count']) // steps} kernels{facts.per_step} "
        f"are shorter than {SMALL_NS // 1000} µs, together {facts.ms(worst['small_ns'])}"
    )
    waits = int(worst["idle_ns"]) >= WAITS_SHARE * int(worst["small_ns"])
    figures += f", and the GPU waits {facts.ms(worst['idle_ns'])} between them" if waits else ", back to back"
    if len(storms) > 1:
        figures += f"; the same in {len(storms) - 1} other places, {facts.ms(storms['small_ns'].iloc[1:].sum())}"
    advice = "torch.compile, a CUDA graph, or a fused kernel for this layer"
    if phase == "optimizer" or facts.classes.is_a("optimizer")[short].any():
        advice = f"a fused optimizer (fused=True or foreach=True), {advice}"
    rows_there = np.flatnonzero((ops["layer"] == layer) & (ops["phase"] == phase) & facts.inside)
    start = int(ops["start_ns"].to_numpy()[rows_there].min())
    end = int(ops["end_ns"].to_numpy()[rows_there[: max(len(rows_there) // steps, 1)]].max())
    refuted = "a fused kernel takes as long as all of them together"
    yield Finding(
        "small-kernels", "Many small kernels", figures, layer, phase, start, max(end, start), saves, advice,
        "medium" if waits else "low", refuted, "launch",
    )  # fmt: skip


def _places(rows: pd.DataFrame) -> pd.MultiIndex:
    """Layer and phase of each row."""
    import pandas as pd

    places: pd.MultiIndex = pd.MultiIndex.from_frame(rows[["layer", "phase"]].astype(object))
    return places


def unfused_chains(facts: Evidence) -> Iterator[Finding]:
    """Elementwise, norm, reduction and copy kernels that run one after another in one call of a layer."""
    ops = facts.ops
    stream = facts.trace.ops["stream"].to_numpy()
    order = np.lexsort(
        (ops["start_ns"].to_numpy(), stream, facts.trace.ops["device"].to_numpy(), facts.trace.ops["pid"].to_numpy())
    )
    light = np.isin(ops["code"].to_numpy(), POINTWISE) & (ops["kind"].to_numpy() == OP_KINDS.index("kernel"))
    light &= facts.inside
    light[facts.score_kernels] = False  # fused attention has none of them
    layer, phase, same = (
        ops["layer"].cat.codes.to_numpy(),
        ops["phase"].cat.codes.to_numpy(),
        np.ones(len(ops), dtype=bool),
    )
    for values in (layer, phase, stream, facts.attribution.layer_range):
        same[1:] &= values[order][1:] == values[order][:-1]
    starts = ~(same & light[order] & np.concatenate(([False], light[order][:-1])))
    chain = np.cumsum(starts)
    ns = ops["ns"].to_numpy()[order]
    length, chain_ns = np.bincount(chain), np.bincount(chain, weights=ns)
    long = (length >= CHAIN_LENGTH) & (layer[order][np.append(0, np.flatnonzero(starts))][: len(length)] >= 0)
    saved = np.where(long, chain_ns * (1 - 1 / np.maximum(length, 1)), 0)  # one pass over memory instead of `length`
    names = ops["layer"].cat.categories
    outside = names.get_loc(NO_LAYER) if NO_LAYER in names else -1
    first = np.append(0, order[np.flatnonzero(starts)])  # each chain's first operation; chain 0 is empty
    saved[layer[first] == outside] = 0
    in_chains = order[(saved > 0)[chain]]
    total = min(int(saved.sum()), facts.busy_ns(in_chains))
    if total < CHAIN_SHARE * facts.wall_ns:
        return
    phases = ops["phase"].cat.categories
    by_place = np.bincount(layer[first].astype(np.int64) * len(phases) + phase[first], weights=saved)
    code = int(by_place.argmax())
    name, where = str(names[code // len(phases)]), str(phases[code % len(phases)])
    in_place = (layer[first] == code // len(phases)) & (phase[first] == code % len(phases))
    worst = int(np.where(in_place, saved, 0).argmax())
    start = int(ops["start_ns"].iloc[first[worst]])
    figures = (
        f"{int((saved > 0).sum())} chains of {CHAIN_LENGTH} or more such kernels, "
        f"{facts.ms(float(chain_ns[saved > 0].sum()))} of GPU time{facts.per_step}; most in "
        f"{name} {where}; the longest has {int(length[saved > 0].max())} kernels"
    )
    advice = "use torch.compile, which fuses them, or a fused norm, rotary embedding or activation from a library"
    change_layout = facts.among(facts.trace.ops["name"].iloc[in_chains], _LAYOUT)
    if ops["ns"].to_numpy()[in_chains][change_layout].sum() >= LAYOUT_SHARE * float(chain_ns[saved > 0].sum()):
        advice = (
            "keep the model and its input in memory_format=torch.channels_last: many of them change the layout around "
            f"convolutions; then {advice}"
        )
    end = int(ops["end_ns"].to_numpy()[order[chain == worst]].max())
    refuted = "torch.compile on that layer leaves as many kernels, or makes it no faster"
    yield Finding(
        "unfused-chains", "Chains of small memory-bound kernels", figures, name, where, start, end, total, advice,
        "medium", refuted,
    )  # fmt: skip


def fp32_gemms(facts: Evidence) -> Iterator[Finding]:
    """Matrix products in FP32 that do not use the tensor cores."""
    names = facts.trace.ops["name"].cat
    is_fp32 = np.array([bool(_FP32.search(str(name))) for name in names.categories])
    rows = np.flatnonzero(is_fp32[names.codes.to_numpy()] & facts.classes.is_a("gemm") & facts.inside)
    casts = facts.among(facts.trace.ops["name"], _CASTS) & facts.inside & (facts.ops["layer"] != NO_LAYER).to_numpy()
    layer_range = facts.attribution.layer_range
    casts &= np.isin(layer_range, layer_range[rows])  # of weights and activations to fp32 and back, for these products
    busy_ns, cast_ns = facts.busy_ns(rows), facts.busy_ns(np.flatnonzero(casts))
    if not len(rows) or busy_ns < FP32_SHARE * facts.wall_ns:
        return
    worst = rows[np.argmax(facts.ops["ns"].to_numpy()[rows])]
    layer, phase = str(facts.ops["layer"].iloc[worst]), str(facts.ops["phase"].iloc[worst])
    figures = (
        f"{len(rows)} kernels, {facts.ms(busy_ns)}{facts.per_step}, the longest in {layer} {phase}: "
        f"{str(names.categories[names.codes.iloc[worst]])[:70]}"
    )
    if cast_ns:
        figures += f"; casts in these layers take {facts.ms(cast_ns)}"
    advice = (
        "autocast to bf16, or torch.set_float32_matmul_precision('high'); tensor cores are about 8 "
        "times as fast in TF32"
    )
    interval = facts.longest(rows)
    refuted = "the program needs fp32 there; or ncu shows the tensor cores busy in these kernels"
    yield Finding(
        "fp32-gemms",
        "Matrix products in fp32",
        figures,
        layer,
        phase,
        *interval,
        busy_ns * 7 // 8 + cast_ns,
        advice,
        "high",
        refuted,
    )


def unfused_attention(facts: Evidence) -> Iterator[Finding]:
    """Attention as two products with a softmax between them, in place of one fused kernel."""
    rows = facts.score_kernels
    saves = facts.busy_ns(rows) if len(rows) else 0
    if not len(rows) or saves < ATTENTION_SHARE * facts.wall_ns:
        return
    scores = facts.ops.iloc[rows]
    by_place = scores.groupby(["layer", "phase"], observed=True)["ns"].sum()
    layer, phase = by_place.index[int(by_place.to_numpy().argmax())]
    figures = (
        f"{facts.ms(saves)} of {facts.ms(facts.wall_ns)}{facts.per_step} ({share(saves, facts.wall_ns)}) in softmax, "
        f"scale, mask and copy kernels over the scores between the products, in {scores['layer'].nunique()} layers; "
        f"most in {layer} {phase}: {facts.ms(int(by_place.max()))}"
    )
    in_place = (scores["layer"] == layer) & (scores["phase"] == phase)
    yield Finding(
        "unfused-attention", "Attention is not fused", figures, str(layer), str(phase),
        *facts.longest(rows[in_place.to_numpy()]), saves,
        "use fused attention: attn_implementation='sdpa' or 'flash_attention_2', scaled_dot_product_attention",
        "high", "fused attention takes as long in these layers",
    )  # fmt: skip


def logits_of_all_tokens(facts: Evidence) -> Iterator[Finding]:
    """A prefill that computes the logits of all tokens, and not only of the last of each sequence."""
    if facts.program not in ("prefill", "mixed"):
        return
    ops = facts.ops
    kernels = np.flatnonzero((ops["kind"] == OP_KINDS.index("kernel")).to_numpy() & facts.inside)
    kernels = kernels[np.argsort(ops["start_ns"].to_numpy()[kernels], kind="stable")]
    layers = [str(layer) for layer in ops["layer"].cat.categories]
    code = ops["layer"].cat.codes.to_numpy()[kernels]
    in_block, in_head = (
        np.array([bool(pattern.search(layer)) for layer in layers], dtype=bool)[code] for pattern in (_INDEX, _LOGITS)
    )
    pointwise = np.isin(ops["code"].to_numpy()[kernels], POINTWISE)
    if not in_head.any() or not (pointwise & in_block).any():
        return
    ns, order = ops["ns"].to_numpy()[kernels], np.arange(len(kernels))
    last_head, last_block = (
        np.maximum.accumulate(np.where(kernel_of, order, -1)) for kernel_of in (in_head & ~pointwise, in_block)
    )
    usual_ns = max(float(np.median(ns[pointwise & in_block])), FEW_TOKENS_NS)
    reads = pointwise & ~in_block & (last_head > last_block) & (ns >= LOGITS_TIMES * usual_ns)
    saves = facts.busy_ns(kernels[np.append(order[reads], np.unique(last_head[reads]))])
    if not reads.any() or saves < LOGITS_SHARE * facts.wall_ns:
        return
    head_kernel = kernels[last_head[reads][0]]
    layer, phase = str(ops["layer"].iloc[head_kernel]), str(ops["phase"].iloc[head_kernel])
    figures = (
        f"{facts.ms(saves)} of {facts.ms(facts.wall_ns)}{facts.per_step} ({share(saves, facts.wall_ns)}) in {layer} "
        f"and kernels on its logits, which take up to {ns[reads].max() / usual_ns:,.0f} times as long as those on the "
        "activations of a block: so many are the logits of all tokens"
    )
    yield Finding(
        "logits", "Logits of all tokens", figures, layer, phase, *facts.longest(np.array([head_kernel])), saves,
        "compute the logits of each sequence's last token only (logits_to_keep=1 in transformers), and keep them in "
        "bf16", "medium", "the program needs the logits of every token, as scoring does",
    )  # fmt: skip


def optimizer_loop(facts: Evidence) -> Iterator[Finding]:
    """An optimizer that runs kernels for each parameter, and not for many at once."""
    ops, steps = facts.ops, facts.steps_and_gpus
    kernel = (ops["kind"] == OP_KINDS.index("kernel")).to_numpy() & facts.inside
    kernel &= ~(facts.classes.is_a("comm") | facts.among(facts.trace.ops["name"], _MANY_PARAMETERS))
    rows = np.flatnonzero((ops["phase"] == "optimizer").to_numpy() & kernel)
    if len(rows) < OPTIMIZER_KERNELS * steps:
        return
    idle = facts.idle("launch", "unknown")
    idle_ns = int(idle["idle_ns"][idle["phase"] == "optimizer"].sum())
    busy_ns = facts.busy_ns(rows)
    saves = idle_ns + busy_ns // 2
    if saves < OPTIMIZER_SHARE * facts.wall_ns:
        return
    longest = rows[np.argmax(ops["ns"].to_numpy()[rows])]
    figures = (
        f"{len(rows) / steps:,.0f} kernels{facts.per_step} in the optimizer, {facts.ms(busy_ns)}, between which the "
        f"GPU waits {facts.ms(idle_ns)} for launches"
    )
    yield Finding(
        "optimizer-loop", "The optimizer runs kernels for each parameter", figures, str(ops["layer"].iloc[longest]),
        "optimizer", *facts.longest(rows), saves, "use fused=True or foreach=True, or an optimizer of a library with "
        "fused kernels", "medium", "the optimizer is fused already, and most of these kernels are not its own",
    )  # fmt: skip


def recompute(facts: Evidence) -> Iterator[Finding]:
    """What activation checkpointing costs."""
    rows = np.flatnonzero((facts.ops["phase"] == "recompute") & facts.inside)
    recompute_ns = int(facts.ops["ns"].to_numpy()[rows].sum())
    total = int(facts.ops["ns"].to_numpy()[facts.inside].sum())
    if not len(rows) or recompute_ns < RECOMPUTE_SHARE * total:
        return
    by_layer = facts.ops.iloc[rows].groupby("layer", observed=True)["ns"].sum()
    by_layer = by_layer.sort_values(ascending=False, kind="stable")
    figures = (
        f"{facts.ms(recompute_ns)} of GPU time{facts.per_step} ({share(recompute_ns, total)}) is recomputed forward "
        f"work; most in {by_layer.index[0]}: {facts.ms(by_layer.iloc[0])}"
    )
    advice = "checkpoint fewer layers, or only what is cheap to compute and large to keep, if memory allows"
    layer, saves = str(by_layer.index[0]), facts.busy_ns(rows)
    interval = facts.longest(rows[(facts.ops["layer"].iloc[rows] == layer).to_numpy()])
    refuted = "without checkpointing the model does not fit"
    yield Finding(
        "recompute", "Recomputed activations", figures, layer, "recompute", *interval, saves, advice, "high", refuted
    )


def outlier_layers(facts: Evidence) -> Iterator[Finding]:
    """Layers that take much longer than others of their kind; all parts and phases of a block are one finding."""
    import pandas as pd

    # a collective's time includes waiting for other ranks, and a copy that of its link
    work = facts.inside & ~facts.classes.is_a("comm") & (facts.ops["kind"] == OP_KINDS.index("kernel")).to_numpy()
    ops = facts.ops[(facts.ops["layer"] != NO_LAYER) & facts.ops["phase"].isin(_LAYER_PHASES) & work]
    sums = ops.groupby(["layer", "phase"], observed=True)["ns"].sum().reset_index().astype({"layer": str, "phase": str})
    sums["kind"] = [_INDEX.sub("N", layer) for layer in sums["layer"]]
    outliers = []
    for _, rows_of_block in sums[sums["kind"] != sums["layer"]].groupby(["kind", "phase"]):
        values = rows_of_block["ns"].to_numpy()
        median_ns = float(np.median(values))
        spread = float(np.median(np.abs(values - median_ns)))
        if len(values) >= SIBLINGS and values.max() > max(OUTLIER * median_ns, median_ns + 5 * spread):
            outliers.append(
                rows_of_block.assign(lost=rows_of_block["ns"] - median_ns, many=len(values)).iloc[int(values.argmax())]
            )
    if not outliers:
        return
    frame = pd.DataFrame(outliers)
    frame["block"] = [layer[: found_.end()] if (found_ := _INDEX.search(layer)) else layer for layer in frame["layer"]]
    for block, rows_of_block in frame.sort_values("lost", ascending=False, kind="stable").groupby("block", sort=False):
        rows = np.flatnonzero(
            _places(facts.ops).isin(list(zip(rows_of_block["layer"], rows_of_block["phase"], strict=True))) & work
        )
        saves = min(int(rows_of_block["lost"].sum()), facts.busy_ns(rows))
        if saves < OUTLIER_SHARE * facts.wall_ns:
            continue
        worst = rows_of_block.iloc[0]
        figures = (
            f"{worst['layer']} {worst['phase']}: {facts.ms(worst['ns'])} of its own compute{facts.per_step}, while the "
            f"median of the {int(worst['many'])} layers like it is {facts.ms(worst['ns'] - worst['lost'])}"
        )
        if len(rows_of_block) > 1:
            other_places = ", ".join(
                f"{outlier['layer']} {outlier['phase']}" for _, outlier in rows_of_block.iloc[1:5].iterrows()
            )
            figures += f"; {block} also takes longer in {len(rows_of_block) - 1} more: {other_places}"
        advice = (
            "compare its kernels with those of a peer (nvprof-kit summary --view kernel --by step): look for a "
            "different shape, dtype or algorithm"
        )
        yield Finding(
            "outlier-layer", "A layer slower than its peers", figures, str(worst["layer"]), str(worst["phase"]),
            *facts.longest(np.flatnonzero(_places(facts.ops).isin([(worst["layer"], worst["phase"])]) & work)),
            saves, advice, "high", "the layer is meant to be larger than its peers",
        )  # fmt: skip


def far_from_limit(facts: Evidence, kinds: pd.DataFrame) -> Iterator[Finding]:
    """Kinds of layers that take much longer than this GPU needs for their work.

    Args:
        facts: The evidence.
        kinds: `Flops.kinds` of the same steps.
    """
    far = kinds[(kinds["gpu_busy_ns"] > LIMIT_TIMES * kinds["limit_ns"])].head(LIMIT_KINDS)
    for row in far[far["excess_ns"] > LIMIT_SHARE * facts.wall_ns].to_dict("records"):
        is_kind = facts.ops["layer"].str.replace(_INDEX, "*", regex=True) == row["kind"]
        inside = np.flatnonzero(is_kind & (facts.ops["phase"] == row["phase"]) & facts.inside)
        if not len(inside):
            continue
        kernels = facts.ops["ns"].iloc[inside].groupby(facts.trace.ops["name"].iloc[inside].astype(str)).sum()
        slow = ", ".join(
            f"{str(kernel_name)[:60]} ({share(ns, kernels.sum())})" for kernel_name, ns in kernels.nlargest(3).items()
        )
        yield Finding(
            "far-from-limit", f"{row['kind']} {row['phase']} is far from its limit",
            f"{facts.ms(row['gpu_busy_ns'])}{facts.per_step} in {row['layers']} of them; this GPU needs at least "
            f"{facts.ms(row['limit_ns'])} for their operators ({share(row['limit_ns'], row['gpu_busy_ns'])}), limited "
            f"by {row['bound']}; their kernels: {slow}",
            str(row["layer"]), str(row["phase"]), *facts.longest(inside), int(row["excess_ns"]),
            "let fewer kernels pass over its memory: torch.compile, or a fused kernel from a library"
            if row["bound"] == "memory"
            else "look at those kernels: a wider or aligned shape, a lower precision, another attention backend, "
            "or what runs beside the products in one kernel with them",
            "low", "the step was counted on another input than was captured, or the fused layer is no faster",
        )  # fmt: skip
