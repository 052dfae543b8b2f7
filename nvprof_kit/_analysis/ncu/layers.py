"""The hardware table: how each layer used the GPU, as ncu measured it.

By itself, an ncu report describes only the launches it measured. With an nsys capture of the same program, each launch
in the capture takes the counters of the measured launch with its signature: percentages weighted by its time in the
capture, amounts as they are. The share of time that no measured launch represents is reported as uncovered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from nvprof_kit._analysis.kernels.classes import family_of
from nvprof_kit._analysis.kernels.signatures import Kernels, Owner, read_kernels
from nvprof_kit._analysis.layers.fold import Blocks, ByLayer
from nvprof_kit._analysis.layers.tree import ModelTree, with_ancestors
from nvprof_kit._analysis.ncu.counters import AMOUNT_NAMES, PERCENTAGES, STALL_PREFIX, counters, missed_links
from nvprof_kit._analysis.ncu.owners import layers_of_kernels, measured_signatures
from nvprof_kit._result.column import read_columns
from nvprof_kit._result.result import Result
from nvprof_kit._trace.ncu.schema import NcuReport
from nvprof_kit._trace.schema import Trace
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue
from nvprof_kit.names import NO_LAYER


def tidy(report: NcuReport) -> pd.DataFrame:
    """A row per measured kernel: id, pid, device, kernel, grid, block, layer, phase, and every metric by its full name,
    in base units.
    """
    owners = layers_of_kernels(report.kernels).owners
    who = report.kernels[["id", "pid", "device", "kernel", "grid", "block"]]
    who = who.assign(layer=[layer for layer, _ in owners], phase=[phase for _, phase in owners])
    return pd.concat([who, report.metrics, report.texts], axis=1)


BUSY = 60.0
"""A unit counts as busy from this percentage of its peak on."""

_UNITS = {"dram_pct": "DRAM", "l2_pct": "the L2 cache", "l1_pct": "the L1 cache"}
_LOW_OCCUPANCY = 40.0

COLUMNS = read_columns("nvprof_kit._analysis.ncu", "layers")
"""The columns of `NcuLayers.rows` and what they mean. What was not measured is missing."""

KERNEL_COLUMNS = read_columns("nvprof_kit._analysis.ncu", "kernels")
"""The columns of the table of kernels that are not metrics; metrics are named as in ncu."""


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
        row = together[(together["layer"] == path) & (together["phase"] == phase)].iloc[0]
        return {str(name): value for name, value in row.items()}


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
    """The launches, by owner and item, where an item has one row of counters.

    Attributes:
        owners: The distinct (layer, phase) pairs, in the model's order.
        parents: The layer that holds each layer, '' at the top.
        launches: Columns ``owner`` and ``item``, indices of `owners` and of `counters`, item -1 for what cannot be
            measured, and their time ``ns`` and number ``launches``.
        counters: Counters by item, those of `nvprof_kit._analysis.ncu.counters.counters`, NaN where none was measured.
        names: Name of each item.
    """

    owners: tuple[Owner, ...]
    parents: Mapping[str, str]
    launches: pd.DataFrame
    counters: pd.DataFrame
    names: tuple[str, ...]

    def measured(self) -> pd.DataFrame:
        """Those of `launches` that a measured kernel represents."""
        is_measured = np.append(self.counters["duration_ns"].notna(), False)
        return self.launches[is_measured[self.launches["item"]]]


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
    if trace is None:  # every measured launch by itself
        attribution, unused = layers_of_kernels(report.kernels), 0
        owner, owners = pd.factorize(pd.Series(attribution.owners))
        launches = pd.DataFrame({"owner": owner, "item": range(len(amounts)), "launches": 1})
        launches["ns"] = amounts["duration_ns"].fillna(0.0).array
        work = Work(tuple(owners), attribution.parents, launches, amounts, tuple(report.kernels["kernel"]))
        warnings = attribution.warnings
    else:
        work, warnings, unused = _spread_work(report, amounts, read_kernels(trace), trace)
    total_ns = float(work.launches["ns"].sum())
    # blocks are alike by their compute time; collectives mostly wait and are not measured
    is_comm = np.array([*(family_of(name).kernel_class == "comm" for name in work.names), False])
    self_ns = work.launches[~is_comm[work.launches["item"]]].groupby("owner")["ns"].sum()
    times = dict(zip(work.owners, self_ns.reindex(range(len(work.owners)), fill_value=0.0).tolist(), strict=True))
    return NcuLayers(
        rows=_rows(work),
        kernels=_kernels(work),
        gpu_ns=int(total_ns),
        covered=float(work.measured()["ns"].sum() / total_ns) if total_ns else 0.0,
        measured=len(amounts),
        unused=unused,
        warnings=(*report.warnings, *warnings, *missed_links(report.metrics)),
        path=report.path,
        report=report,
        capture=trace.info.path if trace is not None else "",
        blocks=Blocks.of(times, work.parents, (layer for layer, _ in work.owners)),
        work=work,
    )


def _spread_work(
    report: NcuReport, amounts: pd.DataFrame, kernels: Kernels, trace: Trace
) -> tuple[Work, tuple[Issue, ...], int]:
    """Every launch of a capture, with the mean counters of the measured launches of its signature."""
    result_of = measured_signatures(report, kernels)
    if not any(result_of):
        raise CaptureError.of("no-kernel-in-capture", report=report.path, path=trace.info.path)
    signature = np.repeat(range(len(result_of)), [len(results) for results in result_of])
    results = [result for results in result_of for result in results]
    averaged = amounts.iloc[results].groupby(signature).mean().reindex(range(len(result_of)))
    unmeasured = np.flatnonzero(kernels.other_ns)
    other_launches = {"owner": unmeasured, "item": -1, "ns": kernels.other_ns[unmeasured], "launches": 0}
    launches = kernels.by_owner().rename(columns={"signature": "item"})
    launches = pd.concat([launches, pd.DataFrame(other_launches)], ignore_index=True)
    names = tuple(each.name for each in kernels.signatures)
    work = Work(kernels.owners, kernels.parents, launches, averaged, names)
    return work, trace.info.warnings, len(amounts) - len(set(results))


_BOUNDS = ("memory", "compute", "latency", "not measured")


def _rows(work: Work) -> pd.DataFrame:
    """The table: each launch counts in its layer's row and, in the same phase, in those of the layers around it."""
    owners = sorted(work.owners, key=lambda owner: owner[0] == NO_LAYER)
    keys = [(outer, phase) for layer, phase in owners for outer in with_ancestors(layer, work.parents)]
    first = {layer: number for number, (layer, _) in reversed([*enumerate(keys)])}
    keys = sorted(dict.fromkeys(keys), key=lambda key: (key[0] == NO_LAYER, first[key[0]]))
    parents = [(work.parents.get(layer, ""), phase) for layer, phase in keys]
    tree = ModelTree(["\n".join(key) for key in keys], ["\n".join(parent) if parent[0] else "" for parent in parents])
    row_of_owner = np.array([tree.index["\n".join(owner)] for owner in work.owners], dtype=np.int64)

    def nested(values: pd.DataFrame, owner: pd.Series[int]) -> pd.DataFrame:
        """Sums by row, with those of the layers inside it."""
        sums = values.groupby(row_of_owner[owner]).sum().reindex(range(len(keys)), fill_value=0)
        return pd.DataFrame(tree.with_nested(sums.to_numpy(dtype=np.float64)), columns=values.columns)

    launched = nested(work.launches[["launches", "ns"]], work.launches["owner"])
    measured = work.measured().reset_index(drop=True)
    owner, counters_of_launch = measured["owner"], work.counters.iloc[measured["item"]].reset_index(drop=True)

    def means(columns: Sequence[str], weight: pd.Series[float]) -> pd.DataFrame:
        """Means over the time of the launches; NaN if none was measured."""
        values = counters_of_launch[[*columns]]
        sums, weights = (nested(of.mul(weight, axis=0), owner) for of in (values, values.notna()))
        return sums / weights

    ns, compute, memory = measured["ns"], counters_of_launch["compute_pct"], counters_of_launch["memory_pct"]
    is_busy = np.maximum(compute, memory) >= BUSY
    is_unknown = (compute.isna() | memory.isna()).to_numpy()
    bound = np.select([is_unknown, is_busy & (memory >= compute), is_busy], ["not measured", *_BOUNDS[:2]], "latency")
    time = nested(pd.DataFrame({name: ns.where(bound == name, 0.0) for name in _BOUNDS}), owner)
    costliest = time.idxmax(axis="columns").where(time.sum(axis="columns") > 0, "")
    of_bound = {name: means([*PERCENTAGES], ns.where(bound == name, 0.0)).to_dict("records") for name in {*costliest}}
    shares = (time.max(axis="columns") / time.sum(axis="columns")).fillna(0.0)
    stalls = means([str(name) for name in counters_of_launch if str(name).startswith(STALL_PREFIX)], ns)
    amounts = counters_of_launch[[*AMOUNT_NAMES]]
    totals = nested(amounts.mul(measured["launches"], axis=0), owner).where(nested(amounts.notna(), owner) > 0)
    operations = totals[["flop", "tensor_flop"]].sum(axis="columns", min_count=1)
    worst = [None if row.isna().all() else str(row.idxmax()).removeprefix(STALL_PREFIX) for _, row in stalls.iterrows()]
    table: pd.DataFrame = pd.DataFrame(keys, columns=["layer", "phase"]).join(means([*PERCENTAGES], ns)).join(totals)
    table = table.assign(
        launches=launched["launches"].astype(np.int64),
        gpu_ns=launched["ns"].astype(np.int64),
        covered=(time.sum(axis="columns") / launched["ns"]).fillna(0.0),
        intensity=operations / totals["dram_bytes"].where(totals["dram_bytes"] > 0),
        stall=pd.Series(worst, dtype=object),
        bound=costliest.replace("", "not measured"),
        reason=[
            _reason(name, share, of_bound[name][row])
            for row, (name, share) in enumerate(zip(costliest, shares, strict=True))
        ],
    )
    return table[[*COLUMNS]]


