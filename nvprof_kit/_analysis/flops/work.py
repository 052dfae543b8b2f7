"""What was counted, by the layers and phases of a capture: work, memory traffic, and the least time for both.

An operator needs at least the longer of two times: its floating point operations at the peak of their data type, and
its memory traffic at the bandwidth (Williams et al., "Roofline", 2009). Its traffic is what it reads and writes, each
storage once, without what the L2 can hold from one operator to the next (`nvprof_kit.count_flops` follows that). A
layer's limit is the sum over its operators; fused, it is the longer time of all its operations together and of its
parameters, inputs and outputs. `torch.compile` fuses operators, so in layers whose kernels it made only products,
convolutions and attention have a limit of their own.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.attribution import Attribution, Operations
from nvprof_kit._analysis.attribution.intervals import Bools, Floats, Int64Array
from nvprof_kit._analysis.hardware import Peaks, peaks_of
from nvprof_kit._analysis.layers.layers import LIMITS, Layers
from nvprof_kit._analysis.layers.tree import parents_of, with_ancestors
from nvprof_kit._trace.flops_file import FlopsFile
from nvprof_kit._trace.schema import CaptureInfo, Trace
from nvprof_kit.names import LAYER_PHASES, NO_LAYER, NO_PHASE, Category

Key = tuple[str, str]
"""Layer and phase."""


_COMPILED = re.compile(r"^triton_(poi|red|per|for|tem|mm|unk)_")
"""Names of kernels that torch.compile generates."""


def compiled_rows(trace: Trace, attribution: Attribution) -> frozenset[Key]:
    """The layers and phases that run kernels which torch.compile made of several operators."""
    if "name" not in trace.ops:
        return frozenset()
    names = trace.ops["name"].astype("category").cat
    is_compiled = np.array([bool(_COMPILED.match(str(name))) for name in names.categories] + [False])
    if not is_compiled.any():
        return frozenset()
    is_compiled = is_compiled[names.codes.to_numpy()]
    layer, phase = (np.asarray(owner, dtype=object)[is_compiled] for owner in attribution.owners)
    return frozenset(zip(map(str, layer), map(str, phase), strict=True))


class Program:
    """A counted program: its ranges, a layer or phase each, and its operators with their least times on a GPU.

    Args:
        counts: What was counted.
        peaks: The GPU's peaks; without them, times are NaN.

    Attributes:
        counts: What was counted.
        keys: The layer and phase of each range.
        calls: How often each layer and phase ran.
        recomputes: Whether a range is in a layer that activation checkpointing runs again.
        operators: The columns of ``operators`` in `nvprof_kit._trace.flops_file.TABLES` and, in ns: ``peak_ns`` and
            ``least_peak_ns``, the time of its operations at the peak, of all and of those that a causal mask leaves;
            ``memory_ns``, that of its traffic at the bandwidth; ``limit_ns``, the longer of the latter two; and the
            parts of it in operators that are limited by their operations (``compute_ns``) and in products,
            convolutions and attention (``products_ns``).
    """

    def __init__(self, counts: FlopsFile, peaks: Peaks | None) -> None:
        self.counts = counts
        ranges, operators = counts.ranges, counts.operators
        self.keys: list[Key] = [*zip(ranges["layer"], ranges["phase"], strict=True)]
        self._inside: list[int] = ranges["inside"].tolist()
        self.calls: Counter[Key] = Counter()
        for key, calls in zip(self.keys, ranges["calls"].tolist(), strict=True):
            self.calls[key] += calls
        self.recomputes = self.within({key for key in self.keys if key[1] == Category.RECOMPUTE.value})
        self._bytes_per_ns = peaks.bandwidth / 1e9 if peaks and peaks.bandwidth else math.nan
        flops, least_flops, dram_bytes = (operators[name].to_numpy() for name in ("flops", "least_flops", "dram_bytes"))
        flops_per_s = peaks.flops if peaks else {}
        peak = np.array([flops_per_s.get(dtype, math.nan) for dtype in operators["dtype"]]) / 1e9
        peak[flops == 0] = math.inf
        at_peak, least_at_peak, memory = flops / peak, least_flops / peak, dram_bytes / self._bytes_per_ns
        limit = np.maximum(least_at_peak, memory)
        self.operators: pd.DataFrame = operators.assign(
            peak_ns=at_peak, least_peak_ns=least_at_peak, memory_ns=memory, limit_ns=limit,
            compute_ns=np.where(least_at_peak <= memory, 0.0, limit), products_ns=np.where(flops > 0, limit, 0.0),
        )  # fmt: skip

    def innermost(self, keys: Collection[Key]) -> list[Key | None]:
        """The innermost of these layers and phases that each range is, or is inside of."""
        innermost: list[Key | None] = []
        for key, inside in zip(self.keys, self._inside, strict=True):
            innermost.append(key if key in keys else innermost[inside] if inside >= 0 else None)
        return innermost

    def within(self, keys: Collection[Key]) -> Bools:
        """Whether each range, or one around it, is of these layers and phases."""
        return np.array([key is not None for key in self.innermost(keys)], dtype=bool)

    def by_range(self, values: Floats) -> Floats:
        """Sums over the operators of each range, NaN where a value is.

        Args:
            values: Of the operators, shape ``(operators,)`` or ``(operators, …)``.
        """
        sums: Floats = np.zeros((len(self.keys), *values.shape[1:]))
        np.add.at(sums, self.counts.operators["range"].to_numpy(), values)
        return sums

    def limited(self, compiled: Collection[Key]) -> Bools:
        """Whether each operator has a limit of its own: in what torch.compile made, only products have."""
        is_compiled = self.within(compiled)[self.operators["range"]]
        return ~is_compiled | (self.operators["flops"].to_numpy() > 0)

    def lacks_all(self, layers: Iterable[str]) -> bool:
        """Whether a capture has layers and none of them was counted, so that their work was counted outside layers."""
        captured = {*layers} - {NO_LAYER}
        return bool(captured) and captured.isdisjoint(layer for layer, _ in self.keys)

    def members(self, keys: Iterable[Key]) -> tuple[Int64Array, Int64Array]:
        """Which ranges belong to which of the layers and phases, both by position: a range to its own, and in the same
        phase to those of the layers that contain its layer in the model, as for time.
        """
        forward = Category.FORWARD.value
        enclosing = [self.keys[inside] if inside >= 0 else (NO_LAYER, "") for inside in self._inside]
        enclosed = (
            (layer, outer if outer != NO_LAYER and outer_phase == forward else "", 1)
            for (layer, phase), (outer, outer_phase) in zip(self.keys, enclosing, strict=True)
            if phase == forward and layer != NO_LAYER
        )
        parent = parents_of(dict.fromkeys(layer for layer, _ in self.keys), enclosed)
        position_of_key = {key: position for position, key in enumerate(keys)}
        pairs = [
            (number, position_of_key[ancestor, phase])
            for number, (layer, phase) in enumerate(self.keys)
            for ancestor in (with_ancestors(layer, parent) if layer != NO_LAYER else [layer])
            if (ancestor, phase) in position_of_key
        ]
        of_range, of_key = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return of_range, of_key

    def of_rows(self, rows: pd.DataFrame, steps: int, compiled: Collection[Key]) -> pd.DataFrame:
        """What the layers and phases of a capture computed in its time.

        Args:
            rows: Columns ``layer``, ``phase``, ``calls`` and ``gpu_busy_ns``, of the capture.
            steps: The capture's steps.
            compiled: Layers and phases of which only products, convolutions and attention have a limit of their own.

        Returns:
            With the index of `rows`: ``times``, how often what was counted ran, NaN if that is not known; ``flops`` and
            ``model_flops``, the same without recomputation, and their times at the peak, ``peak_ns`` and
            ``model_peak_ns``; ``dtypes``, the operations by data type; ``bytes``, ``dram_bytes``, ``limit_ns``,
            ``compute_ns`` and ``fused_limit_ns``; and ``timed_ns``, the time that these took, NaN if that is not known.
        """
        keys: list[Key] = [*zip(rows["layer"], rows["phase"], strict=True)]
        times = np.array(
            [
                steps / self.counts.steps
                if layer == NO_LAYER and steps and self.counts.steps
                else calls / self.calls[layer, phase]
                if self.calls[layer, phase] and (calls or layer == NO_LAYER)
                else math.nan
                for (layer, phase), calls in zip(keys, rows["calls"].tolist(), strict=True)
            ]
        )
        only_inside = (rows["calls"].to_numpy() == 0) & (rows["layer"] != NO_LAYER).to_numpy()  # it did not run itself
        of_range, of_row = self.members(keys)
        times_of_key = dict(zip(keys, times.tolist(), strict=True))
        range_times = np.array([times_of_key.get(key, math.nan) for key in self.keys])
        weight = np.where(only_inside[of_row], range_times[of_range], 1.0)
        ran = ~np.isnan(weight)
        of_range, of_row, weight = of_range[ran], of_row[ran], weight[ran]
        times[only_inside & np.isin(np.arange(len(keys)), of_row)] = 1.0

        operators = {name: values.to_numpy() for name, values in self.operators.items()}
        in_model, is_limited = ~self.recomputes[operators["range"]], self.limited(compiled)
        names = ("flops", "peak_ns", "least_peak_ns", "memory_ns")
        amounts: dict[str, Floats] = {name: operators[name] for name in names}
        amounts |= {f"model_{name}": np.where(in_model, operators[name], 0.0) for name in ("flops", "peak_ns")}
        limits = ("bytes", "dram_bytes", "limit_ns", "compute_ns")
        amounts |= {name: np.where(is_limited, operators[name], 0.0) for name in limits}
        dtypes = [*dict.fromkeys(operators["dtype"][operators["flops"] > 0])]
        of_dtype = [np.where(operators["dtype"] == dtype, operators["flops"], 0.0) for dtype in dtypes]
        per_range = self.by_range(np.column_stack([*amounts.values(), *of_dtype]))
        totals = np.zeros((len(keys), per_range.shape[1]))
        np.add.at(totals, of_row, weight[:, None] * per_range[of_range])
        totals *= times[:, None]
        table: pd.DataFrame = pd.DataFrame(totals[:, : len(amounts)], columns=[*amounts], index=rows.index)
        parts = [
            {dtype: flops for dtype, flops in zip(dtypes, row, strict=True) if flops > 0}
            for row in totals[:, len(amounts) :].tolist()
        ]
        table["dtypes"] = pd.Series(parts, index=rows.index, dtype=object)
        fused = Counter[Key]()
        for key, size in zip(self.keys, self.counts.ranges["fused_bytes"].tolist(), strict=True):
            fused[key] += size
        traffic = times * np.array([fused[key] for key in keys]) / self._bytes_per_ns
        traffic = np.minimum(traffic, table["memory_ns"])  # the L2 may hold some of it
        table["fused_limit_ns"] = np.maximum(table["least_peak_ns"], traffic).mask(only_inside)
        table["timed_ns"] = rows["gpu_busy_ns"].where(rows["gpu_busy_ns"] > 0)
        if self.lacks_all(rows["layer"]):
            is_mixed = (rows["layer"] == NO_LAYER) & rows["phase"].isin([*LAYER_PHASES, NO_PHASE])
            table.loc[is_mixed, ["timed_ns", "limit_ns", "compute_ns", "fused_limit_ns"]] = math.nan
        if math.isnan(self._bytes_per_ns):  # also of rows without operators
            table[["limit_ns", "compute_ns", "fused_limit_ns"]] = math.nan
        table["times"] = times
        return table


def work_per_step(
    counts: FlopsFile, info: CaptureInfo, keys: Collection[Key], compiled: Collection[Key] = ()
) -> dict[Key, dict[str, float]]:
    """What a counted step computed, by the innermost of `keys` that its operators ran in.

    Args:
        counts: The counts of a program.
        info: Of a capture of the program.
        keys: Layers and phases of that capture. Work outside them all goes with its own layer and phase.
        compiled: As in `Program.of_rows`.

    Returns:
        By layer and phase ``flops`` (without what a causal mask leaves out), ``bytes``, ``limit_ns`` and
        ``products_ns``; empty if no steps were counted.
    """
    if not counts.steps:
        return {}
    program = Program(counts, peaks_of(info.gpus, capture=info.path))
    amounts = program.operators[["least_flops", "bytes", "limit_ns", "products_ns"]].to_numpy()
    per_range = program.by_range(np.where(program.limited(compiled)[:, None], amounts, 0.0)) / counts.steps
    sums: dict[Key, Floats] = {}
    for key, own_key, values in zip(program.innermost(keys), program.keys, per_range, strict=True):
        sums[key or own_key] = sums.get(key or own_key, 0.0) + values
    names = ("flops", "bytes", "limit_ns", "products_ns")
    return {key: dict(zip(names, values.tolist(), strict=True)) for key, values in sums.items()}


def with_limits(result: Layers, operations: Operations, counts: FlopsFile) -> Layers:
    """Add the columns `LIMITS` to a per-layer table that is not by step, as far as they are known.

    Args:
        result: The table.
        operations: Its operations.
        counts: The counts from a run of the same program.
    """
    info, rows = result.info, result.rows
    peaks = peaks_of(info.gpus if info.on_gpu else (), capture=info.path)
    compiled = compiled_rows(operations.trace, operations.attribution)
    work = Program(counts, peaks).of_rows(rows, result.steps.count, compiled)
    work["of_limit"] = work["limit_ns"] / work["timed_ns"]
    work["flop"] = work["flops"]
    limits = {name: work[name] for name in LIMITS if work[name].notna().any()}
    return replace(result, rows=rows.assign(**limits), peaks=peaks)
