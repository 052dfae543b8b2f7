"""Rules about the GPU's own work: copies, small kernels, unfused chains, precision, attention, logits, products."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from nvprof_kit._analysis.advise.findings import share, size
from nvprof_kit._analysis.advise.layer_rules import unusual_ns
from nvprof_kit._analysis.advise.program import (
    CHAIN_LENGTH,
    DOUBLE,
    FEW_TOKENS_NS,
    LARGE_TILE,
    MANY_PARAMETERS,
    POINTWISE,
    SHORT_NS,
    SIBLINGS,
    Program,
    at,
    costliest,
    largest,
    placed,
    smallest_side,
)
from nvprof_kit._analysis.advise.replay import FILLS, MOVES, READS, WRITES, matching
from nvprof_kit._analysis.attribution.intervals import as_slice, exact_sums
from nvprof_kit._findings import Finding
from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.joins import distinct_rows, few
from nvprof_kit._trace.schema import OP_KINDS
from nvprof_kit.issues import plural, shortened
from nvprof_kit.names import NO_LAYER

COPY_SHARE, PINNED_SHARE = 0.002, 0.05
NUMBER_BYTES = 64
"""Copies of fewer bytes each are of single numbers."""
SMALL_NS, STORM_COUNT, STORM_SHARE, WAITS_SHARE = 5_000, 50, 0.7, 0.05
LAYOUT_SHARE, UNREAD_SHARE = 0.2, 0.2
"""Less than this share of the logits, as the last token's, is less than the times of filling and copying vary by."""
LOSS_SHARE, IGNORED = 0.2, 0.75
"""Where so much of the time is the head's and the loss's, labels may be ignored: of prompts, padding, or six of seven
words; so many are assumed to be.
"""
LOGITS_TIMES = 4
"""Logits of all tokens take this many times as long to read as the activations of all tokens: there are more of them
than a token has activations. Those of each sequence's last token take less.
"""
READ_SHARE = 0.05
"""Reductions that take this share of the head's time read the logits of all tokens."""
OPTIMIZER_KERNELS = 150
FUSED_ADAM, FUSED_ADAM_16, FUSED_SGD, OF_ROOTS, LEAST_ROOTS = 0.42, 0.55, 5 / 8, 10, 1 / 40
"""What one kernel takes of the time of several: Adam's moves 28 of 80 bytes of a parameter in float32, but slower than
these, and took 0.40 on an H100 and 0.43 on an H200, and in 16 bits 0.55; that of SGD with momentum moves 20 of 32. The
root that Adam takes moves a tenth of these 80; a loop that takes longer than ten roots moves more. One that takes
few, as of the norm of all gradients, is not Adam's.
"""
PIECES, BETWEEN_PRODUCTS = 8, ("attention", "comm", "norm", "softmax")
"""A block that runs so many equal products with none of these kernels between them computes one in pieces."""
COPIES_SHARE, CHAINS_SHARE, FP32_SHARE, ODD_SHARE = 0.02, 0.02, 0.01, 0.02
LIMIT_SHARE, LIMIT_TIMES, LIMIT_KINDS = 0.05, 2.0, 2

_FP32 = re.compile(
    r"(?<!tf32_)\bsgemm|_sgemm_|simt_sgemm|simt_s884|f32f32_f32f32_f32(?!.*tf32)|gemmSN(?!.*(?:half|bfloat16))|"
    r"magma_sgemm|fmha_cutlass[FB]_f32|gemv\w*(?:::kernel)?<(?:int, int, )?float, float, float",
    re.IGNORECASE,
)
_TF32 = re.compile(r"f32_tf32f32|tensorop_s1688(?!.*f16)")
_ODD = re.compile(r"(?:f16_s\d+gemm|s\d+gemm_(?:relu_)?b?f16)_\w*_align([12])(?![0-9])")
ODD_PARTS = {"1": 1 / 6, "2": 1 / 3}
"""What padded products take of the time of these kernels: on an H100 0.11 to 0.19, and 0.27 to 0.35."""
_VECTOR, _JOINS = re.compile("gemv"), re.compile("splitKreduce|CatArray")
_16_BITS, _ROOT = re.compile("BFloat16|Half"), re.compile("(?<!r)sqrt_kernel")
_NUMBER = re.compile(r"\*")
_CASTS = re.compile(r"(?<!index_)copy_kernel")
_TO_DTYPE = re.compile(r"unrolled_elementwise_kernel<.*copy_kernel|float16_copy_kernel")
_LAYOUT = re.compile(r"nchwToNhwc|nhwcToNchw")
_COPIES = re.compile(r"(?<!index_)copy_kernel|CatArray|^[mM]emcpy DtoD")
_INDEX = re.compile(r"gpu_index_kernel|index_?select", re.I)
_HEADS = re.compile(r"(^|\.)(lm_head|embed_out|output|output_layer|logits?)$")
_HEAD = re.compile(r"(^|\.)head$")
_OF_PARTS = ["name", "ns", "layer", "layer_kind", "block", "block_kind"]
_OF_CHAINS = ["name", "start_ns", "end_ns", "ns", "lane", "layer", "phase"]
_TAKES_NO_MASK = re.compile(r"flash_(fwd|bwd)|FlashAttn")
_SLOW_ATTENTION, SLOW_PART = re.compile(r"fmha_cutlass[FB]_b?f16\w*sm(?!7)"), 0.4
"""PyTorch's memory-efficient attention on GPUs that flash attention runs on, and what that takes of its time."""


