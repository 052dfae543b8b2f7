"""Which kernels to measure with ncu: the fewest that represent most of the GPU time.

Every launch of one signature does the same work, so ncu needs to measure only one of each. ncu selects by name and
measures the first launch of every combination of grid, block and shared memory of that name, so the plan chooses names,
and the cost of a name is the number of its signatures. If roles divide a signature, later launches are measured too.

Kernels of collectives are left out: most of their time is waiting for other ranks, and ncu's kernel replay, which runs
a kernel several times on one rank alone, would hang in them.

Where the program's work was counted, the kernels represent the time above the least time for that work instead, so that
counters are spent where something can be won.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from nvprof_kit._analysis.attribution.attribution import Attribution, attribute
from nvprof_kit._analysis.attribution.intervals import Int64Array
from nvprof_kit._analysis.flops.work import compiled_rows, work_per_step
from nvprof_kit._analysis.kernels.classes import family_of
from nvprof_kit._analysis.kernels.signatures import Owner, Signature, read_kernels
from nvprof_kit._analysis.layers.tree import with_ancestors
from nvprof_kit._result.column import read_columns
from nvprof_kit._result.result import Result, renderers
from nvprof_kit._result.writer import write_file
from nvprof_kit._trace.flops_file import FlopsFile
from nvprof_kit._trace.schema import CaptureInfo, Trace
from nvprof_kit.errors import CaptureError, UsageError
from nvprof_kit.issues import Issue
from nvprof_kit.names import NO_LAYER

if TYPE_CHECKING:
    import pandas as pd


LEAST_SHARES = 0.002, 0.0002, 0.0
"""A kind of work below this share of the GPU time gets no launch of its own, unless the requested share needs it."""


COLUMNS = read_columns("nvprof_kit._analysis.ncu", "plan")
"""The columns of `NcuPlan.rows` and what they mean."""


SECONDS_PER_PASS = 0.045, 0.002
"""What a pass of a measured launch costs: at least, and more for every GB that the program holds on the GPU, which ncu
saves and restores. By three runs on H200s with ncu 2025.3, 10 passes each: 0.47 s a launch with 1.18 GB (63 launches,
and 846), 0.52 s with 3.75 GB. Another machine took a third of that.
"""

PASSES = {"basic": 10, "full": 48}
"""Passes of ncu's sets of sections on an H200."""


@dataclass(frozen=True, repr=False, eq=False)
class NcuPlan(Result):
    """The fewest kernel launches that represent most of the GPU time.

    Attributes:
        rows: One row per kernel signature to measure, the costliest first; columns `COLUMNS`. A launch that does
            different work in different layers has one row for each.
        names: Linker (mangled) names of the kernels to measure.
        invocations: Which launches of each configuration to measure, counted from 1.
        measurements: Number of measured launches; per step if the capture has steps.
        covered: The fraction of the requested GPU time that these kernels represent, 0 to 1; with counts, of that
            above the least time.
        least_covered: The block with the smallest covered fraction, and that fraction.
        gpu_ns: The GPU time that the plan covers, with copies and without collectives.
        collectives_ns: GPU time of collective kernels, which the plan leaves out.
        above_limit_ns: The part of `gpu_ns` above the least time for the counted work; None without counts.
        launches: Number of kernel launches in `gpu_ns`, all of which a full ncu run would measure.
        info: Recording tool, GPUs and processes of the capture.
        layer: Only this layer and the layers inside it; '' for all.
        every_layer: Whether each of the outermost blocks (``model.layers.3``) reaches the share, not only all of them.
        section_set: Section set of ncu (``ncu --set``).
    """

    rows: pd.DataFrame
    names: tuple[str, ...]
    invocations: tuple[int, ...]
    measurements: int
    covered: float
    least_covered: tuple[str, float]
    gpu_ns: int
    collectives_ns: int
    launches: int
    info: CaptureInfo
    above_limit_ns: int | None = None
    layer: str = ""
    every_layer: bool = False
    section_set: str = "basic"

    columns: ClassVar = {"ncu-plan": COLUMNS}
    bars: ClassVar = {"ncu-plan": (("gpu_ns",), ("kernel", "grid"))}

    @property
    def warnings(self) -> tuple[Issue, ...]:
        """What may be missing or distorted in the capture; each sentence says what to do about it."""
        return self.info.warnings

    def script(self, report: str = "plan") -> str:
        """A shell script that measures only these kernels; run it with ``bash FILE -- python train.py``.

        Args:
            report: Name of the report that ncu writes, without suffix.
        """
        script: str = renderers().shown(self, "script", report)
        return script

    def save_script(self, path: str | Path) -> Path:
        """Write `script` to an executable file. It appears complete or not at all.

        Raises:
            UsageError: The file is an input or cannot be written.
        """
        return write_file(path, self.script(Path(path).stem), inputs=self.sources, executable=True)

    def predicted_seconds(self, memory_gb: float = 1.0) -> tuple[float, float] | None:
        """How long ncu will take in seconds, with the program's own time: for the plan, and for every launch one by
        one; None for a set of sections that was never timed.

        Args:
            memory_gb: GPU memory of the program in GB, which ncu saves and restores.
        """
        passes = PASSES.get(self.section_set)
        if passes is None:
            return None
        fixed_seconds, for_each_gb = SECONDS_PER_PASS
        each = passes * (fixed_seconds + for_each_gb * memory_gb)
        program = self.info.session_ns / 1e9
        return program + each * self.measurements, program + each * self.launches


