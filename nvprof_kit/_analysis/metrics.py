"""GPU metrics of each layer without ncu: nsys samples them while the program runs at full speed.

A sample is the mean over its interval, which begins at the sample's time. If the GPU was idle for part of the interval,
the value is divided by the busy share. A layer's mean weights each sample by how long the layer's operations ran in its
interval. Other operations in the same interval distort the value; many samples average this out, few do not, so a layer
with too few samples has no values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from nvprof_kit._analysis.attribution.attribution import Attribution, Operations
from nvprof_kit._analysis.attribution.intervals import Cover, Floats, Int64Array, union
from nvprof_kit._analysis.attribution.steps import ALL_STEPS, StepOptions, choose_steps
from nvprof_kit._analysis.layers.fold import NO_BLOCKS, ByLayer, computing_blocks
from nvprof_kit._analysis.layers.tree import layer_parents, with_ancestors
from nvprof_kit._result.column import read_columns
from nvprof_kit._toml import read_toml
from nvprof_kit._trace.schema import CaptureInfo, Trace
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue
from nvprof_kit.names import NO_LAYER

_SAMPLED: Mapping[str, Sequence[str]] = read_toml("nvprof_kit._analysis", "gpu_metrics.toml")["metrics"]
"""The sampled columns, and the names of nsys's metrics of each on different GPUs."""

MIN_SAMPLES = 20
"""A layer with fewer samples has no figures."""

COLUMNS = read_columns("nvprof_kit._analysis", "metrics")
"""The columns of `Metrics.rows` and their descriptions. Values without samples are missing."""


@dataclass(frozen=True, repr=False, eq=False)
class Metrics(ByLayer):
    """How busy each layer keeps SMs, Tensor Cores, DRAM, NVLink and PCIe, from nsys GPU Metrics samples.

    Attributes:
        interval_ns: Median time between two samples of a GPU.
        samples: Number of samples over all GPUs.
        steps: Number of steps that the rows cover.
        all_steps: Number of steps in the capture.
        overall: The same figures over all GPU busy time, by column.
        info: Recording tool, GPUs and processes of the capture.
        parents: The enclosing layer of each layer, '' at the top.
        means: The figures of `rows`, in the same order, whether or not there are enough samples.
    """

    interval_ns: int
    samples: int
    steps: int
    all_steps: int
    overall: dict[str, float]
    info: CaptureInfo
    parents: Mapping[str, str]
    means: pd.DataFrame

    columns: ClassVar = {"metrics": COLUMNS}
    bars: ClassVar = {"metrics": (("sm_active_pct",), ("layer", "phase"))}
    time: ClassVar = "busy_ns"

    @property
    def warnings(self) -> tuple[Issue, ...]:
        """What may be missing or distorted in the capture; each sentence says what to do about it."""
        return self.info.warnings

    def join(self, path: str, phase: str, rows: pd.DataFrame) -> dict[str, Any]:
        """The figures of equal layers in a phase, which together may have enough samples."""
        means = self.means.loc[rows.index]
        samples, figures = means["samples"], means[[*_SAMPLED]]
        weight = figures.notna().mul(samples, axis=0).sum()
        averages = figures.mul(samples, axis=0).sum() / weight.where(weight > 0)
        enough = bool(samples.sum() >= MIN_SAMPLES)
        return {
            "busy_ns": int(rows["busy_ns"].sum()),
            "samples": round(float(samples.sum()), 1),
            "enough": enough,
            **{str(name): average if enough else np.nan for name, average in averages.items()},
        }


class _Samples(NamedTuple):
    """The samples of one GPU: starts and ends of their intervals, and values for the busy part of each, a column for
    each of `_SAMPLED`; NaN if missing.
    """

    start: Int64Array
    end: Int64Array
    values: Floats

    @classmethod
    def of(cls, trace: Trace, device: int) -> _Samples:
        """The samples of a GPU of a capture."""
        assert trace.samples is not None
        device_rows = trace.samples[trace.samples["device"] == device]
        start, index = np.unique(device_rows["time_ns"].to_numpy(), return_inverse=True)
        usual_interval = int(np.median(np.diff(start))) if len(start) > 1 else 0
        end = np.append(np.minimum(start[1:], start[:-1] + 2 * usual_interval), start[-1:] + usual_interval)
        ops = trace.ops[trace.ops["device"] == device]
        busy = _covered(ops["start_ns"].to_numpy(), ops["end_ns"].to_numpy(), start, end)
        busy_share = np.where(busy > 0, busy / np.maximum(end - start, 1), 1.0)
        names, value = device_rows["metric"].to_numpy(), device_rows["value"].to_numpy()
        values = np.full((len(start), len(_SAMPLED)), np.nan)
        for column, candidates in enumerate(_SAMPLED.values()):
            chosen = next((names == name for name in candidates if (names == name).any()), None)
            if chosen is not None:
                values[index[chosen], column] = value[chosen]
        return cls(start, end, np.minimum(values / busy_share[:, None], 100.0))

    def met_by(self, starts: Int64Array, ends: Int64Array) -> _Samples:
        """Select samples with intervals that overlap the given ones, which are disjoint and sorted."""
        first = np.maximum(np.searchsorted(self.start, starts, side="right") - 1, 0)
        counts = np.maximum(np.searchsorted(self.start, ends, side="left") - first, 0)
        shift = first - (np.cumsum(counts) - counts)
        samples = np.unique(np.arange(counts.sum()) + np.repeat(shift, counts))
        return _Samples(self.start[samples], self.end[samples], self.values[samples])