def copies(program: Program) -> Iterator[Finding]:
    """Copies through pageable memory, or by calls that block, and the host's work on their data outside layers beside
    which the GPU idles, take 0.2 % or more; copies of pinned memory are exposed for 5 % or more.

    Where a wait for single numbers costs most, that is `sync`; where the host's work does, the confidence is `medium`,
    and where Python's stacks were recorded `low`.

    Saves: How much shorter the steps would be without these copies, the waits for them and that work, both without the
    profiler, less what their link needs of the exposed time of those to the GPU; of pinned memory the time exposed.
    """
    rows, ops = program.times.copies, program.ops
    moves = ops[np.isin(ops["kind"], (OP_KINDS.index("memcpy"), OP_KINDS.index("memset")))]
    moves = moves.rename(columns={"name": "copy", "host_memory": "memory"})
    blocks = (rows["memory"] == "pageable") | (rows["blocking"] > 0)
    blocking, idle_ns = rows[blocks], int(program.gaps_at_copies["idle_ns"].sum())
    exposed_ns, saves = min(int(blocking["exposed_ns"].sum()), program.busy_ns(moves)), 0
    if len(blocking) and exposed_ns + idle_ns >= COPY_SHARE * program.wall_ns:
        saves = max(program.without_ns(_moves_of(blocking, moves), host=1, gaps=program.gaps_at_copies), exposed_ns)
    if saves >= COPY_SHARE * program.wall_ns:
        is_work, first = 2 * idle_ns >= saves, blocking["exposed_ns"]
        if is_work:  # outside layers, and most of it after data was read, or before it is written
            after = program.gaps_at_copies["start_ns"].isin(moves["end_ns"][matching(moves["copy"], READS)])
            is_after = 2 * program.gaps_at_copies["idle_ns"][after].sum() >= idle_ns
            first = (blocking["layer"] == NO_LAYER) & (blocking["copy"].astype(str).str.contains(READS) == is_after)
        worst = blocking.iloc[int((first if first.any() else blocking["exposed_ns"]).to_numpy().argmax())]
        is_number, is_write = worst["bytes"] < NUMBER_BYTES * worst["ops"], blocking["copy"].str.contains(WRITES)
        evidence = f"{program.number(blocking['ops'].sum(), 'copy', 'copies')}, "
        evidence += f"{share(blocking['ops'][blocking['memory'] == 'pageable'].sum(), blocking['ops'].sum())} of them "
        evidence += f"through pageable memory, {size(blocking['bytes'].sum() / program.parts)}{program.per_step}; "
        evidence += f"{program.ms(exposed_ns)} exposed{program.per_step}; {worst['copy']} in {worst['layer']} "
        evidence += f"{worst['phase']}{f' at {worst.gb_per_s:.1f} GB/s' if worst['gb_per_s'] >= 0.05 else ''}"
        if idle_ns:
            evidence += f"; the GPU idles {program.ms(idle_ns)} more{program.per_step} beside them while the host works"
            evidence += " or waits"
        if saves > exposed_ns + idle_ns:
            evidence += f"; without waiting for them {program.shorter(saves)}"
        way = next((way for way in ("DtoH", "HtoD") if way in worst["copy"]), "")
        is_busy = matching(program.gaps_at_copies["cause"], ("unknown", "python", "off_cpu"))
        busy_ns = program.gaps_at_copies["idle_ns"][is_busy].sum()
        is_wait = way == "DtoH" and is_number and saves > 2 * max(exposed_ns, busy_ns)
        if way == "HtoD" and (is_number or is_work):
            way = "HtoD of numbers" if is_number else "HtoD of work"
        elif way == "HtoD" and (left_ns := (blocking["exposed_ns"] * blocking["of_link"])[is_write].sum()):
            saves -= round(left_ns)
            evidence += f"; not all is saved: over this link they take {program.ms(left_ns)} from pinned memory too"
        cases = ["copies:work" if is_work else "copies"]
        if way:
            cases.append(f"copies:{way}")
        yield program.finding_in_ops(
            "sync:numbers" if is_wait else cases, evidence, _moves_of(worst.to_frame().T, moves), saves=saves,
            confidence="low" if program.has_stacks and (is_work or is_wait) else "medium" if is_work else "high",
        )  # fmt: skip
    pinned = rows[(rows["memory"] == "pinned") & ~blocks & (rows["exposed_ns"] > 0)]
    exposed_ns = min(int(pinned["exposed_ns"].sum()), program.busy_ns(moves))
    if len(pinned) and exposed_ns >= PINNED_SHARE * program.wall_ns:
        worst, gpu_ns = pinned.iloc[0], pinned["gpu_ns"].sum()
        evidence = f"{program.number(pinned['ops'].sum(), 'copy', 'copies')} of pinned memory, "
        evidence += f"{pinned['bytes'].sum() / program.parts / 1e9:.2f} GB and {program.ms(gpu_ns)}{program.per_step}, "
        evidence += f"of which {program.ms(exposed_ns)} ({share(exposed_ns, gpu_ns)}) run beside nothing; most in "
        evidence += f"{worst['copy']} in {worst['layer']} {worst['phase']}: {program.ms(worst['exposed_ns'])} at "
        evidence += f"{worst['gb_per_s']:.1f} GB/s"
        yield program.finding_in_ops(
            "copies:pinned", evidence, _moves_of(worst.to_frame().T, moves), saves=exposed_ns, confidence="high"
        )


