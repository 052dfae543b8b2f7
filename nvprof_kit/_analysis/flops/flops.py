"""How well each layer uses the GPU: its floating point operations per second, and their share of the GPU's peak.

The operations were counted in another run of the same program (`nvprof_kit.count_flops`), the time was captured here.
The two are joined by calls: counted operations per call, times the captured calls. A row includes the layers nested in
its layer, in the same phase, for operations and time alike; if the capture has steps, both cover only the steps.

Utilisation is the time that the operations would take at the peak of their number types, over the time they took. HFU
counts all operations, MFU leaves out those that activation checkpointing recomputes (Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", 2022).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.attribution import Operations, join_warnings
from nvprof_kit._analysis.attribution.intervals import union_lengths
from nvprof_kit._analysis.attribution.steps import (
    ALL_STEPS,
    StepChoice,
    StepOptions,
    choose_steps,
    devices_of,
    left_out_warnings,
    step_times,
)
from nvprof_kit._analysis.flops.shapes import counts_from_shapes
from nvprof_kit._analysis.flops.work import Key, Program, compiled_rows
from nvprof_kit._analysis.hardware import Peaks, peaks_of
from nvprof_kit._analysis.layers.fold import ByLayer, computing_blocks
from nvprof_kit._analysis.layers.layers import LIMITS, layers
from nvprof_kit._analysis.layers.tree import with_ancestors
from nvprof_kit._result.column import Columns, read_columns
from nvprof_kit._trace.flops_file import FlopsFile
from nvprof_kit._trace.schema import CaptureInfo
from nvprof_kit.issues import Issue
from nvprof_kit.names import NO_LAYER

ABOVE_THE_PEAK = (
    "above the peak: a clock above the datasheet's, another input (batch, length) than was counted, a causal mask or "
    "2:4 sparsity, of which the count takes the whole, 32-bit products that ran in TF32, or a peak that is too low"
)

_OWN_COLUMNS = read_columns("nvprof_kit._analysis.flops", "flops")
COLUMNS: Columns = {name: LIMITS.get(name, column) for name, column in _OWN_COLUMNS.items()}
"""The columns of `Flops.rows` and what they mean."""

_NOTABLE = 0.02
"""Share of a row's own time in matrix kernels above which it is suspicious that no operation was counted."""

UNCOUNTED_SHARE = 0.05
"""Where counted operations hold less than the other 95 % of the GPU time, the figures of the step are lower bounds."""

INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
"""The number of a block in a layer's path."""

NOTES_APART = " | "
"""The separator between the notes of a row."""


@dataclass(frozen=True)
class Totals:
    """Figures over all layers, for a mean step; for the whole capture if it has no steps.

    Attributes:
        steps: Number of steps, 0 without steps.
        devices: Number of GPUs that ran operations.
        step_ns: Mean duration of a step in ns, with the boundaries of `breakdown`.
        busy_ns: Time per step in which a GPU was busy, summed over devices, in ns.
        flops: Floating point operations per step.
        model_flops: The same without recomputation.
        peak_ns: The time of `flops` at the GPU's peak, in ns; NaN if no peak is known.
        model_peak_ns: That of `model_flops`.
    """

    steps: int
    devices: int
    step_ns: float
    busy_ns: float
    flops: float
    model_flops: float
    peak_ns: float
    model_peak_ns: float

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization over the duration of the step on all GPUs, 0 to 1; NaN if no peak is known."""
        return self.peak_ns / (self.step_ns * self.devices or math.nan)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the same for `model_flops`."""
        return self.model_peak_ns / (self.step_ns * self.devices or math.nan)

    @property
    def busy_hfu(self) -> float:
        """Like `hfu`, over the busy time only."""
        return self.peak_ns / (self.busy_ns or math.nan)

    @property
    def busy_mfu(self) -> float:
        """Like `mfu`, over the busy time only."""
        return self.model_peak_ns / (self.busy_ns or math.nan)

    @property
    def above_the_peak(self) -> bool:
        """Whether more operations were counted than the GPU can do in that time."""
        return self.hfu > 1 or self.busy_hfu > 1


