"""Sums of operations and ranges by (layer, phase) and step; and by kernel class or phase of the loop.

The arrays of `LayerSums` have shape ``(keys, columns)``: a key is a (layer, phase) pair, a column is a step instance or
several of them together; column 0 is outside steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution, Operations, op_owners
from nvprof_kit._analysis.attribution.intervals import (
    NONE,
    Cover,
    Int64Array,
    Integers,
    alone,
    begins,
    exact_sums,
    inherit,
    union_lengths,
)
from nvprof_kit._analysis.attribution.ranges import Ranges, steps_around
from nvprof_kit._analysis.attribution.steps import devices_of
from nvprof_kit._analysis.kernels.classes import CLASSES, KernelClasses
from nvprof_kit._analysis.layers.tree import ModelTree
from nvprof_kit._result.column import Column, Columns
from nvprof_kit._trace.annotations import engine_phase
from nvprof_kit._trace.schema import OP_KINDS, REPLAYED, Trace
from nvprof_kit.names import LAYER_CATEGORIES, NO_LAYER, NO_PHASE, PHASE_CATEGORIES

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class LayerSums:
    """The sums; arrays are int64 of shape ``(keys, columns)``.

    Attributes:
        keys: The (layer, phase) pairs.
        without_ranges: Those without a range of their own: the layer did not run in that phase, only layers inside it
            did. Their totals are those of these layers, everything else is 0.
        tree: The layers, without `NO_LAYER`.
        loop_phases: Texts of the phase ranges, by first start.
        calls, ops, self_ns, compute_ns, comm_ns, copy_ns, total_ns, cpu_ns: The columns of the per-layer table.
        busy_ns: The same, or a single column for all.
    """

    keys: list[tuple[str, str]]
    without_ranges: frozenset[tuple[str, str]]
    tree: ModelTree
    loop_phases: tuple[str, ...]
    calls: Int64Array
    ops: Int64Array
    self_ns: Int64Array
    compute_ns: Int64Array
    comm_ns: Int64Array
    copy_ns: Int64Array
    total_ns: Int64Array
    busy_ns: Int64Array
    cpu_ns: Int64Array

    @property
    def arrays(self) -> dict[str, Int64Array]:
        """The arrays by their column names in the per-layer table."""
        return {
            "calls": self.calls,
            "gpu_ops": self.ops,
            "gpu_self_ns": self.self_ns,
            "compute_ns": self.compute_ns,
            "comm_ns": self.comm_ns,
            "copy_ns": self.copy_ns,
            "gpu_total_ns": self.total_ns,
            "gpu_busy_ns": self.busy_ns,
            "cpu_ns": self.cpu_ns,
        }


class StepColumns(NamedTuple):
    """The meaning of the columns of the sums.

    Attributes:
        of_instance: The column of each step instance, with that of operations outside steps appended.
        width: Number of columns.
    """

    of_instance: Int64Array
    width: int

    @classmethod
    def by_step(cls, steps: int) -> StepColumns:
        """One column for operations outside steps, then one per instance."""
        return cls(np.append(np.arange(1, steps + 1), 0), steps + 1)

    @classmethod
    def apart(cls, is_shown: npt.NDArray[np.bool_]) -> StepColumns:
        """Three columns: outside steps, the shown instances, and the others."""
        return cls(np.append(np.where(is_shown, 1, 2), 0), 3)


def sum_layers(
    trace: Trace,
    attribution: Attribution,
    columns: StepColumns,
    classes: KernelClasses | None = None,
    *,
    busy: bool = True,
) -> LayerSums:
    """Sum a capture's operations and ranges by layer, phase and column.

    Args:
        trace: The capture.
        attribution: The owner of each operation.
        columns: The meaning of the columns.
        classes: The class of each operation; without it, everything counts as compute or copy by its kind.
        busy: Separate the columns in `LayerSums.busy_ns` too; otherwise it has one column for all.
    """
    ranges = attribution.ranges
    keyed = _keyed(ranges, attribution)
    tree = ModelTree.of_ranges(ranges, dict.fromkeys(layer for layer, _ in keyed.keys if layer != NO_LAYER))
    # the ancestors of each layer in its phases that have no range there: activation checkpointing recomputes the blocks
    # of a model, not the model, but the model's total in `recompute` includes theirs
    with_ranges = set(keyed.keys)
    above = ((outer, phase) for layer, phase in keyed.keys if layer != NO_LAYER for outer in tree.around(layer))
    keys_of_parents = [key for key in dict.fromkeys(above) if key not in with_ranges]
    keyed = replace(keyed, keys=[*keyed.keys, *keys_of_parents])
    width = columns.width
    cells, count = (len(keyed.keys), width), len(keyed.keys) * width
    start, end = (trace.ops[name].to_numpy() for name in ("start_ns", "end_ns"))
    device = devices_of(trace)[1]
    duration = end - start
    column = columns.of_instance[attribution.step]
    inside = attribution.layer_range >= 0
    own_key = np.where(
        inside, np.append(keyed.of_range, NONE)[attribution.layer_range], keyed.outside[attribution.phase]
    )
    cell = own_key * width + column
    chain = _Chain.of(keyed, tree, width)
    kind = trace.ops["kind"].to_numpy()
    is_copy = (kind == OP_KINDS.index("memcpy")) | (kind == OP_KINDS.index("memset"))
    is_comm = np.zeros(len(kind), dtype=bool) if classes is None else classes.is_a("comm")
    sorts = {"compute": ~(is_copy | is_comm), "comm": is_comm, "copy": is_copy & ~is_comm}
    parts = {name: exact_sums(cell[is_sort], duration[is_sort], count) for name, is_sort in sorts.items()}
    self_ns = np.sum(list(parts.values()), axis=0)
    free = alone(start, end, device)
    busy_ns = chain.with_nested(exact_sums(cell[free], duration[free], count))
    columns_per_sum = 1 if busy else width
    busy_ns = busy_ns.reshape(-1, columns_per_sum).sum(axis=1)
    crowd = np.flatnonzero(~free)
    if len(crowd):
        op, group = chain.memberships(crowd, own_key[crowd], column[crowd])
        busy_ns += union_lengths(start[op], end[op], device[op], group // columns_per_sum, count // columns_per_sum)
    calls, cpu_ns = _range_sums(ranges, keyed, columns)
    ran = np.flatnonzero((attribution.replay >= 0) & inside)
    calls += chain.replays(attribution.replay[ran], own_key[ran], column[ran])
    calls = calls.reshape(cells)
    calls[len(keyed.keys) - len(keys_of_parents) :] = 0  # a replay ran layers inside them, but not them
    return LayerSums(
        keys=keyed.keys,
        without_ranges=frozenset(keys_of_parents),
        tree=tree,
        loop_phases=keyed.loop_phases,
        calls=calls,
        ops=np.bincount(cell[begins(trace.ops)], minlength=count).reshape(cells),
        self_ns=self_ns.reshape(cells),
        compute_ns=parts["compute"].reshape(cells),
        comm_ns=parts["comm"].reshape(cells),
        copy_ns=parts["copy"].reshape(cells),
        total_ns=chain.with_nested(self_ns).reshape(cells),
        busy_ns=busy_ns.reshape(len(keyed.keys), -1),
        cpu_ns=cpu_ns.reshape(cells),
    )


# ---------------------------------------------------------------- keys


@dataclass(frozen=True)
class _Keyed:
    """The keys, and the key of each range and of operations outside layers.

    `of_range` is `NONE` for a range that is neither a layer nor a phase. `repeats` marks a range nested in another one
    with the same key: the outer one already includes its time.
    """

    keys: list[tuple[str, str]]
    of_range: Int64Array
    repeats: npt.NDArray[np.bool_]
    outside: Int64Array
    loop_phases: tuple[str, ...]


def _keyed(ranges: Ranges, attribution: Attribution) -> _Keyed:
    is_layer, is_phase = ranges.is_one_of(LAYER_CATEGORIES), ranges.is_one_of(PHASE_CATEGORIES)
    text = np.array([named.text for named in ranges.names], dtype=object)
    by_time = np.argsort(ranges.start, kind="stable")
    loop_phases = tuple(dict.fromkeys(ranges.phase[by_time[is_phase[by_time]]].tolist()))
    layer_code = np.where(is_layer, ranges.name, NONE)
    phase_code = {phase: code for code, phase in enumerate(attribution.phases)}
    pair = layer_code * len(attribution.phases) + _codes(ranges.phase, phase_code)
    pairs = np.unique(pair[is_layer])
    merged: dict[tuple[str, str], int] = {}
    key_of_pair = [
        merged.setdefault(
            (text[pair_code // len(attribution.phases)], attribution.phases[pair_code % len(attribution.phases)]),
            len(merged),
        )
        for pair_code in pairs.tolist()
    ]
    of_range = np.full(len(pair), NONE, dtype=np.int64)
    of_range[is_layer] = np.array(key_of_pair, dtype=np.int64)[np.searchsorted(pairs, pair[is_layer])]
    outside = np.full(len(attribution.phases), NONE, dtype=np.int64)
    for phase in dict.fromkeys((*loop_phases, *attribution.phases, NO_PHASE)):
        if phase:
            outside[phase_code[phase]] = merged.setdefault((NO_LAYER, phase), len(merged))  # a layer may be named so
    of_range[is_phase] = outside[_codes(ranges.phase[is_phase], phase_code)]
    return _Keyed(
        keys=list(merged),
        of_range=of_range,
        repeats=inside_its_like(of_range, ranges),
        outside=outside,
        loop_phases=loop_phases,
    )


def _codes(values: npt.NDArray[Any], codes: dict[str, int]) -> Int64Array:
    return np.array([codes[value] for value in values.tolist()], dtype=np.int64)


def inside_its_like(label: Int64Array, ranges: Ranges) -> npt.NDArray[np.bool_]:
    """Which ranges are nested, at any depth, in a range with the same label."""
    parent = ranges.nesting.parent
    nearest = np.append(inherit(np.where(label >= 0, np.arange(len(label)), NONE), ranges.nesting), NONE)
    result = np.zeros(len(label), dtype=bool)
    current = nearest[parent]
    while (current >= 0).any():
        result |= (current >= 0) & (label >= 0) & (np.append(label, NONE)[current] == label)
        current = nearest[np.append(parent, NONE)[current]]
    return result


# ---------------------------------------------------------------- chains of layers


@dataclass(frozen=True)
class _Chain:
    """Traverses from a key outward through the layer's ancestors in the model, in the same phase.

    Uses the model structure and not the nesting of ranges: a backward pass recomputes a checkpointed block inside the
    range of the submodule that needs it first, but that submodule must not include the time of the others.

    Attributes:
        outer: The key of the next ancestor with the same phase, `NONE` if there is none; `NONE` is appended.
        inwards: The keys, ancestors before descendants.
        columns: Number of columns per key.
    """

    outer: Int64Array
    inwards: list[int]
    columns: int

    @classmethod
    def of(cls, keyed: _Keyed, tree: ModelTree, columns: int) -> _Chain:
        index = {key: number for number, key in enumerate(keyed.keys)}
        outer = [index.get((tree.parent_of.get(layer, ""), phase), NONE) for layer, phase in keyed.keys]
        depth_of = dict(zip(tree.layers, tree.depth.tolist(), strict=True))
        inwards = sorted(range(len(keyed.keys)), key=lambda number: depth_of.get(keyed.keys[number][0], 0))
        return cls(np.array([*outer, NONE], dtype=np.int64), inwards, columns)

    def with_nested(self, self_values: Int64Array) -> Int64Array:
        """Sums by cell including those of descendants."""
        table = self_values.reshape(-1, self.columns).copy()
        for key in reversed(self.inwards):
            if (outer_key := self.outer[key]) >= 0:
                table[outer_key] += table[key]
        summed: Int64Array = table.ravel()
        return summed

    def memberships(self, ops: Int64Array, key: Int64Array, column: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Every (operation, cell) pair in which the operation belongs to the cell or a descendant."""
        op, cell = [], []
        while (here := np.flatnonzero(key >= 0)).size:
            ops, key, column = ops[here], key[here], column[here]
            op.append(ops)
            cell.append(key * self.columns + column)
            key = self.outer[key]
        empty = np.zeros(0, dtype=np.int64)
        return np.concatenate([empty, *op]), np.concatenate([empty, *cell])

    def replays(self, replay: Integers, key: Int64Array, column: Int64Array) -> Int64Array:
        """How often CUDA graph replays ran each cell: once per replay that ran an operation of it or a descendant."""
        cells = (len(self.outer) - 1) * self.columns
        wide = replay.astype(np.int64)  # products of counts overflow int32
        _, first = np.unique(wide * cells + key * self.columns + column, return_index=True)
        op, cell = self.memberships(wide[first], key[first], column[first])
        return np.bincount(np.unique(op * cells + cell) % cells, minlength=cells)


