"""Memory by layer: allocator statistics in the layers' ranges, and CUDA allocations within them.

A layer's range can carry marks with the allocated bytes at its begin and end and its peak (`nvprof_kit.names`). nsys
can also trace CUDA memory allocations; like operations, they belong to the layer of the innermost range open on the
calling thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution, layer_column
from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array
from nvprof_kit._analysis.attribution.ranges import Elsewhere, Ranges, steps_around
from nvprof_kit._analysis.layers.tree import ModelTree
from nvprof_kit._result.column import Column, Columns
from nvprof_kit._trace.schema import Trace
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue
from nvprof_kit.names import (
    LAYER_CATEGORIES,
    MEMORY_BEGIN,
    MEMORY_END,
    MEMORY_PEAK,
    NO_LAYER,
    NO_PHASE,
    PHASE_CATEGORIES,
    Category,
)

if TYPE_CHECKING:
    import pandas as pd

CARRIED: Columns = MappingProxyType(
    {
        "memory_begin_bytes": Column("bytes allocated at the begin of a call, median over calls", "bytes"),
        "memory_end_bytes": Column("bytes allocated at the end of a call, median over calls", "bytes"),
        "memory_retained_bytes": Column(
            "bytes that a call leaves allocated, including nested layers, median over calls; negative if it frees",
            "bytes",
        ),
        "memory_peak_bytes": Column(
            "maximum of the bytes allocated during a call; exact if the process's peak rose there, otherwise the "
            "maximum over the begins and ends of the call and of the layers inside it",
            "bytes",
        ),
    }
)
"""Columns from the marks in layer ranges; missing without marks."""

TRACED: Columns = MappingProxyType(
    {
        "cuda_alloc_bytes": Column(
            "bytes allocated by CUDA (`cudaMalloc`) in the layer, without nested layers", "bytes"
        ),
        "cuda_free_bytes": Column("bytes freed by CUDA (`cudaFree`) in the layer, without nested layers", "bytes"),
    }
)
"""Columns from CUDA allocations; missing if nsys did not trace them."""

MEMORY: Columns = MappingProxyType({**CARRIED, **TRACED})

_ON_DEVICE = ("device", "array", "managed")
_MOST_BYTES = 1 << 50
"""More bytes than any computer has: a mark with a larger value is not a memory mark."""


@dataclass(frozen=True)
class LayerMemory:
    """The memory of a capture.

    Attributes:
        rows: One row per (step and instance,) layer and phase with data, with the columns of `MEMORY`; the sum of
            `cuda_alloc_bytes` covers all allocations in the window.
        traced: Whether CUDA allocations were traced.
        before_bytes: Bytes allocated by CUDA before the capture began, as far as the capture lists them.
        warnings: What is missing, and how to record it.
    """

    rows: pd.DataFrame
    traced: bool
    before_bytes: int
    warnings: tuple[Issue, ...]


def has_memory(trace: Trace) -> bool:
    """Whether a capture has any memory data."""
    return _has_marks(trace) or _has_allocations(trace)


def _has_marks(trace: Trace) -> bool:
    return trace.marks is not None and bool((trace.marks["category"] == Category.MEMORY.value).any())


def _has_allocations(trace: Trace) -> bool:
    return trace.allocations is not None and len(trace.allocations) > 0


def layer_memory(trace: Trace, attribution: Attribution, *, by_step: bool = False) -> LayerMemory:
    """The memory of each layer.

    Args:
        trace: The capture, with the tables of `nvprof_kit._trace.schema.MEMORY_TABLES`.
        attribution: Its ranges.
        by_step: One row per step, layer and phase.

    Raises:
        CaptureError: The capture has no memory data.
    """
    marks, allocations = trace.marks, trace.allocations
    carried, traced = _has_marks(trace), _has_allocations(trace)
    if not carried and not traced:
        raise CaptureError(
            f"{trace.info.path}: no memory in this capture; record it with nvprof-kit profile --preset memory, or "
            "call annotate_model(model, memory=True) in the program, for CUDA's own allocations with nsys profile "
            "--cuda-memory-usage=true"
        )
    keys = ["step", "instance", "layer", "phase"] if by_step else ["layer", "phase"]
    parts = []
    if carried and marks is not None:
        parts.append(_carried(marks, attribution.ranges, keys))
    before = 0
    if traced and allocations is not None:
        on_device = allocations[allocations["kind"].isin(_ON_DEVICE)]
        early = (on_device["tid"] == NONE) & (on_device["time_ns"] <= 0)
        before = int(on_device["bytes"][early].sum())
        parts.append(_traced(on_device[~early], attribution.ranges, keys))
    rows = parts[0] if len(parts) == 1 else parts[0].join(parts[1], how="outer")
    if traced:
        rows[list(TRACED)] = rows[list(TRACED)].fillna(0)
    rows = rows.reindex(columns=list(MEMORY)).astype("Int64").reset_index()
    return LayerMemory(rows, traced, before, tuple(_warnings(rows, carried=carried, traced=traced)))


def with_memory(rows: pd.DataFrame, memory: LayerMemory) -> pd.DataFrame:
    """Add the columns of `MEMORY` to the per-layer table; memory without a matching row is appended as new rows."""
    keys = [name for name in ("step", "instance", "layer", "phase") if name in rows]
    both: pd.DataFrame = rows.merge(memory.rows.astype({"layer": object, "phase": object}), on=keys, how="outer")
    order = rows[keys].reset_index(drop=True).reset_index(names="place")
    both = both.merge(order, on=keys, how="left").sort_values("place", kind="stable", ignore_index=True)
    both = both.drop(columns="place")[[*rows.columns, *MEMORY]]
    counts = [name for name in rows.columns if name not in keys]
    both[counts] = both[counts].fillna(0)
    table: pd.DataFrame = both.astype({name: rows[name].dtype for name in rows.columns})
    if memory.traced:
        table[list(TRACED)] = table[list(TRACED)].fillna(0)
    return table


def memory_tree(memory: LayerMemory, tree: pd.DataFrame) -> pd.DataFrame:
    """The memory of each row of `nvprof_kit._analysis.layers.layers.Layers.tree`, in its order.

    Returns:
        Columns `kept_bytes`, the bytes that a call of its forward leaves allocated, `peak_bytes`, the maximum over its
        phases, and `cuda_bytes`, CUDA allocations in it and its submodules; missing if unknown.
    """
    import pandas as pd

    rows = memory.rows.astype({"layer": object, "phase": object})
    inside = tree["layer"] != NO_LAYER
    forward = rows[rows["phase"] == Category.FORWARD.value].groupby("layer")["memory_retained_bytes"].median()
    peak = rows.groupby("layer")["memory_peak_bytes"].max()
    alloc = rows["cuda_alloc_bytes"].groupby([rows["layer"], rows["phase"].where(rows["layer"] == NO_LAYER, "")]).sum()
    keys = list(zip(tree["layer"].tolist(), tree["phase"].tolist(), strict=True))
    self_bytes = np.array([int(alloc.get(key, 0)) for key in keys], dtype=np.int64)
    nested = ModelTree.of_rows(tree["layer"], tree["parent"]).with_nested(self_bytes)
    table: pd.DataFrame = pd.DataFrame(
        {
            "kept_bytes": tree["layer"].map(forward).where(inside).astype("Float64").round().astype("Int64"),
            "peak_bytes": tree["layer"].map(peak).where(inside).astype("Int64"),
            "cuda_bytes": pd.array(nested if memory.traced else [None] * len(self_bytes), dtype="Int64"),
        }
    )
    return table


def _carried(marks: pd.DataFrame, ranges: Ranges, keys: list[str]) -> pd.DataFrame:
    """Values of the marks in layer ranges, by keys."""
    bytes_ = marks["payload"].notna() & (marks["payload"] < _MOST_BYTES)
    memory_marks = marks[(marks["category"] == Category.MEMORY.value) & bytes_.fillna(False)]
    inner = ranges.nesting.innermost(memory_marks["tid"].to_numpy(), memory_marks["time_ns"].to_numpy())
    owner = np.append(ranges.layer_range, NONE)[inner]
    owned = owner >= 0
    owner, payload = owner[owned], memory_marks["payload"].to_numpy(dtype=np.int64)[owned]
    text = memory_marks["text"].cat.set_categories([MEMORY_BEGIN, MEMORY_END, MEMORY_PEAK]).cat.codes.to_numpy()[owned]
    at_begin, end, peak = (np.full(len(ranges.start), NONE, dtype=np.int64) for _ in range(3))
    for code, values in enumerate((at_begin, end, peak)):
        np.maximum.at(values, owner[text == code], payload[text == code])
    peak = np.maximum(np.maximum(at_begin, end), peak)
    for level in range(int(ranges.nesting.depth.max(initial=0)), 0, -1):  # a peak inside is a peak of what is around
        inside = np.flatnonzero(ranges.nesting.depth == level)
        np.maximum.at(peak, ranges.nesting.parent[inside], peak[inside])
    complete = np.flatnonzero((at_begin >= 0) & (end >= 0) & ranges.is_one_of(LAYER_CATEGORIES))
    table = _keyed(ranges, complete, steps_around(ranges, complete)).assign(
        memory_begin_bytes=at_begin[complete], memory_end_bytes=end[complete], memory_peak_bytes=peak[complete]
    )
    table["memory_retained_bytes"] = table["memory_end_bytes"] - table["memory_begin_bytes"]
    how = dict.fromkeys(CARRIED, "median") | {"memory_peak_bytes": "max"}
    groups = table.groupby(keys, observed=True, dropna=False, sort=False)
    return _by_text(groups.agg(how).round().astype("Int64"), keys)


def _traced(allocations: pd.DataFrame, ranges: Ranges, keys: list[str]) -> pd.DataFrame:
    """CUDA allocations and frees, by keys."""
    pid, tid, call_time = (allocations[name].to_numpy() for name in ("pid", "tid", "call_ns"))
    inner = ranges.nesting.innermost(tid, call_time)
    layer = np.append(ranges.layer_range, NONE)[inner]
    owner = np.where(layer >= 0, layer, np.append(ranges.phase_range, NONE)[inner])
    unattributed = np.flatnonzero(owner == NONE)
    phases = Elsewhere(ranges, ranges.is_one_of(PHASE_CATEGORIES))
    owner[unattributed] = phases.open_at(pid[unattributed], tid[unattributed], call_time[unattributed])
    step = ranges.step_at(inner)
    unattributed = np.flatnonzero(step == NONE)
    steps = Elsewhere(ranges, ranges.step >= 0).open_at(pid[unattributed], tid[unattributed], call_time[unattributed])
    step[unattributed] = np.append(ranges.step, NONE)[steps]
    count = allocations["bytes"].to_numpy()
    table = _keyed(ranges, layer, step, owner).assign(
        cuda_alloc_bytes=np.maximum(count, 0), cuda_free_bytes=np.maximum(-count, 0)
    )
    groups = table.groupby(keys, observed=True, dropna=False, sort=False)
    return _by_text(groups[list(TRACED)].sum().astype("Int64"), keys)


def _by_text(table: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Convert the keys to plain strings, so that tables with different categories can be joined."""
    plain: pd.DataFrame = table.reset_index().astype({"layer": object, "phase": object}).set_index(keys)
    return plain