@dataclass(frozen=True, repr=False, eq=False)
class Flops(ByLayer):
    """Floating point operations, TFLOP/s and MFU of each layer.

    Attributes:
        totals: The same figures for all layers together.
        all_steps: Number of steps in the capture.
        peaks: The GPU's peaks; None if unknown.
        counts: The file of counts, or a text that says the shapes in the capture were used.
        info: Recording tool, GPUs and processes of the capture.
        warnings: What the figures do not include.
        uncounted: Share of the GPU time in layers whose products, attention or experts were not counted, by name; empty
            below `UNCOUNTED_SHARE` altogether.
    """

    totals: Totals
    all_steps: int
    peaks: Peaks | None
    counts: str
    info: CaptureInfo
    warnings: tuple[Issue, ...] = ()
    uncounted: Mapping[str, float] = field(default_factory=dict)

    columns: ClassVar = {"flops": COLUMNS}
    bars: ClassVar = {"flops": (("mfu",), ("layer", "phase"))}
    time: ClassVar = "gpu_busy_ns"

    def kinds(self) -> pd.DataFrame:
        """Time and limit of each kind of layer: of nested layers the innermost, equal blocks of the model together.

        Returns:
            A row for each kind (``layers.*.mlp``), phase and bound, those furthest above their limit first: ``kind``,
            ``phase``, ``bound``, ``layer`` (the first), ``layers`` (how many), ``dtype``, and sums of ``gpu_busy_ns``,
            ``limit_ns``, ``fused_limit_ns``, ``excess_ns`` (time above the limit), ``flops`` and ``dram_bytes``.
        """
        rows = self.rows[(self.rows["limit_ns"] > 0) & (self.rows["calls"] > 0)]
        parents = dict(zip(self.blocks.layers, self.blocks.parents, strict=True))
        holders = {ancestor for layer in rows["layer"] for ancestor in with_ancestors(layer, parents)[:-1]}
        rows = rows[~rows["layer"].isin(holders)]
        rows = rows.assign(kind=rows["layer"].str.replace(INDEX, "*", regex=True), layers=1)
        rows["excess_ns"] = rows["gpu_busy_ns"] - rows["limit_ns"]
        sums = ("layers", "gpu_busy_ns", "limit_ns", "fused_limit_ns", "excess_ns", "flops", "dram_bytes")
        how = {"layer": "first", "dtype": "first", **dict.fromkeys(sums, "sum")}
        kinds = rows.groupby(["kind", "phase", "bound"], sort=False, as_index=False).agg(how)
        return kinds.sort_values("excess_ns", ascending=False, ignore_index=True)

    def join(self, path: str, phase: str, rows: pd.DataFrame) -> dict[str, Any]:
        """The values of equal layers in a phase together: sums, and rates as means weighted by busy time."""
        return {
            **super().join(path, phase, rows),
            "bound": rows["bound"].mode().iat[0],
            "dtype": "+".join(dict.fromkeys(dtype for text in rows["dtype"] for dtype in text.split("+") if dtype)),
            "unknown": "; ".join(sorted({name for text in rows["unknown"] for name in text.split("; ") if name})),
            "note": NOTES_APART.join(
                sorted({note for text in rows["note"] for note in text.split(NOTES_APART) if note})
            ),
        }


def flops(
    operations: Operations,
    counts: FlopsFile | None,
    *,
    peaks: Mapping[str, float] = MappingProxyType({}),
    steps: StepOptions = ALL_STEPS,
) -> Flops:
    """Join the counted operations with the captured times.

    Args:
        operations: The operations of a capture, with their names.
        counts: The counts from a run of the same program; None to count from the shapes in the capture itself, which
            then needs the optional table ``shapes``.
        peaks: Operations per second by data type, instead of the package's values for the GPU.
        steps: Which steps to look at, by default all but warm-up.
    """
    trace, attribution = operations.trace, operations.attribution
    choice = choose_steps(trace, attribution, steps)
    if choice.everything and len(choice.shown):  # without what ran outside steps
        steps = StepOptions(first=int(attribution.ranges.steps.min()))
    rows = layers(operations, steps=steps).rows
    is_empty = ~rows[["calls", "gpu_ops", "gpu_total_ns"]].any(axis=1)
    rows = rows.loc[~is_empty, ["layer", "phase", "calls", "gpu_busy_ns"]]
    from_shapes = counts is None
    counts = counts_from_shapes(operations, choice, rows) if counts is None else counts
    info = trace.info
    of_gpu = peaks_of(info.gpus if info.on_gpu else (), peaks, info.path)
    program = Program(counts, of_gpu)
    rows = rows.join(program.of_rows(rows, choice.count or int(from_shapes), compiled_rows(trace, attribution)))
    rows.index = pd.MultiIndex.from_frame(rows[["layer", "phase"]])
    ran = rows[(rows["calls"] > 0) | (rows["layer"] == NO_LAYER)]
    times: Any = ran["times"].dropna().to_dict()
    totals, uncaptured = _totals(operations, program, times, choice)
    notes, shares = _uncounted(operations, program, ran.index, choice)
    table = _table(program, rows, of_gpu, notes)
    gpus = ", ".join(sorted(set(info.gpus))) or "the GPU"
    return Flops(
        rows=table,
        totals=totals,
        all_steps=len(choice.shown),
        peaks=of_gpu,
        counts=counts.path,
        info=info,
        warnings=(
            *info.warnings,
            *join_warnings(trace, attribution.ranges),
            *([Issue.of("above-the-peak", reason=ABOVE_THE_PEAK)] if totals.above_the_peak else ()),
            *left_out_warnings(choice),
            *([Issue.of("other-layers")] if program.lacks_all(rows["layer"]) else ()),
            *_warnings(program, times, uncaptured, shares, info),
            *([] if of_gpu or not info.on_gpu else [Issue.of("no-peak", gpus=gpus)]),
        ),
        uncounted=shares,
        blocks=computing_blocks(operations, choice.of_ops(attribution)).with_operations(table),
    )