def _moves_of(rows: pd.DataFrame, moves: pd.DataFrame) -> pd.DataFrame:
    """The copies that these rows of the copies' table hold."""
    keys = ["layer", "phase", "copy", "memory"]
    of_rows, of_moves = (pd.MultiIndex.from_frame(table[keys].astype(str)) for table in (rows, moves))
    return moves[of_moves.isin(of_rows)]


def small_kernels(program: Program) -> Iterator[Finding]:
    """Layers run 50 kernels per step below 5 µs or more, and they are 70 % of their kernels.

    Saves: Them and their launches, in steps run again as in `sync`.
    """
    kernels, steps, keys = program.kernels, program.parts, ["layer", "phase"]
    is_small, (place, index) = (kernels["ns"] < SMALL_NS).to_numpy(), placed(kernels)
    counted = {"small": is_small, "small_ns": kernels["ns"].to_numpy() * is_small}
    counts = {name: exact_sums(place, values, len(index)) for name, values in counted.items()}
    storms = pd.DataFrame({**counts, "count": np.bincount(place, minlength=len(index))}, index)
    storms = storms[(storms["small"] >= STORM_COUNT * steps) & (storms["small"] >= STORM_SHARE * storms["count"])]
    if not len(storms):
        return
    idle_ns = program.idle("launch", "unknown").groupby(keys)["idle_ns"].sum().to_dict()
    storms["idle_ns"] = [idle_ns.get(layer_and_phase, 0) for layer_and_phase in storms.index]
    storms = storms.iloc[np.argsort(-(storms["idle_ns"] + storms["small_ns"]).to_numpy(), kind="stable")]
    (layer, phase), worst = storms.index[0], storms.iloc[0]
    short = kernels[is_small]
    short = short[short.set_index(keys).index.isin(storms.index)]
    waits = worst["idle_ns"] >= WAITS_SHARE * worst["small_ns"]
    evidence = f"in {layer} {phase} {worst['small'] // steps} of {worst['count'] // steps} kernels{program.per_step} "
    evidence += f"are shorter than {SMALL_NS // 1000} µs, together {program.ms(worst['small_ns'])}"
    evidence += f"{f', and the GPU waits {program.ms(worst.idle_ns)} between them' if waits else ', back to back'}"
    if len(storms) > 1:
        evidence += f"; the same in {len(storms) - 1} other places, {program.ms(storms['small_ns'].iloc[1:].sum())}"
    between_waits_ns = program.gaps_between(program.waits)["idle_ns"].sum()
    is_optimizer = phase == "optimizer" or (short["kernel_class"] == "optimizer").any()
    saves = program.without_ns(short)
    yield program.finding_in_ops(
        "small-kernels:optimizer" if is_optimizer else "small-kernels",
        evidence + program.with_launches(short, saves), at(short, layer, phase), saves=saves,
        confidence="medium" if waits else "low",
        symptom_of="sync" if waits and 2 * between_waits_ns > program.idle_ns("launch", "unknown") else "launch",
    )  # fmt: skip


def unfused_chains(program: Program) -> Iterator[Finding]:
    """Four or more elementwise, norm, reduction, softmax or copying kernels in a row in one call of a layer, with
    shorter runs in the same call, or outside layers and the optimizer, but no copy by ``cudaMemcpy`` that takes longer
    than the kernels beside it; those of one part of all equal blocks, as their norms, are one finding, but those of a
    block that has more than its peers, as in `outlier-layer`, another.

    Saves: All but the longest of them, or those of torch.compile, and one launch, in steps run again as in `sync`;
    outside layers all but these for each turn of a loop, in which all names that take long recur. In decoding, kernels
    of blocks, or of several nodes of a CUDA graph, that take too long to work on new tokens alone are a finding, also
    one by one, and vanish: they pass over weights or a cache.
    """
    chains = program.chains
    ops, is_part = program.ops[_OF_PARTS].iloc[chains["row"]], ~chains["is_pass"].to_numpy()
    place, index = placed(ops, ("block_kind", "block"))
    saved_ns = pd.Series(np.bincount(place, ops["ns"].to_numpy() * (1 - chains["left"].to_numpy()), len(index)), index)
    by_block: Any = saved_ns[np.bincount(place, minlength=len(index)) > 0]
    outliers = [
        block
        for _, times in by_block.groupby(level=0)
        for (_, block), ns in times.items()
        if len(times) >= SIBLINGS and ns > max(2 * times.median(), unusual_ns(times))
    ]
    is_outlier = matching(ops["block"], outliers) & is_part
    parts = np.where(is_part, _parts(ops, chains["run"]), -1), np.where(is_outlier, ops["block"].cat.codes, -1)
    group = distinct_rows(*(codes.astype(np.int64) for codes in parts))[1]
    del place, ops, is_outlier, parts  # of large captures, much memory
    program.return_memory()
    for number in range(int(group.max(initial=-1)) + 1):
        rows = as_slice(np.flatnonzero(group == number))
        same = program.ops[["ns"] if program.replays else _OF_CHAINS].iloc[chains["row"].iloc[rows]]
        if program.at_most_ns(same) < CHAINS_SHARE * program.wall_ns:
            continue
        saves = program.without_ns(same, *(chains[name].to_numpy()[rows] for name in ("left", "launched")))
        if saves < CHAINS_SHARE * program.wall_ns:
            continue
        same = program.ops[_OF_CHAINS].iloc[chains["row"].iloc[rows]]
        layer, phase = costliest(same, "ns")
        run, length, is_pass = (chains[name].to_numpy()[rows] for name in ("run", "length", "is_pass"))
        longest = length.max()
        is_long = length >= min(CHAIN_LENGTH, longest)
        what = f"{program.number(len(few(run[is_long])), 'chain')} of {length[is_long].min()} or more such kernels"
        cases, longest_text = ["unfused-chains"], f"; the longest has {longest} kernels"
        if is_pass.any():
            what = f"{program.number(len(same), 'kernel')} that take too long to work on new tokens alone"
            cases, longest_text = ["unfused-chains:past"], ""
        elif layer == NO_LAYER:
            cases = ["unfused-chains:outside"]
        if same["ns"][matching(same["name"], _LAYOUT)].sum() >= LAYOUT_SHARE * same["ns"].sum():
            cases.append("unfused-chains:layout")
        evidence = f"{what}, {program.ms(same['ns'].sum())} of GPU time{program.per_step}; most in {layer} {phase}"
        evidence += f"{longest_text}{program.with_launches(same, saves)}"
        yield program.finding_in_ops(cases, evidence, same, saves=saves)


