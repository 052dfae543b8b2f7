"""GPU time per step by layer, phase and kernel class: the samples that two captures are compared by; and which kernels
are new, gone, renamed, or launched a different number of times.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Operations, op_owners
from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array, begins, exact_sums, inherit, union_lengths
from nvprof_kit._analysis.attribution.steps import (
    ALL_STEPS,
    StepOptions,
    choose_steps,
    devices_of,
    left_out_warnings,
    step_windows,
)
from nvprof_kit._analysis.kernels.classes import CLASSES, KernelClasses, Rule
from nvprof_kit._result.column import Column, Columns
from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.schema import OP_KINDS, Trace
from nvprof_kit.issues import as_issues
from nvprof_kit.names import layer_index

if TYPE_CHECKING:
    import pandas as pd

Key = tuple[str, str, str]
"""Layer, phase and kernel class."""

_BLOCK = re.compile(r"((?:[^.]+\.)*?)(\d+)(?=\.|$)")
"""A block: the outermost layer with a number, after what precedes it."""


@dataclass(frozen=True)
class StepSums:
    """The samples of one capture.

    Attributes:
        steps: Number of each step, in order of time; numbers may repeat.
        wall: Length of each step in ns, the mean over devices, shape ``(len(steps),)``.
        by_key: GPU time in ns by key, a value per step, shape ``(len(steps),)`` each.
        kernels: A row per kernel name: name, kernel_class, count and gpu_ns per step, where (counts by owner, a
            hashable thing that is equal for kernels doing the same work).
        left_out: A sentence for each warm-up step that says whether it was compared.
        blocks: Where the capture has no steps, the blocks that stand for them: ``blocks.*``.
        idle_ns, window_ns: Then, how long the devices had nothing to do, of how long they are in the capture.
    """

    steps: npt.NDArray[np.int64]
    wall: npt.NDArray[np.float64]
    by_key: dict[Key, npt.NDArray[np.int64]]
    kernels: pd.DataFrame
    left_out: tuple[str, ...] = ()
    blocks: str = ""
    idle_ns: int = 0
    window_ns: int = 0


def step_sums(
    trace: Trace,
    own_rules: Sequence[Rule] = (),
    options: StepOptions = ALL_STEPS,
    min_steps: int = 0,
    attributed: Operations | None = None,
) -> StepSums:
    """Sum a capture's operations by step and by layer, phase and class; operations outside these steps are left out.

    Args:
        trace: The capture, with the column ``name``.
        own_rules: Rules for kernel classes, tried before the package's.
        options: Which steps, by default all but warm-up.
        min_steps: The number of steps needed; if there are fewer without warm-up, warm-up steps are included.
        attributed: The same operations, if their owners and classes are already known.
    """
    operations = Operations(trace, own_rules, attributed)
    attribution, classes = operations.attribution, operations.classes
    choice = choose_steps(trace, attribution, options)
    left_out = left_out_warnings(choice)
    if not choice.asked and choice.count < min_steps:
        choice = replace(choice, shown=np.ones_like(choice.shown))
        left_out = as_issues(
            "warm-up",
            (f"{reason}: warm-up, compared nevertheless, because there are few steps" for reason in choice.left_out),
            "note",
        )
    steps = attribution.ranges.steps[choice.shown]
    column = np.append(np.where(choice.shown, np.cumsum(choice.shown) - 1, NONE), NONE)
    of_op = column[attribution.step]
    layer, phase = op_owners(attribution)
    sums = _sums(trace, classes, (layer, phase), of_op, steps)
    windows = step_windows(trace, attribution)
    step = column[windows.instance]
    compared = step >= 0
    wall = exact_sums(step[compared], (windows.end - windows.start)[compared], len(steps))
    stretches = np.bincount(step[compared], minlength=len(steps))  # on the devices
    return replace(sums, wall=wall / np.maximum(stretches, 1), left_out=left_out)


def block_sums(trace: Trace, own_rules: Sequence[Rule] = (), attributed: Operations | None = None) -> StepSums:
    """The samples of a capture without steps: every run of a block that is not at the edge of the window.

    The blocks are those of the stack with the most GPU time, named without their numbers. A block's forward, recompute
    and backward are one sample; its wall time is from the first operation to the end of the last of each, added up.
    """
    import pandas as pd

    operations = Operations(trace, own_rules, attributed)
    attribution, ranges = operations.attribution, operations.attribution.ranges
    layer, phase = op_owners(attribution)
    matches = [_BLOCK.match(str(text)) for text in layer.categories]
    stacks = [f"{match[1]}*" if match else "" for match in matches]
    names = [f"{stack}{text[match.end(2) :]}" if match else text
             for match, stack, text in zip(matches, stacks, layer.categories, strict=True)]  # fmt: skip
    code = layer.codes.astype(np.int64)
    start, end = (trace.ops[name].to_numpy() for name in ("start_ns", "end_ns"))
    by_stack = pd.Series(end - start).groupby(np.array(stacks, dtype=object)[code]).sum().drop("", errors="ignore")
    device = devices_of(trace)[1]
    window_ns = int((pd.Series(end).groupby(device).max() - pd.Series(start).groupby(device).min()).sum())
    idle_ns = window_ns - int(union_lengths(start, end, device, np.zeros(len(start), dtype=np.int64), 1)[0])
    stack = str(by_stack.idxmax()) if len(by_stack) else ""
    # the run of a block around each range: the outermost layer with a number
    is_block = np.array(
        [bool((match := _BLOCK.fullmatch(name.text)) and f"{match[1]}*" == stack) for name in ranges.names], dtype=bool
    )[ranges.name] & (ranges.layer_range == np.arange(len(ranges.name)))
    first_piece = np.flatnonzero(ranges.first)[np.cumsum(ranges.first) - 1]
    run = np.append(inherit(np.where(is_block, first_piece, NONE), ranges.nesting), NONE)[attribution.layer_range]
    inside = run >= 0
    times = pd.DataFrame({"run": run[inside], "first": start[inside], "last": end[inside]}).groupby("run")
    runs = pd.DataFrame({"first": times["first"].min(), "last": times["last"].max()}).sort_values("first")
    rows = runs.index.to_numpy()
    runs["pid"], runs["name"] = ranges.pid[rows], ranges.name[rows]
    runs["number"] = [layer_index(ranges.names[name].text) for name in runs["name"]]
    runs["occurrence"] = runs.groupby(["pid", "name"]).cumcount()
    edges = pd.DataFrame({"tid": ranges.tid, "start": ranges.start, "end": ranges.whole_end}).groupby("tid")
    begin_ns, finish = edges["start"].transform("min").to_numpy(), edges["end"].transform("max").to_numpy()
    runs["cut"] = (ranges.start[rows] <= begin_ns[rows]) | (ranges.whole_end[rows] >= finish[rows])
    samples = runs.groupby(["pid", "number", "occurrence"], sort=False)
    runs["sample"] = samples.ngroup()
    is_whole = ~runs.groupby("sample")["cut"].any()
    steps = np.flatnonzero(is_whole.to_numpy())
    column = np.full(len(is_whole) + 1, NONE, dtype=np.int64)
    column[steps] = np.arange(len(steps))
    sample_of_run = np.full(len(ranges.name) + 1, NONE, dtype=np.int64)
    sample_of_run[rows] = runs["sample"].to_numpy()
    sums = _sums(trace, operations.classes, (labels(code, names), phase), column[sample_of_run[run]], steps)
    wall = (runs["last"] - runs["first"]).groupby(runs["sample"]).sum().to_numpy()[steps].astype(np.float64)
    return replace(sums, wall=wall, blocks=stack, idle_ns=idle_ns, window_ns=window_ns)


def _sums(
    trace: Trace,
    classes: KernelClasses,
    owners: tuple[pd.Categorical, pd.Categorical],
    sample_of_op: Int64Array,
    samples: npt.NDArray[np.int64],
) -> StepSums:
    """The sums of the operations of each sample, by layer, phase and class."""
    layer, phase = owners
    inside = np.flatnonzero(sample_of_op >= 0)
    phases, count = len(phase.categories), len(samples)
    code = classes.code.astype(np.int64)
    pair = (layer.codes.astype(np.int64) * phases + phase.codes.astype(np.int64)) * len(CLASSES) + code
    keys, row = np.unique(pair[inside], return_inverse=True)
    duration = (trace.ops["end_ns"] - trace.ops["start_ns"]).to_numpy()[inside]
    cells = exact_sums(row * count + sample_of_op[inside], duration, len(keys) * count)
    names = tuple(CLASSES)
    return StepSums(
        steps=samples,
        wall=np.zeros(count),
        by_key={
            (
                str(layer.categories[key // len(CLASSES) // phases]),
                str(phase.categories[key // len(CLASSES) % phases]),
                names[key % len(CLASSES)],
            ): values
            for key, values in zip(keys.tolist(), cells.reshape(len(keys), count), strict=True)
        },
        kernels=_kernels(trace, classes, pair, inside, max(count, 1)),
    )


def _kernels(
    trace: Trace, classes: KernelClasses, pair: npt.NDArray[np.int64], inside: npt.NDArray[np.int64], steps: int
) -> pd.DataFrame:
    """Kernels, or operators where there is no GPU, among the operations inside the steps, by name, per step."""
    import pandas as pd

    kinds = [OP_KINDS.index("kernel"), OP_KINDS.index("operator")]
    rows = inside[np.isin(trace.ops["kind"].to_numpy()[inside], kinds)]
    names = trace.ops["name"].cat
    frame = pd.DataFrame(
        {
            "name": names.codes.to_numpy()[rows],
            "code": classes.code[rows],
            "key": pair[rows],
            "count": begins(trace.ops)[rows].astype(np.int64),
            "gpu_ns": (trace.ops["end_ns"] - trace.ops["start_ns"]).to_numpy()[rows],
        }
    )
    by_place = frame.groupby(["name", "code", "key"], sort=True)["count"].sum().reset_index()
    where = by_place.groupby("name")["count"].apply(lambda counts: tuple(sorted(counts / steps)))
    table = frame.groupby(["name", "code"], sort=False)[["count", "gpu_ns"]].sum().reset_index()
    kernels: pd.DataFrame = pd.DataFrame(
        {
            "name": [str(names.categories[code]) for code in table["name"]],
            "kernel_class": [tuple(CLASSES)[code] for code in table["code"]],
            "count": table["count"] / steps,
            "gpu_ns": table["gpu_ns"] / steps,
            "where": where.reindex(table["name"]).tolist() if len(table) else [],
        }
    )
    return kernels


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


def compared_kernels(before: Sequence[StepSums], after: Sequence[StepSums]) -> tuple[pd.DataFrame, tuple[float, float]]:
    """What changed about the kernels, with `KERNEL_COLUMNS`, the costliest first, and kernels per step of each side."""
    import pandas as pd

    base, new = (_mean([sums.kernels for sums in side]) for side in (before, after))
    gone, added = (
        side[~side["name"].isin(other["name"])].sort_values("gpu_ns", ascending=False, kind="stable")
        for side, other in ((base, new), (new, base))
    )
    left: list[dict[Any, Any]] = added.to_dict("records")
    none = {"name": "", "count": 0.0, "gpu_ns": 0.0}
    rows = []
    for old in gone.to_dict("records"):
        # renamed if of one class, and run as often per step in as many places
        same = next(
            (
                kernel
                for kernel in left
                if kernel["kernel_class"] == old["kernel_class"] and kernel["where"] == old["where"]
            ),
            None,
        )
        if same is not None:
            left.remove(same)
        rows.append(_row("renamed" if same else "gone", old, same or none))
    rows += [
        _row("new", none | {"name": kernel["name"], "kernel_class": kernel["kernel_class"]}, kernel) for kernel in left
    ]
    both = base.merge(new, on="name", suffixes=("", "_new"))
    changed = both[(both["count"] - both["count_new"]).abs() > _SAME_COUNT]
    rows += [
        _row("launches", kernel, {"name": "", "count": kernel["count_new"], "gpu_ns": kernel["gpu_ns_new"]})
        for kernel in changed.to_dict("records")
    ]
    table = pd.DataFrame(rows, columns=list(KERNEL_COLUMNS)).astype({"base_ns": "int64", "new_ns": "int64"})
    order = np.argsort(-table[["base_ns", "new_ns"]].max(axis=1).to_numpy(), kind="stable")
    return table.iloc[order].reset_index(drop=True), (float(base["count"].sum()), float(new["count"].sum()))


def _mean(runs: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The kernels, averaged over the runs."""
    import pandas as pd

    if len(runs) == 1:
        return runs[0]
    rows = pd.concat(runs, ignore_index=True)
    how = {"kernel_class": "first", "count": "sum", "gpu_ns": "sum", "where": "first"}
    means: pd.DataFrame = rows.groupby("name", sort=False).agg(how).reset_index()
    for column in ("count", "gpu_ns"):
        means[column] /= len(runs)
    return means


def _row(kind: str, old: dict[Any, Any], now: dict[Any, Any]) -> tuple[Any, ...]:
    name = now["name"] if kind == "renamed" else ""
    count = now["count"] if kind == "new" else old["count"]
    time_ns = (old["gpu_ns"], now["gpu_ns"])
    return (kind, old["name"], name, old["kernel_class"], count, *time_ns, old["count"], now["count"])