def _reason(bound: str, share: float, means: Mapping[Any, float]) -> str:
    """Why a row is bound by what it is.

    Args:
        bound: What most of its time is bound by; '' if nothing was measured.
        share: Its share of the measured time.
        means: Of the kernels that are bound by that, over their time, the `PERCENTAGES`, NaN for what was not measured.
    """
    units = {unit: means[name] for name, unit in _UNITS.items() if not np.isnan(means[name])}
    busiest = max(units, key=units.__getitem__, default="memory")
    tensor, waves = means["tensor_pct"], means["waves"]
    match bound:
        case "":
            return "no kernel of it was measured"
        case "not measured":
            return "the report lacks sm__throughput and gpu__compute_memory_throughput (SpeedOfLight)"
        case "memory":
            why = f"{busiest} at {units.get(busiest, means['memory_pct']):.0f} % of its peak"
        case "compute" if tensor >= 0.75 * means["compute_pct"]:
            why = f"tensor cores at {tensor:.0f} % of their peak"
        case "compute":
            tensor_text = "?" if np.isnan(tensor) else f"{tensor:.0f} %"
            why = f"the SMs at {means['compute_pct']:.0f} % of their peak, tensor cores at {tensor_text}"
        case _:
            why = f"compute at {means['compute_pct']:.0f} %, memory at {means['memory_pct']:.0f} % of peak"
            why += f"; grids fill {waves:.1f} of the GPU" if waves < 1 else ""
            occupancy = means["occupancy_pct"]
            why += f"; occupancy {occupancy:.0f} %" if occupancy < _LOW_OCCUPANCY else ""
    return f"{100 * share:.0f} % of its time: {why}"


def _kernels(work: Work) -> pd.DataFrame:
    """The measured kernels for the roofline, by owner."""
    measured = work.measured()
    amounts = work.counters.iloc[measured["item"]].set_index(measured.index)
    kernels: pd.DataFrame = measured[["launches"]].assign(
        kernel=[work.names[item] for item in measured["item"]],
        layer=[work.owners[owner][0] for owner in measured["owner"]],
        phase=[work.owners[owner][1] for owner in measured["owner"]],
        gpu_ns=measured["ns"],
        **{name: amounts[name] for name in ("duration_ns", "flop", "tensor_flop", "dram_bytes")},
    )
    return kernels.reset_index(drop=True)