def _parts(chains: pd.DataFrame, runs: pd.Series[int]) -> Any:
    """The part of the model that each chain is of, as its norms: in equal blocks, chains of equal kernels are of one,
    and so are those of the same kinds of layers. Outside layers each place in the loop begins with its own kernel.
    """
    is_start = np.diff(runs.to_numpy(), prepend=np.int32(-1)) != 0  # they are run by run
    starts, run = np.flatnonzero(is_start), np.cumsum(is_start) - 1
    names, first = chains["name"].cat.codes.to_numpy(dtype=np.uint64), chains.iloc[starts]
    number = np.arange(len(run)) - starts[run]  # of each kernel in its chain
    weights = np.power(np.uint64(1_000_003), np.arange(number.max(initial=0) + 1, dtype=np.uint64))[number]
    kernels = np.add.reduceat((names + np.uint64(1)) * weights, starts)
    kernels ^= first["block_kind"].cat.codes.to_numpy(dtype=np.uint64)
    code, distinct = pd.factorize(kernels)
    pairs = pd.DataFrame({"code": code, "kind": first["layer_kind"]}).drop_duplicates().astype({"kind": str})
    kinds = pairs.sort_values("kind").groupby("code")["kind"].agg(" ".join)
    text = np.where(first["layer"] != NO_LAYER, code, len(distinct) + names[starts].astype(np.int64))
    texts = [*kinds, *map(str, range(len(chains["name"].cat.categories)))]
    return labels(text, texts).codes[run]


def tensor_copies(program: Program) -> Iterator[Finding]:
    """In forward, or outside layers and the optimizer, kernels that only copy, cast or concatenate, outside layers and
    beside attention that is not trained also those that gather rows by an index, in blocks what fills a tensor of
    which the next kernel writes some rows, as padding does, and copies within the GPU, but not beside other light
    kernels in a chain, take 2 % or more in equal blocks. In decoding, and where what the program does is unknown, those
    of new tokens do not count, as they have to be written into the cache: short ones.

    Saves: Their time and launches, in steps run again as in `sync`, and those of their gradients.
    """
    ops, least_ns = program.ops, COPIES_SHARE * program.wall_ns
    is_outside = ops["layer"] == NO_LAYER
    of_attention = ops["layer"].isin(ops["layer"][matching(ops["kernel_class"], {"attention"})])
    of_cache = of_attention & (program.mode != "training")
    is_copy = matching(ops["name"], _COPIES) | (matching(ops["name"], _INDEX) & (is_outside | of_cache))
    is_copy = (is_copy & (ops["kernel_class"] == "copy")) | matching(ops["name"], _LAYOUT)
    is_copy |= (ops["kernel_class"] == "embedding") & of_cache | program.pads
    is_copy &= matching(ops["phase"], ("forward", "recompute")) | (
        is_outside & (ops["phase"] != "optimizer") & (program.mode != "training")
    )
    if program.may_decode:
        is_copy &= program.on_past
    copies = ops[is_copy]
    if program.at_most_ns(copies) < least_ns:
        return
    for explained in (ops.index[program.chains["row"]], program.scores.index, program.mask_kernels.index):
        copies = copies[~np.isin(copies.index, explained)]
    place = copies["layer_kind"].astype(str).where(copies["block"] == "", copies["block_kind"].astype(str))
    for _, same in copies.groupby(place):
        if program.at_most_ns(same) < least_ns or program.without_ns(same) < least_ns:
            continue
        # what a forward pass copies, or casts to another dtype, has its gradient copied or cast in the backward pass
        is_back = matching(ops["name"], _COPIES) & (ops["phase"] == "backward") & ~is_outside
        is_cast, of_cast = (matching(rows["name"], _TO_DTYPE) for rows in (ops, same))
        of_casts, of_copies = (ops["layer"].isin(same["layer"][of_kind]) for of_kind in (of_cast, ~of_cast))
        back = ops[is_back & np.where(is_cast, of_casts, of_copies)]
        saves = program.without_ns(both := pd.concat([same, back]))
        layer, phase = costliest(same, "ns")
        where = "outside layers" if layer == NO_LAYER else f"in {plural(same['layer'].nunique(), 'layer')}"
        evidence = f"{program.of_wall(program.busy_ns(same))} in {program.number(len(same), 'operation')} that only "
        evidence += f"copy, {where}; most in {layer} {phase}: {program.ms(at(same, layer, phase)['ns'].sum())}"
        evidence += f"{f'; those of their gradients take {program.ms(program.busy_ns(back))}' if len(back) else ''}"
        evidence += f"{program.with_launches(both, saves)}"
        layout_ns = same["ns"][matching(same["name"], _LAYOUT)].sum()
        case = "tensor-copies:layout" if layout_ns >= LAYOUT_SHARE * same["ns"].sum() else "tensor-copies"
        yield program.finding_in_ops(case, evidence, same, saves=saves)