def plan(
    trace: Trace,
    attribution: Attribution | None = None,
    counts: FlopsFile | None = None,
    *,
    share: float = 0.9,
    layer: str = "",
    every_layer: bool = False,
) -> NcuPlan:
    """Choose the kernels to measure.

    Args:
        trace: A capture with the optional columns `nvprof_kit._analysis.kernels.signatures.NEEDED`.
        attribution: Who owns each operation, where that is known already.
        counts: The counts of the program, to prefer kernels by their time above the least time for their work.
        share: Fraction of the GPU time that the measured kernels represent, 0 to 1; with counts, of that above the
            least time.
        layer: Only this layer and the layers inside it; '' for all.
        every_layer: Reach the share in each of the outermost blocks (``model.layers.3``), not only overall.

    Raises:
        CaptureError: The capture has no kernel of what is asked for, or does not name its kernels.
        UsageError: The share cannot be reached, since copies and kernels without a name take the rest.
    """
    attribution = attribution or attribute(trace)
    kernels = read_kernels(trace, attribution)
    owners, signatures = kernels.owners, kernels.signatures
    is_included = np.array([not layer or layer in with_ancestors(path, kernels.parents) for path, _ in owners], bool)
    scope = f"in {layer or 'the capture'}"
    work = kernels.by_owner()
    classes = np.array([family_of(signature.name).kernel_class for signature in signatures], dtype=object)
    work = work.assign(kernel_class=classes[work["signature"]])[is_included[work["owner"]]]
    is_comm = work["kernel_class"] == "comm"
    collectives_ns, work = int(work["ns"][is_comm].sum()), work[~is_comm]
    if not work["ns"].any() and collectives_ns:
        raise CaptureError.of("only-collectives", path=trace.info.path, scope=scope)
    if not work["ns"].any():
        raise CaptureError(f"{trace.info.path}: no kernel {scope}; see `nvprof-kit layers` for what there is")
    names = list(dict.fromkeys(signature.mangled for signature in signatures if signature.mangled))
    if not names:
        raise CaptureError.of("no-linker-names", path=trace.info.path)
    index_of_name = {name: index for index, name in enumerate(names)}
    name = np.array([index_of_name.get(signature.mangled, -1) for signature in signatures], dtype=np.int64)
    above_limit = None
    if counts is not None:
        limits = work_per_step(counts, trace.info, owners, compiled_rows(trace, attribution))
        above_limit = _above_limit(work, owners, limits, len(attribution.ranges.steps))
    work = work.assign(weight=work["ns"] if above_limit is None else above_limit)
    other_ns = kernels.other_ns * is_included
    goals, amounts = _goals(work, other_ns, owners, len(signatures), every_layer)
    weight = amounts[0, :-1]
    chosen = _cover(amounts, name, share)
    if chosen is None:
        measurable = weight[name >= 0].sum() / amounts[0].sum()
        raise UsageError.of("share-not-reached", share=share, measurable=measurable, scope=scope)
    has_time = np.isin(np.arange(len(signatures)), work["signature"][work["ns"] > 0])
    early = kernels.launches[kernels.launches["is_early"]]
    early = early[(np.isin(name, chosen) & has_time)[early["signature"]]]
    for least_share in LEAST_SHARES:
        invocations, measured = _choose_launches(early, np.where(weight >= least_share * weight.sum(), weight, -1))
        is_measured = np.isin(np.arange(len(signatures)), measured["signature"])
        covered = (amounts[:, :-1] * is_measured).sum(axis=1) / np.maximum(amounts.sum(axis=1), 1)
        if covered[0] >= share:
            break
    fewest = int(np.argmin(covered[1:])) + 1 if len(covered) > 1 else 0
    gpu_ns = int(work["ns"].sum() + other_ns.sum())
    return NcuPlan(
        rows=_rows(signatures, work[is_measured[work["signature"]]], gpu_ns, above_limit is not None),
        names=tuple(names[index] for index in chosen),
        invocations=invocations,
        measurements=len(measured),
        covered=float(covered[0]),
        least_covered=(goals[fewest], float(covered[fewest])),
        gpu_ns=gpu_ns,
        above_limit_ns=None if above_limit is None else int(amounts[0].sum()),
        collectives_ns=collectives_ns,
        launches=int(work["launches"].sum()),
        info=trace.info,
        layer=layer,
        every_layer=every_layer,
    )


