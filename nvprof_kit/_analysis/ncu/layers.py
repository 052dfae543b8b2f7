"""The hardware table: how each layer used the GPU, as ncu measured it.

By itself, an ncu report describes only the launches it measured. With an nsys capture of the same program, each launch
in the capture takes the counters of the measured launch with its signature: percentages weighted by its time in the
capture, amounts as they are. The share of time that no measured launch represents is reported as uncovered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.kernels.classes import family_of
from nvprof_kit._analysis.kernels.signatures import Kernels, read_kernels
from nvprof_kit._analysis.layers.fold import Blocks, ByLayer
from nvprof_kit._analysis.layers.tree import with_ancestors
from nvprof_kit._analysis.ncu.counters import AMOUNT_NAMES, PERCENTAGES, counters, missed_links
from nvprof_kit._analysis.ncu.owners import Owner, measured_signatures, own_layers
from nvprof_kit._analysis.ncu.sums import Pairs, Sums
from nvprof_kit._result.column import Column, Columns
from nvprof_kit._result.result import Result
from nvprof_kit._trace.ncu.schema import NcuReport
from nvprof_kit._trace.schema import Trace
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue
from nvprof_kit.names import NO_LAYER

if TYPE_CHECKING:
    import pandas as pd


def tidy(report: NcuReport) -> pd.DataFrame:
    """A row per measured kernel: id, pid, device, kernel, grid, block, layer, phase, and every metric by its full name,
    in base units.
    """
    import pandas as pd

    owners = own_layers(report.kernels).owners
    who = report.kernels[["id", "pid", "device", "kernel", "grid", "block"]]
    who = who.assign(layer=[layer for layer, _ in owners], phase=[phase for _, phase in owners])
    table: pd.DataFrame = pd.concat([who, report.metrics, report.texts], axis=1)
    return table


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

COLUMNS: Columns = {
    "layer": Column("module path, including nested layers; or `(none)` for work outside all layers", kind="str"),
    "phase": Column(
        "`forward`, `backward` or `recompute`; outside layers the text of the phase's range or `other`", kind="str"
    ),
    "launches": Column("number of kernel launches: the measured ones or, with a capture, those of the capture"),
    "gpu_ns": Column(
        "their GPU time in ns, from ncu or, with a capture, from the capture, including copies", "ns", kind="float"
    ),
    "covered": Column("fraction of `gpu_ns` that measured kernels represent, 0 to 1", "share", kind="float"),
    "compute_pct": Column(
        "SM throughput in percent of the peak, mean over the covered time", "percent", kind="float", heading="compute"
    ),
    "memory_pct": Column(
        "memory throughput (the busiest part of the memory system), in percent of the peak",
        "percent",
        kind="float",
        heading="memory",
    ),
    "dram_pct": Column("DRAM throughput, in percent of the peak", "percent", kind="float", heading="DRAM"),
    "l2_pct": Column("L2 cache throughput, in percent of the peak", "percent", kind="float", heading="L2"),
    "l1_pct": Column("L1 cache throughput, in percent of the peak", "percent", kind="float"),
    "tensor_pct": Column("Tensor Core throughput, in percent of the peak", "percent", kind="float", heading="tensor"),
    "occupancy_pct": Column(
        "achieved occupancy: active warps per SM, in percent of the maximum", "percent", kind="float", heading="occup."
    ),
    "l2_hit_pct": Column("L2 hit rate, in percent of sectors", "percent", kind="float", heading="L2 hit"),
    "l1_hit_pct": Column("L1 hit rate, in percent of sectors", "percent", kind="float"),
    "dram_bytes": Column(
        "bytes between DRAM and L2, over the covered launches", "bytes", kind="float", heading="DRAM bytes"
    ),
    "l2_bytes": Column("bytes between L2 and the SMs, over the covered launches", "bytes", kind="float"),
    "l1_bytes": Column("bytes through the L1 caches, over the covered launches", "bytes", kind="float"),
    "nvlink_bytes": Column(
        "bytes over NVLink in both directions, including protocol overhead, over the covered launches",
        "bytes",
        kind="float",
    ),
    "nvlink_sent_bytes": Column(
        "bytes sent over NVLink, without protocol overhead", "bytes", kind="float", heading="NVLink out"
    ),
    "nvlink_received_bytes": Column(
        "bytes received over NVLink, without those that a peer sent before the launch began",
        "bytes",
        kind="float",
        heading="NVLink in",
    ),
    "flop": Column("floating point operations of the CUDA cores, over the covered launches", "flop", kind="float"),
    "tensor_flop": Column("operations of the Tensor Cores, over the covered launches", "flop", kind="float"),
    "intensity": Column(
        "arithmetic intensity: all operations per byte of DRAM traffic", kind="float", heading="op/byte"
    ),
    "stall": Column("most frequent stall reason of warps, as named by ncu", kind="str", heading="stall"),
    "bound": Column(
        "`memory`, `compute` or `latency`, whichever holds for most of the covered time; or `not measured`",
        kind="str",
        heading="bound",
    ),
    "reason": Column("reason for `bound`", kind="str", heading="why"),
}
"""The columns of `NcuLayers.rows` and what they mean. What was not measured is missing."""

KERNEL_COLUMNS: Columns = {
    "layer": Column("module path, or `(none)`", kind="str"),
    "phase": Column("its phase", kind="str"),
}
"""The columns of the table of kernels that are not metrics; metrics are named as in ncu."""

_MEANS = tuple(name for name in PERCENTAGES if name != "waves")


@dataclass(frozen=True, repr=False, eq=False)
class NcuLayers(ByLayer):
    """Hardware utilization of each layer: compute, memory and Tensor Core throughput, and what limits it.

    Attributes:
        kernels: One row per measured kernel, for the roofline: kernel, layer, phase, gpu_ns, flop, tensor_flop,
            dram_bytes. With a capture, gpu_ns is the time of all launches that the kernel represents.
        gpu_ns: The GPU time that the table covers.
        covered: The fraction of it that measured kernels represent, 0 to 1.
        measured: Number of results in the report.
        unused: Number of results that match no launch of the capture; 0 without a capture.
        warnings: What may be missing or misread.
        path: The ncu report.
        report: The measurements.
        capture: The nsys capture, '' if there is none.
        work: What the rows are made of.
    """

    kernels: pd.DataFrame
    gpu_ns: int
    covered: float
    measured: int
    unused: int
    warnings: tuple[Issue, ...]
    path: str
    report: NcuReport | None = None
    capture: str = ""
    work: Work | None = None

    columns: ClassVar = {"ncu-layers": COLUMNS}
    time: ClassVar = "gpu_ns"

    def folded(self, into: Mapping[str, str]) -> pd.DataFrame:
        """`rows` where some layers have another's path, and are counted together.

        Args:
            into: That path by layer.
        """
        if self.work is None:
            return self.rows
        owners = tuple((into.get(layer, layer), phase) for layer, phase in self.work.owners)
        parents = {into.get(layer, layer): into.get(parent, parent) for layer, parent in self.work.parents.items()}
        return _rows(replace(self.work, owners=owners, parents=parents))

    def join(self, path: str, phase: str, rows: pd.DataFrame) -> dict[str, Any]:
        """The values of equal layers in a phase together, from the counters of all their kernels."""
        together = self.folded(dict.fromkeys(rows["layer"], path))
        row: dict[str, Any] = together[(together["layer"] == path) & (together["phase"] == phase)].iloc[0].to_dict()
        return row


@dataclass(frozen=True, repr=False, eq=False)
class NcuKernels(Result):
    """All metrics of all measured kernels, with layer and phase, in base units: ns, byte, hz, %.

    Attributes:
        rows: The table, one row per kernel.
        warnings: What may be missing or misread.
    """

    rows: pd.DataFrame
    warnings: tuple[Issue, ...] = ()

    columns: ClassVar = {"ncu-kernels": KERNEL_COLUMNS}


@dataclass(frozen=True)
class Work:
    """The launches: an element for each (owner, item) pair, where an item has one row of counters.

    Attributes:
        owners: The distinct (layer, phase) pairs, in the model's order.
        parents: The layer that holds each layer, '' at the top.
        owner, item: Indices of `owners` and of `counted`; item -1 for what cannot be measured.
        ns, launches: Time and launches.
        counted: Counters by item; a row of NaN where none was measured.
        measured: Whether an item was measured.
        names: Name of each item.
    """

    owners: tuple[Owner, ...]
    parents: Mapping[str, str]
    owner: Ints
    item: Ints
    ns: Floats
    launches: Ints
    counted: pd.DataFrame
    measured: npt.NDArray[np.bool_]
    names: tuple[str, ...]


def ncu_layers(report: NcuReport, trace: Trace | None = None) -> NcuLayers:
    """How each layer used the GPU.

    Args:
        report: What ncu measured.
        trace: An nsys capture of the same program to spread it over, with the optional columns
            `nvprof_kit._analysis.kernels.signatures.NEEDED`.

    Raises:
        CaptureError: The report has no durations, or none of its kernels is in the capture.
    """
    amounts = counters(report)
    if amounts["duration_ns"].isna().all():
        raise CaptureError(f"{report.path}: no gpu__time_duration; measure with `--set basic` or section SpeedOfLight")
    if trace is None:
        work, warnings, unused = _measured_work(report, amounts)
    else:
        work, unused = _spread_work(report, amounts, read_kernels(trace), trace)
        warnings = trace.info.warnings
    rows = _rows(work)
    total_ns = float(work.ns.sum())
    hit = work.measured[work.item] & (work.item >= 0)
    return NcuLayers(
        rows=rows,
        kernels=_kernels(work),
        gpu_ns=int(total_ns),
        covered=float(work.ns[hit].sum() / total_ns) if total_ns else 0.0,
        measured=len(amounts),
        unused=unused,
        warnings=(*report.warnings, *warnings, *missed_links(report.metrics)),
        path=report.path,
        report=report,
        capture=trace.info.path if trace is not None else "",
        blocks=_blocks(work),
        work=work,
    )


def _blocks(work: Work) -> Blocks:
    """The layers by their compute time; collectives are left out because they mostly wait and are not measured."""
    comm = np.array([family_of(name).kernel_class == "comm" for name in work.names], dtype=bool)
    computing = work.item < 0
    computing[~computing] = ~comm[work.item[~computing]]
    self_ns = np.bincount(work.owner[computing], weights=work.ns[computing], minlength=len(work.owners))
    times: dict[Owner, float] = {}
    for owner, ns in zip(work.owners, self_ns.tolist(), strict=True):
        times[owner] = times.get(owner, 0.0) + ns
    return Blocks.of(times, work.parents, (layer for layer, _ in work.owners))


def _measured_work(report: NcuReport, amounts: pd.DataFrame) -> tuple[Work, tuple[Issue, ...], int]:
    """Every measured launch by itself, without a capture."""
    attribution = own_layers(report.kernels)
    owners = tuple(dict.fromkeys(attribution.owners))
    index_of_owner = {owner: index for index, owner in enumerate(owners)}
    duration = amounts["duration_ns"].to_numpy()
    work = Work(
        owners=owners,
        parents=attribution.parents,
        owner=np.array([index_of_owner[owner] for owner in attribution.owners], dtype=np.int64),
        item=np.arange(len(amounts)),
        ns=np.nan_to_num(duration),
        launches=np.ones(len(amounts), dtype=np.int64),
        counted=amounts,
        measured=~np.isnan(duration),
        names=tuple(report.kernels["kernel"]),
    )
    return work, attribution.warnings, 0


def _spread_work(report: NcuReport, amounts: pd.DataFrame, kernels: Kernels, trace: Trace) -> tuple[Work, int]:
    """Every launch of a capture, with the counters of the measured launch of its signature."""
    result_of = measured_signatures(report, kernels)
    if not any(result_of):
        raise CaptureError(
            f"{report.path}: no kernel of it is in {trace.info.path}; needed a measurement of the same program, "
            "with the same shapes, on the same kind of GPU"
        )
    averaged = _averages(amounts, result_of)
    times, launches = kernels.by_owner(), kernels.launches()
    owner, item = np.nonzero(launches)
    unmeasured = np.flatnonzero(kernels.other_ns)
    work = Work(
        owners=kernels.owners,
        parents=kernels.parents,
        owner=np.append(owner, unmeasured),
        item=np.append(item, np.full(len(unmeasured), -1)),
        ns=np.append(times[owner, item], kernels.other_ns[unmeasured]).astype(np.float64),
        launches=np.append(launches[owner, item], np.zeros(len(unmeasured), dtype=np.int64)),
        counted=averaged,
        measured=np.array([bool(results) for results in result_of]),
        names=tuple(signature.name for signature in kernels.signatures),
    )
    used = {result for results in result_of for result in results}
    return work, len(amounts) - len(used)


def _averages(amounts: pd.DataFrame, result_of: list[list[int]]) -> pd.DataFrame:
    """The counters of each signature: the mean of its measured launches, NaN if there are none."""
    group = np.concatenate([np.full(len(results), number) for number, results in enumerate(result_of)]).astype(np.int64)
    rows = np.concatenate([np.array(results, dtype=np.int64) for results in result_of])
    means = amounts.iloc[rows].groupby(group).mean()
    averaged: pd.DataFrame = means.reindex(range(len(result_of)))
    return averaged


# ---------------------------------------------------------------- rows


def _rows(work: Work) -> pd.DataFrame:
    import pandas as pd

    keys, of_owner = _keys(work)
    key = np.concatenate([np.array(of_owner[owner], dtype=np.int64) for owner in work.owner.tolist()])
    times = np.array([len(of_owner[owner]) for owner in work.owner.tolist()])
    item, ns, launches = (np.repeat(values, times) for values in (work.item, work.ns, work.launches))
    pairs = Pairs(key, item.astype(np.int64), ns.astype(np.float64), launches.astype(np.int64), len(keys))
    sums = Sums(pairs, work.counted, work.measured)
    rows: dict[str, Any] = {
        "layer": [layer for layer, _ in keys],
        "phase": [phase for _, phase in keys],
        "launches": np.bincount(key, weights=launches, minlength=len(keys)).astype(np.int64),
        "gpu_ns": np.bincount(key, weights=ns, minlength=len(keys)).astype(np.int64),
        "covered": sums.covered(),
    }
    rows |= {name: sums.mean(name) for name in _MEANS}
    rows |= {name: sums.amount(name) for name in AMOUNT_NAMES}
    operations = np.nansum([rows["flop"], rows["tensor_flop"]], axis=0)
    has_intensity = ~(np.isnan(rows["flop"]) & np.isnan(rows["tensor_flop"])) & (rows["dram_bytes"] > 0)
    rows["intensity"] = np.where(has_intensity, operations / np.where(has_intensity, rows["dram_bytes"], 1.0), np.nan)
    rows["stall"] = sums.first_stall()
    rows["bound"], rows["reason"] = zip(*sums.judged(), strict=True) if keys else ((), ())
    table: pd.DataFrame = pd.DataFrame({name: rows[name] for name in COLUMNS})
    return table


def _keys(work: Work) -> tuple[list[Owner], list[list[int]]]:
    """The rows' (layer, phase) pairs, each layer's ancestors before it, and for each owner the rows it counts for."""
    index_of_owner: dict[Owner, int] = {}
    of_owner = []
    for layer, phase in sorted(work.owners, key=lambda owner: owner[0] == NO_LAYER):
        ancestors = with_ancestors(layer, work.parents)
        of_owner.append(
            ((layer, phase), [index_of_owner.setdefault((path, phase), len(index_of_owner)) for path in ancestors])
        )
    order = _by_layer(list(index_of_owner))
    rank = {key: index for index, key in enumerate(order)}
    by_place = [rank[key] for key in index_of_owner]
    lookup = {owner: [by_place[row] for row in rows] for owner, rows in of_owner}
    return order, [lookup[owner] for owner in work.owners]


def _by_layer(keys: list[Owner]) -> list[Owner]:
    """The pairs in the order in which their layers first appear, phases of one layer together, `(none)` last."""
    first: dict[str, int] = {}
    for layer, _ in keys:
        first.setdefault(layer, len(first))
    return sorted(keys, key=lambda key: (key[0] == NO_LAYER, first[key[0]]))


def _kernels(work: Work) -> pd.DataFrame:
    """The measured kernels for the roofline, by owner."""
    import pandas as pd

    hit = np.flatnonzero((work.item >= 0) & work.measured[work.item])
    item, owner = work.item[hit], work.owner[hit]
    table: dict[str, Any] = {
        "kernel": [work.names[index] for index in item.tolist()],
        "layer": [work.owners[index][0] for index in owner.tolist()],
        "phase": [work.owners[index][1] for index in owner.tolist()],
        "gpu_ns": work.ns[hit],
        "launches": work.launches[hit],
    }
    for name in ("duration_ns", "flop", "tensor_flop", "dram_bytes"):
        table[name] = work.counted[name].to_numpy()[item]
    kernels: pd.DataFrame = pd.DataFrame(table)
    return kernels