def _range_sums(ranges: Ranges, keyed: _Keyed, columns: StepColumns) -> tuple[Int64Array, Int64Array]:
    """Number of ranges of each cell, and their CPU time: of a layer all, of a phase what no layer covers. A range
    nested in another of its key is counted with the outer one.
    """
    keyed_ranges = np.flatnonzero(keyed.of_range >= 0)
    column = columns.of_instance[steps_around(ranges, keyed_ranges)]
    cell = keyed.of_range[keyed_ranges] * columns.width + column
    cells = len(keyed.keys) * columns.width
    start, end, pid = ranges.start[keyed_ranges], ranges.end[keyed_ranges], ranges.pid[keyed_ranges]
    of_layer = ranges.is_one_of(LAYER_CATEGORIES)[keyed_ranges]
    length = end - start
    if of_layer.any() and not of_layer.all():  # of a phase of the loop, what no layer's range covers
        covered = Cover(pid[of_layer], start[of_layer], end[of_layer])
        length[~of_layer] -= covered.inside(pid[~of_layer], start[~of_layer], end[~of_layer])
    replayed = ranges.tid[keyed_ranges] < REPLAYED
    length = np.where(keyed.repeats[keyed_ranges] | replayed, 0, length)
    is_call = ranges.first[keyed_ranges] & (of_layer | ~keyed.repeats[keyed_ranges]) & ~replayed
    return np.bincount(cell[is_call], minlength=cells), exact_sums(cell, length, cells)


