"""Communication and copies by layer: exposed and hidden time, and bandwidth."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution, op_owners
from nvprof_kit._analysis.attribution.intervals import Cover, Int64Array, touches
from nvprof_kit._analysis.attribution.steps import Windows
from nvprof_kit._analysis.breakdown.activity import COMM, COMPUTE, COPY, Activity
from nvprof_kit._analysis.breakdown.collectives import bus_factors, messages
from nvprof_kit._analysis.breakdown.host import HostCalls
from nvprof_kit._analysis.hardware import fastest_link, link_of
from nvprof_kit._result.column import Column, Columns
from nvprof_kit._trace.frames import distinct_rows
from nvprof_kit._trace.schema import Trace

if TYPE_CHECKING:
    import pandas as pd

COMM_COLUMNS: Columns = {
    "layer": Column("module path, or `(none)`", kind="str"),
    "phase": Column("phase of the layer or of the loop", kind="str"),
    "collective": Column("`AllReduce`, `AllGather`, … if the kernel's name contains it", kind="str"),
    "ops": Column("kernels"),
    "gpu_ns": Column("sum of their durations", "ns"),
    "exposed_ns": Column("the part not overlapped by compute on the same device", "ns"),
    "hidden": Column("the overlapped part, as a share of `gpu_ns`", "share", kind="float", fold="mean"),
    "waiting_ns": Column(
        "the part of `exposed_ns` in excess of the fastest similar collective: possibly waiting for other ranks", "ns"
    ),
    "bytes": Column("bytes of the larger buffer (all of an all-gather's output), missing if unknown", "bytes"),
    "exposed_bytes": Column("estimate of the bytes moved while exposed, in proportion to time", "bytes"),
    "ranks": Column("number of ranks in the group; missing if unknown or not the same for all", fold="key"),
    "algorithm_gb_per_s": Column(
        "`bytes` over `gpu_ns` in 10⁹ bytes per second; `gpu_ns` includes waiting for other ranks",
        "gb_per_s",
        kind="float",
        fold="mean",
    ),
    "bus_gb_per_s": Column(
        "bus bandwidth as defined by nccl-tests, comparable to the bandwidth of the link",
        "gb_per_s",
        kind="float",
        fold="mean",
    ),
    "wire_bytes": Column(
        "bytes that each GPU sends: `bytes` times the factor of the ring algorithm, 2(n-1)/n of an all-reduce of n "
        "ranks, (n-1)/n of an all-gather, reduce-scatter or all-to-all",
        "bytes",
    ),
    "link": Column(
        "fastest link of the GPU to another one: `NVLink`, or else `PCIe 5 x16`; '' if unknown. Other nodes are behind "
        "slower ones, which a capture does not tell",
        kind="str",
        fold="first",
    ),
    "limit_ns": Column("least time for `wire_bytes` over `link`; missing if either is unknown", "ns"),
    "of_limit": Column(
        "`limit_ns` over `gpu_ns`, which includes waiting; a switch that reduces (NVLS) can exceed 1",
        "share",
        kind="float",
        fold="mean",
    ),
}
"""The columns of the communication table."""

COPY_COLUMNS: Columns = {
    "copy": Column("direction of the copy, or memset", kind="str"),
    "memory": Column("host memory: `pageable`, `pinned` or `managed`; '' if none or unknown", kind="str"),
    "layer": Column("module path, or `(none)`", kind="str"),
    "phase": Column("phase of the layer or of the loop", kind="str"),
    "ops": Column("copies"),
    "bytes": Column("sum of their bytes", "bytes"),
    "gpu_ns": Column("sum of their durations", "ns"),
    "exposed_ns": Column("the part not overlapped by compute on the same device", "ns"),
    "gb_per_s": Column("bytes over duration, 10⁹ bytes per second", "gb_per_s", kind="float", fold="mean"),
    "link": Column(
        "link of a copy to or from the host or another GPU: `PCIe 5 x16`, `NVLink`; '' if unknown", kind="str"
    ),
    "of_link": Column("`gb_per_s` as a share of the link's bandwidth in one direction", kind="float", fold="mean"),
    "blocking": Column("number of copies that block the host: synchronous calls, or pageable memory"),
}
"""The columns of the copy table."""

_UNEQUAL, _UNEQUAL_STEADY = 2, 20
"""How many times the duration of the fast collectives of its name one of unknown size may need; the larger limit is for
collectives of stable duration, because waiting times vary.
"""

_STEADY, _SOME = 1.2, 3
"""Maximum spread of a stable duration, and the minimum number of samples."""

_MOVED = ("bytes", "exposed_bytes", "wire_bytes", "limit_ns")

_COLLECTIVE = re.compile(
    r"(All_?Reduce|All_?Gather|Reduce_?Scatter|Broadcast|Send_?Recv|All_?To_?All|Reduce|Send|Recv|dispatch|combine)",
    re.IGNORECASE,
)


def exposed(trace: Trace, windows: Windows, active: Activity) -> Int64Array:
    """The part of each operation's duration that no compute on its device overlaps, shape ``(n,)``; 0 for compute."""
    start, end = trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
    exposed_ns = np.zeros(len(start), dtype=np.int64)
    other = np.flatnonzero(active.sort != COMPUTE)
    if not len(other):
        return exposed_ns
    computes = np.flatnonzero(active.sort == COMPUTE)
    # on any device: what hides none of them need not be joined
    computes = computes[touches((start[other], end[other]), start[computes], end[computes])]
    cover = Cover(windows.of_op[computes], start[computes], end[computes])
    hidden = cover.inside(windows.of_op[other], start[other], end[other])
    exposed_ns[other] = end[other] - start[other] - hidden
    return exposed_ns