def fp32_gemms(program: Program) -> Iterator[Finding]:
    """Matrix products or fused attention whose kernels' names say fp32 without tensor cores, or TF32 beside more
    products in 16 bits.

    Saves: What they take longer than the products of three or more layers like them that are not in fp32; without such
    layers 7/8 of their time, but half of TF32, and where it is that of memory, as in decoding, of products with a
    vector, or beside casts that take half as long; and the casts in the same call, outside layers those next to them;
    but no more than the host lets the GPU gain.
    """
    ops, is_product = program.ops, matching(program.ops["kernel_class"], ("gemm", "attention"))
    is_fp32, is_tf32 = (matching(ops["name"], like) & is_product for like in (_FP32, _TF32))
    if 2 * ops["ns"][is_tf32].sum() < ops["ns"][is_product & ~is_fp32].sum():  # beside more products in 16 bits
        is_fp32 |= is_tf32
    products = ops[is_fp32]
    busy_ns = program.busy_ns(products)
    if not busy_ns or busy_ns < FP32_SHARE * program.wall_ns:
        return
    # of weights and activations to fp32 and back, for these products
    is_cast = matching(ops["name"], _CASTS)
    nearest = pd.Series(np.where(is_cast, np.nan, is_fp32), ops.index).iloc[program.by_start]
    beside = ((nearest.bfill() == 1) | (nearest.ffill() == 1)).reindex(ops.index)
    is_cast &= np.where(ops["layer"] == NO_LAYER, beside, ops["call_of_layer"].isin(products["call_of_layer"]))
    casts = ops.loc[is_cast, ["start_ns", "end_ns", "lane"]]
    cast_ns = program.busy_ns(casts)
    of_vectors_ns = products["ns"][matching(products["name"], _VECTOR)].sum()
    is_of_memory = program.mode in ("decode", "mixed") or 2 * cast_ns > busy_ns or 2 * of_vectors_ns > busy_ns
    keys, saved_share = ["layer_kind", "phase", "layer"], np.where(is_tf32 | is_of_memory, 1 / 2, 7 / 8)
    times = ops[keys].assign(ns=ops["ns"], fp32_ns=ops["ns"] * is_fp32, saved_ns=ops["ns"] * is_fp32 * saved_share)
    times = times[is_product].groupby(keys, observed=True)[["ns", "fp32_ns", "saved_ns"]].sum().reset_index()
    in_16_bits = times[times["fp32_ns"] == 0].groupby(keys[:2], observed=True)["ns"].agg(["median", "size"])
    times = times[times["fp32_ns"] > 0].join(in_16_bits, on=keys[:2])
    has_peers = times["size"] >= SIBLINGS - 1
    saved_ns = times["saved_ns"].where(~has_peers, times["ns"] - times["median"]).clip(lower=0)
    share_saved = float(saved_ns.sum() / times["fp32_ns"].sum())
    both = pd.concat([products[casts.columns], casts])
    saves = min(busy_ns * share_saved + cast_ns, program.busy_ns(both))  # they may overlap
    is_left = both.index.isin(products.index)  # and launched, unlike the casts
    saves = min(saves, program.without_ns(both, np.where(is_left, 1 - share_saved, 0), is_left))
    layer, phase = costliest(products, "ns")
    is_mostly_tf32 = 2 * ops["ns"][is_fp32 & is_tf32].sum() > products["ns"].sum()
    case = "fp32-gemms:TF32" if is_mostly_tf32 else "fp32-gemms"
    longest = largest(at(products, layer, phase), "ns")
    evidence = f"{program.number(len(products), 'kernel')}, {program.ms(busy_ns)}{program.per_step}, most in {layer} "
    evidence += f"{phase}: {shortened(longest['name'])}"
    evidence += f"{f'; casts beside them take {program.ms(cast_ns)}' if cast_ns else ''}"
    yield program.finding_in_ops(case, evidence, products, saves=saves, confidence="high")


def double_precision(program: Program) -> Iterator[Finding]:
    """Kernels that compute with 64-bit floating-point numbers take 1 % or more.

    Saves: The casts to them and from them, and 3/4 of the rest, as numbers of 16 bits are a quarter of the bytes; 1/2
    outside layers in a phase with a softmax there, as in a loss, which is right in float32.
    """
    kernels = program.kernels[matching(program.kernels["name"], DOUBLE)]
    if not len(kernels):
        return
    is_cast, outside = matching(kernels["name"], _CASTS), program.kernels[program.kernels["layer"] == NO_LAYER]
    of_loss = outside["phase"][matching(outside["kernel_class"], ("softmax",))].unique()
    in_loss = (kernels["layer"] == NO_LAYER) & kernels["phase"].isin(of_loss)
    saves = program.without_ns(kernels, np.select([in_loss, is_cast], [1 / 2, 0], 1 / 4), 1)
    evidence = f"{program.number(len(kernels), 'kernel')}, {program.of_wall(program.busy_ns(kernels))}, of which casts "
    evidence += f"{program.ms(kernels['ns'][is_cast].sum())}"
    yield program.finding_in_ops("double-precision", evidence, kernels, saves=saves, confidence="high")


