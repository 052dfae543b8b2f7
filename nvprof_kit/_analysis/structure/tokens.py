"""The kernels of one device in launch order, as tokens; and the anchors among them.

A transformer's block has one kernel, or a few that follow each other, that nothing else has: attention, a softmax
between two matrix products, a state space's scan or convolution. These are its *anchors*. The thread that launched an
anchor tells the forward pass from the backward pass, for PyTorch's autograd has a thread of its own; where one thread
launches all, as in the replay of a CUDA graph, the names of the kernels tell it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from nvprof_kit._analysis.attribution.intervals import NONE, Bools, Int64Array
from nvprof_kit._analysis.kernels.classes import CLASSES, classify
from nvprof_kit._toml import read_toml
from nvprof_kit._trace.schema import OP_KINDS, Trace

FORWARD, BACKWARD = 1, 2
"""Directions of an anchor."""

_CANDIDATES, _RECURS = 64, 0.8
"""Of a stretch without attention so many kernels are tried as anchors; so much of what is between two recurs."""
_GROUP = 12
"""At most so many kernels between two anchors of one attention."""


class Anchor(NamedTuple):
    """One anchor: the positions of its first and last kernel, its direction, and whether a backward pass runs it again
    as part of a forward pass.
    """

    first: int
    last: int
    direction: int
    recomputed: bool = False


@dataclass(frozen=True)
class Sequence:
    """The kernels of one device of one process in launch order; shape ``(n,)`` each, without communication and copies.

    Attributes:
        row: Index into `Trace.ops`.
        token: Number of the kernel's name.
        coarse: Number of its class.
        call: Index into `Trace.api` of its launch, or `NONE`.
        time: When it was launched.
        duration: GPU time in ns.
        outer: Whether it may belong to the model's ends: a look-up, a convolution, a sine or cosine, or as `end`.
        end: Whether it belongs to no block: the loss, sampling, the optimizer.
        product: Whether it is a matrix product.
        sums: Whether it adds two tensors, as a block ends.
        is_product, is_norm: Whether a token is one; indexed by token.
        is_sum_and_norm: Whether a token does so before a norm, as many blocks start; indexed by token.
        is_sum: Whether a token adds two tensors of one layout, as most blocks end; indexed by token.
        anchors: The anchors, in order.
    """

    row: Int64Array
    token: Int64Array
    coarse: Int64Array
    call: Int64Array
    time: Int64Array
    duration: Int64Array
    outer: Bools
    end: Bools
    product: Bools
    sums: Bools
    is_product: Bools
    is_norm: Bools
    is_sum: Bools
    is_sum_and_norm: Bools
    anchors: tuple[Anchor, ...]


def sequences(trace: Trace) -> list[Sequence]:
    """The kernels of each device and process, in launch order: by the launching call, then by start."""
    import pandas as pd

    ops = trace.ops
    if "name" not in ops or not len(ops):
        return []
    classes = classify(ops)
    kernels = np.flatnonzero((ops["kind"].to_numpy() == OP_KINDS.index("kernel")) & ~classes.is_a("comm"))
    pid, device, start, end = (ops[name].to_numpy()[kernels] for name in ("pid", "device", "start_ns", "end_ns"))
    call = trace.launching_calls[kernels]
    call_tid, call_start = (np.append(trace.api[name].to_numpy(), NONE) for name in ("tid", "start_ns"))
    time = np.where(call == NONE, start, call_start[call])
    order = np.lexsort((start, time, device, pid))
    row, call, time, duration = kernels[order], call[order], time[order], (end - start)[order]
    token = ops["name"].cat.codes.to_numpy()[row].astype(np.int64)
    coarse = classes.code[row].astype(np.int64)
    texts = [str(name) for name in ops["name"].cat.categories]
    names = {
        said: np.array([re.search(pattern, text, re.IGNORECASE) is not None for text in texts], dtype=bool)
        for said, pattern in read_toml("nvprof_kit._analysis.structure", "kernel_names.toml").items()
    }
    names["convolution"] &= ~names["scan"]
    names["ends"] |= names["loss"]
    end_kernels = (names["ends"][token] | _is_a(coarse, "optimizer", "sampling")) & ~names["copies"][token]
    outer = end_kernels | _is_a(coarse, "embedding")
    product = _is_a(coarse, "gemm", "experts")
    is_product, is_norm = np.zeros((2, len(names["ends"])), dtype=bool)
    is_product[token[_is_a(coarse, "gemm")]] = True
    is_norm[token[_is_a(coarse, "norm")]] = True
    is_norm |= names["root"]
    owner = np.stack([pid, device])[:, order]
    cuts = np.flatnonzero(np.any(owner[:, 1:] != owner[:, :-1], axis=0)) + 1
    of_kernels = {"row": row, "token": token, "coarse": coarse, "call": call, "time": time, "duration": duration}
    of_kernels |= {"outer": outer, "end": end_kernels, "product": product, "sums": names["sums"][token]}
    of_tokens = {"is_product": is_product, "is_norm": is_norm, "is_sum": names["sums"] & names["contiguous"]}
    of_tokens |= {"is_sum_and_norm": names["sums_and_norms"]}
    device_sequences = []
    for low, high in zip([0, *cuts.tolist()], [*cuts.tolist(), len(row)], strict=True):
        of_device = slice(low, high)
        anchors = _anchors(token[of_device], coarse[of_device], call_tid[call[of_device]], names)
        firsts = np.array([low + anchor.first for anchor in anchors] + [high])
        # the angles of timesteps or positions are computed before the first block's products, those in a block after
        positions = low + np.flatnonzero(names["angles"][token[of_device]])
        products = np.concatenate([[0], np.cumsum(product)])
        outer[positions] |= products[firsts[np.searchsorted(firsts[:-1], positions)]] > products[positions]
        # convolutions that few stretches between anchors have embed patches or sounds
        positions = low + np.flatnonzero(names["convolution"][token[of_device]])
        gap = pd.Series(np.searchsorted(firsts[:-1], positions))
        stretches_of_kernel = gap.groupby(token[positions]).transform("nunique").to_numpy()
        outer[positions] |= stretches_of_kernel <= len(anchors) / 4
        of_device_kernels = {name: values[of_device] for name, values in of_kernels.items()}
        device_sequences.append(Sequence(**of_device_kernels, **of_tokens, anchors=anchors))
    return device_sequences


def _is_a(coarse: Int64Array, *classes: str) -> Bools:
    return np.isin(coarse, [list(CLASSES).index(name) for name in classes])


def _anchors(token: Int64Array, coarse: Int64Array, tid: Int64Array, names: dict[str, Bools]) -> tuple[Anchor, ...]:
    """The anchors of a sequence: fused attention, scans, and each softmax that selects no expert and is no loss.

    A softmax is an anchor of backward passes only if it is one of forward passes.
    """
    product = _is_a(coarse, "gemm", "experts")
    softmax = _is_a(coarse, "softmax") & ~names["loss"][token]
    # attention's weights another product: nothing is selected between the two, as experts are, and it is no convolution
    positions, products = np.flatnonzero(softmax), np.concatenate([[-1], np.flatnonzero(product), [len(token)]])
    number = np.searchsorted(products, positions)
    is_backward = names["backward"][token[positions]]
    weighted = np.where(is_backward, products[number - 1], products[number])
    selected = np.concatenate([[0], np.cumsum(names["selection"][token] | _is_a(coarse, "experts"))])
    softmax[positions] = selected[np.maximum(weighted, 0)] == selected[positions]
    is_end = np.append(names["convolution"][token], True)  # of the capture, or of a network that classifies
    softmax[positions] &= ~is_end[weighted]
    mixer = softmax | _is_a(coarse, "attention", "ssm")
    anchor = mixer | names["scan"][token]
    if not mixer.any() and not _is_a(coarse, "embedding").any():
        return ()  # a convolutional network has depthwise convolutions too
    if not anchor.any():
        return _recurring(token, coarse, tid, names)
    backward = names["backward"][token]
    if (softmax & backward).any() != (softmax & ~backward).any() and (anchor & ~softmax & backward).any():
        anchor &= ~softmax
    positions = np.flatnonzero(anchor)
    if not len(positions):
        return ()
    products = np.cumsum(product & ~anchor)
    neutral, thread = names["neutral"][token[positions]], tid[positions]
    named = np.where(names["backward"][token[positions]], BACKWARD, FORWARD)
    is_autograd = np.isin(thread, np.unique(thread[(named == BACKWARD) & ~neutral]))
    direction = named
    if not is_autograd.all():
        direction = np.where(is_autograd, BACKWARD, FORWARD)
    joined = (np.diff(positions) <= _GROUP) & (products[positions[1:]] == products[positions[:-1]])
    joined &= (named[1:] == named[:-1]) | neutral[1:] | neutral[:-1]
    first = np.flatnonzero(np.append(True, ~joined))
    last = np.append(first[1:], len(positions)) - 1
    anchors = []
    for start, end in zip(first.tolist(), last.tolist(), strict=True):
        of_anchor = slice(start, end + 1)
        inside = direction[of_anchor][~neutral[of_anchor]]
        anchor_direction = int(inside[0]) if len(inside) else int(direction[start])
        is_recomputed = anchor_direction == BACKWARD and bool((named[of_anchor] == FORWARD)[~neutral[of_anchor]].all())
        anchors.append(Anchor(int(positions[start]), int(positions[end]), anchor_direction, is_recomputed))
    return tuple(anchors)


def _recurring(token: Int64Array, coarse: Int64Array, tid: Int64Array, names: dict[str, Bools]) -> tuple[Anchor, ...]:
    """Anchors of a model without attention or scans: in each stretch between look-ups, losses and changes of thread,
    the kernel that recurs the fewest times, with alike kernels between. A recommender, say, has no norms.
    """
    outer = names["ends"][token] | _is_a(coarse, "embedding", "optimizer", "sampling")
    norm = names["root"][token] | _is_a(coarse, "norm")
    backward = np.isin(tid, np.unique(tid[names["backward"][token]]))
    backward &= not backward.all()
    cuts = np.flatnonzero(outer[1:] | outer[:-1] | (backward[1:] != backward[:-1])) + 1
    anchors: list[Anchor] = []
    recurring_in: dict[bytes, Int64Array] = {}
    for start, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(token)], strict=True):
        stretch = token[start:end]
        key = stretch.tobytes()
        if key not in recurring_in:
            recurring_in[key] = _fewest(stretch, norm[start:end] | backward[start:end])
        direction = BACKWARD if backward[start] else FORWARD
        anchors += [Anchor(start + position, start + position, direction) for position in recurring_in[key].tolist()]
    return tuple(anchors) if any(anchor.direction == FORWARD for anchor in anchors) else ()


def _fewest(stretch: Int64Array, norm: Bools) -> Int64Array:
    """Positions of the kernel that recurs the fewest times, at least three, over most of a stretch, with norms."""
    norms = np.cumsum(norm)
    kernels, counts = np.unique(stretch, return_counts=True)
    for kernel in kernels[np.argsort(counts, kind="stable")][np.sort(counts) >= 3][:_CANDIDATES].tolist():
        positions = np.flatnonzero(stretch == kernel)
        between = [np.bincount(stretch[a:b], minlength=kernels[-1] + 1) for a, b in pairwise(positions)]
        similarities = [np.minimum(a, b).sum() / np.maximum(a, b).sum() for a, b in pairwise(between)]
        has_norms = (np.diff(norms[positions]) > 0).all()
        if has_norms and min(similarities) >= _RECURS and positions[-1] - positions[0] >= len(stretch) / 2:
            return positions
    return np.zeros(0, dtype=np.int64)