def comm_table(
    trace: Trace, attribution: Attribution, active: Activity, bare: Int64Array, *, is_counted: npt.NDArray[np.bool_]
) -> pd.DataFrame:
    """Communication by layer, phase and collective, with `COMM_COLUMNS`; the most exposed first.

    Args:
        trace: The capture, with the columns ``name`` and ``bytes``, and the table ``collectives`` if bytes are needed.
        attribution: The owner of each operation.
        active: The activity of the devices.
        bare: The result of `exposed`.
        is_counted: The operations to include, shape ``(n,)``.
    """
    rows = np.flatnonzero((active.sort == COMM) & is_counted)
    names = trace.ops["name"].cat
    matches = (_COLLECTIVE.search(str(name)) for name in names.categories)
    collective = [match.group(1).replace("_", "") if match else "other" for match in matches]
    frame = _chosen(trace, attribution, bare, rows)
    frame["collective"] = np.array([*collective, ""], dtype=object)[names.codes.to_numpy()[rows]]
    moved = messages(trace, rows)
    size = np.where(moved.bytes >= 0, moved.bytes, np.nan)
    bare_share = frame["exposed_ns"].to_numpy() / np.maximum(frame["gpu_ns"].to_numpy(), 1)
    frame["bytes"], frame["exposed_bytes"] = size, size * bare_share
    frame["wire_bytes"] = size * bus_factors(frame["collective"].to_numpy(), moved.ranks)
    gpus, gpu = np.unique(trace.ops["device"].to_numpy()[rows], return_inverse=True)
    links = [fastest_link(trace.info.gpu_name(number)) for number in gpus.tolist()]
    frame["link"] = np.array([link.name for link in links], dtype=object)[gpu]
    frame["limit_ns"] = frame["wire_bytes"] / np.array([link.gb_per_s for link in links], dtype=np.float64)[gpu]
    frame["least"], frame["ranks"] = moved.ranks, moved.ranks
    frame["waiting_ns"] = _waiting(trace, attribution, active)[rows] * bare_share
    groups = frame.groupby(["layer", "phase", "collective"], observed=True, sort=False)
    table = groups[["ops", "gpu_ns", "exposed_ns"]].sum()
    table["hidden"] = 1 - table["exposed_ns"] / table["gpu_ns"].clip(lower=1)
    table["waiting_ns"] = groups["waiting_ns"].sum().round().astype("int64")
    sums = {name: groups[name].sum(min_count=1).where(groups[name].count() == table["ops"]) for name in _MOVED}
    for name in ("bytes", "exposed_bytes"):
        table[name] = sums[name].round().astype("Int64")
    most_ranks = groups["ranks"].max()
    table["ranks"] = most_ranks.where((most_ranks > 0) & (most_ranks == groups["least"].min())).astype("Int64")
    table["algorithm_gb_per_s"] = sums["bytes"] / table["gpu_ns"].clip(lower=1)
    table["bus_gb_per_s"] = sums["wire_bytes"] / table["gpu_ns"].clip(lower=1)
    table["wire_bytes"] = sums["wire_bytes"].round().astype("Int64")
    table["link"] = groups["link"].first().where(groups["link"].nunique() == 1, "")
    table["limit_ns"] = sums["limit_ns"].round().astype("Int64")
    table["of_limit"] = sums["limit_ns"] / table["gpu_ns"].clip(lower=1)
    return _finished(table)