def _table(program: Program, rows: pd.DataFrame, peaks: Peaks | None, notes: Mapping[Key, str]) -> pd.DataFrame:
    """The rows with the columns of `COLUMNS`.

    Args:
        program: What was counted.
        rows: The rows of the capture, by layer and phase, with the columns of `Program.of_rows`.
        peaks: The GPU's peaks.
        notes: On the rows that have matrix kernels of which nothing was counted.
    """
    names_of_range = program.counts.unknown.groupby("range")["name"].agg(set).to_dict()
    unknown: list[set[str]] = [set() for _ in range(len(rows))]
    for of_range, of_row in zip(*program.members(rows.index), strict=True):
        unknown[of_row] |= names_of_range.get(of_range, set())
    timed_ns = rows["timed_ns"]
    bound = [~(rows["limit_ns"] > 0), 2 * rows["compute_ns"] > rows["limit_ns"]]

    def types(flops: Mapping[str, float]) -> str:
        notable = [dtype for dtype in flops if flops[dtype] >= sum(flops.values()) / 100]
        return "+".join(sorted(notable, key=lambda dtype: -flops[dtype]))

    table: pd.DataFrame = rows.assign(
        dtype=rows["dtypes"].map(types),
        tflops_per_s=rows["flops"] / timed_ns / 1000,
        hfu=rows["peak_ns"] / timed_ns if peaks else math.nan,
        mfu=rows["model_peak_ns"] / timed_ns if peaks else math.nan,
        of_limit=rows["limit_ns"] / timed_ns,
        bound=np.select(bound, ["", "compute"], "memory"),
        unknown=["; ".join(sorted(names)) for names in unknown],
    ).reset_index(drop=True)  # fmt: skip
    reasons = [
        ["not in the count"]
        if math.isnan(row["times"])
        else [
            f"no peak for {', '.join(missing)}"
            if (missing := sorted(dtype for dtype in row["dtypes"] if peaks and dtype not in peaks.flops))
            else "",
            "at least: operators of unknown work" if row["unknown"] else "",
            notes.get((row["layer"], row["phase"]), ""),
            ABOVE_THE_PEAK if row["hfu"] > 1 else "",
        ]
        for row in table.to_dict("records")
    ]
    table["note"] = [NOTES_APART.join(filter(None, texts)) for texts in reasons]
    return table[[*COLUMNS]]


def _totals(
    operations: Operations, program: Program, times: Mapping[Key, float], choice: StepChoice
) -> tuple[Totals, float]:
    """The steps of a capture together, and the share of the counted operations that no captured row has. What was
    counted in a range that the capture lacks goes with the nearest one around it that it has.
    """
    trace = operations.trace
    steps = step_times(trace, operations.attribution)[choice.shown]
    lanes, of_op = devices_of(trace)
    if len(steps):
        length_ns, busy_ns = int(steps["wall_ns"].sum()), int(steps["busy_ns"].sum())
    else:
        start, end = (trace.ops[name].to_numpy() for name in ("start_ns", "end_ns"))
        length_ns = int(end.max(initial=0) - start.min(initial=end.max(initial=0)))
        busy_ns = int(union_lengths(start, end, of_op, np.zeros(len(start), dtype=np.int64), 1)[0])
    runs = np.array([times[key] if key else 0.0 for key in program.innermost(times)])
    flops, peak_ns = program.by_range(program.operators[["flops", "peak_ns"]].to_numpy()).T
    ran, step_count = runs > 0, max(len(steps), 1)
    in_model = ran & ~program.recomputes
    amounts = [values[is_run] @ runs[is_run] for values in (flops, peak_ns) for is_run in (ran, in_model)]
    figures = (float(amount) / step_count for amount in (length_ns, busy_ns, *amounts))
    return Totals(len(steps), max(len(lanes), 1), *figures), float(flops[runs == 0].sum() / max(flops.sum(), 1))


