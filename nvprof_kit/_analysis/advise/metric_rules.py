"""A rule about sampled GPU metrics: whether a layer is limited by memory or by the tensor cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from nvprof_kit._analysis.advise.evidence import Evidence, ms
from nvprof_kit._analysis.layers.order import with_ancestors
from nvprof_kit._analysis.metrics import metrics
from nvprof_kit._findings import Finding
from nvprof_kit.names import NO_LAYER

MEMORY_PCT, TENSOR_PCT, BUSY_SHARE = 60.0, 60.0, 0.02


def bound(found: Evidence) -> Iterator[Finding]:
    """The longest-running layer of those limited by memory, and of those limited by the tensor cores."""
    import pandas as pd

    samples = found.trace.samples
    if samples is None or not len(samples):
        return
    trace = replace(found.trace, ops=found.trace.ops[found.inside])
    sampled = metrics(trace)
    rows = pd.concat([sampled.rows.assign(own=False), metrics(trace, own=True).rows.assign(own=True)])
    rows = rows.reset_index(drop=True)
    rows = rows[rows["enough"] & (rows["layer"] != NO_LAYER) & (rows["busy_ns"] >= BUSY_SHARE * found.wall_ns)]
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
    for what, (chosen, advice) in kinds.items():
        if not chosen.any():
            continue
        worst = rows[chosen].sort_values("busy_ns", ascending=False, kind="stable").iloc[0]
        layer, phase, place = str(worst["layer"]), str(worst["phase"]), worst.name
        evidence = (
            f"{layer} {phase}{' by itself' if worst['own'] else ''}: DRAM at {memory[place]:.0f} % and tensor cores at "
            f"{tensor[place]:.0f} % of their peak over {ms(worst['busy_ns'])} of busy time, "
            f"{worst['samples']:.0f} samples"
        )
        names = found.ops["layer"].cat.categories
        holders = {} if worst["own"] else sampled.parents
        within = [name for name in names if layer in with_ancestors(str(name), holders)]
        mine = np.flatnonzero(found.ops["layer"].isin(within) & (found.ops["phase"] == phase) & found.inside)
        saves = int(worst["busy_ns"] * (100 - tensor[place]) / 100) if what == "memory" else int(worst["busy_ns"] // 2)
        yield Finding(
            "gpu-metrics", f"Bound by {what}", evidence, layer, phase, *found.longest(mine), saves, advice,
            "medium", "ncu measures these kernels far below that limit",
        )  # fmt: skip