def unfused_attention(program: Program) -> Iterator[Finding]:
    """Two or more layers run a softmax between two products, and no fused attention: softmax, scale, mask and casts of
    the scores; or they make a mask before fused attention in each call; or attention runs in PyTorch's
    memory-efficient kernels where flash attention could.

    Saves: Their time and launches; not in decoding also half of the two products beside each softmax, assuming a causal
    mask, and of attention for which a mask is made half, if its kernels can read one: without it they take about half.
    Of memory-efficient attention 0.6 of its time.
    """
    masks, scores, ops = program.mask_kernels, program.scores, program.ops
    reads_mask = (ops["kernel_class"] == "attention") & ~matching(ops["name"], _TAKES_NO_MASK)
    reads_mask &= matching(ops["layer"], {*masks["layer"].unique()}) & (not program.may_decode)
    half_ns, saves = program.busy_ns(ops[reads_mask]) // 2, 0
    if masks["layer"].nunique() >= 2:
        gpu = pd.concat([pd.Series(0.0, masks.index), pd.Series(0.5, ops.index[reads_mask])])
        saves = program.without_ns(ops.loc[gpu.index], gpu, (gpu > 0).astype(float))
    if saves and saves >= COPIES_SHARE * program.wall_ns:
        half = f", and half of that attention, {program.ms(half_ns)}, since it reads the mask" * bool(half_ns)
        evidence = f"{program.of_wall(program.busy_ns(masks))} in kernels that make a mask before fused attention{half}"
        evidence += f", in {plural(masks['layer'].nunique(), 'layer')}{program.with_launches(masks, saves - half_ns)}"
        yield program.finding_in_ops("unfused-attention:mask", evidence, masks, saves=saves)
    slow = ops[matching(ops["name"], _SLOW_ATTENTION) & ~matching(ops["layer"], {*masks["layer"].unique()})]
    saves = program.without_ns(slow, SLOW_PART, 1) if len(slow) and not program.may_decode else 0
    if saves and saves >= COPIES_SHARE * program.wall_ns:
        evidence = f"{program.of_wall(program.busy_ns(slow))} in kernels such as {shortened(slow['name'].iloc[0])}"
        yield program.finding_in_ops("unfused-attention:slow", evidence, slow, saves=saves)
    if not len(scores):
        return
    light, saves = scores[scores["gpu"] == 0], program.without_ns(scores, scores["gpu"], scores["gpu"])
    layer, phase = costliest(light, "ns")
    scores_ns, half_ns = at(light, layer, phase)["ns"].sum(), program.busy_ns(scores[scores["gpu"] > 0]) // 2
    half = f", and half of these products, {program.ms(half_ns)}, assuming a causal mask" * bool(half_ns)
    evidence = f"{program.of_wall(light['ns'].sum())} in softmax, scale, mask and copy kernels between the products"
    evidence += f"{half}, in {plural(scores['layer'].nunique(), 'layer')}; most in {layer} {phase}: "
    evidence += f"{program.ms(scores_ns)}{program.with_launches(light, saves - half_ns)}"
    yield program.finding_in_ops("unfused-attention", evidence, light, saves=saves, confidence="high")


def logits_of_all_tokens(program: Program) -> Iterator[Finding]:
    """A prefill runs kernels on its logits four times as long as those on a block's activations; or its head's product
    has a kernel with tiles of at least 128x128, as `nvjet_sm90_tst_320x128_…`, and takes as long as nine of ten
    products of the blocks, unless these have few tokens: so it computes the logits of all tokens. With `low` confidence
    if a softmax or another reduction reads them, or takes 5 % of the head's time. In training, the head's product in
    the backward pass reads gradients that were filled with zeros, of which the next kernel wrote four fifths or less: a
    copy of all would take twice as long as the filling, since it reads and writes. With `low` confidence, the head and
    a loss with a softmax take 20 %: labels may be ignored.

    Saves: The time of the head and of these kernels; in training the part of the head's time that is not of written
    gradients, and the filling and writing; where labels may be ignored, 3/4.
    """
    if program.mode not in ("training", "prefill", "mixed"):
        return
    kernels = program.kernels.iloc[np.lexsort((program.kernels["start_ns"], program.kernels["lane"]))]
    if program.mode == "training":
        yield from logits_in_training(program, kernels)
        return
    is_light, is_product = matching(kernels["kernel_class"], POINTWISE), kernels["kernel_class"] == "gemm"
    in_block, is_named = (matching(kernels[name], like) for name, like in (("layer_kind", _NUMBER), ("layer", _HEADS)))
    if not (is_light & in_block).any():
        return
    usual_ns = max(kernels["ns"][is_light & in_block].median(), FEW_TOKENS_NS)
    # the last tokens of many sequences have large tiles too, but take less time; in decoding all tokens are last ones
    is_large = is_product & ~in_block & (is_named | matching(kernels["layer"], _HEAD))
    is_large &= kernels["ns"] >= kernels["ns"][is_product & in_block].quantile(0.9)
    is_large &= (program.mode == "prefill") & (usual_ns >= 2 * FEW_TOKENS_NS)
    is_large &= smallest_side(kernels["name"]) >= LARGE_TILE
    is_head = is_named & ~is_light | is_large
    after_head = pd.Series(np.select([is_head, in_block], [1.0, 0.0], np.nan), kernels.index).ffill() == 1
    reads = is_light & ~in_block & after_head & (kernels["ns"] >= LOGITS_TIMES * usual_ns)
    turn: Any = is_head.cumsum()
    of_all = is_large | is_head & turn.isin(turn[reads])
    if not of_all.any():
        return
    heads, removed = kernels[of_all], kernels[reads | of_all]
    saves = min(program.busy_ns(removed), program.without_ns(removed, 0, 1))
    evidence = f"{program.of_wall(saves)} in {heads['layer'].iloc[0]}"
    if reads.any():
        evidence += (
            " and kernels on its logits, which take up to "
            f"{kernels['ns'][reads].max() / usual_ns:,.0f} times as long as those on the activations of a block: so "
            "many are the logits of all tokens"
        )
    is_reader = after_head & ~in_block & matching(kernels["kernel_class"], ("softmax", "reduction"))
    read_ns = kernels["ns"][is_reader].sum()
    is_needed = bool((is_reader & reads).any() or read_ns >= READ_SHARE * heads["ns"].sum())
    evidence += "; a softmax or a reduction reads them, and may need all" * is_needed
    if is_large.any():
        name = shortened(str(kernels["name"][is_large].iloc[0]))
        evidence += f"; its product, {name}, has tiles for many rows and takes as long as the long ones of a block"
    confidence = "low" if is_needed else "medium"
    yield program.finding_in_ops("logits", evidence, heads, saves=saves, confidence=confidence)


