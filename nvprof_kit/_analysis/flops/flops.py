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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from nvprof_kit._analysis.attribution.attribution import Operations, join_warnings
from nvprof_kit._analysis.attribution.steps import ALL_STEPS, StepOptions
from nvprof_kit._analysis.attribution.warm_up import choose_steps, left_out_warnings
from nvprof_kit._analysis.flops.counted import Counted, Key, Work, read_counted
from nvprof_kit._analysis.flops.limits import row_limits
from nvprof_kit._analysis.flops.rows import (
    Row,
    Whole,
    captured_rows,
    times_of,
    uncounted_rows,
    uncounted_shares,
    utilisation,
    whole,
    without_peak,
)
from nvprof_kit._analysis.flops.shapes import counted_from_shapes
from nvprof_kit._analysis.hardware import Peaks, peaks_of
from nvprof_kit._analysis.layers.fold import ByLayer, computing_blocks
from nvprof_kit._analysis.layers.layers import LIMITS
from nvprof_kit._analysis.layers.tree import with_ancestors
from nvprof_kit._result.column import Column, Columns
from nvprof_kit._trace.flops_file import FlopsFile
from nvprof_kit._trace.schema import CaptureInfo, Trace
from nvprof_kit.issues import Issue
from nvprof_kit.names import NO_LAYER

if TYPE_CHECKING:
    import pandas as pd


MOST_BY_CLOCK = 1.2
"""The most that a clock above the datasheet's explains: an H200 may run at 1980 MHz, its peak is given for 1830."""

MOST_BY_HALVES = 2.0
"""The most that a causal mask or 2:4 sparsity explains: either leaves half of the counted operations to do."""


def why_above(hfu: float, *, attention: bool, fp32: bool, own_peak: bool) -> str:
    """Possible reasons for a utilisation above 1, the likeliest first.

    Args:
        hfu: The utilisation.
        attention: Whether fused attention was counted.
        fp32: Whether products of 32-bit floats were.
        own_peak: Whether the user gave the peak.
    """
    reasons = [
        ("the peak given is too low", own_peak),
        ("a clock above the datasheet's", hfu <= MOST_BY_CLOCK),
        ("a causal mask, of which the count takes the whole", attention and hfu <= MOST_BY_HALVES),
        ("32-bit products that ran in TF32", fp32),
        ("it was counted on another input (batch, length) than was captured", True),
        ("2:4 sparsity", hfu <= MOST_BY_HALVES),
    ]
    return "above the peak: " + ", or ".join(reason for reason, possible in reasons if possible)


COLUMNS: Columns = {
    "layer": Column("module path, including nested layers; or `(none)` for work outside every layer", kind="str"),
    "phase": Column(
        "`forward`, `backward` or `recompute`; outside layers the text of the phase's range or `other`", kind="str"
    ),
    "calls": Column(
        "times it ran in the capture's steps, as in `layers`; in all of a capture without steps; 0 if only "
        "layers inside it ran in the phase"
    ),
    "gpu_busy_ns": Column("length of the union of its operations' intervals there, in ns, summed over devices", "ns"),
    "dtype": Column(
        "data types of at least 1 % of its operations, the most frequent first: `bf16`, `bf16+fp32`", kind="str"
    ),
    "flops": Column(
        "floating point operations in that time: the count per call, times the calls", "flop", kind="float"
    ),
    "model_flops": Column("the same without recomputation by activation checkpointing", "flop", kind="float"),
    "tflops_per_s": Column(
        "`flops` divided by `gpu_busy_ns`, in 10^12 per second", "tflops_per_s", kind="float", fold="mean"
    ),
    "hfu": Column(
        "hardware FLOPs utilization: the time that `flops` take at the GPU's peak for their data "
        "types, divided by `gpu_busy_ns`",
        "share",
        kind="float",
        fold="mean",
    ),
    "mfu": Column("model FLOPs utilization: the same for `model_flops`", "share", kind="float", fold="mean"),
    "bytes": LIMITS["bytes"],
    "dram_bytes": Column(
        "the part of `bytes` that the L2 cannot hold from one operator to the next", "bytes", kind="float"
    ),
    **{name: LIMITS[name] for name in ("limit_ns", "of_limit")},
    "bound": Column("what most of `limit_ns` is limited by: `compute` or `memory`", kind="str", fold="first"),
    "unknown": Column("operators with unknown work, not included in `flops`, by name", kind="str"),
    "note": Column("why a figure is missing, too low or above the peak", kind="str"),
}
"""The columns of `Flops.rows` and what they mean."""

