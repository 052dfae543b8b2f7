"""The rows of a capture that operations are joined with: each layer and phase, in the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from nvprof_kit.analysis.attribution import Attribution
from nvprof_kit.analysis.flops_counted import Counted, Key
from nvprof_kit.analysis.layer_order import model_order, parents, with_holders
from nvprof_kit.analysis.layer_sums import sum_layers
from nvprof_kit.analysis.layers import LAYER_PHASES
from nvprof_kit.analysis.nesting import NONE
from nvprof_kit.analysis.operations import Operations
from nvprof_kit.analysis.owners import op_owners
from nvprof_kit.analysis.ranges import Ranges
from nvprof_kit.names import NO_LAYER, Category
from nvprof_kit.trace.schema import Trace

_MATRIX_KERNELS = ("gemm", "attention")
_ODD = 0.02
"""Part of a row's own time in matrix kernels from which on it is odd that no operation was counted."""


class Row(NamedTuple):
    """A layer and phase.

    Attributes:
        key: Both.
        calls: Times it ran.
        busy_ns: Length of the union of its operations' intervals, summed over devices, without another layer's
            recompute.
    """

    key: Key
    calls: int
    busy_ns: int


def captured_rows(trace: Trace, owned: Attribution) -> list[Row]:
    """The rows in the capture's steps, or in all of a capture without steps; in the model's order, `(none)` last."""
    sums = sum_layers(trace, owned, by_step=True)
    parent = parents(owned.ranges, sums.layers)
    order = model_order(owned.ranges, sums.layers, parent)
    apart = _with_recomputes_apart(owned.ranges, parent)
    busy_ns = sums.busy_ns
    if apart is not owned.ranges:
        busy_ns = sum_layers(trace, replace(owned, ranges=apart), by_step=True).busy_ns
    inside = slice(1 if len(sums.steps) else 0, None)  # column 0 is outside the steps
    calls, ops, busy = (values[:, inside].sum(axis=1) for values in (sums.calls, sums.ops, busy_ns))
    seen = np.flatnonzero((calls > 0) | (ops > 0) | (busy > 0)).tolist()
    rows = [Row(sums.keys[index], int(calls[index]), int(busy[index])) for index in seen]
    loop = {phase: place for place, phase in enumerate(sums.loop_phases)}

    def place(row: Row) -> tuple[int, int]:
        layer, phase = row.key
        if layer == NO_LAYER:
            return len(order), loop.get(phase, len(loop))
        return order[layer], LAYER_PHASES.index(phase)

    return sorted(rows, key=place)


def _with_recomputes_apart(ranges: Ranges, parent: Mapping[str, str]) -> Ranges:
    """The ranges as if each recompute lay in ranges of those layers alone that hold its layer, as with operations
    (`nvprof_kit.analysis.flops_counted.Counted.rows_of`).

    Args:
        ranges: All ranges.
        parent: The layer that holds each layer, '' at the top.
    """
    again = ranges.phase == Category.RECOMPUTE.value
    outer = np.append(np.append(ranges.layer_range, NONE)[ranges.nesting.parent], NONE)  # the next layer's range around
    around = outer[:-1].copy()
    outermost = again.copy()
    while (current := np.flatnonzero(outermost & (around != NONE))).size:
        outermost[current] &= ~again[around[current]]
        around = outer[around]
    holder, held = outer[:-1].copy(), dict[tuple[int, int], bool]()
    pending = np.flatnonzero(outermost & (holder != NONE))
    while pending.size:
        pairs = list(zip(ranges.name[pending].tolist(), ranges.name[holder[pending]].tolist(), strict=True))
        for inner, one in set(pairs) - held.keys():
            held[inner, one] = ranges.names[one].text in with_holders(ranges.names[inner].text, parent)
        pending = pending[[not held[pair] for pair in pairs]]
        holder[pending] = outer[holder[pending]]
        pending = pending[holder[pending] != NONE]
    moved = holder != outer[:-1]
    if not moved.any():
        return ranges
    return replace(ranges, nesting=replace(ranges.nesting, parent=np.where(moved, holder, ranges.nesting.parent)))


def uncounted_rows(operations: Operations, counted: Counted, rows: Sequence[Row]) -> dict[Key, float]:
    """Rows that run kernels of matrix products or attention, while no operation that could be theirs was counted nor
    is unknown: what called these kernels passed PyTorch by. Each with their part of its own time.
    """
    import pandas as pd

    trace = operations.trace
    if "name" not in trace.ops or not trace.info.on_gpu:
        return {}
    layer, phase = op_owners(operations.owned)
    is_matrix = np.any([operations.classes.is_a(one) for one in _MATRIX_KERNELS], axis=0)
    ns = (trace.ops["end_ns"] - trace.ops["start_ns"]).to_numpy()
    frame = pd.DataFrame({"layer": layer, "phase": phase, "ns": ns, "matrix": np.where(is_matrix, ns, 0)})
    sums = frame.groupby(["layer", "phase"], observed=True)[["ns", "matrix"]].sum()
    told = counted.told({row.key for row in rows})
    return {
        (str(layer), str(phase)): matrix / total
        for (layer, phase), total, matrix in sums.itertuples()
        if total and matrix / total > _ODD and (layer, phase) not in told
    }
