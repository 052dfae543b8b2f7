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

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution, attribute
from nvprof_kit._analysis.attribution.intervals import Int64Array
from nvprof_kit._analysis.flops.work import compiled_rows, work_per_step
from nvprof_kit._analysis.kernels.classes import family_of
from nvprof_kit._analysis.kernels.signatures import Kernels, read_kernels
from nvprof_kit._analysis.layers.tree import with_ancestors
from nvprof_kit._result.column import Column, Columns
from nvprof_kit._result.result import Result, renderers
from nvprof_kit._result.writer import write_file
from nvprof_kit._trace.flops_file import FlopsFile
from nvprof_kit._trace.schema import CaptureInfo, Trace
from nvprof_kit.errors import CaptureError, UsageError
from nvprof_kit.issues import Issue
from nvprof_kit.names import NO_LAYER

if TYPE_CHECKING:
    import pandas as pd


Bools = npt.NDArray[np.bool_]

LEAST_SHARES = 0.002, 0.0002, 0.0
"""A kind of work below this share of the GPU time gets no launch of its own, unless the requested share needs it."""


COLUMNS: Columns = {
    "kernel": Column("the kernel's name", kind="str"),
    "grid": Column("grid size of the launch, in blocks", kind="str"),
    "block": Column("block size, in threads", kind="str"),
    "registers": Column("registers per thread"),
    "shared_bytes": Column("static and dynamic shared memory per block, in bytes", "bytes"),
    "launches": Column("number of launches with this kernel and launch configuration"),
    "gpu_ns": Column("their GPU time, in ns", "ns"),
    "share": Column("`gpu_ns` as a fraction of the GPU time that the plan covers, 0 to 1", "share", kind="float"),
    "covered": Column("cumulative share of this row and the rows above it, 0 to 1", "share", kind="float"),
    "above_limit_ns": Column(
        "`gpu_ns` without the least time for the layer's counted work, if counts lie beside the capture; the plan then "
        "chooses and sorts by it",
        "ns",
    ),
}
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
    included = np.array(
        [not layer or layer in with_ancestors(path, kernels.parents) for path, _ in kernels.owners], dtype=bool
    )
    scope = f"in {layer or 'the capture'}"
    times = kernels.by_owner() * included[:, None]
    collective = np.array(
        [family_of(signature.name).kernel_class == "comm" for signature in kernels.signatures], dtype=bool
    )
    collectives_ns = int(times[:, collective].sum())
    times[:, collective] = 0
    other = kernels.other_ns * included
    if not times.any() and collectives_ns:
        raise CaptureError(
            f"{trace.info.path}: every kernel {scope} is a collective's, which ncu cannot replay on one "
            "rank; measure those with ncu profile --kernel nccl -s communication --rank N"
        )
    if not times.any():
        raise CaptureError(f"{trace.info.path}: no kernel {scope}; see `nvprof-kit layers` for what there is")
    signatures = kernels.signatures
    names = list(dict.fromkeys(signature.mangled for signature in signatures if signature.mangled))
    index_of_name = {name: index for index, name in enumerate(names)}
    name = np.array([index_of_name.get(signature.mangled, -1) for signature in signatures], dtype=np.int64)
    if not names:
        raise CaptureError(
            f"{trace.info.path}: no linker names of kernels (column mangledName); needed nsys 2022.4 or newer"
        )
    above_limit = None if counts is None else _above_limit(trace, attribution, kernels, times, counts)
    weights = times if above_limit is None else above_limit
    blocks, goals = _goals(kernels, weights, other, every_layer)
    chosen = _cover(goals, name, share)
    if chosen is None:
        best = goals[0, :-1][name >= 0].sum() / goals[0].sum()
        raise UsageError(
            f"--share {share:g} cannot be reached: kernels that can be measured take {best:.2%} of the GPU "
            f"time {scope}, copies the rest; ask for less"
        )
    is_wanted = np.isin(name, chosen) & (times.sum(axis=0) > 0)
    for least_share in LEAST_SHARES:
        is_worth = is_wanted & (weights.sum(axis=0) >= least_share * weights.sum())
        invocations, measured, measurements = _choose_launches(kernels, is_wanted, is_worth, weights.sum(axis=0))
        covered = (goals[:, :-1] * measured).sum(axis=1) / np.maximum(goals.sum(axis=1), 1)
        if covered[0] >= share:
            break
    fewest = int(np.argmin(covered[1:])) + 1 if len(covered) > 1 else 0
    gpu_ns = int(times.sum() + other.sum())
    launches = kernels.launches() * included[:, None]
    return NcuPlan(
        rows=_rows(kernels, times, launches, measured, total_ns=gpu_ns, above=above_limit),
        names=tuple(names[index] for index in chosen),
        invocations=invocations,
        measurements=measurements,
        covered=float(covered[0]),
        least_covered=(blocks[fewest], float(covered[fewest])),
        gpu_ns=gpu_ns,
        above_limit_ns=None if above_limit is None else int(goals[0].sum()),
        collectives_ns=collectives_ns,
        launches=int(launches[:, ~collective].sum()),
        info=trace.info,
        layer=layer,
        every_layer=every_layer,
    )


