"""Communication and copies by layer: exposed and hidden time, and bandwidth."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution, op_owners
from nvprof_kit._analysis.attribution.intervals import Int64Array
from nvprof_kit._analysis.breakdown.activity import COMM, COPY, Activity
from nvprof_kit._analysis.breakdown.collectives import bus_factors, messages
from nvprof_kit._analysis.breakdown.host import HostCalls
from nvprof_kit._analysis.hardware import fastest_link, link_of
from nvprof_kit._result.column import Column, Columns
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
    rows = np.flatnonzero(active.sort == COMM)
    names = trace.ops["name"].cat
    matches = (_COLLECTIVE.search(str(name)) for name in names.categories)
    collective = [match.group(1).replace("_", "") if match else "other" for match in matches]
    frame = _transfers(trace, attribution, bare, rows)
    frame["collective"] = np.array([*collective, ""], dtype=object)[names.codes.to_numpy()[rows]]
    size, frame["ranks"] = messages(trace, rows)
    bare_share = frame["exposed_ns"] / frame["gpu_ns"].clip(lower=1)
    frame["bytes"] = np.where(size >= 0, size, np.nan)
    frame["exposed_bytes"] = frame["bytes"] * bare_share
    frame["wire_bytes"] = frame["bytes"] * bus_factors(frame["collective"].to_numpy(), frame["ranks"].to_numpy())
    links = {gpu: fastest_link(trace.info.gpu_name(gpu)) for gpu in frame["device"].unique().tolist()}
    frame["link"] = np.array([links[gpu].name for gpu in frame["device"]], dtype=object)
    frame["limit_ns"] = frame["wire_bytes"] / np.array([links[gpu].gb_per_s for gpu in frame["device"]], dtype=float)
    frame["waiting_ns"] = _excess(frame.assign(name=names.codes.to_numpy()[rows])) * bare_share
    groups = frame[is_counted[rows]].groupby(["layer", "phase", "collective"], observed=True, sort=False)
    table = groups[["ops", "gpu_ns", "exposed_ns"]].sum()
    gpu_ns = table["gpu_ns"].clip(lower=1)
    table["hidden"] = 1 - table["exposed_ns"] / gpu_ns
    table["waiting_ns"] = groups["waiting_ns"].sum().round().astype("int64")
    sums = {name: groups[name].sum(min_count=1).where(groups[name].count() == table["ops"]) for name in _MOVED}
    for name in ("bytes", "exposed_bytes", "wire_bytes", "limit_ns"):
        table[name] = sums[name].round().astype("Int64")
    most_ranks = groups["ranks"].max()
    table["ranks"] = most_ranks.where((most_ranks > 0) & (most_ranks == groups["ranks"].min())).astype("Int64")
    table["algorithm_gb_per_s"] = sums["bytes"] / gpu_ns
    table["bus_gb_per_s"] = sums["wire_bytes"] / gpu_ns
    table["link"] = groups["link"].first().where(groups["link"].nunique() == 1, "")
    table["of_limit"] = sums["limit_ns"] / gpu_ns
    return _ranked(table, COMM_COLUMNS)


def _excess(calls: pd.DataFrame) -> Int64Array:
    """How much longer each communication took than the fastest similar one in the capture, in ns, shape ``(n,)``.

    Communications of the same name and size are similar. If the size is unknown, those in the same layer and phase are
    similar; since all of them may wait, the assumed minimum is capped at a multiple of the first decile of the name.
    """
    has_size = calls["bytes"].notna()
    calls = calls.assign(**{place: calls[place].cat.codes.where(~has_size, -1) for place in ("layer", "phase")})
    groups = calls.groupby(["name", "bytes", "layer", "phase"], dropna=False)["gpu_ns"]
    fastest_ns, slowest_ns, group_size = (groups.transform(how) for how in ("min", "max", "size"))
    steady = (group_size >= _SOME) & (slowest_ns <= _STEADY * fastest_ns)
    fast = calls.groupby("name")["gpu_ns"].transform(lambda ns: ns.quantile(0.1))
    capped_ns = np.minimum(fastest_ns, fast * np.where(steady, _UNEQUAL_STEADY, _UNEQUAL)).astype(np.int64)
    excess: Int64Array = (calls["gpu_ns"] - fastest_ns.where(has_size, capped_ns)).to_numpy()
    return excess


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
    frame = _transfers(trace, attribution, bare, rows)
    frame["copy"], frame["memory"] = (trace.ops[name].iloc[rows].array for name in ("name", "host_memory"))
    pairs = [*zip(frame["device"].tolist(), frame["copy"].astype(str), strict=True)]
    links = {(gpu, copy): link_of(trace.info.gpu_name(gpu), copy) for gpu, copy in set(pairs)}
    frame["link"] = np.array([links[pair].name for pair in pairs], dtype=object)
    peak = np.array([links[pair].gb_per_s for pair in pairs], dtype=np.float64)
    frame["at_peak_ns"] = frame["bytes"] / peak
    frame["blocking"] = host.waits[host.of_op[rows]] | (frame["memory"] == "pageable")
    groups = frame.groupby(["copy", "memory", "layer", "phase"], observed=True, sort=False)
    table = groups[["ops", "bytes", "gpu_ns", "exposed_ns", "blocking"]].sum()
    gpu_ns = table["gpu_ns"].clip(lower=1)
    table["gb_per_s"], table["link"] = table["bytes"] / gpu_ns, groups["link"].first()
    table["of_link"] = groups["at_peak_ns"].sum(min_count=1) / gpu_ns
    return _ranked(table, COPY_COLUMNS)


def _transfers(trace: Trace, attribution: Attribution, bare: Int64Array, rows: Int64Array) -> pd.DataFrame:
    layer, phase = op_owners(attribution)
    ops = trace.ops.iloc[rows]
    columns = {"layer": layer[rows], "phase": phase[rows], "ops": 1, "gpu_ns": ops["end_ns"] - ops["start_ns"]}
    transfers: pd.DataFrame = ops[["device"]].assign(
        **columns, exposed_ns=bare[rows], bytes=ops["bytes"].clip(lower=0)
    ).reset_index(drop=True)  # fmt: skip
    return transfers


def _ranked(table: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    texts = {name: str for name, column in columns.items() if column.kind == "str"}
    ranked: pd.DataFrame = table.reset_index().astype(texts)[list(columns)].sort_values(
        ["exposed_ns", "gpu_ns"], ascending=False, kind="stable", ignore_index=True
    )  # fmt: skip
    return ranked
