"""The views of individual items: operators with their kernels, kernels, copies, and ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array, Nesting, exact_sums, nest, whole_calls
from nvprof_kit._analysis.attribution.ranges import Elsewhere, steps_around
from nvprof_kit._analysis.layers.layers import BY_STEP
from nvprof_kit._analysis.layers.layers import COLUMNS as LAYER_COLUMNS
from nvprof_kit._analysis.summary.facts import Facts
from nvprof_kit._result.column import Column, Columns
from nvprof_kit._trace.schema import OP_KINDS
from nvprof_kit.names import PHASE_CATEGORIES, Category

if TYPE_CHECKING:
    import pandas as pd


NO_CPU = (
    "CPU utilization was not recorded: nsys records it with --cpuctxsw=process-tree (which needs the right to use "
    "perf events; check with nsys status -e)"
)
"""What to do if the capture has no CPU data."""

_STATISTICS: Columns = {
    "calls": Column("number of calls"),
    **{
        f"{clock}_{name}_ns": Column(f"{meaning}, in ns", "ns")
        for clock, time in (("cpu", "CPU time"), ("gpu", "GPU time"))
        for name, meaning in (
            ("total", f"{time}, sum over the calls"),
            ("avg", "mean over the calls"),
            ("max", "maximum"),
            ("min", "minimum"),
            ("p50", "median"),
            ("p95", "95th percentile"),
        )
    },
    "cpu_ratio": Column("`cpu_total_ns` divided by that of the capture", "share", kind="float"),
    "gpu_ratio": Column("`gpu_total_ns` divided by that of the capture", "share", kind="float"),
}
_BY_STEP: Columns = {name: LAYER_COLUMNS[name] for name in BY_STEP}
_GPU: Columns = {
    "process": Column("index of the process in the capture; missing for a CPU used by several"),
    "device": Column("device ordinal in the process; missing for a CPU"),
    "wall_ns": Column("duration of the recording, in ns", "ns"),
}

COLUMNS: Mapping[str, Columns] = {
    "device": {
        **_BY_STEP,
        **_GPU,
        "name": Column("name of the GPU, `CPU`, or `CPU operators` in a capture without a GPU", kind="str"),
        "busy_ns": Column("time in which it was busy, in ns; missing without context switches", "ns"),
        "utilisation": Column("`busy_ns` over `wall_ns`; above 1 for several threads on a CPU", "share", kind="float"),
    },
    "overview": {
        **_BY_STEP,
        "event": Column("kind of activity; overlapping time counts once", kind="str"),
        **_STATISTICS,
    },
    "model": {
        **_BY_STEP,
        "part": Column("part of the loop", kind="str"),
        "gpu_ops": Column("number of GPU operations"),
        **_STATISTICS,
    },
    "distributed": {
        **_BY_STEP,
        **_GPU,
        "compute_ns": Column("time in which it computed, in ns", "ns"),
        "comm_ns": Column("time in which it communicated, in ns", "ns"),
        "overlap_ns": Column("time of both, in ns", "ns"),
        "exposed_comm_ns": Column("exposed communication, in ns", "ns"),
        "comm_ratio": Column("`comm_ns` over `wall_ns`", "share", kind="float"),
        "overlap_ratio": Column("`overlap_ns` over `comm_ns`", "share", kind="float"),
    },
    "operator": {
        **_BY_STEP,
        "operator": Column("name of the operator", kind="str"),
        "kernel": Column("a kernel that it launched; '' for the operator itself", kind="str"),
        **_STATISTICS,
    },
    "kernel": {
        **_BY_STEP,
        "name": Column("name of the kernel", kind="str"),
        "kernel_class": Column("its class", kind="str"),
        "family": Column("the rule that classified it", kind="str"),
        **_STATISTICS,
    },
    "memory": {
        **_BY_STEP,
        "copy": Column("direction of the copy, or memset", kind="str"),
        "memory": Column("host memory, '' if none", kind="str"),
        **_STATISTICS,
        "bytes": Column("sum of their bytes", "bytes"),
        "gb_per_s": Column("10^9 bytes per second", "gb_per_s", kind="float"),
    },
    "user": {
        **_BY_STEP,
        "range": Column("text of the range", kind="str"),
        "category": Column("its category", kind="str"),
        **_STATISTICS,
    },
}
"""The columns of each view; an answer has a subset."""

_COLUMNS = ("process", "device", "name", "wall_ns", "busy_ns", "utilisation")


def device_view(facts: Facts) -> pd.DataFrame:
    """Wall time and busy time of every GPU, and CPU time over the same period: of each process that uses a GPU, and of
    all other processes together. CPU time is summed over threads and can exceed the wall time. Without a GPU, the time
    in which a process's operators ran, and CPU time if it was recorded.
    """
    import pandas as pd

    parts = [_gpus(facts), *([_cpus(facts)] if facts.trace.info.on_gpu or facts.trace.scheduled is not None else [])]
    table: pd.DataFrame = pd.concat(parts, ignore_index=True)
    table = table.astype({"process": "Int64", "device": "Int64", "wall_ns": "Int64", "busy_ns": "Int64"})
    table["utilisation"] = (table["busy_ns"] / table["wall_ns"].clip(lower=1)).astype("Float64")
    view: pd.DataFrame = table[[*facts.step_columns, *_COLUMNS]]
    return view


def _gpus(facts: Facts) -> pd.DataFrame:
    steps = facts.states()
    steps["busy_ns"] = steps["wall_ns"] - steps["idle_ns"]
    if facts.trace.info.on_gpu:
        steps["name"] = [facts.trace.info.gpu_name(device) for device in steps["device"].tolist()]
    else:
        steps = steps.assign(name="CPU operators", device=None)
    return steps


def _cpus(facts: Facts) -> pd.DataFrame:
    """The CPU rows, over the windows of each process's first GPU; and once for all processes without a GPU, such as
    data loader workers.
    """
    import pandas as pd

    windows, scheduled, frames = facts.windows, facts.trace.scheduled, []
    first = {device.pid: position for position, device in reversed([*enumerate(windows.devices)])}
    for pid, position in sorted(first.items(), key=lambda pair: pair[1]):
        of_first = facts.counted_windows[windows.device[facts.counted_windows] == position]
        start, end = windows.start[of_first], windows.end[of_first]
        rows = {"step": windows.instance[of_first], "device": None, "wall_ns": end - start}
        threads = {"CPU": None if scheduled is None or not len(scheduled) else scheduled[scheduled["pid"] == pid]}
        if position == 0 and scheduled is not None and not scheduled["pid"].isin(first).all():
            threads["CPU, other processes"] = scheduled[~scheduled["pid"].isin(first)]
        for name, running in threads.items():
            process = windows.devices[position].process if name == "CPU" else None
            busy = None if running is None else _until(running, end) - _until(running, start)
            frames.append(pd.DataFrame({**rows, "process": process, "name": name, "busy_ns": busy}, dtype=object))
    frame = pd.concat(frames, ignore_index=True)
    frame = frame.astype(
        {"step": "int64", "process": "Int64", "device": "Int64", "wall_ns": "int64", "busy_ns": "Int64"}
    )
    groups = frame.groupby([*facts.step_columns, "process", "device", "name"], dropna=False, sort=False)
    table: pd.DataFrame = groups[["wall_ns", "busy_ns"]].sum(min_count=1).reset_index()
    return table


def _until(running: pd.DataFrame, time_ns: Int64Array) -> Int64Array:
    """How long threads ran before each moment, summed."""
    total = np.zeros(len(time_ns), dtype=np.int64)
    for name, sign in (("start_ns", 1), ("end_ns", -1)):
        edges = np.sort(running[name].to_numpy())
        before = np.searchsorted(edges, time_ns)
        total += sign * (before * time_ns - np.concatenate(([0], np.cumsum(edges)))[before])
    return total


def kernel_view(facts: Facts) -> pd.DataFrame:
    """Kernels by name: class, family, calls, CPU time of the launching call, GPU time."""
    import pandas as pd

    kind, name = facts.trace.ops["kind"].to_numpy(), facts.trace.ops["name"].cat
    copies = (kind == OP_KINDS.index("memcpy")) | (kind == OP_KINDS.index("memset"))
    rows = np.flatnonzero(~copies & facts.counted)
    rows, duration_ns = whole_calls(facts.trace.ops, rows, facts.duration)
    families = facts.classes.families
    of_kernels = {"family": facts.classes.family[rows], "name": name.codes.to_numpy()[rows], "gpu": duration_ns}
    frame = _ops(facts, rows).assign(**of_kernels)
    table = facts.statistics(frame, ["name", "family"], facts.gpu_ns)
    family_of_row = [families[family] for family in table["family"].tolist()]
    texts = {
        "name": [str(name.categories[code]) for code in table["name"].tolist()],
        "kernel_class": [family.kernel_class for family in family_of_row],
        "family": [family.name for family in family_of_row],
    }
    view: pd.DataFrame = table.assign(**{column: pd.Series(values, dtype=str) for column, values in texts.items()})
    keys = [*facts.step_columns, *texts]
    view = view[[*keys, *view.columns.drop(keys)]]
    return view


def memory_view(facts: Facts) -> pd.DataFrame:
    """Copies and memsets by direction and host memory: calls, bytes, bandwidth, CPU and GPU time."""
    ops = facts.trace.ops
    copies = np.isin(ops["kind"].to_numpy(), [OP_KINDS.index("memcpy"), OP_KINDS.index("memset")])
    rows = np.flatnonzero(copies & facts.counted)
    frame = _ops(facts, rows).assign(
        copy=ops["name"].iloc[rows].array,
        memory=ops["host_memory"].iloc[rows].array,
        bytes=ops["bytes"].to_numpy()[rows],
    )
    table = facts.statistics(frame, ["copy", "memory"], facts.gpu_ns)
    keys = [*facts.step_columns, "copy", "memory"]
    moved = frame.astype({"copy": str, "memory": str}).groupby(keys, dropna=False)["bytes"].sum().reset_index()
    view: pd.DataFrame = table.merge(moved, on=keys, how="left")
    view["gb_per_s"] = view["bytes"] / view["gpu_total_ns"].clip(lower=1)
    return view


def user_view(facts: Facts) -> pd.DataFrame:
    """Ranges by text and category: calls, CPU time, time of the operations launched inside."""
    import pandas as pd

    ranges, host, count = facts.attribution.ranges, facts.host, len(facts.attribution.ranges.start)
    inner = ranges.nesting.innermost(host.tid[host.of_op], host.start[host.of_op])  # on the launching thread
    gpu = _nested_sums(ranges.nesting, inner, np.where(facts.counted, facts.duration, 0), count)
    # autograd threads work for the training loop's ``backward`` range, and have no such range of their own
    in_loop = np.append(np.maximum(ranges.phase_range, ranges.step_range), NONE)[inner] >= 0
    ops = np.flatnonzero(~in_loop & facts.counted & (host.of_op >= 0))
    call = host.of_op[ops]
    loop = ranges.is_one_of((*PHASE_CATEGORIES, Category.STEP, Category.USER))
    inner = Elsewhere(ranges, loop).open_at(host.pid[call], host.tid[call], host.start[call])
    gpu += _nested_sums(ranges.nesting, inner, facts.duration[ops], count)
    frame = pd.DataFrame(
        {
            "range": [ranges.names[span].text for span in ranges.name.tolist()],
            "category": [ranges.names[span].category.value for span in ranges.name.tolist()],
            "step": steps_around(ranges, np.arange(count)),
            "cpu": ranges.end - ranges.start,
            "gpu": gpu,
        }
    )
    frame = frame[facts.included(frame["step"].to_numpy())]
    return facts.statistics(frame, ["range", "category"], facts.gpu_ns)


def operator_view(facts: Facts) -> pd.DataFrame:
    """PyTorch operators, each with its kernels in rows below it: kernel '' is the operator itself."""
    import pandas as pd

    host = facts.host
    rows = np.flatnonzero(host.operator[:-1])
    if not len(rows):
        empty: pd.DataFrame = pd.DataFrame(columns=[*facts.step_columns, "operator", "kernel", "calls"])
        return empty
    tid, start, end = host.tid[rows], host.start[rows], host.end[rows]
    nesting = nest(start, end, tid)
    inner = nesting.innermost(host.tid[host.of_op], host.start[host.of_op])
    names = np.array(host.names, dtype=object)[host.name[rows]]
    frame = pd.DataFrame(
        {
            "operator": names,
            "kernel": "",
            "step": facts.step_of_calls(rows),
            "cpu": end - start,
            "gpu": _nested_sums(nesting, inner, facts.duration, len(rows)),
        }
    )
    ops = np.flatnonzero((inner >= 0) & facts.counted)
    below = _ops(facts, ops).assign(
        operator=names[inner[ops]], kernel=facts.trace.ops["name"].iloc[ops].astype(str).array
    )
    frame = frame.iloc[np.lexsort((start, tid))]
    frame = frame[facts.included(frame["step"].to_numpy())]
    operators, kernels = (
        facts.statistics(operator, ["operator", "kernel"], facts.gpu_ns) for operator in (frame, below)
    )
    rank = {name: position for position, name in enumerate(dict.fromkeys(operators["operator"]))}
    table = pd.concat([operators, kernels], ignore_index=True)
    table["rank"] = table["operator"].map(rank)
    keys = [*facts.step_columns, "rank"]
    ordered: pd.DataFrame = table.sort_values(keys, kind="stable", ignore_index=True).drop(columns="rank")
    return ordered


def sorted_operators(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Sort the table of `operator_view` by a column, descending: operators, each followed by its kernels."""
    keys = [name for name in ("instance", "operator") if name in table]
    operators = table[table["kernel"] == ""].sort_values(column, ascending=False, kind="stable")
    position = operators.assign(place=range(len(operators)))[[*keys, "place"]]
    placed = table.assign(inner=table["kernel"] != "").merge(position, on=keys, how="left")
    by = [*keys[:-1], "place", "inner", column]
    placed = placed.sort_values(by, ascending=[name != column for name in by], kind="stable", ignore_index=True)
    ordered: pd.DataFrame = placed.drop(columns=["place", "inner"])
    return ordered


