"""Communication and copies by layer: exposed and hidden time, sizes of messages, and bandwidth.

Bandwidths are defined as in nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). *Algorithm* bandwidth is
size divided by time. *Bus* bandwidth multiplies it by a factor for the traffic of the algorithm, so that it can be
compared with the link bandwidth independent of the collective and the number of ranks.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nvprof_kit._analysis.attribution.attribution import Attribution
from nvprof_kit._analysis.attribution.intervals import NONE, Bools, Floats, Int64Array, nest
from nvprof_kit._analysis.breakdown.columns import COLUMNS
from nvprof_kit._analysis.breakdown.devices import COMM, COPY, Activity
from nvprof_kit._analysis.breakdown.host import HostCalls
from nvprof_kit._analysis.hardware import fastest_link, link_of
from nvprof_kit._analysis.kernels.classes import KernelClasses
from nvprof_kit._result.column import Columns
from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.joins import distinct_rows
from nvprof_kit._trace.schema import Trace
from nvprof_kit.issues import Issue

_UNEQUAL, _UNEQUAL_STEADY = 2, 20
"""How many times the duration of the fast collectives of its name one of unknown size may need; the larger limit is for
collectives of stable duration, because waiting times vary.
"""

_STEADY, _RECURRING, _SOME = 1.2, 1.05, 3
"""Maximum spread of a stable duration, of the median of one that recurs in each step, and the minimum number of
samples.
"""

_MOVED = ("bytes", "exposed_bytes", "wire_bytes", "limit_ns")

_COLLECTIVE = re.compile(
    r"(All_?Reduce|All_?Gather|Reduce_?Scatter|Broadcast|Send_?Recv|All_?To_?All|Reduce|Send|Recv|dispatch|combine)",
    re.IGNORECASE,
)


def comm_table(
    trace: Trace, attribution: Attribution, active: Activity, bare: Int64Array, *, is_counted: Bools
) -> pd.DataFrame:
    """Communication by layer, phase and collective, with its columns; the most exposed first.

    Args:
        trace: The capture, with the columns ``name`` and ``bytes``, and the table ``collectives`` if bytes are needed.
        attribution: The owner of each operation.
        active: The activity of the devices.
        bare: The result of `exposed`.
        is_counted: The operations to include, shape ``(n,)``.
    """
    rows = np.flatnonzero(active.sort == COMM)
    if not len(rows):  # what follows takes a while for none, too
        dtypes, columns = {"str": "str", "float": "float64"}, COLUMNS["communication"]
        types = {name: dtypes.get(column.kind, "int64") for name, column in columns.items()}
        types |= dict.fromkeys((*_MOVED, "ranks"), "Int64")
        return pd.DataFrame({name: pd.Series(dtype=dtype) for name, dtype in types.items()})
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
    calls = frame.assign(name=names.codes.to_numpy()[rows], step=attribution.step[rows])
    frame["waiting_ns"] = _excess(calls.assign(start_ns=trace.ops["start_ns"].to_numpy()[rows])) * bare_share
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
    return _ranked(table, COLUMNS["communication"])


def _excess(calls: pd.DataFrame) -> Int64Array:
    """How much longer each communication took than the fastest similar one in the capture, in ns, shape ``(n,)``.

    Communications of the same name and size are similar. If the size is unknown, those in the same layer and phase are
    similar, and gathers that take as long at their place in most steps, those of that place; since all others may wait,
    the assumed minimum is capped at a multiple of the first decile of the name.
    """
    has_size, keys = calls["bytes"].notna(), ["name", "layer", "phase", "device"]
    place = calls.sort_values("start_ns").groupby([*keys, "step"], observed=True).cumcount()
    of_place = calls.assign(place=place).groupby([*keys, "place"], observed=True)["gpu_ns"]
    least_ns, usual_ns, steps = (of_place.transform(how) for how in ("min", "median", "size"))
    recurs = (steps >= _SOME) & (usual_ns <= _RECURRING * least_ns) & (calls["step"] >= 0)
    # others end what may take a rank longer in each step
    recurs &= calls["collective"].isin(("AllGather", "Broadcast"))
    calls = calls.assign(**{owner: calls[owner].cat.codes.where(~has_size, -1) for owner in ("layer", "phase")})
    groups = calls.groupby(["name", "bytes", "layer", "phase"], dropna=False)["gpu_ns"]
    fastest_ns, slowest_ns, group_size = (groups.transform(how) for how in ("min", "max", "size"))
    steady = (group_size >= _SOME) & (slowest_ns <= _STEADY * fastest_ns)
    fast = calls.groupby("name")["gpu_ns"].transform(lambda ns: ns.quantile(0.1))
    capped_ns = np.minimum(fastest_ns, fast * np.where(steady, _UNEQUAL_STEADY, _UNEQUAL)).astype(np.int64)
    return (calls["gpu_ns"] - fastest_ns.where(has_size, np.where(recurs, least_ns, capped_ns))).to_numpy()


def copy_table(
    trace: Trace, attribution: Attribution, active: Activity, bare: Int64Array, host: HostCalls, *, is_counted: Bools
) -> pd.DataFrame:
    """The `counted` copies by direction, memory, layer and phase, with its columns; the most exposed first."""
    rows = np.flatnonzero((active.sort == COPY) & is_counted)
    frame = _transfers(trace, attribution, bare, rows)
    frame["copy"], frame["memory"] = (trace.ops[name].iloc[rows].array for name in ("name", "host_memory"))
    (gpus, codes), pair = distinct_rows(frame["device"].to_numpy(), np.asarray(frame["copy"].cat.codes, np.int64))
    copies = frame["copy"].cat.categories[codes]
    links = [link_of(trace.info.gpu_name(gpu), str(copy)) for gpu, copy in zip(gpus.tolist(), copies, strict=True)]
    frame["link"] = labels(pair, [link.name for link in links])
    frame["at_peak_ns"] = frame["bytes"] / np.array([link.gb_per_s for link in links], dtype=np.float64)[pair]
    frame["blocking"] = host.waits[host.of_op[rows]] | (frame["memory"] == "pageable")
    groups = frame.groupby(["copy", "memory", "layer", "phase"], observed=True, sort=False)
    table = groups[["ops", "bytes", "gpu_ns", "exposed_ns", "blocking"]].sum()
    gpu_ns = table["gpu_ns"].clip(lower=1)
    table["gb_per_s"], table["link"] = table["bytes"] / gpu_ns, groups["link"].first()
    table["of_link"] = groups["at_peak_ns"].sum(min_count=1) / gpu_ns
    return _ranked(table, COLUMNS["copies"])


def _transfers(trace: Trace, attribution: Attribution, bare: Int64Array, rows: Int64Array) -> pd.DataFrame:
    layer, phase = attribution.owners
    ops = trace.ops[["device", "start_ns", "end_ns", "bytes"]].iloc[rows]
    columns: dict[str, Any] = {"layer": layer[rows], "phase": phase[rows], "ops": 1}
    return ops[["device"]].assign(
        **columns, gpu_ns=ops["end_ns"] - ops["start_ns"], exposed_ns=bare[rows], bytes=ops["bytes"].clip(lower=0)
    ).reset_index(drop=True)  # fmt: skip


def _ranked(table: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    texts = {name: str for name, column in columns.items() if column.kind == "str"}
    return table.reset_index().astype(texts)[list(columns)].sort_values(
        ["exposed_ns", "gpu_ns"], ascending=False, kind="stable", ignore_index=True
    )  # fmt: skip


_TWICE = ("allreduce",)
_ONCE = ("allgather", "reducescatter", "alltoall", "gather", "scatter")
_DIRECT = ("broadcast", "reduce", "sendrecv", "send", "recv")


_MUCH_LONGER, _NOTABLE_NS = 5, 1_000_000


def first_collective(trace: Trace, classes: KernelClasses, is_counted: Bools) -> list[Issue]:
    """Warn that a capture's first collective may include waiting for other ranks whose profilers started later: the
    first one of a name took a multiple of the median of the others. A single rank's capture cannot show which rank it
    waited for.

    Args:
        trace: The capture.
        classes: The class of each operation.
        is_counted: The operations included in the figures; collectives outside them need no warning.
    """
    rows = np.flatnonzero(classes.is_a("comm"))
    if not len(rows) or "name" not in trace.ops:
        return []
    start, end = (trace.ops[name].to_numpy()[rows] for name in ("start_ns", "end_ns"))
    name, duration_ns, slow_firsts = trace.ops["name"].cat.codes.to_numpy()[rows], end - start, []
    for kernel_name in np.unique(name).tolist():
        runs = np.flatnonzero(name == kernel_name)
        runs = runs[np.argsort(start[runs], kind="stable")]
        usual = float(np.median(duration_ns[runs[1:]])) if len(runs) > 1 else np.inf
        first = int(duration_ns[runs[0]])
        if is_counted[rows[runs[0]]] and first - usual >= _NOTABLE_NS and first >= _MUCH_LONGER * usual:
            slow_firsts.append((first, usual))
    if not slow_firsts:
        return []
    first, usual = max(slow_firsts)
    return [Issue.of("first-collective", first_ms=first / 1e6, usual_ms=usual / 1e6)]


def messages(trace: Trace, rows: Int64Array, owner: Int64Array | None = None) -> tuple[Int64Array, Int64Array]:
    """Bytes of the larger buffer of communication kernels, and ranks of their group, -1 if unknown, shape ``(n,)``.

    A call belongs to the kernel with its correlation id. If the capture links them only by time, a kernel launched
    inside a call belongs to that call, and a kernel launched by the end of a group belongs to the calls of its thread
    since the previous launch. If one call launches several kernels, their messages are unknown.

    Args:
        trace: The capture, with its table ``collectives`` if it could be read.
        rows: Communication kernels, as rows of `Trace.ops`, shape ``(n,)``.
        owner: The result of `kernels_of_calls`, if already computed.
    """
    size, ranks = np.full(len(rows), -1, dtype=np.int64), np.full(len(rows), -1, dtype=np.int64)
    if trace.collectives is None or not len(trace.collectives) or not len(rows):
        return size, ranks
    owner = kernels_of_calls(trace, rows) if owner is None else owner
    calls = trace.collectives[["bytes", "ranks"]].assign(is_unknown=trace.collectives["bytes"] < 0)[owner >= 0]
    groups = calls.groupby(owner[owner >= 0])
    kernel, sums = np.array([*groups.groups], dtype=np.int64), groups.sum()
    size[kernel] = np.where(sums["is_unknown"] > 0, -1, sums["bytes"])
    ranks[kernel] = groups["ranks"].max()
    return size, ranks


def kernels_of_calls(trace: Trace, rows: Int64Array) -> Int64Array:
    """The kernel, an index into `rows`, that each row of `Trace.collectives` launched, by the rules of `messages`;
    `NONE` for a call without one and for the end of a group, shape ``(c,)``.
    """
    if trace.collectives is None or not len(trace.collectives):
        return np.zeros(0, dtype=np.int64)
    calls = {name: trace.collectives[name].to_numpy() for name in ("start_ns", "end_ns", "tid")}
    ends_group = (trace.collectives["call"] == "ncclGroupEnd").to_numpy()
    calls["ends_group"] = ends_group.astype(np.int64)
    linked = trace.collectives["correlation"].to_numpy() >= 0
    keys = ["pid", "correlation"]
    kernels = trace.ops.iloc[rows][keys].assign(kernel=np.arange(len(rows))).drop_duplicates(keys)
    kernel = trace.collectives[keys].merge(kernels, how="left", on=keys)["kernel"].fillna(NONE)
    owner: Int64Array = kernel.to_numpy().astype(np.int64)
    owner[~linked] = _by_time(trace, rows, {name: values[~linked] for name, values in calls.items()})
    return np.where(ends_group, NONE, owner)


def _by_time(trace: Trace, rows: Int64Array, calls: dict[str, Int64Array]) -> Int64Array:
    """The kernel, an index into `rows`, that each call launched, or `NONE`."""
    owner = np.full(len(calls["start_ns"]), NONE, dtype=np.int64)
    if not len(owner):
        return owner
    call = trace.launching_calls[rows]
    tid, launch_time = (np.append(trace.api[name].to_numpy(), NONE)[call] for name in ("tid", "start_ns"))
    inside = nest(calls["start_ns"], calls["end_ns"], calls["tid"]).innermost(tid, launch_time)
    alone = np.bincount(inside[inside >= 0], minlength=len(owner))[inside] == 1
    kernels = np.flatnonzero((inside >= 0) & alone)  # a graph launch is not inside an NCCL call
    kernels = kernels[np.lexsort((launch_time[kernels], tid[kernels]))]
    for thread in np.unique(tid[kernels]).tolist():
        of_thread = kernels[tid[kernels] == thread]
        its = np.flatnonzero(calls["tid"] == thread)
        # the first launch at or after the start of the call: inside it, or by the end of its group
        position = np.searchsorted(launch_time[of_thread], calls["start_ns"][its], side="left")
        kernel = np.append(of_thread, NONE)[position]
        fits = (inside[kernel] == its) | calls["ends_group"][inside[kernel]].astype(bool)
        owner[its] = np.where(fits, kernel, NONE)
    return owner


def bus_factors(collective: npt.NDArray[np.object_], ranks: Int64Array) -> Floats:
    """Bus bandwidth factor of a collective; NaN if its kind or its number of ranks is unknown.

    Args:
        collective: Kinds, like ``AllReduce``, shape ``(n,)``.
        ranks: Ranks of the groups, -1 if unknown, shape ``(n,)``.
    """
    kind = np.array([str(operation).lower() for operation in collective], dtype=object)
    share = np.where(ranks > 0, (ranks - 1) / np.maximum(ranks, 1), np.nan)
    is_of = [np.isin(kind, kinds) for kinds in (_TWICE, _ONCE, _DIRECT)]
    return np.select(is_of, [2 * share, share, 1.0], np.nan)