def _keyed(ranges: Ranges, layer: Int64Array, step: Int64Array, phase: Int64Array | None = None) -> pd.DataFrame:
    """Step, layer and phase of ranges; with `phase`, the phase of those ranges instead."""
    import pandas as pd

    texts = np.append(ranges.phase, NO_PHASE).astype(object)[layer if phase is None else phase]
    numbers = np.append(ranges.steps, 0)[step]
    keyed: pd.DataFrame = pd.DataFrame(
        {
            "step": pd.arrays.IntegerArray(numbers, _missing(step)),
            "instance": pd.arrays.IntegerArray(step.astype(np.int64), _missing(step)),
            "layer": layer_column(ranges, layer),
            "phase": np.where(texts == "", NO_PHASE, texts),
        }
    )
    return keyed


def _missing(step: Int64Array) -> npt.NDArray[np.bool_]:
    absent: npt.NDArray[np.bool_] = step == NONE
    return absent


def _warnings(rows: pd.DataFrame, *, carried: bool, traced: bool) -> list[Issue]:
    issues = []
    if not carried:
        text = (
            "the layers' ranges carry no memory, only CUDA's own allocations are known: call annotate_model(model, "
            "memory=True), or run the program with NVPROF_KIT_MEMORY=1"
        )
        issues.append(Issue("no-memory-marks", "note", 1.0, text))
    if traced and not rows["cuda_alloc_bytes"].sum():
        text = (
            "CUDA handed out no memory in the window: PyTorch's allocator used what it had; let the window hold the "
            "first step, or run with PYTORCH_NO_CUDA_MEMORY_CACHING=1 to see every allocation"
        )
        issues.append(Issue("no-cuda-allocations", "note", 1.0, text))
    return issues