def _ops(facts: Facts, rows: Int64Array) -> pd.DataFrame:
    """One row per operation: step, duration of the launching call, own duration."""
    import pandas as pd

    trace, step = facts.trace, {}
    if trace.calls is None and "duration_ns" in trace.api:  # only the launching calls were read
        launch_ns = np.append(trace.api["duration_ns"].to_numpy(), 0)[trace.launching_calls[rows]]
    else:
        call, host = facts.host.of_op[rows], facts.host
        launch_ns = np.where(call >= 0, host.end[call] - host.start[call], 0)
    if facts.by_step:
        step = {"step": facts.attribution.step[rows].astype(np.int64)}
    operations: pd.DataFrame = pd.DataFrame({**step, "cpu": launch_ns, "gpu": facts.duration[rows]})
    return operations


def _nested_sums(nesting: Nesting, inner: Int64Array, duration: Int64Array, count: int) -> Int64Array:
    """For each range, the total duration of operations launched in it or in a nested range."""
    own_rows = inner >= 0
    total = exact_sums(inner[own_rows], duration[own_rows], count)
    for level in range(int(nesting.depth.max(initial=0)), 0, -1):
        here = np.flatnonzero((nesting.depth == level) & (nesting.parent != NONE))
        np.add.at(total, nesting.parent[here], total[here])
    return total
