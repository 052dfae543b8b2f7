"""Rules about the GPU itself: what limits a layer by sampled GPU metrics; clocks that fall, or are below the peers'."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from nvprof_kit._analysis.advise.evidence import Evidence, share
from nvprof_kit._analysis.attribution.attribution import Operations
from nvprof_kit._analysis.layers.tree import with_ancestors
from nvprof_kit._analysis.metrics import metrics
from nvprof_kit._findings import Finding
from nvprof_kit.names import NO_LAYER

MEMORY_PCT, TENSOR_PCT, BUSY_SHARE = 60.0, 60.0, 0.02
FALLEN, FALLEN_SHARE, LOST_SHARE, SAMPLES = 0.93, 0.2, 0.01, 20
"""A clock falls that is below this part of what the GPU reaches while it works, in this share of the samples."""

SLOWER, COMMON_KERNELS = 1.04, 8
_CLOCK = re.compile(r"^(GPC|SM|Graphics) Clock", re.IGNORECASE)
_POWER = re.compile(r"power", re.IGNORECASE)
_REASON = re.compile(r"throttl|slowdown", re.IGNORECASE)


def bound(facts: Evidence) -> Iterator[Finding]:
    """The longest-running layer of those limited by memory, and of those limited by the tensor cores."""
    import pandas as pd

    samples = facts.trace.samples
    if samples is None or not len(samples):
        return
    operations = Operations(replace(facts.trace, ops=facts.trace.ops[facts.inside]))
    sampled = metrics(operations)
    rows = pd.concat([sampled.rows.assign(own=False), metrics(operations, self_only=True).rows.assign(own=True)])
    rows = rows.reset_index(drop=True)
    rows = rows[rows["enough"] & (rows["layer"] != NO_LAYER) & (rows["busy_ns"] >= BUSY_SHARE * facts.wall_ns)]
    memory = rows["dram_read_pct"].fillna(0) + rows["dram_write_pct"].fillna(0)
    tensor = rows["tensor_active_pct"].fillna(0)
    kinds = {
        "memory": (
            (memory >= MEMORY_PCT) & (tensor < TENSOR_PCT),
            "fuse it with what comes before or after, keep activations in bf16 or fp8, or reuse more of what is read",
        ),
        "the tensor cores": (
            tensor >= TENSOR_PCT,
            "only less arithmetic helps: fp8, fewer recomputed products, less padding",
        ),
    }
    for limit, (chosen, advice) in kinds.items():
        if not chosen.any():
            continue
        worst = rows[chosen].sort_values("busy_ns", ascending=False, kind="stable").iloc[0]
        layer, phase, row = str(worst["layer"]), str(worst["phase"]), worst.name
        figures = (
            f"{layer} {phase}{' by itself' if worst['own'] else ''}: DRAM at {memory[row]:.0f} % and tensor cores at "
            f"{tensor[row]:.0f} % of their peak over {facts.ms(worst['busy_ns'])} of busy time{facts.per_step}, "
            f"{worst['samples']:.0f} samples"
        )
        names = facts.ops["layer"].cat.categories
        holders = {} if worst["own"] else sampled.parents
        within = [name for name in names if layer in with_ancestors(str(name), holders)]
        rows_there = np.flatnonzero(facts.ops["layer"].isin(within) & (facts.ops["phase"] == phase) & facts.inside)
        saves = int(worst["busy_ns"] * (100 - tensor[row]) / 100) if limit == "memory" else int(worst["busy_ns"] // 2)
        yield Finding(
            "gpu-metrics", f"Bound by {limit}", figures, layer, phase, *facts.longest(rows_there), saves, advice,
            "medium", "ncu measures these kernels far below that limit",
        )  # fmt: skip


def clocks(facts: Evidence) -> Iterator[Finding]:
    """A GPU whose clock falls while it works; and one that runs the same kernels slower than its peers."""
    samples = facts.trace.samples
    if samples is not None and len(samples):
        for device in samples["device"].unique().tolist():
            yield from _fallen(facts, device)
    kernels = (facts.classes.is_a("gemm") | facts.classes.is_a("attention")) & facts.inside
    rows = facts.trace.ops[kernels]
    if rows[["pid", "device"]].drop_duplicates().shape[0] < 2:
        return
    gpu = rows["pid"].astype(str) + ":" + rows["device"].astype(str)
    median_ns = (rows["end_ns"] - rows["start_ns"]).groupby([rows["name"], gpu], observed=True).median().unstack()
    median_ns = median_ns.dropna()
    if len(median_ns) < COMMON_KERNELS:
        return
    ratio = median_ns.div(median_ns.median(axis=1), axis=0)
    slowness = ratio.median()
    slowest = slowness.idxmax()
    # nearly all of its kernels are slower, not a few with other shapes
    if slowness[slowest] < SLOWER or (ratio[slowest] > 1 + (SLOWER - 1) / 2).mean() < 0.9:
        return
    own_kernels = np.flatnonzero(kernels)[(gpu == slowest).to_numpy()]
    device = int(facts.trace.ops["device"].iloc[own_kernels[0]])
    on_gpu = facts.trace.ops[["pid", "device"]].eq(facts.trace.ops[["pid", "device"]].iloc[own_kernels[0]]).all(axis=1)
    busy_ns = facts.busy_ns(np.flatnonzero(on_gpu.to_numpy() & facts.inside))
    figures = (
        f"GPU {device} takes {100 * (slowness[slowest] - 1):.1f} % longer than the median GPU for the same "
        f"{len(median_ns)} matrix product and attention kernels"
    )
    longest = own_kernels[np.argmax(facts.ops["ns"].to_numpy()[own_kernels])]
    layer, phase = (str(facts.ops[name].iloc[longest]) for name in ("layer", "phase"))
    yield Finding(
        "gpu-clocks", f"GPU {device} is slower than its peers", figures, layer, phase, *facts.longest(own_kernels),
        int(busy_ns * (1 - 1 / float(slowness[slowest]))) * facts.gpus,  # the others wait for it
        "compare its clocks, power limit and temperature with the others' (nvidia-smi -q -d CLOCK,POWER,PERFORMANCE)",
        "medium", "the kernels have other shapes on this GPU, or nvidia-smi shows equal clocks",
    )  # fmt: skip


def _fallen(facts: Evidence, device: int) -> Iterator[Finding]:
    """The finding that this GPU's clock falls while it works, if it does."""
    samples = facts.trace.samples
    if samples is None:
        return
    rows = samples[samples["device"] == device]
    names = rows["metric"].astype(str)
    clock = rows[names.str.match(_CLOCK)].sort_values("time_ns")
    ops = facts.trace.ops[(facts.trace.ops["device"] == device).to_numpy() & facts.inside]
    begun, ended = (
        np.searchsorted(np.sort(ops[name]), clock["time_ns"], side="right") for name in ("start_ns", "end_ns")
    )
    clock = clock[begun > ended]  # while it works
    if len(clock) < SAMPLES:
        return
    values = clock["value"].to_numpy()
    top = float(np.quantile(values, 0.95))
    low = values < FALLEN * top
    if low.mean() < FALLEN_SHARE:
        return
    busy_ns = facts.busy_ns(np.flatnonzero((facts.trace.ops["device"] == device).to_numpy() & facts.inside))
    saves = int(busy_ns * float(np.clip(1 - values / top, 0, 1).mean()))
    if saves < LOST_SHARE * facts.wall_ns:
        return
    mhz = 1e6 if top > 1e6 else 1.0
    mean_of_metric = {
        str(name): float(group["value"].mean())
        for name, group in rows[names.str.contains(_POWER) | names.str.contains(_REASON)].groupby(names)
    }
    figures = (
        f"the clock of GPU {device} is {values[low].mean() / mhz:,.0f} MHz on average in "
        f"{share(low.sum(), len(low))} of the samples in which it works, and reaches {top / mhz:,.0f} MHz"
        f"{''.join(f'; {name}: {value:,.1f} on average' for name, value in mean_of_metric.items())}"
    )
    worst = clock["time_ns"].to_numpy()[int(values.argmin())]
    step = int(np.median(np.diff(clock["time_ns"].to_numpy())))
    yield Finding(
        "gpu-clocks", "The GPU's clock falls", figures, "", "", int(worst), int(worst) + step, saves,
        "look at power and temperature while it runs (nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE): raise the power "
        "limit, cool it, or lock a clock that it can hold (nvidia-smi -lgc)",
        "medium", "nvidia-smi names no reason for lower clocks while the program runs",
    )  # fmt: skip