def _uncounted(
    operations: Operations, program: Program, ran: Collection[Key], choice: StepChoice
) -> tuple[dict[Key, str], dict[str, float]]:
    """Notes on the rows that run matrix or attention kernels although no operation was counted or is unknown there,
    because these kernels were not launched by PyTorch operators; and the share of the steps' GPU time in layers that
    run such kernels or experts of which no operation was counted, by the layer's name without its place in the model,
    the largest first, empty below `UNCOUNTED_SHARE` altogether.
    """
    trace, counts, classes = operations.trace, program.counts, operations.classes
    if "name" not in trace.ops or not trace.info.on_gpu:
        return {}, {}
    layer, phase = operations.attribution.owners
    is_matrix = classes.is_a("gemm") | classes.is_a("attention")
    ops = pd.DataFrame({"layer": layer, "phase": phase, "ns": trace.ops["end_ns"] - trace.ops["start_ns"]})
    ops["matrix"] = ops["ns"] * is_matrix
    ops["work"] = ops["ns"] * (choice.of_ops(operations.attribution) & ~classes.is_a("comm"))
    ops["products"] = ops["work"] * (is_matrix | classes.is_a("experts"))
    total_ns = max(int(ops["ns"][choice.of_ops(operations.attribution)].sum()), 1)
    times = ops.groupby(["layer", "phase"], observed=True).sum()
    innermost = program.innermost(ran)
    with_flops = {*counts.operators["range"][counts.operators["flops"] > 0]}
    has_flops, is_known = (
        times.index.isin([innermost[number] or program.keys[number] for number in numbers])
        for numbers in (with_flops, with_flops | {*counts.unknown["range"]})
    )
    shares = times["matrix"] / times["ns"].clip(lower=1)
    notes: Any = {
        key: f"{share:.0%} of its own time is in matrix kernels that were not counted"
        for key, share in shares[(shares > _NOTABLE) & ~is_known].items()
    }
    uncounted = times[(times["products"] > _NOTABLE * times["work"].clip(lower=1)) & ~has_flops]
    layers = uncounted.index.get_level_values("layer").astype(str)
    names = layers.str.replace(r"(^|\.)\d+(?=\.|$)", "", regex=True).str.extract(r"([^.]*?)_?\d*$", expand=False)
    by_name: Any = (uncounted["work"] / total_ns).groupby(names).sum().sort_values(ascending=False, kind="stable")
    return notes, by_name.to_dict() if by_name.sum() > UNCOUNTED_SHARE else {}


def _warnings(
    program: Program, times: Mapping[Key, float], uncaptured: float, shares: Mapping[str, float], info: CaptureInfo
) -> list[Issue]:
    """What the counts lack, and what they have that the capture lacks.

    Args:
        program: What was counted.
        times: How often what was counted of each row ran.
        uncaptured: Share of the counted operations that no row has.
        shares: Of the GPU time in what was not counted.
        info: The capture.
    """
    counts = program.counts
    if not counts.operators["flops"].any():
        return [Issue.of("nothing-counted", path=counts.path)]
    issues = []
    if shares:
        largest = ", ".join(f"{name} {share:.0%}" for name, share in list(shares.items())[:4])
        issues.append(Issue.of("uncounted", sum(shares.values()), largest=largest))
    if uncaptured:
        issues.append(Issue.of("not-captured", uncaptured, percent=100 * uncaptured))
    ratios = sorted({round(runs, 6) for (layer, _), runs in times.items() if layer != NO_LAYER})
    if len(ratios) > 1:
        issues.append(Issue.of("uneven-calls", least=ratios[0], largest=ratios[-1]))
    if unknown := sorted({*counts.unknown["name"]}):
        issues.append(Issue.of("unknown-work", names=", ".join(unknown)))
    if counts.gpu and info.gpus and counts.gpu not in info.gpus:
        issues.append(Issue.of("other-gpu", counted=counts.gpu, captured=", ".join(sorted(set(info.gpus)))))
    return issues