def _waiting(trace: Trace, attribution: Attribution, active: Activity) -> npt.NDArray[np.int64]:
    """How much longer each communication took than the fastest similar one in the capture, in ns, shape ``(n,)``.

    Communications of the same name and size are similar. If the size is unknown, those in the same layer and phase are
    similar; since all of them may wait, the assumed minimum is capped at a multiple of the first decile of the name.
    """
    import pandas as pd

    rows = np.flatnonzero(active.sort == COMM)
    size = messages(trace, rows).bytes
    layer, phase = (np.asarray(categorical.codes[rows], dtype=np.int64) for categorical in op_owners(attribution))
    has_size = size >= 0
    duration_ns = (trace.ops["end_ns"].to_numpy() - trace.ops["start_ns"].to_numpy())[rows]
    calls = pd.DataFrame(
        {
            "name": trace.ops["name"].cat.codes.to_numpy()[rows],
            "bytes": size,
            "layer": np.where(has_size, -1, layer),
            "phase": np.where(has_size, -1, phase),
            "ns": duration_ns,
        }
    )
    groups = calls.groupby(["name", "bytes", "layer", "phase"])["ns"]
    fastest_ns, slowest_ns, group_size = (groups.transform(how).to_numpy() for how in ("min", "max", "size"))
    steady = (group_size >= _SOME) & (slowest_ns <= _STEADY * fastest_ns)
    times = np.where(steady, _UNEQUAL_STEADY, _UNEQUAL)
    fast = calls.groupby("name")["ns"].transform(lambda ns: ns.quantile(0.1)).to_numpy()
    fastest_ns = np.where(has_size, fastest_ns, np.minimum(fastest_ns, times * fast)).astype(np.int64)
    waiting_ns = np.zeros(len(trace.ops), dtype=np.int64)
    waiting_ns[rows] = duration_ns - fastest_ns
    return waiting_ns


def copy_table(
    trace: Trace,
    attribution: Attribution,
    active: Activity,
    bare: Int64Array,
    host: HostCalls,
    *,
    is_counted: npt.NDArray[np.bool_],
) -> pd.DataFrame:
    """The `counted` copies by direction, memory, layer and phase, with `COPY_COLUMNS`; the most exposed first."""
    rows = np.flatnonzero((active.sort == COPY) & is_counted)
    frame = _chosen(trace, attribution, bare, rows)
    frame["copy"], frame["memory"] = (trace.ops[name].iloc[rows].array for name in ("name", "host_memory"))
    device, names = trace.ops["device"].to_numpy()[rows], trace.ops["name"].cat
    (gpus, kinds), pair = distinct_rows(device, names.codes.to_numpy()[rows].astype(np.int64))
    pairs = zip(gpus.tolist(), kinds.tolist(), strict=True)
    links = [link_of(trace.info.gpu_name(gpu), str(names.categories[kind])) for gpu, kind in pairs]
    frame["link"] = np.array([link.name for link in links], dtype=object)[pair]
    peak = np.array([link.gb_per_s for link in links], dtype=np.float64)[pair]
    frame["at_peak_ns"] = frame["bytes"].to_numpy() / peak
    call = host.of_op[rows]
    frame["blocking"] = host.waits[call] | (frame["memory"] == "pageable").to_numpy()
    groups = frame.groupby(["copy", "memory", "layer", "phase"], observed=True, sort=False)
    table = groups[["ops", "bytes", "gpu_ns", "exposed_ns"]].sum()
    table["gb_per_s"] = table["bytes"] / table["gpu_ns"].clip(lower=1)
    table["link"] = groups["link"].first()
    table["of_link"] = groups["at_peak_ns"].sum(min_count=1) / table["gpu_ns"].clip(lower=1)
    table["blocking"] = groups["blocking"].sum()
    return _finished(table)


def _chosen(trace: Trace, attribution: Attribution, bare: Int64Array, rows: Int64Array) -> pd.DataFrame:
    import pandas as pd

    layer, phase = op_owners(attribution)
    ops = trace.ops
    chosen: pd.DataFrame = pd.DataFrame(
        {
            "layer": layer[rows],
            "phase": phase[rows],
            "ops": 1,
            "gpu_ns": (ops["end_ns"].to_numpy() - ops["start_ns"].to_numpy())[rows],
            "exposed_ns": bare[rows],
            "bytes": np.maximum(ops["bytes"].to_numpy()[rows], 0),
        }
    )
    return chosen


def _finished(table: pd.DataFrame) -> pd.DataFrame:
    plain = table.reset_index()
    plain = plain.astype(
        {name: str for name in ("layer", "phase", "copy", "memory", "link", "collective") if name in plain}
    )
    ranked: pd.DataFrame = plain.sort_values(
        ["exposed_ns", "gpu_ns"], ascending=False, kind="stable", ignore_index=True
    )
    return ranked
