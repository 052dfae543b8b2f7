"""The eight views, each a function of the capture's facts.

In views of wall time (device, overview, busy time in model, distributed), overlapping time counts once; in views of
individual items (operator, kernel, memory, user), each item counts in full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.intervals import (
    NONE,
    Int64Array,
    Nesting,
    as_slice,
    exact_sums,
    nest,
    whole_calls,
)
from nvprof_kit._analysis.attribution.ranges import Elsewhere, steps_around
from nvprof_kit._analysis.layers.sums import inside_its_like
from nvprof_kit._analysis.summary.facts import Facts
from nvprof_kit._trace.schema import OP_KINDS, REPLAYED
from nvprof_kit.names import LAYER_CATEGORIES, PHASE_CATEGORIES, Category

MODEL_PARTS = ("data", "forward", "backward", "recompute", "optimizer", "other")
"""The parts in the model view; `data` is the data loader."""

_PART_OF_PHASE = dict(zip(MODEL_PARTS, MODEL_PARTS, strict=True)) | {"dataloader": "data", "zero_grad": "optimizer"}


def device(facts: Facts) -> pd.DataFrame:
    """Wall time and busy time of every GPU, and CPU time over the same period: of each process that uses a GPU, and of
    all other processes together, such as data loader workers. CPU time is summed over threads and can exceed the wall
    time. Without a GPU, the time in which a process's operators ran, and CPU time if it was recorded.
    """
    info, devices, scheduled = facts.trace.info, facts.windows.devices, facts.trace.scheduled
    scheduled = scheduled if scheduled is not None and len(scheduled) else None
    table = facts.states.assign(busy_ns=facts.states["wall_ns"] - facts.states["idle_ns"])
    if info.on_gpu:
        table["name"] = table["device"].map(info.gpu_name)
    else:
        table = table.assign(name="CPU operators", device=None)
    tables = [table]
    if info.on_gpu or facts.trace.scheduled is not None:
        first = {of_process.pid: position for position, of_process in reversed([*enumerate(devices)])}
        for pid, position in sorted(first.items(), key=lambda item: item[1]):
            running = scheduled[scheduled["pid"] == pid] if scheduled is not None else None
            tables.append(_cpu(facts, position, running).assign(process=devices[position].process, name="CPU"))
        if scheduled is not None and not scheduled["pid"].isin(first).all():
            running = scheduled[~scheduled["pid"].isin(first)]
            tables.append(_cpu(facts, 0, running).assign(process=None, name="CPU, other processes"))
    names = ["step", "process", "device", "name", "wall_ns", "busy_ns"]
    view: pd.DataFrame = pd.concat(tables, ignore_index=True)[names]
    view = view.astype({name: "Int64" for name in names if name != "name"})
    view["utilisation"] = (view["busy_ns"] / view["wall_ns"].clip(lower=1)).astype("Float64")
    return view


def _cpu(facts: Facts, position: int, running: pd.DataFrame | None) -> pd.DataFrame:
    """How long threads ran in the windows of a device, None if that was not recorded."""
    windows = facts.windows
    rows = np.flatnonzero(windows.device == position)
    start, end = windows.start[rows], windows.end[rows]
    busy = np.nan if running is None else _until(running, end) - _until(running, start)
    frame = pd.DataFrame({"step": windows.instance[rows], "wall_ns": end - start, "busy_ns": busy})
    return facts.included(frame).groupby("step", as_index=False).sum(min_count=1)


def _until(running: pd.DataFrame, time_ns: Int64Array) -> Int64Array:
    """How long threads ran before each moment, summed."""
    total = np.zeros(len(time_ns), dtype=np.int64)
    for name, sign in (("start_ns", 1), ("end_ns", -1)):
        edges = np.sort(running[name].to_numpy())
        before = np.searchsorted(edges, time_ns)
        total += sign * (before * time_ns - np.concatenate(([0], np.cumsum(edges)))[before])
    return total


def overview(facts: Facts) -> pd.DataFrame:
    """Wall time by kind of event, summed over devices and threads; overlapping time counts once per row."""
    kind, host = facts.trace.ops["kind"].to_numpy(), facts.host
    is_comm = facts.classes.is_a("comm")
    of_ops = {"kernel": (kind == OP_KINDS.index("kernel")) & ~is_comm, "communication": is_comm}
    of_ops |= {name: kind == OP_KINDS.index(name) for name in ("memcpy", "memset", "graph", "operator")}
    of_calls = {"CUDA API": ~(host.overhead | host.operator | host.system), "profiler": host.overhead}
    tables = [facts.busy_ops(np.flatnonzero(is_event), event=name) for name, is_event in of_ops.items()]
    for name, is_event in of_calls.items():
        facts.return_memory()
        calls = np.flatnonzero(is_event[:-1])
        columns = {"pid": host.pid, "lane": host.tid, "start": host.start, "end": host.end}
        columns = {key: values[as_slice(calls)] for key, values in columns.items()}
        intervals = pd.DataFrame({**columns, "step": facts.step_of_calls(calls)}, copy=False)
        del calls, columns  # of large captures, much memory
        tables.append(facts.busy_host(intervals, event=name))
    return facts.with_ratios(tables, ["event", "calls"])


def model(facts: Facts) -> pd.DataFrame:
    """Data loading, forward, backward, recompute, optimizer and everything else: CPU and GPU wall time. A part that the
    loop does not name has the ranges of its layers. The CPU time of other phases, such as prefill, is what no layer
    covers.
    """
    ranges, other = facts.attribution.ranges, MODEL_PARTS.index("other")
    part_of_op = _parts(pd.Series(facts.attribution.phases))[facts.attribution.phase]
    phases = pd.Series(ranges.phase_text).str.lower()
    parts, is_phase = _parts(phases), ranges.is_one_of((Category.PHASE, Category.OPTIMIZER, Category.DATA))
    is_layer = ranges.is_one_of(LAYER_CATEGORIES) & (ranges.tid >= REPLAYED)
    part_of_range = np.where(is_phase | (is_layer & ~np.isin(parts, parts[is_phase])), parts, NONE)
    is_other = part_of_range == other
    is_call = ranges.first & ~inside_its_like(np.where(is_other, other + ranges.phase, part_of_range), ranges)
    for code, model_part in enumerate(MODEL_PARTS):  # zero_grad is a part of the optimizer, but not a call of it
        is_named = (phases == model_part).to_numpy()
        if (is_named & (part_of_range == code)).any():
            is_call &= is_named | (part_of_range != code)
    columns = {"start": ranges.start, "end": ranges.end, "pid": ranges.pid, "lane": ranges.tid, "is_call": is_call}
    intervals = pd.DataFrame({**columns, "step": steps_around(ranges, np.arange(len(ranges.start)))})
    tables = []
    for code, model_part in enumerate(MODEL_PARTS):
        gpu = facts.busy_ops(np.flatnonzero(part_of_op == code), part=model_part).rename(columns={"calls": "gpu_ops"})
        cpu = facts.busy_host(intervals[part_of_range == code], part=model_part)
        if code == other:
            of_layers, with_other = (
                facts.busy_host(intervals[rows]).set_index("step") for rows in (is_layer, is_layer | is_other)
            )
            uncovered_ns = with_other.sub(of_layers, fill_value=0).reindex(cpu["step"])
            cpu = cpu.assign(**{name: uncovered_ns[name].to_numpy() for name in ("cpu_total_ns", "in_wall_ns")})
        tables.append(gpu.merge(cpu, on=["step", "part"], how="outer", sort=False))
    return facts.with_ratios(tables, ["part", "calls", "gpu_ops"])


def _parts(phases: pd.Series[str]) -> Int64Array:
    """The place among `MODEL_PARTS` of each phase."""
    parts = phases.str.lower().map(_PART_OF_PHASE).fillna("other")
    return parts.map(MODEL_PARTS.index).to_numpy(dtype=np.int64)


def distributed(facts: Facts) -> pd.DataFrame:
    """Compute, communication and their overlap on every GPU, in wall time."""
    table = facts.states
    if not facts.trace.info.on_gpu:
        table = table[table["comm_ns"] > 0].assign(device=None)
    overlap_ns = table["comm_ns"] - table["exposed_comm_ns"]
    table = table.assign(
        overlap_ns=overlap_ns,
        comm_ratio=table["comm_ns"] / table["wall_ns"].clip(lower=1),
        overlap_ratio=(overlap_ns / table["comm_ns"]).where(table["comm_ns"] > 0, 0.0),
    )
    times = ["wall_ns", "compute_ns", "comm_ns", "overlap_ns", "exposed_comm_ns", "comm_ratio", "overlap_ratio"]
    return table[["step", "process", "device", *times]]


def kernel(facts: Facts) -> pd.DataFrame:
    """Kernels by name: class, family, calls, CPU time of the launching call, GPU time."""
    kind, name = facts.trace.ops["kind"].to_numpy(), facts.trace.ops["name"].cat
    is_copy = (kind == OP_KINDS.index("memcpy")) | (kind == OP_KINDS.index("memset"))
    rows, duration_ns = whole_calls(facts.trace.ops, np.flatnonzero(~is_copy & facts.is_included), facts.duration)
    families, names = facts.classes.families, name.categories.astype(str)
    of_kernels = {"family": facts.classes.family[rows], "name": name.codes.to_numpy()[rows], "gpu": duration_ns}
    table = facts.statistics(facts.ops(rows).assign(**of_kernels), ["name", "family"])
    table.insert(2, "kernel_class", table["family"].map(lambda family: families[family].kernel_class).astype(str))
    table["family"] = table["family"].map(lambda family: families[family].name).astype(str)
    table["name"] = names[table["name"]]
    return table


def memory(facts: Facts) -> pd.DataFrame:
    """Copies and memsets by direction and host memory: calls, bytes, bandwidth, CPU and GPU time."""
    ops = facts.trace.ops
    is_copy = np.isin(ops["kind"].to_numpy(), [OP_KINDS.index("memcpy"), OP_KINDS.index("memset")])
    rows = np.flatnonzero(is_copy & facts.is_included)
    columns = ops[["name", "host_memory", "bytes"]].iloc[rows].astype({"name": str, "host_memory": str})
    frame = facts.ops(rows).join(columns.set_axis(["copy", "memory", "bytes"], axis=1).reset_index(drop=True))
    keys = ["step", "copy", "memory"]
    moved = frame.groupby(keys)["bytes"].sum().reset_index()
    view: pd.DataFrame = facts.statistics(frame, keys[1:]).merge(moved, on=keys, how="left")
    view["gb_per_s"] = view["bytes"] / view["gpu_total_ns"].clip(lower=1)
    return view


def user(facts: Facts) -> pd.DataFrame:
    """Ranges by text and category: calls, CPU time, time of the operations launched inside."""
    ranges, host = facts.attribution.ranges, facts.host
    count = len(ranges.start)
    inner = ranges.nesting.innermost(host.tid[host.of_op], host.start[host.of_op])  # on the launching thread
    gpu = _nested_sums(ranges.nesting, inner, np.where(facts.is_included, facts.duration, 0))
    # autograd threads work for the training loop's ``backward`` range, and have no such range of their own
    in_loop = np.append(np.maximum(ranges.phase_range, ranges.step_range), NONE)[inner] >= 0
    ops = np.flatnonzero(~in_loop & facts.is_included & (host.of_op >= 0))
    call = host.of_op[ops]
    loop = Elsewhere(ranges, ranges.is_one_of((*PHASE_CATEGORIES, Category.STEP, Category.USER)))
    inner = loop.open_at(host.pid[call], host.tid[call], host.start[call])
    gpu += _nested_sums(ranges.nesting, inner, facts.duration[ops])
    names = [ranges.names[name] for name in ranges.name.tolist()]
    frame = pd.DataFrame(
        {
            "range": [name.text for name in names],
            "category": [name.category.value for name in names],
            "step": steps_around(ranges, np.arange(count)),
            "cpu": ranges.end - ranges.start,
            "gpu": gpu,
        }
    )
    return facts.statistics(facts.included(frame), ["range", "category"])


def operator(facts: Facts) -> pd.DataFrame:
    """PyTorch operators, each with its kernels in rows below it: kernel '' is the operator itself."""
    host = facts.host
    rows = np.flatnonzero(host.operator[:-1])
    rows = rows[np.lexsort((host.start[rows], host.tid[rows]))]
    if not len(rows):
        return pd.DataFrame(columns=["step", "operator", "kernel", "calls"])
    start, end = host.start[rows], host.end[rows]
    nesting = nest(start, end, host.tid[rows])
    inner = nesting.innermost(host.tid[host.of_op], host.start[host.of_op])
    names = np.array(host.names, dtype=object)[host.name[rows]]
    gpu = _nested_sums(nesting, inner, facts.duration)
    frame = pd.DataFrame(
        {"operator": names, "kernel": "", "step": facts.step_of_calls(rows), "cpu": end - start, "gpu": gpu}
    )
    ops = np.flatnonzero((inner >= 0) & facts.is_included)
    names_of_ops = facts.trace.ops["name"].iloc[ops].astype(str).array
    below = facts.ops(ops).assign(operator=names[inner[ops]], kernel=names_of_ops)
    operators, kernels = (facts.statistics(rows, ["operator", "kernel"]) for rows in (facts.included(frame), below))
    rank = operators.sort_values("step", kind="stable")[["step", "operator"]].assign(rank=range(len(operators)))
    table = pd.concat([operators, kernels], ignore_index=True).merge(rank, on=["step", "operator"], how="left")
    return table.sort_values("rank", kind="stable", ignore_index=True).drop(columns="rank")


def _nested_sums(nesting: Nesting, inner: Int64Array, duration: Int64Array) -> Int64Array:
    """For each range, the total duration of operations launched in it or in a nested range."""
    inside = inner >= 0
    total = exact_sums(inner[inside], duration[inside], len(nesting.depth))
    for level in range(int(nesting.depth.max(initial=0)), 0, -1):
        here = np.flatnonzero((nesting.depth == level) & (nesting.parent != NONE))
        np.add.at(total, nesting.parent[here], total[here])
    return total


_VIEWS = (device, overview, model, distributed, operator, kernel, memory, user)
VIEWS: Mapping[str, Callable[[Facts], pd.DataFrame]] = {view.__name__: view for view in _VIEWS}
"""The views by name."""