UNCOUNTED_SHARE = 0.05
"""Where counted operations hold less than the other 95 % of the GPU time, the figures of the step are lower bounds."""

INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
"""The number of a block in a layer's path."""

NOTES_APART = " | "
"""The separator between the notes of a row."""


@dataclass(frozen=True, repr=False, eq=False)
class Flops(ByLayer):
    """Floating point operations, TFLOP/s and MFU of each layer.

    Attributes:
        whole: The same figures for all layers together.
        peaks: The GPU's peaks; None if unknown.
        counts: The file of counts, or a text that says the shapes in the capture were used.
        info: Recording tool, GPUs and processes of the capture.
        warnings: What the figures do not include.
        uncounted: Share of the GPU time in layers whose products, attention or experts were not counted, by name; empty
            below `UNCOUNTED_SHARE` altogether.
    """

    whole: Whole
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
            ``limit_ns``, ``excess_ns`` (time above the limit), ``flops`` and ``dram_bytes``.
        """
        rows = self.rows[(self.rows["limit_ns"] > 0) & (self.rows["calls"] > 0)]
        parents = dict(zip(self.blocks.layers, self.blocks.parents, strict=True))
        holders = {holder for layer in rows["layer"] for holder in with_ancestors(layer, parents) if holder != layer}
        rows = rows[~rows["layer"].isin(holders)]
        rows = rows.assign(kind=rows["layer"].str.replace(INDEX, "*", regex=True), layers=1)
        rows["excess_ns"] = rows["gpu_busy_ns"] - rows["limit_ns"]
        sums = ("layers", "gpu_busy_ns", "limit_ns", "excess_ns", "flops", "dram_bytes")
        how = {"layer": "first", "dtype": "first", **dict.fromkeys(sums, "sum")}
        kinds = rows.groupby(["kind", "phase", "bound"], sort=False, as_index=False).agg(how)
        sorted_kinds: pd.DataFrame = kinds.sort_values("excess_ns", ascending=False, ignore_index=True)
        return sorted_kinds

    def join(self, path: str, phase: str, rows: pd.DataFrame) -> dict[str, Any]:
        """The values of equal layers in a phase together: sums, and rates as means weighted by busy time."""
        notes = (note for text in rows["note"] for note in text.split(NOTES_APART) if note)
        return {
            **super().join(path, phase, rows),
            "dtype": "+".join(dict.fromkeys(dtype for text in rows["dtype"] for dtype in text.split("+") if dtype)),
            "unknown": "; ".join(sorted({name for text in rows["unknown"] for name in text.split("; ") if name})),
            "note": NOTES_APART.join(_alike_notes(notes)),
        }


def _alike_notes(notes: Iterable[str]) -> list[str]:
    """Each note once; notes that differ only in their percentage become one, with the lowest and the highest."""
    numbers: dict[str, list[int]] = {}
    for note in notes:
        number, sign, note_text = note.partition("%")
        has_number = bool(sign) and number.isdecimal()
        numbers.setdefault(f"%{note_text}" if has_number else note, []).extend([int(number)] if has_number else [])
    ranges = {text: "-".join(map(str, sorted({min(of), max(of)}))) if of else "" for text, of in numbers.items()}
    return [f"{ranges[text]}{text}" for text in numbers]


def flops(
    trace: Trace,
    counts: FlopsFile | None,
    known: Operations | None = None,
    *,
    peaks: Mapping[str, float] = MappingProxyType({}),
    steps: StepOptions = ALL_STEPS,
) -> Flops:
    """Join the counted operations with the captured times.

    Args:
        trace: The capture, its ranges as in the contract, with the operations' names.
        counts: The counts from a run of the same program; None to count from the shapes in the capture itself, which
            then needs the optional table ``shapes``.
        known: The same operations, if their owners and classes are already known.
        peaks: Operations per second by data type, instead of the package's values for the GPU.
        steps: Which steps to look at, by default all but warm-up.
    """
    import pandas as pd

    operations = Operations(trace, known=known)
    choice = choose_steps(trace, operations.attribution, steps)
    rows = captured_rows(trace, operations.attribution, choice)
    program = counted_from_shapes(operations, choice, rows) if counts is None else read_counted(counts)
    named = f"the shapes in {trace.info.path}" if counts is None else counts.path
    of_gpu = peaks_of(trace.info.gpus if trace.info.on_gpu else (), peaks, trace.info.path)
    times = {row.key: 1.0 if counts is None else times_of(row, program, choice.count) for row in rows}
    held_keys = {row.key for row in rows if row.held}
    uncounted = uncounted_rows(operations, program, rows)
    limits = row_limits(operations, program, rows, times, of_gpu)
    records = _Records(program.with_holders(held_keys), times, of_gpu, uncounted, limits)
    together = whole(trace, operations.attribution, program, times, peaks=of_gpu, choice=choice)
    reason = f"the steps together are {records.why_above(together.busy_hfu)}"
    shares = uncounted_shares(operations, program, rows, choice)
    shares = shares if sum(shares.values()) > UNCOUNTED_SHARE else {}
    above = [Issue("above-the-peak", "warning", 1.0, reason)] if together.above_the_peak else []
    table = pd.DataFrame([records.of(row) for row in rows], columns=list(COLUMNS))
    return Flops(
        rows=table,
        whole=together,
        peaks=of_gpu,
        counts=named,
        info=trace.info,
        warnings=(
            *trace.info.warnings,
            *join_warnings(trace, operations.attribution.ranges, operations.attribution.unjoined),
            *above,
            *_uncounted_issues(shares),
            *left_out_warnings(choice),
            *_warnings(program, times, named),
            *_warnings_of_gpu(trace.info, of_gpu, counts.gpu if counts else ""),
        ),
        uncounted=shares,
        blocks=computing_blocks(operations, choice.of_ops(operations.attribution)).with_amounts(
            table, "flops", "operations"
        ),
    )


class _Records:
    """Makes the rows of the table."""

    def __init__(
        self,
        program: Counted,
        times: Mapping[Key, float],
        peaks: Peaks | None,
        uncounted: Mapping[Key, float],
        limits: Mapping[Key, dict[str, Any]],
    ) -> None:
        self._work, self._model = program.nested(), program.nested(model=True)
        self._inside, self._inside_model = (program.nested(model=model, times=times) for model in (False, True))
        self._limits = limits
        self._unknown, self._attention = program.nested_unknown(), program.nested_attention()
        self._times, self._peaks, self._uncounted = times, peaks, uncounted

    def of(self, row: Row) -> dict[str, Any]:
        """A row with the columns of `COLUMNS`."""
        times = self._times[row.key]
        work, model = self._work.get(row.key, {}), self._model.get(row.key, {})
        if row.held and row.key in self._inside:
            times, work, model = 1.0, self._inside[row.key], self._inside_model[row.key]
        flops = sum(work.values()) * times
        hfu, mfu = (utilisation(work_part, self._peaks, row.busy_ns, times) for work_part in (work, model))
        return {
            "layer": row.key[0],
            "phase": row.key[1],
            "calls": row.calls,
            "gpu_busy_ns": row.busy_ns,
            "dtype": "+".join(_types(work)),
            "flops": flops,
            "model_flops": sum(model.values()) * times,
            "tflops_per_s": flops / row.busy_ns / 1000 if row.busy_ns else math.nan,
            "hfu": hfu,
            "mfu": mfu,
            **self._limits[row.key],
            "unknown": "; ".join(sorted(self._unknown.get(row.key, ()))),
            "note": NOTES_APART.join(["not in the count"] if math.isnan(times) else self._notes(row, work, hfu)),
        }

    def _notes(self, row: Row, work: Work, hfu: float) -> list[str]:
        notes = []
        if self._peaks is not None and (missing := without_peak(work, self._peaks)):
            notes.append(f"no peak for {', '.join(missing)}")
        if self._unknown.get(row.key):
            notes.append("at least: operators of unknown work")
        if row.key in self._uncounted:
            notes.append(f"{self._uncounted[row.key]:.0%} of its own time is in matrix kernels that were not counted")
        if hfu > 1:
            notes.append(self.why_above(hfu, row.key))
        return notes

    def why_above(self, hfu: float, key: Key | None = None) -> str:
        """Why a row may be above the peak; without a key, why all rows together may be."""
        work = [self._work.get(key, {})] if key else list(self._work.values())
        return why_above(
            hfu,
            attention=key in self._attention if key else bool(self._attention),
            fp32=any("fp32" in dtypes for dtypes in work),
            own_peak=self._peaks is not None and self._peaks.source.endswith("--peak"),
        )


def _types(work: Work) -> list[str]:
    """The number types with at least 1 % of the operations, most operations first."""
    total = sum(work.values())
    return sorted((dtype for dtype in work if 100 * work[dtype] >= total), key=lambda dtype: -work[dtype])


def _warnings(program: Counted, times: Mapping[Key, float], named: str) -> list[Issue]:
    """What the counts lack, and what they have that the capture lacks."""
    everything = sum(sum(work.values()) for work in program.work.values())
    if not everything:
        text = f"{named}: no operation was counted; count a step that runs its operators, not a graph's replay"
        return [Issue("nothing-counted", "error", 1.0, text)]
    issues = []
    timed = {key for key, number in times.items() if not math.isnan(number)}
    lost_flops = sum(sum(work.values()) for chain, work in program.work.items() if timed.isdisjoint(chain))
    if lost_flops:
        text = (
            f"{100 * lost_flops / everything:.1f} % of the operations counted are of layers and phases that the "
            "capture does not have, and in no figure; count and capture the same program"
        )
        issues.append(Issue("not-captured", "warning", lost_flops / everything, text))
    ratios = sorted({round(times[key], 6) for key in timed if key[0] != NO_LAYER})
    if len(ratios) > 1:
        text = (
            f"layers ran from {ratios[0]:g} to {ratios[-1]:g} times as often as where they were counted; figures go by "
            "the call, and those of layers that hold others may mix"
        )
        issues.append(Issue("uneven-calls", "note", 1.0, text))
    if unknown := sorted({name for names in program.unknown.values() for name in names}):
        text = f"operators of unknown work: {', '.join(unknown)}; figures with them are at least so high"
        issues.append(Issue("unknown-work", "warning", 1.0, text))
    return issues


def _uncounted_issues(shares: Mapping[str, float]) -> list[Issue]:
    """What is not counted of the GPU time."""
    if not shares:
        return []
    largest = ", ".join(f"{name} {share:.0%}" for name, share in list(shares.items())[:4])
    text = (
        f"{sum(shares.values()):.0%} of the GPU time is in work that was not counted ({largest}): the step's figures "
        "are at least so high"
    )
    return [Issue("uncounted", "warning", sum(shares.values()), text)]


def _warnings_of_gpu(info: CaptureInfo, peaks: Peaks | None, counted_on: str) -> list[Issue]:
    issues = []
    names = ", ".join(sorted(set(info.gpus)))
    if peaks is None and info.on_gpu:
        text = f"no peak is known of {names or 'the GPU'}: no HFU and MFU; give it with --peak bf16=989e12"
        issues.append(Issue("no-peak", "note", 1.0, text))
    if counted_on and names and counted_on not in info.gpus:
        issues.append(Issue("other-gpu", "note", 1.0, f"counted on {counted_on}, captured on {names}"))
    return issues
