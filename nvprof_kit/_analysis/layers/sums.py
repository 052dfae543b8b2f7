"""Sums of operations and ranges by layer, phase and step: the figures of the per-layer table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nvprof_kit._analysis.attribution.attribution import Attribution, Operations
from nvprof_kit._analysis.attribution.intervals import (
    NONE,
    Bools,
    Cover,
    Int64Array,
    begins,
    exact_sums,
    inherit,
    union_lengths,
)
from nvprof_kit._analysis.attribution.ranges import Ranges, steps_around
from nvprof_kit._analysis.attribution.steps import StepChoice, devices_of
from nvprof_kit._analysis.kernels.classes import CLASSES
from nvprof_kit._analysis.layers.tree import ModelTree
from nvprof_kit._result.column import Columns, read_columns
from nvprof_kit._trace.annotations import engine_phase
from nvprof_kit._trace.schema import OP_KINDS, REPLAYED
from nvprof_kit.names import LAYER_CATEGORIES, LAYER_PHASES, NO_LAYER, NO_PHASE, PHASE_CATEGORIES

PARTS = ("compute_ns", "comm_ns", "copy_ns")
"""Columns that split `gpu_self_ns`; they exist only if the operations' names were read."""

SPLITS: Mapping[str, str] = {"class": "class_", "phase": "during_"}
"""The further ways to split time, and the prefixes of their column names."""

SPLIT_COLUMNS = read_columns("nvprof_kit._analysis.layers", "splits")
"""Their columns and what they mean."""

CARRIED = read_columns("nvprof_kit._analysis.layers", "marked-memory")
"""Columns from the marks in layer ranges; missing without marks."""

TRACED = read_columns("nvprof_kit._analysis.layers", "traced-memory")
"""Columns from CUDA allocations; missing if nsys did not trace them."""

MEMORY: Columns = {**CARRIED, **TRACED}
"""All columns of memory."""


