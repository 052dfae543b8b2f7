"""Plots of memory: of a snapshot over time by layer and by segment, and of a step at the ends of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvprof_kit._report.plots.plots import PALETTE, canvas, encode, legend_above
from nvprof_kit._result.writer import write_file

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from matplotlib.figure import Figure

    from nvprof_kit._analysis.memory.memory import Memory
    from nvprof_kit._trace.torch_memory.snapshot import Snapshot

_POINTS = 1000
_LAYERS = 7
_SEGMENTS = 60
_LABELS = 48
_STEPS = 16
_MIB = 1 << 20
_EARLY = "before the history"
_BEFORE = "#BBBBBB"


def memory_figure(result: Memory) -> Figure:
    """Allocated memory over time, or the segments if the result is by ``segment``."""
    return (
        segments_figure(result.snapshot, result.summary.device) if result.by == "segment" else timeline_figure(result)
    )


def timeline_figure(result: Memory) -> Figure:
    """Allocated memory after each event, stacked by the largest layers at the peak, with reserved memory as a line.

    Events are equidistant, regardless of time: a step takes milliseconds, building a model takes seconds.
    """
    import numpy as np

    events = len(result.level_bytes)
    at = np.linspace(0, events - 1, min(_POINTS, events)).astype(np.int64)
    at = np.unique(np.append(at, result.summary.peak_event)) if events else at
    bands = _bands(result, at)
    figure, axes = canvas((12, 5.2), f"Allocated memory on device {result.summary.device} by layer; the peak is dotted")
    if len(at):
        heights = [height / _MIB for height in bands.values()]
        colours = [_BEFORE] * (_EARLY in bands) + [*PALETTE]
        axes.stackplot(at, heights, labels=list(bands), colors=colours[: len(bands)], step="post", linewidth=0)
        axes.plot(
            at, result.reserved_bytes[at] / _MIB, color="#222222", lw=1.2, label="reserved", drawstyle="steps-post"
        )
        axes.axvline(result.summary.peak_event, color="#222222", lw=0.8, ls=":")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, frameon=False, fontsize=11)
    axes.set_xlabel("events, in order", fontsize=12)
    in_steps = result.held[result.held["step"].notna() & (result.held["start"] >= 0)]
    first = in_steps.groupby(in_steps["step"].astype("int64"))["start"].min()
    if 0 < len(first) <= _STEPS:
        axes.set_xticks(first.tolist(), [f"step {step}" for step in first.index], ha="left")
    axes.set_ylabel("MiB", fontsize=12)
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    return figure


def _bands(result: Memory, at: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.int64]]:
    """Bytes at these events by the largest layers at the peak, by other layers, and from before the recording."""
    import numpy as np

    allocations = result.held[result.held["start"] >= 0]
    layers = allocations["layer"].astype("str")
    order = result.by_layer.groupby("layer", sort=False)["bytes"].sum().sort_values(ascending=False, kind="stable")
    present = set(layers)
    chosen = [name for name in order.index if name in present][:_LAYERS]
    bands = {}
    left = result.level_bytes[at].copy()
    groups = {name: layers == name for name in chosen} | {"other layers": ~layers.isin(chosen)}
    for name, rows in groups.items():
        change = np.zeros(len(result.level_bytes) + 1, dtype=np.int64)
        sizes = allocations["size_bytes"][rows].to_numpy()
        np.add.at(change, allocations["start"][rows].to_numpy(), sizes)
        np.subtract.at(change, allocations["end"][rows].to_numpy(), sizes)
        level = np.cumsum(change)[at]
        if level.any():
            bands[name] = level
            left = left - level
    return ({_EARLY: np.maximum(left, 0)} if (left > 0).any() else {}) | bands


def segments_figure(snapshot: Snapshot, device: int) -> Figure:
    """A bar for each segment, the largest first: memory in use and idle."""
    segments = snapshot.segments[snapshot.segments["device"] == device].nlargest(_SEGMENTS, "total_bytes")
    title = f"The {len(segments)} largest segments on device {device}: kind and stream"
    figure, axes = canvas((12, 1.6 + 0.16 * len(segments)), title)
    blocks = snapshot.blocks.groupby("segment")
    for position, (row, segment) in enumerate(segments.iterrows()):
        axes.barh(position, segment["total_bytes"] / _MIB, color="#DDDDDD", height=0.8)
        if row not in blocks.groups:
            continue
        segment_blocks = blocks.get_group(row)
        segment_blocks = segment_blocks[segment_blocks["state"] != "inactive"]
        starts = (segment_blocks["address"] - segment["address"]) / _MIB
        spans = list(zip(starts, segment_blocks["size_bytes"] / _MIB, strict=True))
        axes.broken_barh(spans, (position - 0.4, 0.8), color=PALETTE[0], edgecolor="white", linewidth=0.3)
    labels = [f"{kind} {stream}" for kind, stream in zip(segments["kind"], segments["stream"], strict=True)]
    axes.set_yticks(range(len(segments)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("MiB from the segment's begin; blue in use, grey idle", fontsize=12)
    return figure


def write_curve(path: Path, boundaries: Sequence[Any]) -> None:
    """Write the chart of the last complete step; the file suffix selects the format."""
    write_file(path, encode(curve_figure(boundaries), path.suffix[1:]))


def curve_figure(boundaries: Sequence[Any]) -> Figure:
    """The chart of the last complete step.

    Args:
        boundaries: The layer calls in order of their ends, as `nvprof_kit._instrument.memory.allocator.Boundary`.
    """
    steps = sorted({boundary.step for boundary in boundaries})
    with_backward = [b.step for b in boundaries if b.phase == "backward"]
    step = max(with_backward, default=steps[-1])
    step_boundaries = [boundary for boundary in boundaries if boundary.step == step]
    places = range(len(step_boundaries))
    figure, axes = canvas((13, 5.5), f"Memory at the layers' ends, step {step}", "y")
    axes.plot(places, [b.reserved / _MIB for b in step_boundaries], color="#8C8C8C", lw=2, label="reserved")
    axes.plot(
        places, [b.peak / _MIB for b in step_boundaries], color="#D55E00", lw=1, ls="--", label="peak inside the layer"
    )
    axes.plot(
        places, [b.end / _MIB for b in step_boundaries], color="#0072B2", lw=2, marker=".", label="allocated at its end"
    )
    turn = next((number for number, b in enumerate(step_boundaries) if b.phase != "forward"), None)
    if turn is not None:
        axes.axvline(turn - 0.5, color="#222222", lw=0.8, ls=":")
        axes.text(turn - 0.3, 1.0, "backward", transform=axes.get_xaxis_transform(), va="bottom", fontsize=11)
    stride = max(len(step_boundaries) // _LABELS, 1)
    axes.set_xticks(list(places)[::stride], [b.layer for b in step_boundaries][::stride], rotation=90, fontsize=8)
    axes.set_ylabel("MiB", fontsize=12)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    legend_above(axes, 3)
    return figure