def logits_in_training(program: Program, kernels: pd.DataFrame) -> Iterator[Finding]:
    """The findings of `logits_of_all_tokens` about a loss, which reads some of the logits, or may read some."""
    of_head = (kernels["kernel_class"] == "gemm") & (kernels["block"] == "") & (kernels["layer"] != NO_LAYER)
    written, filled = (kernels[["name", "kernel_class", "ns"]].shift(back) for back in (1, 2))
    is_padded = of_head & (kernels["phase"] == "backward") & (written["kernel_class"] == "copy")
    is_padded &= pd.Series(matching(filled["name"], FILLS), kernels.index)
    heads = kernels[of_head & kernels["layer"].isin(kernels["layer"][is_padded])]
    written_ns, filled_ns = (int(before["ns"][is_padded].sum()) for before in (written, filled))
    left = written_ns / max(2 * filled_ns, 1)  # a copy reads and writes
    if left <= 1 - UNREAD_SHARE and (1 - left) * heads["ns"].sum() >= COPIES_SHARE * program.wall_ns:
        evidence = f"{program.of_wall(program.busy_ns(heads))} in products of {heads['layer'].iloc[0]}, of whose "
        evidence += f"logits the loss reads about {share(left, 1)}: zeros fill the others' gradients"
        saves = program.without_ns(heads, left, 1) + written_ns + filled_ns
        yield program.finding_in_ops("logits:training", evidence, heads, saves=saves)
        return
    in_block = kernels["block"] != ""
    in_head = ~in_block & (matching(kernels["layer"], _HEADS) | matching(kernels["layer"], _HEAD))
    is_last = in_head & (kernels["phase"] == "backward")  # without its backward pass, it is unknown where a loss ends
    ends = in_block | is_last.shift(fill_value=False) & ~in_head
    at_head = pd.Series(np.select([of_head & in_head, ends], [1.0, 0.0], np.nan), kernels.index).ffill()
    of_loss = kernels[(at_head == 1) & matching(kernels["phase"], ("forward", "backward", "other"))]
    loss_ns = program.busy_ns(of_loss) if is_last.any() else 0
    if loss_ns >= LOSS_SHARE * program.wall_ns and (of_loss["kernel_class"] == "softmax").any():
        heads, saves = of_loss[(of_head & in_head)[of_loss.index]], program.without_ns(of_loss, 1 - IGNORED, 1)
        evidence = f"{program.of_wall(loss_ns)} in {heads['layer'].iloc[0]} and the loss"
        yield program.finding_in_ops("logits:labels", evidence, heads, saves=saves, confidence="low")


def optimizer_loop(program: Program) -> Iterator[Finding]:
    """150 kernels per step or more in the optimizer, of those that work on one parameter, but no products, as of Muon.

    Saves: Their launches; of each as much as the shortest takes, at most 3 µs; and of the rest of their time what one
    fused kernel saves: 58 % of the eight kernels of Adam, 45 % in 16 bits, more where the others take more than nine
    times as long as the square root; and 3/8 of others, as of SGD with momentum.
    """
    ops = program.ops[program.ops["phase"] == "optimizer"]
    is_kernel, is_move = ops["kind"] == OP_KINDS.index("kernel"), matching(ops["name"], MOVES)
    is_single = ~matching(ops["kernel_class"], ("comm", "gemm")) & ~matching(ops["name"], MANY_PARAMETERS)
    if (is_single & is_kernel).sum() < max(OPTIMIZER_KERNELS * program.parts, 1):
        return
    kernels = ops[is_single & (is_kernel | is_move)]
    is_root = matching(kernels["name"], _ROOT)
    roots_ns = kernels["ns"][is_root].sum() * (is_root.mean() >= LEAST_ROOTS)
    fused = np.where(matching(kernels["name"], _16_BITS), FUSED_ADAM_16, FUSED_ADAM)
    fused = fused * min(OF_ROOTS * roots_ns / kernels["ns"].sum(), 1) if roots_ns else np.maximum(fused, FUSED_SGD)
    left = fused * (1 - min(kernels["ns"].min(), SHORT_NS) / kernels["ns"].clip(lower=1))
    saves = program.without_ns(kernels, left, OPTIMIZER_KERNELS / 100 / len(kernels) * program.parts)
    evidence = f"{program.number(len(kernels), 'kernel')} in the optimizer, {program.of_wall(program.busy_ns(kernels))}"
    evidence += f"{program.with_launches(kernels, saves)}"
    yield program.finding_in_ops("optimizer-loop", evidence, kernels, saves=saves)


