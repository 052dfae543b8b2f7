"""Plots of memory: of a snapshot over time by layer and by segment, and of a step at the ends of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from nvprof_kit._report.plots.plots import PALETTE, canvas, encode, legend_above
from nvprof_kit._result.writer import write_file

if TYPE_CHECKING:
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
    """Allocated memory after each event, stacked by the largest layers at the peak, with reserved memory as a line; or
    the segments if the result is by ``segment``.

    Events are equidistant, regardless of time: a step takes milliseconds, building a model takes seconds.
    """
    if result.view == "segment":
        return segments_figure(result.snapshot, result.summary.device)
    import numpy as np

    # after some events: bytes from before the recording, by the largest layers at the peak, and by other layers
    events = len(result.level_bytes)
    at = np.linspace(0, max(events - 1, 0), min(_POINTS, events)).astype(np.int64)
    at = np.union1d(at, [result.summary.peak_event]) if events else at
    layers = result.held["layer"].astype("str")
    order = result.layer.groupby("layer", sort=False)["bytes"].sum().sort_values(ascending=False, kind="stable")
    largest = [name for name in order.index if name in set(layers)][:_LAYERS]
    changes = np.zeros((events + 1, len(largest) + 1), dtype=np.int64)
    group = pd.Index(largest).get_indexer(layers)  # -1, the last column, are the others
    np.add.at(changes, (result.held["start"].to_numpy(), group), result.held["size_bytes"].to_numpy())
    np.subtract.at(changes, (result.held["end"].to_numpy(), group), result.held["size_bytes"].to_numpy())
    bands = pd.DataFrame(np.cumsum(changes, axis=0)[at], index=at, columns=[*largest, "other layers"])
    bands.insert(0, _EARLY, np.maximum(result.level_bytes[at] - bands.sum(axis=1), 0))
    bands = bands.loc[:, bands.any()]

    title = f"Allocated memory on device {result.summary.device} by layer; the peak is dotted"
    figure, axes = canvas((12, 5.2), title, "events, in order", "MiB")
    if bands.size:
        colours = [_BEFORE] * (_EARLY in bands) + [*PALETTE]
        names, heights = list(map(str, bands)), bands.to_numpy().T / _MIB
        axes.stackplot(bands.index, heights, labels=names, colors=colours[: len(names)], step="post", linewidth=0)
        reserved = result.reserved_bytes[bands.index] / _MIB
        axes.plot(bands.index, reserved, color="#222222", lw=1.2, label="reserved", drawstyle="steps-post")
        axes.axvline(result.summary.peak_event, color="#222222", lw=0.8, ls=":")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, frameon=False, fontsize=11)
    in_steps = result.held[result.held["step"].notna()]
    first = in_steps.groupby(in_steps["step"].astype("int64"))["start"].min()
    if 0 < len(first) <= _STEPS:
        axes.set_xticks(first.tolist(), [f"step {step}" for step in first.index], ha="left")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    return figure


def segments_figure(snapshot: Snapshot, device: int) -> Figure:
    """A bar for each segment, the largest first: memory in use and idle."""
    segments = snapshot.segments[snapshot.segments["device"] == device].nlargest(_SEGMENTS, "total_bytes")
    title = f"The {len(segments)} largest segments on device {device}: kind and stream"
    about = "MiB from the segment's begin; blue in use, grey idle"
    figure, axes = canvas((12, 1.6 + 0.16 * len(segments)), title, about)
    in_use = snapshot.blocks[snapshot.blocks["state"] != "inactive"]
    for position, (row, segment) in enumerate(segments.iterrows()):
        axes.barh(position, segment["total_bytes"] / _MIB, color="#DDDDDD", height=0.8)
        blocks = in_use[in_use["segment"] == row]
        spans = zip((blocks["address"] - segment["address"]) / _MIB, blocks["size_bytes"] / _MIB, strict=True)
        axes.broken_barh(list(spans), (position - 0.4, 0.8), color=PALETTE[0], edgecolor="white", linewidth=0.3)
    labels = [f"{kind} {stream}" for kind, stream in zip(segments["kind"], segments["stream"], strict=True)]
    axes.set_yticks(range(len(segments)), labels, fontsize=8)
    axes.invert_yaxis()
    return figure


def write_curve(path: Path, boundaries: Sequence[Any]) -> None:
    """Write the chart of the last complete step; the file suffix selects the format."""
    write_file(path, encode(curve_figure(boundaries), path.suffix[1:]))


def curve_figure(boundaries: Sequence[Any]) -> Figure:
    """The chart of the last complete step.

    Args:
        boundaries: The layer calls in order of their ends, as `nvprof_kit._instrument.memory.allocator.Boundary`.
    """
    complete = [boundary.step for boundary in boundaries if boundary.phase == "backward"]
    step = max(complete or [boundary.step for boundary in boundaries])
    calls = [boundary for boundary in boundaries if boundary.step == step]
    places = range(len(calls))
    figure, axes = canvas((13, 5.5), f"Memory at the layers' ends, step {step}", y="MiB", grid="y")
    axes.plot(places, [call.reserved / _MIB for call in calls], color="#8C8C8C", lw=2, label="reserved")
    peaks = [call.peak / _MIB for call in calls]
    axes.plot(places, peaks, color="#D55E00", lw=1, ls="--", label="peak inside the layer")
    ends = [call.end / _MIB for call in calls]
    axes.plot(places, ends, color="#0072B2", lw=2, marker=".", label="allocated at its end")
    turn = next((number for number, call in enumerate(calls) if call.phase != "forward"), None)
    if turn is not None:
        axes.axvline(turn - 0.5, color="#222222", lw=0.8, ls=":")
        axes.text(turn - 0.3, 1.0, "backward", transform=axes.get_xaxis_transform(), va="bottom", fontsize=11)
    stride = max(len(calls) // _LABELS, 1)
    axes.set_xticks(list(places)[::stride], [call.layer for call in calls][::stride], rotation=90, fontsize=8)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    legend_above(axes, 3)
    return figure