SPLITS: Mapping[str, str] = MappingProxyType({"class": "class_", "phase": "during_"})
"""The ways to split time, and the prefixes of their column names."""

SPLIT_COLUMNS: Columns = {
    "class_NAME_ns": Column(
        "the part of `gpu_self_ns` in kernels of a class: `class_gemm_ns`, `class_attention_ns`, …, in ns "
        "(only with `--columns class`)",
        "ns",
    ),
    "during_NAME_ns": Column(
        "the part that ran during a phase of the loop: `during_prefill_ns`, `during_decode_ns`, …, or "
        "`during_other_ns`, in ns (only with `--columns phase`)",
        "ns",
    ),
}
"""The columns and what they mean."""


@dataclass(frozen=True)
class Parts:
    """The part that each operation belongs to.

    Attributes:
        columns: Column name of each part.
        code: Index into `columns`, shape ``(n,)``.
    """

    columns: tuple[str, ...]
    code: Int64Array


def parts_by_class(classes: KernelClasses) -> Parts:
    """Kernels by class; only classes that occur."""
    present, code = np.unique(classes.code.astype(np.int64), return_inverse=True)
    names = list(CLASSES)
    return Parts(tuple(f"{SPLITS['class']}{names[number]}_ns" for number in present.tolist()), code.astype(np.int64))


