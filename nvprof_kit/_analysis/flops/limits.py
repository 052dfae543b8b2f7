"""The least time that the counted work needs on the GPU, of each layer and phase.

An operator needs at least the longer of two times: its floating point operations at the peak of their data type, and
its memory traffic at the bandwidth (Williams et al., "Roofline", 2009). Its traffic is what it reads and writes, each
storage once, without what the L2 can hold from one operator to the next (`nvprof_kit.count_flops` follows that). A
layer's limit is the sum over its operators. `torch.compile` fuses operators, so in layers whose kernels it made only
products, convolutions and attention count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping

import numpy as np

from nvprof_kit._analysis.attribution.attribution import Operations, op_owners
from nvprof_kit._analysis.flops.counted import Chain, Counted, Key, Work, add
from nvprof_kit._analysis.hardware import Peaks

BYTES, LIMIT, COMPUTE = "bytes", "limit_ns", "compute_ns"
"""Amounts of `least_work`: bytes of inputs and outputs; the least time; the part of it in operators that are limited by
their operations, not by their traffic."""

_FUSED = re.compile(r"^triton_(poi|red|per|for|tem|mm|unk)_")
"""Names of kernels that torch.compile generates."""


def fused_rows(operations: Operations) -> frozenset[Key]:
    """The layers and phases that run kernels which torch.compile made of several operators."""
    ops = operations.trace.ops
    if "name" not in ops:
        return frozenset()
    names = ops["name"].astype("category").cat
    is_fused = np.array([bool(_FUSED.match(str(name))) for name in names.categories], dtype=bool)
    fused_ops = np.append(is_fused, False)[names.codes.to_numpy()]
    layer, phase = (np.asarray(owner, dtype=object)[fused_ops] for owner in op_owners(operations.attribution))
    return frozenset(zip(map(str, layer), map(str, phase), strict=True))


def least_work(counted: Counted, peaks: Peaks | None, fused: Collection[Key]) -> Mapping[Chain, Work]:
    """Bytes, least time and its part that is limited by compute, by the ranges that the operators ran in.

    Args:
        counted: What was counted, with its traffic.
        peaks: The GPU's peaks; without them, times are NaN.
        fused: Layers and phases of which only products, convolutions and attention count.
    """
    sums: dict[Chain, Work] = {}
    for chain, operators in (counted.traffic or {}).items():
        is_fused = any(key in fused for key in chain)
        for operator in operators:
            if is_fused and not operator.flops:
                continue
            compute_ns = _at_peak(operator.dtype, operator.flops, peaks)
            memory_ns = 1e9 * operator.dram_bytes / peaks.bandwidth if peaks and peaks.bandwidth else math.nan
            limit_ns = max(compute_ns, memory_ns) if not math.isnan(compute_ns + memory_ns) else math.nan
            add(
                sums.setdefault(chain, {}),
                {BYTES: operator.bytes, LIMIT: limit_ns, COMPUTE: limit_ns if compute_ns > memory_ns else 0.0},
            )
    return sums


def _at_peak(dtype: str, flops: float, peaks: Peaks | None) -> float:
    if not flops:
        return 0.0
    return 1e9 * flops / peaks.flops[dtype] if peaks and dtype in peaks.flops else math.nan
