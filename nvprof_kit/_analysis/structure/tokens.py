"""The kernels of one device in launch order, as tokens; and the anchors among them.

A transformer's block has one kernel, or a few that follow each other, that nothing else has: attention, a softmax
between two matrix products, a state space's scan or convolution. These are its *anchors*. Their names tell the forward
pass from the backward pass.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array
from nvprof_kit._analysis.attribution.launches import Launches
from nvprof_kit._analysis.kernels.classes import CLASSES, classify
from nvprof_kit._trace.schema import OP_KINDS, Trace

Bools = npt.NDArray[np.bool_]

FORWARD, BACKWARD = 1, 2
"""Directions of an anchor; 0 is none."""

_BACKWARD = re.compile(r"bwd|backward|bprop|dgrad|wgrad|grad_weight|_d[qkv]_|dot_do_o|convert_dq|reduce_head", re.I)
_NEUTRAL = re.compile(r"unpack_cudnn|compute_dot|convert_dq|reduce_head|preprocess|postprocess", re.I)
_SCAN = re.compile(r"depthwise|causal_conv1d|selective_(scan|state)|chunk_scan|delta_rule", re.I)
_LOSS = re.compile(r"softmax_warp_\w+<[^<>]*?\d+, (?:\(bool\)1|true),|log_?softmax|cross_?entropy|nll_loss", re.I)
_ENDS = re.compile(_LOSS.pattern + r"|argmax", re.I)
_RESIDUAL = re.compile(r"CUDAFunctor_add<")
_COPIES = re.compile(r"multi_tensor_apply_kernel.*\b(Copy|CopyFunctor)<")
_TOPK = re.compile(r"topk|sort", re.I)
_GROUP = 12
"""At most so many kernels between two anchors of one attention."""
_PRODUCTS = ("gemm", "experts")


class Anchor(NamedTuple):
    """One anchor: the positions of its first and last kernel, and its direction."""

    first: int
    last: int
    direction: int


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
        outer: Whether it may belong to the model's ends: a look-up, or as `end`.
        end: Whether it belongs to no block: the loss, sampling, the optimizer.
        product: Whether it is a matrix product.
        residual: Whether it adds two tensors, as a block ends.
        kind: The class of each token that others of its class can stand for, else -1; indexed by token.
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
    residual: Bools
    kind: Int64Array
    anchors: tuple[Anchor, ...]


def sequences(trace: Trace) -> list[Sequence]:
    """The kernels of each device and process, in launch order: by the launching call, then by start."""
    ops = trace.ops
    if "name" not in ops or not len(ops):
        return []
    classes = classify(ops)
    code = classes.code.astype(np.int64)
    kernels = np.flatnonzero((ops["kind"].to_numpy() == OP_KINDS.index("kernel")) & ~classes.is_a("comm"))
    pid, device, start, end, correlation = (
        ops[name].to_numpy()[kernels] for name in ("pid", "device", "start_ns", "end_ns", "correlation")
    )
    launches = Launches(trace.api)
    call = launches.that_launched(pid, correlation, start)
    time = np.where(call == NONE, start, launches.time[call])
    names = [str(name) for name in ops["name"].cat.categories]
    token = ops["name"].cat.codes.to_numpy()[kernels].astype(np.int64)
    flags = _Names(names)
    order = np.lexsort((start, time, device, pid))
    kind = np.full(len(names), -1, dtype=np.int64)
    replaceable = np.isin(code[kernels], _codes("norm"))
    kind[token[replaceable]] = code[kernels[replaceable]]
    owner = np.stack([pid, device])[:, order]
    cuts = np.flatnonzero(np.any(owner[:, 1:] != owner[:, :-1], axis=0)) + 1
    device_sequences = []
    for positions_of_device in np.split(order, cuts):
        if not len(positions_of_device):
            continue
        coarse, tokens = code[kernels[positions_of_device]], token[positions_of_device]
        end_kernels = flags.ends[tokens] | np.isin(coarse, _codes("optimizer", "sampling"))
        end_kernels &= ~flags.copies[tokens]
        device_sequences.append(
            Sequence(
                row=kernels[positions_of_device],
                token=tokens,
                coarse=coarse,
                call=call[positions_of_device],
                time=time[positions_of_device],
                duration=(end - start)[positions_of_device],
                outer=end_kernels | np.isin(coarse, _codes("embedding")),
                end=end_kernels,
                product=np.isin(coarse, _codes(*_PRODUCTS)),
                residual=flags.residual[tokens],
                kind=kind,
                anchors=_anchors(tokens, coarse, flags),
            )
        )
    return device_sequences


def _codes(*names: str) -> list[int]:
    return [list(CLASSES).index(name) for name in names]


class _Names:
    """What the names of kernels say, one entry per name."""

    def __init__(self, names: list[str]) -> None:
        def flags(pattern: re.Pattern[str]) -> Bools:
            return np.array([pattern.search(name) is not None for name in names], dtype=bool)

        self.backward, self.neutral, self.scan = flags(_BACKWARD), flags(_NEUTRAL), flags(_SCAN)
        self.loss, self.ends, self.select = flags(_LOSS), flags(_ENDS), flags(_TOPK)
        self.residual, self.copies = flags(_RESIDUAL), flags(_COPIES)


def _anchors(token: Int64Array, coarse: Int64Array, flags: _Names) -> tuple[Anchor, ...]:
    """The anchors of a sequence: fused attention where it is, else a softmax that no selection of experts is near."""
    attention = np.isin(coarse, _codes("attention"))
    softmax = np.isin(coarse, _codes("softmax")) & ~flags.loss[token]
    softmax &= ~_near(flags.select[token] | np.isin(coarse, _codes("experts")), 6)
    product = np.isin(coarse, _codes(*_PRODUCTS))
    softmax &= _near(product, _GROUP)
    anchor = attention | softmax | flags.scan[token] | np.isin(coarse, _codes("ssm"))
    positions = np.flatnonzero(anchor)
    if not len(positions):
        return ()
    products = np.cumsum(product & ~anchor)
    direction = np.where(flags.backward[token[positions]], BACKWARD, FORWARD)
    neutral = flags.neutral[token[positions]]
    joined = (np.diff(positions) <= _GROUP) & (products[positions[1:]] == products[positions[:-1]])
    joined &= (direction[1:] == direction[:-1]) | neutral[1:] | neutral[:-1]
    first = np.flatnonzero(np.append(True, ~joined))
    last = np.append(first[1:], len(positions)) - 1
    device_sequences = []
    for start_at, end in zip(first.tolist(), last.tolist(), strict=True):
        inside = direction[start_at : end + 1][~neutral[start_at : end + 1]]
        device_sequences.append(
            Anchor(
                int(positions[start_at]),
                int(positions[end]),
                int(inside[0]) if len(inside) else int(direction[start_at]),
            )
        )
    return tuple(device_sequences)


def _near(marked: Bools, distance: int) -> Bools:
    """Which positions have a marked one at most this far away."""
    sums = np.concatenate([[0], np.cumsum(marked)])
    index = np.arange(len(marked))
    low, high = np.maximum(index - distance, 0), np.minimum(index + distance + 1, len(marked))
    near: Bools = sums[high] > sums[low]
    return near
