"""The samples that two captures are compared by: the GPU time of each step by layer, phase and kernel class, or of each
run of a block; and which kernels are new, gone, renamed, or launched a different number of times.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Operations, op_owners
from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array, begins, exact_sums, inherit, union_lengths
from nvprof_kit._analysis.attribution.steps import (
    StepOptions,
    choose_steps,
    devices_of,
    left_out_warnings,
    step_windows,
)
from nvprof_kit._analysis.kernels.classes import CLASSES
from nvprof_kit._result.column import Column, Columns
from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.schema import OP_KINDS
from nvprof_kit.issues import as_issues
from nvprof_kit.names import layer_index

if TYPE_CHECKING:
    import pandas as pd

KEY = ["layer", "phase", "kernel_class"]
MIN_STEPS = 2
"""The fewest steps of a capture to compare; where there are fewer, its warm-up steps are compared too."""

_BLOCK = re.compile(r"^((?:[^.]+\.)*?)(\d+)(?=\.|$)")
"""A block: the outermost layer with a number, after what precedes it."""


@dataclass(frozen=True)
class Samples:
    """The samples of one capture.

    Attributes:
        steps: Number of each step, in order of time; numbers may repeat.
        wall: Length of each step in ns, the mean over devices, shape ``(len(steps),)``.
        times: GPU time in ns: a row per layer, phase and kernel class, a column per step.
        kernels: A row per kernel name: name, kernel_class, count and gpu_ns per step, where (counts by owner, a
            hashable thing that is equal for kernels doing the same work).
        left_out: A sentence for each warm-up step that says whether it was compared.
        blocks: Where the capture has no steps, the blocks that stand for them: ``blocks.*``.
        idle_ns, window_ns: Then, how long the devices had nothing to do, of how long they are in the capture.
    """

    steps: Int64Array
    wall: npt.NDArray[np.float64]
    times: pd.DataFrame
    kernels: pd.DataFrame
    left_out: tuple[str, ...] = ()
    blocks: str = ""
    idle_ns: int = 0
    window_ns: int = 0


def step_samples(operations: Operations, options: StepOptions) -> Samples:
    """The steps of a capture; operations outside them are left out.

    Args:
        operations: The operations, with their names.
        options: Which steps, by default all but warm-up.
    """
    attribution = operations.attribution
    choice = choose_steps(operations.trace, attribution, options)
    left_out = left_out_warnings(choice)
    if not choice.asked and choice.count < MIN_STEPS:
        choice = replace(choice, shown=np.ones_like(choice.shown))
        texts = (f"{why}: warm-up, compared nevertheless, because there are few steps" for why in choice.left_out)
        left_out = as_issues("warm-up", texts, "note")
    steps = attribution.ranges.steps[choice.shown]
    column = np.append(np.where(choice.shown, np.cumsum(choice.shown) - 1, NONE), NONE)
    samples = _samples(operations, op_owners(attribution), column[attribution.step], steps)
    windows = step_windows(operations.trace, attribution)
    step = column[windows.instance]
    compared = step >= 0
    wall = exact_sums(step[compared], (windows.end - windows.start)[compared], len(steps))
    on_devices = np.bincount(step[compared], minlength=len(steps))
    return replace(samples, wall=wall / np.maximum(on_devices, 1), left_out=left_out)


def block_samples(operations: Operations) -> Samples:
    """The samples of a capture without steps: every run of a block that is not at the edge of the window.

    The blocks are those of the stack with the most GPU time, named without their numbers. A block's forward, recompute
    and backward are one sample; its wall time is from the first operation to the end of the last of each, added up.
    """
    import pandas as pd

    trace, attribution = operations.trace, operations.attribution
    ranges, (layer, phase) = attribution.ranges, op_owners(attribution)
    names = [_BLOCK.sub(r"\1*", str(text)) for text in layer.categories]
    start, end = (trace.ops[name].to_numpy() for name in ("start_ns", "end_ns"))
    stacks = np.array([re.sub(r"\*.*", "*", name) if "*" in name else "" for name in names], dtype=object)
    by_stack = pd.Series(end - start).groupby(stacks[layer.codes]).sum().drop("", errors="ignore")
    stack = str(by_stack.idxmax()) if len(by_stack) else ""
    device = devices_of(trace)[1]
    window_ns = int((pd.Series(end).groupby(device).max() - pd.Series(start).groupby(device).min()).sum())
    idle_ns = window_ns - int(union_lengths(start, end, device, np.zeros(len(start), dtype=np.int64), 1)[0])
    # the run of a block around each range: the outermost layer with a number
    is_of_stack = np.array([_BLOCK.sub(r"\1*", name.text) == stack for name in ranges.names], dtype=bool)
    is_block = is_of_stack[ranges.name] & (ranges.layer_range == np.arange(len(ranges.name)))
    first_piece = np.flatnonzero(ranges.first)[np.cumsum(ranges.first) - 1]
    run = np.append(inherit(np.where(is_block, first_piece, NONE), ranges.nesting), NONE)[attribution.layer_range]
    inside = run >= 0
    times = pd.DataFrame({"run": run[inside], "first": start[inside], "last": end[inside]}).groupby("run")
    runs = pd.DataFrame({"first": times["first"].min(), "last": times["last"].max()}).sort_values("first")
    rows = runs.index.to_numpy()
    runs["pid"], runs["name"] = ranges.pid[rows], ranges.name[rows]
    runs["number"] = [layer_index(ranges.names[name].text) for name in runs["name"]]
    runs["occurrence"] = runs.groupby(["pid", "name"]).cumcount()
    of_thread = pd.DataFrame({"tid": ranges.tid, "start": ranges.start, "end": ranges.whole_end}).groupby("tid")
    begin_ns, finish_ns = of_thread["start"].transform("min"), of_thread["end"].transform("max")
    runs["cut"] = ((ranges.start <= begin_ns) | (ranges.whole_end >= finish_ns)).to_numpy()[rows]
    runs["sample"] = runs.groupby(["pid", "number", "occurrence"], sort=False).ngroup()
    is_whole = ~runs.groupby("sample")["cut"].any().to_numpy()
    samples = np.flatnonzero(is_whole)
    column = np.append(np.where(is_whole, np.cumsum(is_whole) - 1, NONE), NONE)
    sample_of_run = np.full(len(ranges.name) + 1, NONE, dtype=np.int64)
    sample_of_run[rows] = runs["sample"].to_numpy()
    owners = labels(layer.codes, names), phase
    wall = (runs["last"] - runs["first"]).groupby(runs["sample"]).sum().to_numpy()[samples].astype(np.float64)
    return replace(
        _samples(operations, owners, column[sample_of_run[run]], samples),
        wall=wall,
        blocks=stack,
        idle_ns=idle_ns,
        window_ns=window_ns,
    )


def _samples(
    operations: Operations, owners: tuple[pd.Categorical, pd.Categorical], sample_of_op: Int64Array, samples: Int64Array
) -> Samples:
    """The samples, without their wall time: what their operations took by layer, phase and class."""
    import pandas as pd

    trace, inside = operations.trace, np.flatnonzero(sample_of_op >= 0)
    ops, number = trace.ops.iloc[inside], len(samples)
    frame = pd.DataFrame(
        {
            "layer": owners[0][inside],
            "phase": owners[1][inside],
            "kernel_class": labels(operations.classes.code[inside], list(CLASSES)),
            "sample": sample_of_op[inside],
            "gpu_ns": (ops["end_ns"] - ops["start_ns"]).to_numpy(),
            "name": ops["name"].array,
            "count": begins(trace.ops)[inside].astype(np.int64),
        }
    )
    times = frame.groupby([*KEY, "sample"], observed=True)["gpu_ns"].sum().unstack(fill_value=0)
    # kernels, or operators where there is no GPU
    kinds = [OP_KINDS.index("kernel"), OP_KINDS.index("operator")]
    frame = frame[ops["kind"].isin(kinds).to_numpy()]
    counts = frame.groupby(["name", *KEY], observed=True)["count"].sum() / max(number, 1)
    where = counts.groupby(level="name", observed=True).agg(lambda of_name: tuple(sorted(of_name)))
    kernels = frame.groupby(["name", "kernel_class"], observed=True)[["count", "gpu_ns"]].sum() / max(number, 1)
    kernels = kernels.reset_index().astype({"name": str, "kernel_class": str})
    kernels["where"] = kernels["name"].map(where.rename(index=str).to_dict())
    return Samples(samples, np.zeros(number), times.reindex(columns=range(number), fill_value=0), kernels)


KERNEL_COLUMNS: Columns = {
    "what": Column("`new`, `gone`, `renamed`, or `launches` if the number of launches differs", kind="str"),
    "name": Column("name of the kernel; in BASE if it is gone or renamed", kind="str"),
    "now": Column("its name in NEW if it is renamed", kind="str"),
    "kernel_class": Column("its class", kind="str"),
    "count": Column("launches per step, in BASE unless it is new", kind="float"),
    "base_ns": Column("time per step in BASE", "ns"),
    "new_ns": Column("time per step in NEW", "ns"),
    "base_count": Column("launches per step in BASE", kind="float"),
    "new_count": Column("launches per step in NEW", kind="float"),
}
"""The columns of `nvprof_kit._analysis.diff.diff.Diff.kernels`."""

_SAME_COUNT = 1e-9


def compared_kernels(before: Sequence[Samples], after: Sequence[Samples]) -> tuple[pd.DataFrame, tuple[float, float]]:
    """What changed about the kernels, with `KERNEL_COLUMNS`, the costliest first, and kernels per step of each side."""
    import pandas as pd

    base, new = (_mean([samples.kernels for samples in side]) for side in (before, after))
    gone, added = (
        side[~side["name"].isin(other["name"])].sort_values("gpu_ns", ascending=False, kind="stable")
        for side, other in ((base, new), (new, base))
    )
    # renamed if of one class, and run as often per step in as many places
    same_work = ["kernel_class", "where"]
    gone, added = (side.assign(turn=side.groupby(same_work).cumcount()) for side in (gone, added))
    changed = gone.merge(added, how="outer", on=[*same_work, "turn"], suffixes=("_base", "_new"), indicator="what")
    changed["what"] = changed["what"].map({"both": "renamed", "left_only": "gone", "right_only": "new"})
    changed["now"] = changed["name_new"].where(changed["what"] == "renamed", "")
    changed["name"] = changed["name_base"].fillna(changed["name_new"])
    changed = changed.sort_values("what", kind="stable")
    both = base.merge(new, on="name", suffixes=("_base", "_new"))
    both = both[(both["count_base"] - both["count_new"]).abs() > _SAME_COUNT]
    both = both.assign(what="launches", now="", kernel_class=both["kernel_class_base"])
    names = {"gpu_ns_base": "base_ns", "gpu_ns_new": "new_ns", "count_base": "base_count", "count_new": "new_count"}
    table = pd.concat([changed, both]).rename(columns=names)
    table[[*names.values()]] = table[[*names.values()]].astype(float).fillna(0.0)
    table["count"] = table["base_count"].where(table["what"] != "new", table["new_count"])
    table = table.astype({"base_ns": "int64", "new_ns": "int64", "what": str})[[*KERNEL_COLUMNS]]
    order = np.argsort(-table[["base_ns", "new_ns"]].max(axis=1).to_numpy(), kind="stable")
    return table.iloc[order].reset_index(drop=True), (float(base["count"].sum()), float(new["count"].sum()))


def _mean(runs: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The kernels, averaged over the runs."""
    import pandas as pd

    rows = pd.concat(runs, ignore_index=True)
    means = rows.groupby("name", sort=False).agg(
        kernel_class=("kernel_class", "first"),
        count=("count", "sum"),
        gpu_ns=("gpu_ns", "sum"),
        where=("where", "first"),
    )
    means[["count", "gpu_ns"]] /= len(runs)
    kernels: pd.DataFrame = means.reset_index()
    return kernels