@dataclass(frozen=True)
class Cells:
    """The rows and columns of the sums, which have the shape ``(rows, columns)``.

    A row is a layer in a phase, layer by layer in the order of the model; behind the layers, a phase outside layers. A
    column is a step, or all steps together.

    Attributes:
        tree: The layers.
        phases: The phases in which layers have ranges; each layer has a row for each.
        outside: The phases outside layers, in the order in which they first ran, and `NO_PHASE`.
        of_range: The row of each range, `NONE` for one that is neither a layer nor a phase.
        of_phase: The row of each of `Ranges.phases` outside layers, `NONE` for one that only layers have.
        instances: The step instance of each column; `NONE` for work outside steps, and for all steps together.
        of_instance: The column of each step instance, with that of work outside steps appended; `NONE` where it is not
            shown.
    """

    tree: ModelTree
    phases: tuple[str, ...]
    outside: tuple[str, ...]
    of_range: Int64Array
    of_phase: Int64Array
    instances: Int64Array
    of_instance: Int64Array

    @classmethod
    def of(cls, ranges: Ranges, choice: StepChoice, by_step: bool = False) -> Cells:
        """The rows of a capture's ranges and the columns of the chosen steps."""
        is_layer, is_phase = ranges.is_one_of(LAYER_CATEGORIES), ranges.is_one_of(PHASE_CATEGORIES)
        tree = ModelTree.of_ranges(ranges)
        of_layers = {ranges.phases[code] for code in np.unique(ranges.phase[is_layer]).tolist()}
        phases = tuple(phase for phase in LAYER_PHASES if phase in of_layers)
        in_time = ranges.phase[is_phase][np.argsort(ranges.start[is_phase], kind="stable")]
        outside = tuple(dict.fromkeys([*(ranges.phases[code] for code in in_time.tolist()), NO_PHASE]))
        layer = np.array([tree.index.get(name.text, NONE) for name in ranges.names], dtype=np.int64)
        phase = np.array([phases.index(text) if text in phases else NONE for text in ranges.phases])
        behind = len(tree.layers) * len(phases)
        of_phase = np.array([behind + outside.index(text) if text in outside else NONE for text in ranges.phases])
        row = np.full(len(ranges.start), NONE, dtype=np.int64)
        row[is_layer] = layer[ranges.name[is_layer]] * len(phases) + phase[ranges.phase[is_layer]]
        row[is_phase] = of_phase[ranges.phase[is_phase]]
        is_shown = np.append(choice.shown, choice.is_whole)
        instances = np.append(np.arange(len(choice.shown)), NONE)[is_shown] if by_step else np.array([NONE])
        column = np.cumsum(is_shown) - 1 if by_step else np.zeros(len(is_shown), dtype=np.int64)
        return cls(tree, phases, outside, row, of_phase, instances, np.where(is_shown, column, NONE))

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and of columns."""
        return len(self.tree.layers) * len(self.phases) + len(self.outside), len(self.instances)

    @property
    def layer_rows(self) -> int:
        """The number of rows of layers, which come first."""
        return len(self.tree.layers) * len(self.phases)

    @property
    def labels(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Layer and phase of each row."""
        layers = [layer for layer in self.tree.layers for _ in self.phases] + [NO_LAYER] * len(self.outside)
        phases = [*self.phases * len(self.tree.layers), *self.outside]
        return np.array(layers, dtype=object), np.array(phases, dtype=object)

    @property
    def outer(self) -> Int64Array:
        """The row of each row's parent layer in the same phase, `NONE` at the top and outside layers."""
        outer = np.full(self.shape[0], NONE, dtype=np.int64)
        parent, count = np.repeat(self.tree.parent, len(self.phases)), len(self.phases)
        outer[: self.layer_rows] = np.where(parent >= 0, parent * count + np.arange(self.layer_rows) % count, NONE)
        return outer

    def of_operations(self, attribution: Attribution) -> Int64Array:
        """The cell of each operation, row * columns + column; `NONE` where its step is not shown."""
        cell = np.append(self.of_range, NONE)[attribution.layer_range]
        outside, column = np.flatnonzero(attribution.layer_range < 0), self.of_instance[attribution.step]
        cell[outside] = self.of_phase[attribution.phase[outside]]
        cell *= self.shape[1]  # in place, to limit memory
        cell += column
        cell[column < 0] = NONE
        return cell

    def by_layer(self, values: Int64Array) -> Int64Array:
        """The rows of layers, shape ``(layers, phases, columns)``."""
        return values[: self.layer_rows].reshape(len(self.tree.layers), len(self.phases), values.shape[1])

    def with_nested(self, values: Int64Array) -> Int64Array:
        """Sums over each layer and all layers inside it, phase by phase."""
        nested = self.tree.with_nested(self.by_layer(values))
        return np.concatenate([nested.reshape(self.layer_rows, values.shape[1]), values[self.layer_rows :]])

    def frame(self, values: Mapping[str, Int64Array], is_row: Bools, steps: Int64Array) -> pd.DataFrame:
        """Step number, step instance, layer, phase and the values of some cells, step by step in model order.

        Args:
            values: Columns, shape ``(rows, columns)`` each.
            is_row: The cells.
            steps: The step number of each step instance.
        """
        column, row = np.nonzero(is_row.T)
        instance = self.instances[column]
        layer, phase = self.labels
        return pd.DataFrame(
            {
                "step": pd.arrays.IntegerArray(np.append(steps, 0)[instance], instance < 0),
                "instance": pd.arrays.IntegerArray(instance, instance < 0),
                "layer": layer[row],
                "phase": phase[row],
                **{name: of_cells[row, column] for name, of_cells in values.items()},
            }
        )

    def around(self, items: Int64Array, cell: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Every pair of an item and a cell such that the item is of the cell, or of one of a layer inside it.

        Args:
            items: The items, shape ``(n,)``.
            cell: The cell of each: row * columns + column.
        """
        outer, width = self.outer, self.shape[1]
        pairs = [(items, cell)]
        while len(items):
            is_inside = outer[cell // width] >= 0
            items, cell = items[is_inside], cell[is_inside]
            cell = outer[cell // width] * width + cell % width
            pairs.append((items, cell))
        all_items, cells = zip(*pairs, strict=True)
        return np.concatenate(all_items), np.concatenate(cells)


def sum_layers(
    operations: Operations, cells: Cells, splits: Sequence[str] = ()
) -> tuple[dict[str, Int64Array], dict[str, tuple[str, ...]], Cover]:
    """Sum a capture's operations and ranges by row and column.

    Args:
        operations: The operations and their owners.
        cells: The rows and columns.
        splits: Which of `SPLITS` to add.

    Returns:
        The sums by column of the per-layer table, the names of those that split the time further, and when each device
        was busy.
    """
    trace, attribution = operations.trace, operations.attribution
    cell, duration = cells.of_operations(attribution), trace.durations
    start, end = (trace.ops[name].to_numpy() for name in ("start_ns", "end_ns"))
    device, shape = devices_of(trace)[1], cells.shape
    count = shape[0] * shape[1]
    is_shown = cell >= 0
    cell[~is_shown] = count  # behind the cells: that costs less than to take the other operations out

    def split(names: Sequence[str], code: npt.NDArray[np.integer[Any]]) -> dict[str, Int64Array]:
        """The durations by cell and part."""
        table = exact_sums(cell * len(names) + code, duration, count * len(names)).reshape(*shape, len(names))
        return {name: table[:, :, index] for index, name in enumerate(names)}

    has_names = "name" in trace.ops
    kind = trace.ops["kind"].to_numpy()
    part_code = np.zeros(len(kind), dtype=np.int8)
    part_code[(kind == OP_KINDS.index("memcpy")) | (kind == OP_KINDS.index("memset"))] = PARTS.index("copy_ns")
    if has_names:
        part_code[operations.is_comm] = PARTS.index("comm_ns")
    sums = split(PARTS, part_code)
    self_ns = np.sum(list(sums.values()), axis=0)
    busy = Cover(device, start, end)
    overlapping = np.flatnonzero(is_shown & ~busy.alone())
    of_overlapping = exact_sums(cell[overlapping], duration[overlapping], count).reshape(shape)
    op, cell_around = cells.around(overlapping, cell[overlapping])
    busy_ns = cells.with_nested(self_ns - of_overlapping)
    busy_ns += union_lengths(start[op], end[op], device[op], cell_around, count).reshape(shape)
    calls, cpu_ns = _calls_and_cpu_time(attribution.ranges, cells, attribution.replay, cell)
    is_first = begins(trace.ops)
    sums |= {
        "calls": calls,
        "gpu_ops": np.bincount(cell if is_first.all() else cell[is_first], minlength=count)[:count].reshape(shape),
        "gpu_self_ns": self_ns,
        "gpu_total_ns": cells.with_nested(self_ns),
        "gpu_busy_ns": busy_ns,
        "cpu_ns": cpu_ns,
    }
    names: dict[str, tuple[str, ...]] = {}
    if "class" in splits and has_names:
        present, code = np.unique(operations.classes.code.astype(np.int64), return_inverse=True)
        names["class"] = tuple(f"{SPLITS['class']}{[*CLASSES][number]}_ns" for number in present.tolist())
        sums |= split(names["class"], code)
    if "phase" in splits:
        names["phase"], code = _phases_of_loop(attribution)
        sums |= split(names["phase"], code)
    return sums, names, busy


def _calls_and_cpu_time(
    ranges: Ranges, cells: Cells, replay: npt.NDArray[np.int32], cell: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Number of calls of each cell, and the CPU time of its ranges: of a layer all, of a phase what no layer covers. A
    range nested in another of its row is counted with the outer one. Of a layer that has a range, each CUDA graph
    replay that ran an operation of it or of a layer inside it is a call too.

    Args:
        ranges: The ranges.
        cells: The rows and columns.
        replay: The replay of each operation, or `NONE`.
        cell: The cell of each operation, which is in no cell if that is behind the last.
    """
    chosen = np.flatnonzero(cells.of_range >= 0)
    start, end, pid = ranges.start[chosen], ranges.end[chosen], ranges.pid[chosen]
    of_layer, repeats = ranges.is_one_of(LAYER_CATEGORIES)[chosen], inside_its_like(cells.of_range, ranges)[chosen]
    length = end - start
    if of_layer.any() and not of_layer.all():  # of a phase of the loop, what no layer's range covers
        covered = Cover(pid[of_layer], start[of_layer], end[of_layer])
        length[~of_layer] -= covered.inside(pid[~of_layer], start[~of_layer], end[~of_layer])
    column = cells.of_instance[steps_around(ranges, chosen)]
    counts = (column >= 0) & (ranges.tid[chosen] >= REPLAYED)
    is_call = counts & ranges.first[chosen] & (of_layer | ~repeats)
    range_cell, is_timed = cells.of_range[chosen] * cells.shape[1] + column, counts & ~repeats
    size = cells.shape[0] * cells.shape[1]
    calls = np.bincount(range_cell[is_call], minlength=size).reshape(cells.shape)
    cpu_ns = exact_sums(range_cell[is_timed], length[is_timed], size).reshape(cells.shape)
    in_replay = (replay >= 0) & (cell < size)
    replays, cell = np.divmod(np.unique(replay[in_replay].astype(np.int64) * size + cell[in_replay]), size)
    run, cell_around = cells.around(np.arange(len(cell)), cell)
    runs = np.unique(replays[run] * size + cell_around)
    rows = np.arange(cells.shape[0])
    is_layer = (rows < cells.layer_rows) & np.isin(rows, cells.of_range)
    calls[is_layer] += np.bincount(runs % size, minlength=size).reshape(cells.shape)[is_layer]
    return calls, cpu_ns


def inside_its_like(label: Int64Array, ranges: Ranges) -> Bools:
    """Which ranges are nested, at any depth, in a range with the same label."""
    parent = ranges.nesting.parent
    nearest = np.append(inherit(np.where(label >= 0, np.arange(len(label)), NONE), ranges.nesting), NONE)
    result = np.zeros(len(label), dtype=bool)
    rows, outer = np.arange(len(label)), nearest[parent]
    while len(rows):
        is_inside = outer >= 0
        rows, outer = rows[is_inside], outer[is_inside]
        result[rows[label[outer] == label[rows]]] = True
        outer = nearest[parent[outer]]
    return result


def _phases_of_loop(attribution: Attribution) -> tuple[tuple[str, ...], Int64Array]:
    """The columns of the phases of the loop, in the order in which they first ran, and the column of each operation: by
    the phase range that encloses its layer's range, else by what an engine's step computes.
    """
    ranges = attribution.ranges
    of_layer = np.append(ranges.phase_text, NO_PHASE)[np.append(ranges.phase_range, NONE)[attribution.layer_range]]
    outside = np.array(ranges.phases, dtype=object)[attribution.phase]
    text = np.where(attribution.layer_range >= 0, of_layer, outside)
    of_step = np.full(len(ranges.steps) + 1, "", dtype=object)
    for row in np.flatnonzero(ranges.step >= 0).tolist():
        of_step[ranges.step[row]] = engine_phase(ranges.names[ranges.name[row]].text) or ""
    of_engine = of_step[attribution.step]
    text = np.where((text == NO_PHASE) & (of_engine != ""), of_engine, text)
    names, first, code = np.unique(text.astype(str), return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    columns = (re.sub(r"[^0-9A-Za-z]+", "_", str(name)) for name in names[order])
    return tuple(f"{SPLITS['phase']}{name}_ns" for name in columns), np.argsort(order, kind="stable")[code]
