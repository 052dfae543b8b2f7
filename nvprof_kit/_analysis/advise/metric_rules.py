"""Rules about the GPU itself: what limits a layer by sampled GPU metrics; clocks that fall, or are below the peers'."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from nvprof_kit._analysis.advise.findings import finding_of, share
from nvprof_kit._analysis.advise.program import Program, largest
from nvprof_kit._analysis.attribution.attribution import Operations
from nvprof_kit._analysis.attribution.steps import devices_of
from nvprof_kit._analysis.layers.tree import with_ancestors
from nvprof_kit._analysis.metrics import metrics
from nvprof_kit._findings import Finding
from nvprof_kit.names import NO_LAYER

MEMORY_PCT, TENSOR_PCT, BUSY_SHARE = 60.0, 60.0, 0.02
FALLEN, FALLEN_SHARE, LOST_SHARE, SAMPLES = 0.93, 0.2, 0.01, 20
SLOWER, COMMON_KERNELS = 1.04, 8


def bound(program: Program) -> Iterator[Finding]:
    """In a capture with sampled GPU metrics, a layer with enough samples and 2 % of the time keeps DRAM or the tensor
    cores at 60 % of their peak: the longest-running of each.

    Saves: What the tensor cores do not use; half.
    """
    samples = program.trace.samples
    if samples is None or not len(samples):
        return
    operations = Operations(replace(program.trace, ops=program.trace.ops.loc[program.ops.index]))
    sampled = metrics(operations)
    by_itself = metrics(operations, self_only=True).rows
    rows = pd.concat([sampled.rows.assign(is_self=False), by_itself.assign(is_self=True)])
    rows = rows[rows["enough"] & (rows["layer"] != NO_LAYER) & (rows["busy_ns"] >= BUSY_SHARE * program.wall_ns)]
    rows["memory"] = rows["dram_read_pct"].fillna(0) + rows["dram_write_pct"].fillna(0)
    rows["tensor"] = rows["tensor_active_pct"].fillna(0)
    is_of_tensor_cores = rows["tensor"] >= TENSOR_PCT
    of_memory = rows[(rows["memory"] >= MEMORY_PCT) & ~is_of_tensor_cores]
    for limit, limited in (("memory", of_memory), ("tensor cores", rows[is_of_tensor_cores])):
        if not len(limited):
            continue
        worst = largest(limited, "busy_ns")
        layer, phase = str(worst["layer"]), str(worst["phase"])
        evidence = f"{layer} {phase}{' by itself' if worst['is_self'] else ''}: DRAM at {worst['memory']:.0f} % and "
        evidence += f"tensor cores at {worst['tensor']:.0f} % of their peak over {program.ms(worst['busy_ns'])} of "
        evidence += f"busy time{program.per_step}, {worst['samples']:.0f} samples"
        ops, parents = program.ops, {} if worst["is_self"] else sampled.parents
        within = [name for name in ops["layer"].cat.categories if layer in with_ancestors(str(name), parents)]
        ops = ops[ops["layer"].isin(within) & (ops["phase"] == phase)]
        unused_pct = 50 if limit == "tensor cores" else 100 - worst["tensor"]
        saves = worst["busy_ns"] * unused_pct / 100
        finding = program.finding_in_ops(f"gpu-metrics:{limit}", evidence, ops, saves=saves)
        yield replace(finding, layer=layer)


def clocks(program: Program) -> Iterator[Finding]:
    """In a capture with sampled clocks, the GPU's is below 93 % of what it reaches in 20 % of the samples in which it
    works, for 1 % of the time; or a GPU takes 4 % longer than its peers for nearly all of 8 or more matrix product and
    attention kernels.

    Saves: What its work takes longer.
    """
    samples = program.trace.samples
    if samples is not None and len(samples):
        for device in samples["device"].unique().tolist():
            yield from _falling_clock(program, device)
    if program.gpus < 2:
        return
    ops = program.ops
    kernels = ops[ops["kernel_class"].isin(("gemm", "attention"))]
    median_ns = kernels.groupby(["name", "lane"], observed=True)["ns"].median().unstack().dropna()
    if median_ns.shape[1] < 2 or len(median_ns) < COMMON_KERNELS:
        return
    ratio = median_ns.div(median_ns.median(axis=1), axis=0)
    usual: Any = ratio.median()
    slowest, slower = int(usual.idxmax()), float(usual.max())
    # nearly all of its kernels are slower, not a few with other shapes
    if slower < SLOWER or (ratio[slowest] > 1 + (SLOWER - 1) / 2).mean() < 0.9:
        return
    kernels = kernels[kernels["lane"] == slowest]
    device = devices_of(program.trace)[0][slowest].device
    evidence = f"GPU {device} takes {100 * (slower - 1):.1f} % longer than the median GPU for the same {len(median_ns)}"
    evidence += " matrix product and attention kernels"
    # the others wait for it
    saves = int(program.busy_ns(ops[ops["lane"] == slowest]) * (1 - 1 / slower)) * program.gpus
    yield program.finding_in_ops("gpu-clocks:slower", evidence, kernels, saves=saves, device=device)


def _falling_clock(program: Program, device: int) -> Iterator[Finding]:
    """The finding that this GPU's clock falls while it works, if it does."""
    samples = program.trace.samples
    assert samples is not None
    rows = samples[samples["device"] == device]
    metric = rows["metric"].astype(str)
    clock = rows[metric.str.match(r"(?i)(GPC|SM|Graphics) Clock")].sort_values("time_ns")
    lanes = [lane for lane, gpu in enumerate(devices_of(program.trace)[0]) if gpu.device == device]
    ops = program.ops[program.ops["lane"].isin(lanes)]
    begun, ended = (
        np.searchsorted(np.sort(ops[name]), clock["time_ns"], side="right") for name in ("start_ns", "end_ns")
    )
    clock = clock[begun > ended]  # while it works
    if len(clock) < SAMPLES:
        return
    values, top = clock["value"].to_numpy(), float(clock["value"].quantile(0.95))
    is_low = values < FALLEN * top
    saves = int(program.busy_ns(ops) * float(np.clip(1 - values / top, 0, 1).mean()))
    if is_low.mean() < FALLEN_SHARE or saves < LOST_SHARE * program.wall_ns:
        return
    hz = 1e6 if top > 1e6 else 1.0
    reasons = rows[metric.str.contains(r"(?i)power|throttl|slowdown")].groupby("metric", observed=True)["value"].mean()
    evidence = f"the clock of GPU {device} is {values[is_low].mean() / hz:,.0f} MHz on average in "
    evidence += f"{share(is_low.sum(), len(is_low))} of the samples in which it works, and reaches {top / hz:,.0f} MHz"
    evidence += f"{''.join(f'; {name}: {value:,.1f} on average' for name, value in reasons.items())}"
    lowest_ns, sample_ns = int(clock["time_ns"].iloc[values.argmin()]), int(clock["time_ns"].diff().median())
    yield finding_of("gpu-clocks:falling", evidence, ("", ""), (lowest_ns, sample_ns), saves, confidence="medium")
