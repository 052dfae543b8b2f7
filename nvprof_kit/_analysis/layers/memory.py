"""Memory by layer: allocator statistics in the layers' ranges, and CUDA allocations within them.

A layer's range can carry marks with the allocated bytes at its begin and end and its peak (`nvprof_kit.names`). nsys
can also trace CUDA memory allocations; like operations, they belong to the layer of the innermost range open on the
calling thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array
from nvprof_kit._analysis.attribution.ranges import OwnerLookup, Ranges, steps_around
from nvprof_kit._analysis.layers.sums import CARRIED, MEMORY, TRACED, Cells
from nvprof_kit._analysis.layers.tree import ModelTree
from nvprof_kit._trace.schema import Trace
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue
from nvprof_kit.names import LAYER_CATEGORIES, MEMORY_BEGIN, MEMORY_END, MEMORY_PEAK, NO_LAYER, NO_PHASE, Category

_ON_DEVICE = ("device", "array", "managed")
_MOST_BYTES = 1 << 50
"""More bytes than any computer has: a mark with a larger value is not a memory mark."""


@dataclass(frozen=True)
class LayerMemory:
    """The memory of a capture.

    Attributes:
        by_cell: The columns of `MEMORY`; a row for each cell of `Cells` that has data, by row * columns + column. By
            step those of the chosen steps, else the whole capture: the sum of `cuda_alloc_bytes` covers all allocations
            in the window.
        traced: Whether CUDA allocations were traced.
        before_bytes: Bytes allocated by CUDA before the capture began, as far as the capture lists them.
        warnings: What is missing, and how to record it.
    """

    by_cell: pd.DataFrame
    traced: bool
    before_bytes: int
    warnings: tuple[Issue, ...]

    def beside(self, rows: pd.DataFrame, cell: Int64Array) -> pd.DataFrame:
        """The rows of a table with the columns of `MEMORY`, by the cell of each."""
        memory = self.by_cell.reindex(cell)
        if self.traced:
            memory = memory.fillna(dict.fromkeys(TRACED, 0))
        return rows.assign(**{str(name): values.array for name, values in memory.items()})

    def of_tree(self, cells: Cells, tree: pd.DataFrame) -> pd.DataFrame:
        """The memory of each row of `Layers.tree`, in its order.

        Returns:
            Columns `kept_bytes`, the bytes that a call of its forward leaves allocated, `peak_bytes`, the maximum over
            its phases, and `cuda_bytes`, CUDA allocations in it and its submodules; missing if unknown.
        """
        layer, phase = cells.labels
        by_row = self.by_cell.reindex(range(len(layer))).assign(layer=layer, phase=phase)
        inside = tree["layer"] != NO_LAYER
        forward = by_row[by_row["phase"] == Category.FORWARD.value].groupby("layer")["memory_retained_bytes"].max()
        peak = by_row.groupby("layer")["memory_peak_bytes"].max()
        row_of_tree = by_row["layer"].where(by_row["layer"] != NO_LAYER, NO_LAYER + by_row["phase"])
        alloc = by_row["cuda_alloc_bytes"].groupby(row_of_tree).sum()
        keys = tree["layer"].where(inside, NO_LAYER + tree["phase"])
        own_bytes = keys.map(alloc).fillna(0).to_numpy(dtype=np.int64)
        nested = ModelTree(keys.tolist(), tree["parent"].tolist()).with_nested(own_bytes)
        return pd.DataFrame(
            {
                "kept_bytes": tree["layer"].map(forward).where(inside).astype("Int64"),
                "peak_bytes": tree["layer"].map(peak).where(inside).astype("Int64"),
                "cuda_bytes": pd.array(nested if self.traced else [None] * len(nested), dtype="Int64"),
            }
        )


def has_memory(trace: Trace) -> bool:
    """Whether a capture has any memory data."""
    return _has_marks(trace) or _has_allocations(trace)


def _has_marks(trace: Trace) -> bool:
    return trace.marks is not None and bool((trace.marks["category"] == Category.MEMORY.value).any())


def _has_allocations(trace: Trace) -> bool:
    return trace.allocations is not None and len(trace.allocations) > 0


def layer_memory(trace: Trace, ranges: Ranges, cells: Cells, *, by_step: bool = False) -> LayerMemory:
    """The memory of each layer.

    Args:
        trace: The capture, with the tables ``marks`` and ``allocations``.
        ranges: Its ranges.
        cells: The rows and columns of the per-layer table.
        by_step: Whether these columns are steps.

    Raises:
        CaptureError: The capture has no memory data.
    """
    marks, allocations = trace.marks, trace.allocations
    carried, traced = _has_marks(trace), _has_allocations(trace)
    if not carried and not traced:
        on_gpu = trace.info.on_gpu and len(trace.ops)
        raise CaptureError.of("no-memory" if on_gpu else "no-memory:no-gpu", path=trace.info.path)

    def by_cell(table: pd.DataFrame, row: Int64Array, step: Int64Array, how: Mapping[str, str]) -> pd.DataFrame:
        """Columns of a table together by cell."""
        column = cells.of_instance[step] if by_step else np.zeros(len(step), dtype=np.int64)
        is_shown = column >= 0
        cell = row[is_shown] * cells.shape[1] + column[is_shown]
        return table[is_shown].groupby(cell).agg(dict(how)).round().astype("Int64")

    parts, before = [], 0
    if carried and marks is not None:
        rows, carry = _carried(marks, ranges)
        how = dict.fromkeys(CARRIED, "median") | {"memory_peak_bytes": "max"}
        parts.append(by_cell(carry, cells.of_range[rows], steps_around(ranges, rows), how))
    if traced and allocations is not None:
        on_device = allocations[allocations["kind"].isin(_ON_DEVICE)]
        early = (on_device["tid"] == NONE) & (on_device["time_ns"] <= 0)
        before, later = int(on_device["bytes"][early].sum()), on_device[~early]
        _, _, owner, step, _ = OwnerLookup(ranges).at(*(later[name].to_numpy() for name in ("pid", "tid", "call_ns")))
        row = np.append(cells.of_range, cells.of_phase[ranges.phases.index(NO_PHASE)])[owner]
        count = later["bytes"].to_numpy()
        amounts = pd.DataFrame({"cuda_alloc_bytes": np.maximum(count, 0), "cuda_free_bytes": np.maximum(-count, 0)})
        parts.append(by_cell(amounts, row, step, dict.fromkeys(TRACED, "sum")))
    table = pd.concat(parts, axis=1).reindex(columns=list(MEMORY)).astype("Int64")
    issues = []
    if not carried:
        issues.append(Issue.of("no-memory-marks"))
    if traced and not table["cuda_alloc_bytes"].sum():
        issues.append(Issue.of("no-cuda-allocations"))
    return LayerMemory(table, traced, before, tuple(issues))


def _carried(marks: pd.DataFrame, ranges: Ranges) -> tuple[Int64Array, pd.DataFrame]:
    """The ranges of layers with marks at begin and end, and for each the values of `CARRIED`."""
    has_bytes = marks["payload"].notna() & (marks["payload"] < _MOST_BYTES)
    memory_marks = marks[(marks["category"] == Category.MEMORY.value) & has_bytes.fillna(False)]
    inner = ranges.nesting.innermost(memory_marks["tid"].to_numpy(), memory_marks["time_ns"].to_numpy())
    owner = np.append(ranges.layer_range, NONE)[inner]
    owned = owner >= 0
    owner, payload = owner[owned], memory_marks["payload"].to_numpy(dtype=np.int64)[owned]
    text = memory_marks["text"].cat.set_categories([MEMORY_BEGIN, MEMORY_END, MEMORY_PEAK]).cat.codes.to_numpy()[owned]
    at_begin, at_end, peak = (np.full(len(ranges.start), NONE, dtype=np.int64) for _ in range(3))
    for code, values in enumerate((at_begin, at_end, peak)):
        np.maximum.at(values, owner[text == code], payload[text == code])
    peak = np.maximum(np.maximum(at_begin, at_end), peak)
    for level in range(int(ranges.nesting.depth.max(initial=0)), 0, -1):  # a peak inside is a peak of what is around
        inside = np.flatnonzero(ranges.nesting.depth == level)
        np.maximum.at(peak, ranges.nesting.parent[inside], peak[inside])
    rows = np.flatnonzero((at_begin >= 0) & (at_end >= 0) & ranges.is_one_of(LAYER_CATEGORIES))
    table = pd.DataFrame({"memory_begin_bytes": at_begin[rows], "memory_end_bytes": at_end[rows]})
    table["memory_retained_bytes"] = table["memory_end_bytes"] - table["memory_begin_bytes"]
    return rows, table.assign(memory_peak_bytes=peak[rows])