def _times(run: Any, name: Any) -> Any:
    """How often the name of each kernel recurs in its run."""
    of_name = distinct_rows(run.astype(np.int64), name.astype(np.int64))[1]
    return np.bincount(of_name, minlength=1)[of_name]


def far_from_limit(program: Program) -> Iterator[Finding]:
    """Matrix products in kernels that load elements of 16 bits one by one or by two, as for rows of no multiple of 8
    (``align1`` and ``align2`` in CUTLASS's names), or products that a block computes in eight pieces or more, with no
    norm or attention between them, save 2 % or more. With [counts](flops.md#the-least-time-of-limit) beside the
    capture, layers of a kind take twice the least time of their operators, and 5 % of the time above it; then
    confidence is low.

    Saves: 5/6 or 2/3 of these products, or what the layers take above that least time; of pieces, and what runs as
    often beside them, seven of eight launches and 3 µs each, and what joins them. Tiles with a side below 128, as 64,
    save that part too, 1/2, unless the program may decode.
    """
    ops = program.ops[matching(program.ops["name"], _ODD)]
    parts = ops["name"].astype(str).str.extract(_ODD)[0].map(ODD_PARTS)
    saves = program.without_ns(ops, parts, 1) if len(ops) else 0
    if saves and saves >= ODD_SHARE * program.wall_ns:
        evidence = f"{program.of_wall(program.busy_ns(ops))} in {program.number(len(ops), 'kernel')} such as "
        evidence += f"{shortened(largest(ops, 'ns')['name'])}"
        yield program.finding_in_ops("far-from-limit:unaligned", evidence, ops, saves=saves, confidence="high")
    ops, order = program.ops, program.by_start
    block, phase, name = (ops[column].cat.codes.to_numpy()[order] for column in ("block", "phase", "name"))
    columns = block, phase, ops["lane"].to_numpy()[order], matching(ops["kernel_class"], BETWEEN_PRODUCTS)[order]
    run = np.cumsum(np.any([np.diff(column, prepend=0) != 0 for column in columns], axis=0), dtype=np.int32)
    is_product = (matching(ops["kernel_class"], {"gemm"}) & (ops["block"] != "").to_numpy())[order]
    rows = np.flatnonzero(is_product)
    is_piece = _times(run[rows], name[rows]) >= PIECES
    rows = np.flatnonzero(np.isin(run, run[rows[is_piece & (ops["ns"].to_numpy()[order[rows]] >= SMALL_NS)]]))
    is_join = matching(ops["name"], _JOINS)[order[rows]]
    is_piece = (_times(run[rows], name[rows]) >= PIECES) & (ops["block"].to_numpy()[order[rows]] != "")
    pieces, is_join = ops.iloc[order[rows[is_piece | is_join]]], is_join[is_piece | is_join]
    of_tile = 1.0 if program.may_decode else np.fmin(smallest_side(pieces["name"]) / LARGE_TILE, 1)
    left = of_tile * (1 - SHORT_NS / pieces["ns"].clip(lower=SHORT_NS)) * ~is_join
    saves = program.without_ns(pieces, left, 1 / PIECES)
    if saves and saves >= COPIES_SHARE * program.wall_ns:
        evidence = f"{program.of_wall(program.busy_ns(pieces))} in {program.number(len(pieces), 'kernel')} of products "
        product = largest(pieces[pieces["kernel_class"] == "gemm"], "ns")["name"]
        evidence += f"in {PIECES} pieces or more, such as {shortened(product)}{program.with_launches(pieces, saves)}"
        yield program.finding_in_ops("far-from-limit:pieces", evidence, pieces, saves=saves)
    if program.limits is None:
        return
    of_kinds = program.limits.kinds()
    far = of_kinds[of_kinds["gpu_busy_ns"] > LIMIT_TIMES * of_kinds["limit_ns"]].head(LIMIT_KINDS)
    for row in far[far["excess_ns"] > LIMIT_SHARE * program.wall_ns].to_dict("records"):
        ops = program.ops[(program.ops["layer_kind"] == row["kind"]) & (program.ops["phase"] == row["phase"])]
        if not len(ops):
            continue
        by_name = ops["ns"].groupby(ops["name"].astype(str)).sum()
        slow = ", ".join(f"{shortened(name)} ({share(ns, by_name.sum())})" for name, ns in by_name.nlargest(3).items())
        evidence = f"{program.ms(row['gpu_busy_ns'])}{program.per_step} in {row['layers']} of them; this GPU needs at "
        evidence += f"least {program.ms(row['limit_ns'])} for their operators ("
        evidence += f"{share(row['limit_ns'], row['gpu_busy_ns'])}), limited by {row['bound']}; their kernels: {slow}"
        case = "far-from-limit:memory" if row["bound"] == "memory" else "far-from-limit"
        yield program.finding_in_ops(
            case, evidence, ops[ops["layer"] == row["layer"]], saves=row["excess_ns"], confidence="low",
            place=f"{row['kind']} {row['phase']}",
        )  # fmt: skip