def _above_limit(
    work: pd.DataFrame, owners: Sequence[Owner], limits: Mapping[Owner, Mapping[str, float]], steps: int
) -> Int64Array | None:
    """The part of the time of `work` above the least time for what was counted; None if no work is known.

    The least time of a layer's products, convolutions and attention is that of its gemm and attention kernels, that of
    its other operators that of its other kernels; in a layer that torch.compile fused, only the former is known.
    """
    products, all_work = (
        np.nan_to_num([limits.get(owner, {}).get(amount, 0.0) * steps for owner in owners])  # unknown counts as none
        for amount in ("products_ns", "limit_ns")
    )
    if not (products.any() or all_work.any()):
        return None
    is_product = work["kernel_class"].isin(("gemm", "attention"))
    limit = np.where(is_product, products[work["owner"]], np.maximum(all_work - products, 0)[work["owner"]])
    time = work.groupby(["owner", is_product])["ns"].transform("sum")
    above_limit: Int64Array = np.rint(work["ns"] * (1 - np.minimum(limit / time.clip(lower=1), 1))).to_numpy(np.int64)
    return above_limit


def block_of(layer: str) -> str:
    """The outermost block that a layer is part of: its path up to the first number, or all of it:
    ``model.layers.3.mlp`` gives ``model.layers.3``.
    """
    parts = layer.split(".")
    number = next((index for index, path_part in enumerate(parts) if path_part.isdecimal()), len(parts) - 1)
    return ".".join(parts[: number + 1])


def _goals(
    work: pd.DataFrame, other_ns: Int64Array, owners: Sequence[Owner], signatures: int, every_layer: bool
) -> tuple[list[str], Int64Array]:
    """What must be covered: everything, and with `every_layer` each block.

    Returns:
        The names of the goals, and their weight by signature with the time of everything else as a last column, shape
        ``(goals, signatures + 1)``.
    """
    blocks = np.array([block_of(path) for path, _ in owners], dtype=object)
    goals, amounts = [], []
    for block in ("everything", *dict.fromkeys(blocks.tolist())) if every_layer else ("everything",):
        in_block = np.ones(len(blocks), dtype=bool) if block == "everything" else blocks == block
        rows = work[in_block[work["owner"]]]
        if block == "everything" or (block != NO_LAYER and rows["weight"].any()):
            by_signature = np.bincount(rows["signature"], weights=rows["weight"], minlength=signatures)
            goals.append(block)
            amounts.append(np.append(by_signature, other_ns[in_block].sum()))
    return goals, np.array(amounts).astype(np.int64)


