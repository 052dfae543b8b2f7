"""Communication and copies: how much of each the device's computing hides, where, and how fast it went."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit.analysis.activity import COMM, COMPUTE, COPY, Activity
from nvprof_kit.analysis.attribution import Attribution
from nvprof_kit.analysis.cover import Cover
from nvprof_kit.analysis.host import WAITS, HostCalls
from nvprof_kit.analysis.nesting import Int64Array
from nvprof_kit.analysis.owners import op_owners
from nvprof_kit.analysis.windows import Windows
from nvprof_kit.trace.schema import Trace

if TYPE_CHECKING:
    import pandas as pd

COMM_COLUMNS = {
    "layer": "module path, or `(none)`",
    "phase": "phase of the layer or of the loop",
    "collective": "what was communicated: `AllReduce`, `AllGather`, … where the kernel's name says so",
    "ops": "kernels",
    "gpu_ns": "sum of their durations",
    "exposed_ns": "the part of it beside which nothing computed on the device",
    "hidden": "the rest, as a share of `gpu_ns`",
    "bytes": "bytes where the capture has them (a PyTorch trace's arguments), else missing",
}
"""The columns of the communication table."""

COPY_COLUMNS = {
    "copy": "direction, or memset",
    "memory": "the host's end: `pageable`, `pinned`, `managed`, '' where there is none or it is unknown",
    "layer": "module path, or `(none)`",
    "phase": "phase of the layer or of the loop",
    "ops": "copies",
    "bytes": "sum of their bytes",
    "gpu_ns": "sum of their durations",
    "exposed_ns": "the part of it beside which nothing computed on the device",
    "gb_per_s": "bytes over duration, 10⁹ bytes per second",
    "blocking": "copies whose call waits until the copy is done (not asynchronous), or that pageable memory makes wait",
}
"""The columns of the copy table."""

_COLLECTIVE = re.compile(
    r"(All_?Reduce|All_?Gather|Reduce_?Scatter|Broadcast|Send_?Recv|All_?To_?All|Reduce|Send|Recv|dispatch|combine)",
    re.IGNORECASE,
)


def exposed(trace: Trace, windows: Windows, active: Activity) -> Int64Array:
    """How much of each operation's duration nothing computed beside it on its device, shape ``(n,)``; 0 for one that
    computes itself.
    """
    start, end = trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
    found = np.zeros(len(start), dtype=np.int64)
    other = np.flatnonzero(active.sort != COMPUTE)
    computes = active.sort == COMPUTE
    cover = Cover(windows.of_op[computes], start[computes], end[computes])
    hidden = cover.inside(windows.of_op[other], start[other], end[other])
    found[other] = end[other] - start[other] - hidden
    return found


def comm_table(trace: Trace, owned: Attribution, active: Activity, bare: Int64Array) -> pd.DataFrame:
    """Communication by layer, phase and collective, with `COMM_COLUMNS`; the most exposed first.

    Args:
        trace: The capture, with the columns ``name`` and ``bytes``.
        owned: Who owns each operation.
        active: What the devices do.
        bare: What `exposed` gives.
    """
    rows = np.flatnonzero(active.sort == COMM)
    names = trace.ops["name"].cat
    collective = [_collective(str(name)) for name in names.categories]
    frame = _chosen(trace, owned, bare, rows)
    frame["collective"] = np.array([*collective, ""], dtype=object)[names.codes.to_numpy()[rows]]
    frame["told"] = frame["bytes"] > 0
    groups = frame.groupby(["layer", "phase", "collective"], observed=True, sort=False)
    table = groups[["ops", "gpu_ns", "exposed_ns"]].sum()
    table["hidden"] = 1 - table["exposed_ns"] / table["gpu_ns"].clip(lower=1)
    table["bytes"] = groups["bytes"].sum().where(groups["told"].all()).astype("Int64")
    return _finished(table)


def copy_table(trace: Trace, owned: Attribution, active: Activity, bare: Int64Array, host: HostCalls) -> pd.DataFrame:
    """Copies by direction, memory, layer and phase, with `COPY_COLUMNS`; the most exposed first."""
    rows = np.flatnonzero(active.sort == COPY)
    frame = _chosen(trace, owned, bare, rows)
    frame["copy"], frame["memory"] = (trace.ops[name].iloc[rows].array for name in ("name", "host_memory"))
    call = host.of_op[rows]
    frame["blocking"] = host.is_a(WAITS)[call] | (frame["memory"] == "pageable").to_numpy()
    groups = frame.groupby(["copy", "memory", "layer", "phase"], observed=True, sort=False)
    table = groups[["ops", "bytes", "gpu_ns", "exposed_ns"]].sum()
    table["gb_per_s"] = table["bytes"] / table["gpu_ns"].clip(lower=1)
    table["blocking"] = groups["blocking"].sum()
    return _finished(table)


def _chosen(trace: Trace, owned: Attribution, bare: Int64Array, rows: Int64Array) -> pd.DataFrame:
    import pandas as pd

    layer, phase = op_owners(owned)
    ops = trace.ops
    made: pd.DataFrame = pd.DataFrame(
        {
            "layer": layer[rows],
            "phase": phase[rows],
            "ops": 1,
            "gpu_ns": (ops["end_ns"].to_numpy() - ops["start_ns"].to_numpy())[rows],
            "exposed_ns": bare[rows],
            "bytes": np.maximum(ops["bytes"].to_numpy()[rows], 0),
        }
    )
    return made


def _finished(table: pd.DataFrame) -> pd.DataFrame:
    plain = table.reset_index()
    plain = plain.astype({name: str for name in ("layer", "phase", "copy", "memory", "collective") if name in plain})
    made: pd.DataFrame = plain.sort_values(["exposed_ns", "gpu_ns"], ascending=False, kind="stable", ignore_index=True)
    return made


def _collective(name: str) -> str:
    found = _COLLECTIVE.search(name)
    return found.group(1).replace("_", "") if found else "other"