def _above_limit(
    trace: Trace, attribution: Attribution, kernels: Kernels, times: Int64Array, counts: FlopsFile
) -> Int64Array | None:
    """The part of `times` above the least time for the counted work, the same shape; None if no work is known.

    The least time of a layer's products, convolutions and attention is that of its gemm and attention kernels, that of
    its other operators that of its other kernels; in a layer that torch.compile fused, only the former is known.
    """
    work = work_per_step(counts, trace.info, kernels.owners, compiled_rows(trace, attribution))
    steps = len(attribution.ranges.steps)
    is_product = np.array(
        [family_of(signature.name).kernel_class in ("gemm", "attention") for signature in kernels.signatures]
    )
    limits = np.array(
        [[work.get(owner, {}).get(amount, 0.0) for amount in ("products_ns", "limit_ns")] for owner in kernels.owners]
    )
    limits = np.nan_to_num(limits) * steps  # unknown is as none
    if not limits.any():
        return None
    above_limit = times.astype(np.float64)
    for kind, limit in ((is_product, limits[:, 0]), (~is_product, np.maximum(limits[:, 1] - limits[:, 0], 0))):
        time = times[:, kind].sum(axis=1)
        above_limit[:, kind] *= (1 - np.minimum(limit / np.maximum(time, 1), 1))[:, None]
    return np.rint(above_limit).astype(np.int64)


def block_of(layer: str) -> str:
    """The outermost block that a layer is part of: its path up to the first number, or all of it:
    ``model.layers.3.mlp`` gives ``model.layers.3``.
    """
    parts = layer.split(".")
    number = next((index for index, path_part in enumerate(parts) if path_part.isdecimal()), len(parts) - 1)
    return ".".join(parts[: number + 1])


def _goals(kernels: Kernels, times: Int64Array, other: Int64Array, every_layer: bool) -> tuple[list[str], Int64Array]:
    """What must be covered: everything, and with `every_layer` each block.

    Returns:
        The names of the goals, and their time by signature with that of everything else as a last column, shape
        ``(goals, signatures + 1)``.
    """
    total = np.append(times.sum(axis=0), other.sum())
    blocks, goals = ["everything"], [total]
    of_owner = np.array([block_of(layer) for layer, _ in kernels.owners], dtype=object)
    for block in dict.fromkeys(of_owner.tolist()) if every_layer else ():
        is_of_block = of_owner == block
        if block != NO_LAYER and times[is_of_block].any():
            blocks.append(block)
            goals.append(np.append(times[is_of_block].sum(axis=0), other[is_of_block].sum()))
    return blocks, np.array(goals, dtype=np.int64)


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


def _choose_launches(
    kernels: Kernels, is_wanted: Bools, is_worth: Bools, times: Int64Array
) -> tuple[tuple[int, ...], Bools, int]:
    """The numbers of the launches to measure, ascending, the first always among them; which signatures they measure;
    and with how many launches. The next number is the one that measures most time for its price.

    Args:
        kernels: The launches of the capture.
        is_wanted: Which signatures are of a chosen name, shape ``(s,)``.
        is_worth: Which of them get a launch of their own if they need one.
        times: GPU time by signature, ``(s,)``.
    """
    import pandas as pd

    early = kernels.early & is_wanted[kernels.signature]
    launches = pd.DataFrame({"number": kernels.invocation[early], "signature": kernels.signature[early]})
    price = launches.groupby("number").size()
    chosen = [1]
    while True:
        measured = launches[launches["number"].isin(chosen)]
        is_measured = np.isin(np.arange(len(times)), measured["signature"])
        useful = launches[(is_worth & ~is_measured)[launches["signature"]]].drop_duplicates()
        if useful.empty:
            return tuple(sorted(chosen)), is_measured, len(measured)
        gain = useful.assign(gain=times[useful["signature"]]).groupby("number")["gain"].sum()
        value = gain / price[gain.index]
        chosen.append(int(value[value == value.max()].index.max()))


def _rows(
    kernels: Kernels,
    times: Int64Array,
    launches: Int64Array,
    measured: Bools,
    *,
    total_ns: int,
    above: Int64Array | None,
) -> pd.DataFrame:
    import pandas as pd

    chosen = [(index, signature) for index, signature in enumerate(kernels.signatures) if measured[index]]
    rows = {
        "kernel": [signature.name for _, signature in chosen],
        "grid": [size_text(signature.grid) for _, signature in chosen],
        "block": [size_text(signature.block) for _, signature in chosen],
        "registers": [signature.registers for _, signature in chosen],
        "shared_bytes": [signature.shared_bytes for _, signature in chosen],
        "launches": launches.sum(axis=0)[measured],
        "gpu_ns": times.sum(axis=0)[measured],
        **({} if above is None else {"above_limit_ns": above.sum(axis=0)[measured]}),
    }
    by = "gpu_ns" if above is None else "above_limit_ns"
    table = pd.DataFrame(rows).sort_values(by, ascending=False, kind="stable", ignore_index=True)
    table["share"] = table["gpu_ns"] / total_ns
    table["covered"] = table["share"].cumsum()
    in_order: pd.DataFrame = table[[name for name in COLUMNS if name in table]]
    return in_order


def size_text(size: tuple[int, int, int]) -> str:
    """A grid's or a block's size as ncu writes it: ``(64, 1, 1)``."""
    return f"({size[0]}, {size[1]}, {size[2]})"