def _cover(goals: Int64Array, name: Int64Array, share: float) -> list[int] | None:
    """The names whose signatures cover the share of every goal, few signatures altogether.

    A goal that cannot reach its share because of copies and unnamed kernels gets as much as possible; only the first,
    which is everything, must reach it, otherwise the result is None. Greedily, the next name is the one with the most
    progress for its price; at the end superfluous names are dropped, the costliest first. If every name has one
    signature and there is one goal, the result is optimal.
    """
    count = int(name.max()) + 1
    is_named = name >= 0
    gains = np.zeros((len(goals), count))
    for goal, row in enumerate(goals):
        gains[goal] = np.bincount(name[is_named], weights=row[:-1][is_named], minlength=count)
    price = np.maximum(np.bincount(name[is_named & (goals[0, :-1] > 0)], minlength=count), 1)
    need = share * goals.sum(axis=1).astype(np.float64)
    attainable = gains.sum(axis=1)
    if attainable[0] < need[0] * (1 - 1e-12):
        return None
    need = np.minimum(need, attainable)
    left, chosen = need.copy(), list[int]()
    weight = 1 / np.maximum(need, 1)
    while (left > 1e-9 * need).any():
        worth = (np.minimum(gains, np.maximum(left, 0)[:, None]) * weight[:, None]).sum(axis=0) / price
        worth = worth + 1e-6 * gains[0] / max(gains[0].sum(), 1)  # on a tie, the one that covers more
        worth[chosen] = -1
        best = int(np.argmax(worth))
        chosen.append(best)
        left -= gains[:, best]
    for candidate in sorted(chosen, key=lambda index: (-price[index], gains[0, index])):
        if (left + gains[:, candidate] <= 1e-9 * need).all():
            chosen.remove(candidate)
            left += gains[:, candidate]
    return chosen


def _choose_launches(launches: pd.DataFrame, weight: Int64Array) -> tuple[tuple[int, ...], pd.DataFrame]:
    """The numbers of the launches to measure, ascending, the first always among them; and which launches these are. The
    next number is the one that measures most for its price.

    Args:
        launches: Launches of the chosen names, columns ``invocation`` and ``signature``.
        weight: What measuring each signature is worth; below 0 if it gets no launch of its own.
    """
    price = launches.groupby("invocation").size()
    chosen = [1]
    while True:
        measured = launches[launches["invocation"].isin(chosen)]
        is_useful = (weight[launches["signature"]] >= 0) & ~launches["signature"].isin(measured["signature"])
        useful = launches.loc[is_useful, ["invocation", "signature"]].drop_duplicates()
        if useful.empty:
            return tuple(sorted(chosen)), measured
        gain = useful.assign(gain=weight[useful["signature"]]).groupby("invocation")["gain"].sum()
        value = gain / price[gain.index]
        chosen.append(int(value[value == value.max()].index.max()))


def _rows(signatures: Sequence[Signature], work: pd.DataFrame, total_ns: int, has_limits: bool) -> pd.DataFrame:
    """The measured signatures, the costliest first."""
    table = work.groupby("signature", as_index=False)[["launches", "ns", "weight"]].sum()
    of_row = [signatures[signature] for signature in table["signature"]]
    table = table.rename(columns={"ns": "gpu_ns", "weight": "above_limit_ns"}).assign(
        kernel=[signature.name for signature in of_row],
        grid=[size_text(signature.grid) for signature in of_row],
        block=[size_text(signature.block) for signature in of_row],
        registers=[signature.registers for signature in of_row],
        shared_bytes=[signature.shared_bytes for signature in of_row],
    )
    table = table.sort_values("above_limit_ns", ascending=False, kind="stable", ignore_index=True)
    table["share"] = table["gpu_ns"] / total_ns
    table["covered"] = table["share"].cumsum()
    return table[[name for name in COLUMNS if has_limits or name != "above_limit_ns"]]


def size_text(size: tuple[int, int, int]) -> str:
    """A grid's or a block's size as ncu writes it: ``(64, 1, 1)``."""
    return f"({size[0]}, {size[1]}, {size[2]})"