def metrics(operations: Operations, *, self_only: bool = False, steps: StepOptions = ALL_STEPS) -> Metrics:
    """Compute the GPU metrics of each layer.

    Args:
        operations: The operations of a capture with `Trace.samples`.
        self_only: Only a layer's own operations, without its submodules.
        steps: The steps to include; the whole capture by default.

    Raises:
        CaptureError: The capture has no samples.
        UsageError: None of the selected steps is in the capture.
    """
    trace, attribution = operations.trace, operations.attribution
    if trace.samples is None or not len(trace.samples):
        raise CaptureError.of("no-gpu-metrics", path=trace.info.path)
    by_device = {device: _Samples.of(trace, device) for device in sorted(set(trace.samples["device"]))}
    interval = int(np.median(np.concatenate([samples.end - samples.start for samples in by_device.values()])))
    parent = {} if self_only else layer_parents(attribution.ranges)
    choice = choose_steps(trace, attribution, steps)
    is_shown = choice.of_ops(attribution)
    each = [(key, chosen[is_shown[chosen]]) for key, chosen in _rows(trace, attribution, parent)]
    records = [
        {"layer": layer, "phase": phase, **_means(trace, chosen, by_device)}
        for (layer, phase), chosen in each
        if len(chosen)
    ]
    means = pd.DataFrame(records, columns=["layer", "phase", "busy_ns", "samples", *_SAMPLED])
    enough = means["samples"] >= MIN_SAMPLES
    rounded = means["samples"].round(1)
    values = {name: means[name].where(enough) for name in _SAMPLED}
    rows = means.assign(samples=rounded, enough=enough, **values)[list(COLUMNS)]
    everything = _means(trace, np.flatnonzero(is_shown), by_device)
    return Metrics(
        rows=rows,
        interval_ns=interval,
        samples=sum(len(device_samples.start) for device_samples in by_device.values()),
        steps=choice.count,
        all_steps=len(choice.shown),
        overall={name: float(everything[name]) for name in _SAMPLED},
        info=trace.info,
        parents=parent,
        means=means,
        blocks=NO_BLOCKS if self_only else computing_blocks(operations, is_shown),
    )


def _rows(
    trace: Trace, attribution: Attribution, parent: Mapping[str, str]
) -> Iterator[tuple[tuple[str, str], npt.NDArray[np.intp]]]:
    """The (layer, phase) pairs by first start, each with its operations including submodules."""
    layers, phases = attribution.owners
    rows = np.argsort(trace.ops["start_ns"].to_numpy(), kind="stable")
    owners = pd.DataFrame({"layer": layers, "phase": phases}).iloc[rows]
    ops_of_key: dict[tuple[str, str], list[npt.NDArray[np.intp]]] = {}
    for (layer, phase), of_owner in owners.groupby([*owners], observed=True, sort=False):
        for ancestor in with_ancestors(str(layer), parent):
            ops_of_key.setdefault((ancestor, str(phase)), []).append(of_owner.index.to_numpy())
    first = {layer: index for index, layer in enumerate(dict.fromkeys(layer for layer, _ in ops_of_key))}
    for key in sorted(ops_of_key, key=lambda key: (key[0] == NO_LAYER, first[key[0]])):
        yield key, np.concatenate(ops_of_key[key])


def _means(trace: Trace, chosen: npt.NDArray[np.intp], by_device: dict[int, _Samples]) -> dict[str, Any]:
    """Busy time, samples and means of selected operations."""
    start, end, device = (trace.ops[name].to_numpy()[chosen] for name in ("start_ns", "end_ns", "device"))
    busy, count = 0, 0.0
    weight, total = np.zeros(len(_SAMPLED)), np.zeros(len(_SAMPLED))
    for ordinal in np.unique(device).tolist():
        starts, ends = union(start[device == ordinal], end[device == ordinal])
        busy += int((ends - starts).sum())
        if ordinal not in by_device:
            continue
        samples = by_device[ordinal].met_by(starts, ends)
        overlap = _covered(starts, ends, samples.start, samples.end)
        count += float((overlap / np.maximum(samples.end - samples.start, 1)).sum())
        is_known = ~np.isnan(samples.values)
        weight += overlap @ is_known
        total += overlap @ np.where(is_known, samples.values, 0.0)
    means = np.divide(total, weight, where=weight > 0, out=np.full(len(_SAMPLED), np.nan))
    return {"busy_ns": busy, "samples": count, **dict(zip(_SAMPLED, means.tolist(), strict=True))}


def _covered(start: Int64Array, end: Int64Array, since: Int64Array, until: Int64Array) -> Int64Array:
    """How long at least one of some intervals lasts in each of others, in ns."""
    return Cover(np.zeros_like(start), start, end).inside(np.zeros_like(since), since, until)
