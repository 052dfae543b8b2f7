"""Message size and bandwidth of communication kernels.

Bandwidths are defined as in nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). *Algorithm* bandwidth is
size divided by time. *Bus* bandwidth multiplies it by a factor for the traffic of the algorithm, so that it can be
compared with the link bandwidth independent of the collective and the number of ranks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array, nest
from nvprof_kit._analysis.attribution.launches import Launches
from nvprof_kit._analysis.kernels.classes import KernelClasses
from nvprof_kit._trace.schema import Trace
from nvprof_kit.issues import Issue

_TWICE = ("allreduce",)
_ONCE = ("allgather", "reducescatter", "alltoall", "gather", "scatter")
_DIRECT = ("broadcast", "reduce", "sendrecv", "send", "recv")


_MUCH_LONGER, _NOTABLE_NS = 5, 1_000_000


def first_collective(trace: Trace, classes: KernelClasses, is_counted: npt.NDArray[np.bool_]) -> list[Issue]:
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
    text = (
        f"the first collective of the window took {first / 1e6:,.3f} ms, the median of its like {usual / 1e6:,.3f} ms: "
        "it may be waiting only since the ranks' profilers began at different moments, and is no cost of the program; "
        "--steps +1: leaves it out"
    )
    return [Issue("first-collective", "warning", 1.0, text)]


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
    pid, correlation, start = (trace.ops[name].to_numpy()[rows] for name in ("pid", "correlation", "start_ns"))
    selected = np.isin(trace.api["correlation"].to_numpy(), correlation)  # keeps the search over few calls
    launches = Launches(trace.api[selected])
    call = launches.that_launched(pid, correlation, start)
    tid, launch_time = launches.tid[call], launches.time[call]
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


def bus_factors(collective: npt.NDArray[np.object_], ranks: Int64Array) -> npt.NDArray[np.float64]:
    """Bus bandwidth factor of a collective; NaN if its kind or its number of ranks is unknown.

    Args:
        collective: Kinds, like ``AllReduce``, shape ``(n,)``.
        ranks: Ranks of the groups, -1 if unknown, shape ``(n,)``.
    """
    kind = np.array([str(operation).lower() for operation in collective], dtype=object)
    share = np.where(ranks > 0, (ranks - 1) / np.maximum(ranks, 1), np.nan)
    factors: npt.NDArray[np.float64] = np.select(
        [np.isin(kind, _TWICE), np.isin(kind, _ONCE), np.isin(kind, _DIRECT)], [2 * share, share, 1.0], np.nan
    )
    return factors
