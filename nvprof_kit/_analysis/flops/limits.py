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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nvprof_kit._analysis.attribution.attribution import Attribution, Operations, op_owners
from nvprof_kit._analysis.flops.counted import Chain, Counted, Key, Work, add, read_counted
from nvprof_kit._analysis.flops.rows import Row, times_of
from nvprof_kit._analysis.hardware import Peaks, peaks_of
from nvprof_kit._analysis.layers.layers import LIMITS, Layers
from nvprof_kit._trace.flops_file import FlopsFile
from nvprof_kit._trace.schema import CaptureInfo, Trace
from nvprof_kit.names import NO_LAYER

FLOPS, BYTES, DRAM, LIMIT = "flops", "bytes", "dram_bytes", "limit_ns"
COMPUTE, PRODUCTS = "compute_ns", "products_ns"
"""Amounts of `least_work`: floating point operations; bytes of inputs and outputs, and those that the L2 cannot hold;
the least time; the parts of it in operators that are limited by their operations, not by their traffic, and in
products, convolutions and attention."""

_FUSED = re.compile(r"^triton_(poi|red|per|for|tem|mm|unk)_")
"""Names of kernels that torch.compile generates."""


def fused_rows(trace: Trace, attribution: Attribution) -> frozenset[Key]:
    """The layers and phases that run kernels which torch.compile made of several operators."""
    ops = trace.ops
    if "name" not in ops:
        return frozenset()
    names = ops["name"].astype("category").cat
    is_fused = np.array([bool(_FUSED.match(str(name))) for name in names.categories], dtype=bool)
    if not is_fused.any():
        return frozenset()
    fused_ops = np.append(is_fused, False)[names.codes.to_numpy()]
    layer, phase = (np.asarray(owner, dtype=object)[fused_ops] for owner in op_owners(attribution))
    return frozenset(zip(map(str, layer), map(str, phase), strict=True))


def least_work(program: Counted, peaks: Peaks | None, fused: Collection[Key]) -> Mapping[Chain, Work]:
    """Operations, bytes, least time and its parts, by the ranges that the operators ran in.

    Args:
        program: What was counted, with its traffic.
        peaks: The GPU's peaks; without them, times are NaN.
        fused: Layers and phases of which only products, convolutions and attention count.
    """
    sums: dict[Chain, Work] = {}
    for chain, operators in (program.traffic or {}).items():
        is_fused = any(key in fused for key in chain)
        for operator in operators:
            if is_fused and not operator.flops:
                continue
            compute_ns = _at_peak(operator.dtype, operator.flops, peaks)
            memory_ns = 1e9 * operator.dram_bytes / peaks.bandwidth if peaks and peaks.bandwidth else math.nan
            limit_ns = max(compute_ns, memory_ns) if not math.isnan(compute_ns + memory_ns) else math.nan
            add(
                sums.setdefault(chain, {}),
                {
                    FLOPS: operator.flops,
                    BYTES: operator.bytes,
                    DRAM: operator.dram_bytes,
                    LIMIT: limit_ns,
                    COMPUTE: limit_ns if compute_ns > memory_ns else 0.0,
                    PRODUCTS: limit_ns if operator.flops else 0.0,
                },
            )
    return sums


def _at_peak(dtype: str, flops: float, peaks: Peaks | None) -> float:
    if not flops:
        return 0.0
    return 1e9 * flops / peaks.flops[dtype] if peaks and dtype in peaks.flops else math.nan


def row_limits(
    operations: Operations, program: Counted, rows: Sequence[Row], times: Mapping[Key, float], peaks: Peaks | None
) -> dict[Key, dict[str, Any]]:
    """Bytes, limit and what it is bound by, of each row, as in `flops`; missing if traffic was not counted.

    Args:
        operations: The operations of the capture.
        program: What was counted.
        rows: The rows.
        times: How often the counted work of a row ran in the capture, of each row.
        peaks: The GPU's peaks.
    """
    if program.traffic is None:
        unknown = dict.fromkeys((BYTES, DRAM, LIMIT, "of_limit"), math.nan)
        return {row.key: {**unknown, "bound": ""} for row in rows}
    program = program.with_holders(row.key for row in rows if row.held)
    amounts = least_work(program, peaks, fused_rows(operations.trace, operations.attribution))
    a_call = program.nested(amounts)
    inside = program.nested(amounts, times=times) if any(row.held for row in rows) else {}
    limits = {}
    for row in rows:
        work, often = (inside.get(row.key, {}), 1.0) if row.held else (a_call.get(row.key, {}), times[row.key])
        bytes_, dram_bytes, limit, compute = (work.get(amount, 0.0) * often for amount in (BYTES, DRAM, LIMIT, COMPUTE))
        limits[row.key] = {
            BYTES: bytes_,
            DRAM: dram_bytes,
            LIMIT: limit,
            "of_limit": limit / row.busy_ns if row.busy_ns else math.nan,
            "bound": "" if not limit or math.isnan(limit) else "compute" if 2 * compute > limit else "memory",
        }
    return limits


def work_per_step(
    counts: FlopsFile, info: CaptureInfo, rows: Collection[Key], fused: Collection[Key] = ()
) -> dict[Key, Work]:
    """The amounts of `least_work` in a counted step, by the innermost of `rows` that its operators ran in.

    Args:
        counts: The counts of a program.
        info: Of a capture of the program.
        rows: Layers and phases of that capture. Work outside them all goes with its own layer and phase.
        fused: As in `least_work`.

    Returns:
        By layer and phase; empty if no steps or no traffic were counted.
    """
    program = read_counted(counts)
    sums: dict[Key, Work] = {}
    peaks = peaks_of(info.gpus, capture=info.path)
    for chain, work in least_work(program, peaks, fused).items() if program.steps else ():
        key = next((key for key in chain if key in rows), chain[0])
        add(sums.setdefault(key, {}), work, 1 / program.steps)
    return sums


def with_limits(result: Layers, operations: Operations, counts: FlopsFile) -> Layers:
    """Add the columns `LIMITS` to a per-layer table that is not by step, as far as they are known.

    Args:
        result: The table.
        operations: Its operations.
        counts: The counts from a run of the same program.
    """
    program, info = read_counted(counts), result.info
    columns = ("layer", "phase", "calls", "gpu_busy_ns")
    rows = [
        Row((layer, phase), calls, busy_ns, held=not calls and layer != NO_LAYER)
        for layer, phase, calls, busy_ns in result.rows[list(columns)].itertuples(index=False)
    ]
    times = {row.key: times_of(row, program, result.steps.count) for row in rows}
    peaks = peaks_of(info.gpus if info.on_gpu else (), capture=info.path)
    limits = row_limits(operations, program, rows, times, peaks)
    with_held = program.with_holders(row.key for row in rows if row.held)
    a_call = with_held.nested()
    inside = with_held.nested(times=times) if any(row.held for row in rows) else {}
    flop = [
        sum(inside.get(row.key, {}).values()) if row.held else sum(a_call.get(row.key, {}).values()) * times[row.key]
        for row in rows
    ]
    amounts = {"flop": flop, **{name: [limits[row.key][name] for row in rows] for name in LIMITS if name != "flop"}}
    table = result.rows.assign(**amounts)
    return replace(result, rows=table.drop(columns=[name for name in LIMITS if table[name].isna().all()]), peaks=peaks)