def parts_by_phase(attribution: Attribution) -> Parts:
    """Operations by the phase range that encloses their layer's range, else by what an engine's step computes, in the
    order in which the phases first ran.
    """
    ranges = attribution.ranges
    phase_range = np.append(ranges.phase_range, NONE)[attribution.layer_range]
    of_loop = np.append(np.asarray(ranges.phase, dtype=object), NO_PHASE)[phase_range]
    outside = np.asarray(attribution.phases, dtype=object)[attribution.phase]
    text = np.where(attribution.layer_range >= 0, of_loop, outside)
    phase_of_step = np.full(len(ranges.steps) + 1, "", dtype=object)
    for row in np.flatnonzero(ranges.step >= 0).tolist():
        phase_of_step[ranges.step[row]] = engine_phase(ranges.names[ranges.name[row]].text) or ""
    of_step = phase_of_step[attribution.step]
    text = np.where((text == NO_PHASE) & (of_step != ""), of_step, text)
    names, first, code = np.unique(text.astype(str), return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.argsort(order, kind="stable")
    columns = tuple(
        f"{SPLITS['phase']}{re.sub(r'[^0-9A-Za-z]+', '_', str(names[code_number]))}_ns"
        for code_number in order.tolist()
    )
    return Parts(columns, rank[code].astype(np.int64))


def split(
    rows: pd.DataFrame, tree: pd.DataFrame, operations: Operations, parts: Parts, is_shown: npt.NDArray[np.bool_]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Add a column for each part to the rows, with self times, and to the tree, with submodules and over all phases.

    Args:
        rows: One row per layer and phase.
        tree: `nvprof_kit._analysis.layers.layers.Layers.tree`.
        operations: The operations.
        parts: The part of each operation.
        is_shown: The operations that rows and tree cover.
    """
    ops = operations.trace.ops
    duration = (ops["end_ns"] - ops["start_ns"]).to_numpy()
    layer_of_op, phase_of_op = op_owners(operations.attribution)
    count, phases = len(parts.columns), len(phase_of_op.categories)
    codes = (layer_of_op.codes.astype(np.int64) * phases + phase_of_op.codes)[is_shown]
    cells = len(layer_of_op.categories) * phases * count
    table = exact_sums(codes * count + parts.code[is_shown], duration[is_shown], cells).reshape(-1, count)
    sums = {
        (str(layer_of_op.categories[code // phases]), str(phase_of_op.categories[code % phases])): table[code]
        for code in np.unique(codes).tolist()
    }
    nothing = np.zeros(count, dtype=np.int64)
    keys = zip(rows["layer"].tolist(), rows["phase"].tolist(), strict=True)
    values = np.array([sums.get(key, nothing) for key in keys], dtype=np.int64).reshape(-1, count)
    tree_keys = zip(tree["layer"].tolist(), tree["phase"].tolist(), strict=True)
    line_of_key = {key if key[0] == NO_LAYER else (key[0], ""): number for number, key in enumerate(tree_keys)}
    self_times = np.zeros((len(tree), count), dtype=np.int64)
    for (layer, phase), times in sums.items():
        self_times[line_of_key[layer, phase if layer == NO_LAYER else ""]] += times
    nested = ModelTree.of_rows(tree["layer"], tree["parent"]).with_nested(self_times)
    return (
        rows.assign(**{name: values[:, index] for index, name in enumerate(parts.columns)}),
        tree.assign(**{name: nested[:, index] for index, name in enumerate(parts.columns)}),
    )
