"""The parts of a block, named by what their kernels are: norm, qkv, attention, out, mlp or experts."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import numpy as np

from nvprof_kit._analysis.kernels.classes import CLASSES
from nvprof_kit._analysis.structure.blocks import Block
from nvprof_kit._analysis.structure.tokens import BACKWARD, Sequence

_CODE = {name: code for code, name in enumerate(CLASSES)}


class Part(NamedTuple):
    """A run of kernels with one purpose: positions ``first`` to ``last`` of the sequence."""

    name: str
    first: int
    last: int


def parts_of(sequence: Sequence, block: Block, first: int) -> list[Part]:
    """The parts of a block from the position `first` on, in order of launch."""
    positions = np.arange(first, block.last + 1)
    backward = block.direction == BACKWARD
    if backward:  # as in the forward pass: the backward pass runs the parts in reverse
        positions = positions[::-1]
    product, coarse = sequence.product[positions], sequence.coarse[positions]
    names = [""] * len(positions)
    spans = sorted((abs(edge.first - positions[0]), abs(edge.last - positions[0])) for edge in block.anchors)
    spans = [(min(span), max(span)) for span in spans]
    softmax = _CODE["softmax"]
    start_at = 0
    for number, span in enumerate(spans):
        start, end = span
        state = (
            coarse[start] == _CODE["ssm"] or not np.isin(coarse[start : end + 1], (_CODE["attention"], softmax)).any()
        )
        if (coarse[start : end + 1] == softmax).all():  # attention of several kernels: the products around its softmax
            before, after = (np.flatnonzero(product[start_at:start]), np.flatnonzero(product[end + 1 :]))
            start = start_at + int(before[-1]) if len(before) else start
            end = end + 1 + int(after[0]) if len(after) else end
        prefix = "cross_" if number else ""
        inputs = start_at + np.flatnonzero(product[start_at:start])
        outputs = end + 1 + np.flatnonzero(product[end + 1 :])
        out = int(outputs[min(int(backward), len(outputs) - 1)]) if len(outputs) else end
        for position in range(start_at, out + 1):
            if position <= end:
                before_products = len(inputs) == 0 or position < inputs[0]
                projects = len(inputs) > 0 and position <= inputs[-1]
                attention = "mixer" if state else "attention"
                names[position] = prefix + (
                    "norm" if before_products and position < start else "qkv" if projects else attention
                )
                for kind in ("rope", "kv_cache"):
                    if coarse[position] == _CODE[kind]:
                        names[position] = kind
            else:
                names[position] = prefix + "out"
        start_at = out + 1
    unsized = slice(start_at, len(positions))
    products = start_at + np.flatnonzero(product[unsized])
    expert = np.isin(coarse[unsized], (_CODE["experts"], _CODE["softmax"])).any()
    for position in range(start_at, len(positions)):
        names[position] = "mlp_norm" if len(products) and position < products[0] else "experts" if expert else "mlp"
    runs = []
    position = 0
    for name, group in groupby(names):
        size = len(list(group))
        edges = int(positions[position]), int(positions[position + size - 1])
        runs.append(Part(name, min(edges), max(edges)))
        position += size
    return runs
