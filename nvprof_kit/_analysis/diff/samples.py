"""The samples that two captures are compared by: the GPU time of each step by layer, phase and kernel class, or of each
run of a block; and which kernels are new, gone, renamed, or launched a different number of times.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.attribution import Operations
from nvprof_kit._analysis.attribution.intervals import (
    NONE,
    Floats,
    Int64Array,
    as_slice,
    begins,
    exact_sums,
    inherit,
    joined,
    union_lengths,
)
from nvprof_kit._analysis.attribution.steps import (
    StepOptions,
    choose_steps,
    devices_of,
    left_out_warnings,
    step_windows,
)
from nvprof_kit._analysis.kernels.classes import CLASSES
from nvprof_kit._result.column import read_columns
from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.joins import distinct
from nvprof_kit._trace.schema import OP_KINDS
from nvprof_kit.issues import as_issues
from nvprof_kit.names import NO_LAYER, NO_PHASE, layer_index

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
    wall: Floats
    times: pd.DataFrame
    kernels: pd.DataFrame
    left_out: tuple[str, ...] = ()
    blocks: str = ""
    idle_ns: int = 0
    window_ns: int = 0


def phases_of_one_side(sides: tuple[list[Samples], list[Samples]]) -> set[str]:
    """The phases outside layers that only one side has, where the other has more work in no phase, by half of theirs or
    more: it does not name them.
    """
    times: list[pd.Series[float]] = []
    for runs in sides:
        rows: Any = pd.concat([run.times.mean(axis="columns") for run in runs])
        rows = rows[rows.index.get_level_values("layer") == NO_LAYER]
        times.append(rows.groupby(level="phase", observed=True).sum() / len(runs))
    unnamed: set[str] = set()
    for side, other in (times, times[::-1]):
        alone = side.drop([phase for phase in side.index if phase in other.index or phase == NO_PHASE])
        more_ns = other.get(NO_PHASE, 0.0) - side.get(NO_PHASE, 0.0)
        unnamed |= {*alone.index} if more_ns >= alone.sum() / 2 > 0 else set()
    return unnamed


def in_other(run: Samples, phases: set[str]) -> Samples:
    """The samples with these phases outside layers as `NO_PHASE`."""
    index = run.times.index.to_frame(index=False)
    index.loc[(index["layer"] == NO_LAYER) & index["phase"].isin(phases), "phase"] = NO_PHASE
    return replace(run, times=run.times.set_axis(pd.MultiIndex.from_frame(index)))


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
    number_of_step = np.append(np.where(choice.shown, np.cumsum(choice.shown) - 1, NONE), NONE)
    windows = step_windows(operations.trace, attribution)
    wall = pd.Series(windows.end - windows.start).groupby(number_of_step[windows.instance]).mean()
    return Samples(
        attribution.ranges.steps[choice.shown],
        wall.reindex(range(choice.count), fill_value=0.0).to_numpy(),
        *_times_and_kernels(operations, attribution.owners, number_of_step[attribution.step], choice.count),
        left_out,
    )


def block_samples(operations: Operations) -> Samples:
    """The samples of a capture without steps: every run of a block that is not at the edge of the window.

    The blocks are those of the stack with the most GPU time, named without their numbers. A block's forward, recompute
    and backward are one sample; its wall time is from the first operation to the end of the last of each, added up.
    """
    ranges, (layer, phase) = operations.ranges, operations.attribution.owners
    names = [_BLOCK.sub(r"\1*", str(path)) for path in layer.categories]
    start, end = (operations.trace.ops[name].to_numpy() for name in ("start_ns", "end_ns"))
    device = devices_of(operations.trace)[1]
    in_stack = np.array([name[: name.find("*") + 1] for name in names], dtype=object)[layer.codes]
    times = pd.Series(end - start).groupby(in_stack).sum().drop("", errors="ignore")
    stack = str(times.idxmax()) if len(times) else ""
    window_ns = int((pd.Series(end).groupby(device).max() - pd.Series(start).groupby(device).min()).sum())
    busy_ns = int(union_lengths(start, end, device, np.zeros(len(start), dtype=np.int64), 1)[0])

    # the run of a block around each range: the outermost layer with a number
    is_of_stack = np.array([_BLOCK.sub(r"\1*", name.text) == stack for name in ranges.names], dtype=bool)
    is_block = is_of_stack[ranges.name] & (ranges.layer_range == np.arange(len(ranges.name)))
    first_piece = np.flatnonzero(ranges.first)[np.cumsum(ranges.first) - 1]
    run = np.append(inherit(np.where(is_block, first_piece, NONE), ranges.nesting), NONE)
    ops = pd.DataFrame({"start": start, "end": end, "run": run[operations.attribution.layer_range]})
    spans = pd.DataFrame({name: getattr(ranges, name) for name in ("pid", "tid", "name", "start", "whole_end")})
    of_thread = spans.groupby("tid")
    spans["is_cut"] = spans["start"] <= of_thread["start"].transform("min")
    spans["is_cut"] |= spans["whole_end"] >= of_thread["whole_end"].transform("max")
    of_run = ops[ops["run"] >= 0].groupby("run")
    runs = spans.join(of_run.agg(first=("start", "min"), last=("end", "max")), how="inner").sort_values("first")

    # a pass of a block: its forward, recompute and backward
    runs["block"] = [layer_index(ranges.names[name].text) for name in runs["name"]]
    runs["occurrence"] = runs.groupby(["pid", "name"]).cumcount()
    of_pass = runs.groupby(["pid", "block", "occurrence"], sort=False)
    runs["pass"], is_cut = of_pass.ngroup(), of_pass["is_cut"].transform("any")
    runs = runs[~is_cut]
    passes, number = np.unique(runs["pass"], return_inverse=True)
    number_of_run = np.full(len(spans) + 1, NONE, dtype=np.int64)
    number_of_run[runs.index] = number
    owners = labels(layer.codes, names), phase
    return Samples(
        passes,
        np.bincount(number, runs["last"] - runs["first"], len(passes)).astype(np.float64),
        *_times_and_kernels(operations, owners, number_of_run[ops["run"]], len(passes)),
        blocks=stack,
        idle_ns=window_ns - busy_ns,
        window_ns=window_ns,
    )


def _times_and_kernels(
    operations: Operations, owners: tuple[pd.Categorical, pd.Categorical], sample: Int64Array, count: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The tables `Samples.times` and `Samples.kernels`.

    Args:
        operations: The operations.
        owners: Layer and phase of each.
        sample: The sample that each is in, or `NONE`.
        count: How many samples there are.
    """
    ops, inside = operations.trace.ops, as_slice(np.flatnonzero(sample >= 0))
    columns = [*owners, labels(operations.classes.code, list(CLASSES)), ops["name"].array]
    place_code = joined([column.codes[inside] for column in columns])
    assert place_code is not None, "a program has few names"
    codes, place = distinct(place_code)
    del place_code  # to limit memory
    row = np.empty(len(codes), dtype=np.int64)
    row[place] = np.arange(len(place))
    table = pd.DataFrame({name: column[inside][row] for name, column in zip([*KEY, "name"], columns, strict=True)})
    of_owner, gpu_ns = table.groupby(KEY, observed=True), (ops["end_ns"] - ops["start_ns"]).to_numpy()[inside]
    owner = of_owner.ngroup().to_numpy()
    sums_ns = exact_sums(owner[place] * count + sample[inside], gpu_ns, of_owner.ngroups * count)
    times = pd.DataFrame(sums_ns.reshape(of_owner.ngroups, count), index=of_owner.size().index)
    # kernels, or operators where there is no GPU
    is_kernel = np.isin(ops["kind"].to_numpy()[inside], [OP_KINDS.index("kernel"), OP_KINDS.index("operator")])
    place, begun = place[is_kernel], begins(ops)[inside][is_kernel].astype(np.int64)
    sums = {"count": exact_sums(place, begun, len(table)), "gpu_ns": exact_sums(place, gpu_ns[is_kernel], len(table))}
    by_owner = table.assign(**sums)[np.bincount(place, minlength=len(table)) > 0]
    of_kernel: Any = by_owner.groupby(["name", "kernel_class"], observed=True)
    where = of_kernel["count"].agg(lambda counts: tuple(sorted(counts / count)))
    kernels = (of_kernel[[*sums]].sum() / max(count, 1)).assign(where=where).reset_index()
    return times, kernels.astype({"name": str, "kernel_class": str})


KERNEL_COLUMNS = read_columns("nvprof_kit._analysis.diff", "kernels")
"""The columns of `nvprof_kit._analysis.diff.diff.Diff.kernels`."""

_SAME_COUNT = 1e-9


def compared_kernels(before: Sequence[Samples], after: Sequence[Samples]) -> tuple[pd.DataFrame, tuple[float, float]]:
    """What changed about the kernels, with `KERNEL_COLUMNS`, the costliest first, and kernels per step of each side."""
    means = []
    for side in (before, after):
        of_kernel = pd.concat([run.kernels for run in side]).groupby("name", sort=False, as_index=False)
        kernels = of_kernel.agg({"kernel_class": "first", "count": "sum", "gpu_ns": "sum", "where": "first"})
        kernels[["count", "gpu_ns"]] /= len(side)
        means.append(kernels)
    base, new = means
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
