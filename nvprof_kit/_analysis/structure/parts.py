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
    begin = 0
    for number, span in enumerate(spans):
        start, end = span
        state = (
            coarse[start] == _CODE["ssm"] or not np.isin(coarse[start : end + 1], (_CODE["attention"], softmax)).any()
        )
        if (coarse[start : end + 1] == softmax).all():  # attention of several kernels: the products around its softmax
            before, after = (np.flatnonzero(product[begin:start]), np.flatnonzero(product[end + 1 :]))
            start = begin + int(before[-1]) if len(before) else start
            end = end + 1 + int(after[0]) if len(after) else end
        prefix = "cross_" if number else ""
        inputs = begin + np.flatnonzero(product[begin:start])
        outputs = end + 1 + np.flatnonzero(product[end + 1 :])
        out = int(outputs[min(int(backward), len(outputs) - 1)]) if len(outputs) else end
        for place in range(begin, out + 1):
            if place <= end:
                before_products = len(inputs) == 0 or place < inputs[0]
                projects = len(inputs) > 0 and place <= inputs[-1]
                attention = "mixer" if state else "attention"
                names[place] = prefix + (
                    "norm" if before_products and place < start else "qkv" if projects else attention
                )
                for kind in ("rope", "kv_cache"):
                    if coarse[place] == _CODE[kind]:
                        names[place] = kind
            else:
                names[place] = prefix + "out"
        begin = out + 1
    rest = slice(begin, len(positions))
    products = begin + np.flatnonzero(product[rest])
    expert = np.isin(coarse[rest], (_CODE["experts"], _CODE["softmax"])).any()
    for place in range(begin, len(positions)):
        names[place] = "mlp_norm" if len(products) and place < products[0] else "experts" if expert else "mlp"
    runs = []
    place = 0
    for name, group in groupby(names):
        size = len(list(group))
        edges = int(positions[place]), int(positions[place + size - 1])
        runs.append(Part(name, min(edges), max(edges)))
        place += size
    return runs
