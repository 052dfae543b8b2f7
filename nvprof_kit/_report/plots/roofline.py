"""Roofline plot: a dot for each measured kernel, sized by its time, below the GPU's peaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._analysis.ncu.roofline import Roofline
from nvprof_kit._analysis.ncu.roofline import roofline as roofline_of
from nvprof_kit._report.plots.plots import PALETTE, canvas
from nvprof_kit._report.text.texts import fit, kernel_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nvprof_kit._analysis.ncu.layers import NcuLayers

_OTHERS, _OTHER_COLOUR = "other layers", "#999999"
_MARKERS = {"forward": "o", "backward": "s", "recompute": "^"}
_LABELLED = 12
_LONGEST = 40
_APART = 0.15  # as a fraction of a power of ten
_SAME = 1.02
_LARGEST = 600.0  # area in square points of the kernel with the most time


def roofline_figure(result: NcuLayers) -> Figure:
    """FLOP/s over arithmetic intensity (FLOP/byte) of each measured kernel, both logarithmic."""
    assert result.report is not None
    roofline = roofline_of(result.report, result)
    title = "Roofline: a dot is a kernel of a layer, as large as its GPU time"
    figure, axes = canvas((10, 6.5), title, "operations by byte of DRAM", "operations a second", "both")
    # the peaks, of which equal ones share a line, and the slope of the memory's bandwidth
    points, bandwidth = roofline.points["intensity"], roofline.bandwidth
    highest = max(roofline.peaks.values())
    span = np.array([points.min() / 4, max(points.max() * 4, 4 * highest / bandwidth)])
    names: dict[float, str] = {}
    for name, peak in sorted(roofline.peaks.items(), key=lambda pair: pair[1]):
        same = next((height for height in names if peak < _SAME * height), peak)
        names[same] = f"{names[same]}, {name}" if same in names else name
    for peak, label in names.items():
        if peak / bandwidth < span[1]:
            axes.plot([max(peak / bandwidth, span[0]), span[1]], [peak, peak], color="#444444", linewidth=1.2)
            axes.text(span[1], peak, f"{label} {peak / 1e12:,.0f} T/s ", ha="right", va="bottom", fontsize=10)
    slope = np.array([span[0], highest / bandwidth])
    axes.plot(slope, slope * bandwidth, color="#444444", linewidth=1.2)
    center = float(np.sqrt(slope.prod()))
    axes.text(center, center * bandwidth, f"DRAM {bandwidth / 1e12:.1f} TB/s ", ha="right", va="bottom", fontsize=10)
    _dots(axes, roofline)
    axes.set_xscale("log")
    axes.set_yscale("log")
    return figure


def _dots(axes: Axes, roofline: Roofline) -> None:
    """A dot for each kernel, colored by layer and shaped by phase; the costliest have labels."""
    from matplotlib.lines import Line2D

    points = roofline.points.sort_values("gpu_ns", ascending=False, kind="stable")
    layers, phases = points["layer"].astype(str), points["phase"].astype(str)
    costliest = points.groupby(layers)["gpu_ns"].sum().sort_values(ascending=False, kind="stable").index
    colours = dict(zip(map(str, costliest), PALETTE, strict=False))
    colours |= {_OTHERS: _OTHER_COLOUR} if len(costliest) > len(colours) else {}
    longest_ns = points["gpu_ns"].max() or 1.0
    for (layer, phase), group in points.groupby([layers.where(layers.isin(list(colours)), _OTHERS), phases]):
        size = 8 + _LARGEST * group["gpu_ns"] / longest_ns
        colour, marker = colours[str(layer)], _MARKERS.get(str(phase), "D")
        axes.scatter("intensity", "rate", data=group, s=size, color=colour, marker=marker, alpha=0.6, linewidths=0)
    names = kernel_names(points["kernel"].astype(str))
    labelled_points: list[tuple[float, float]] = []
    for kernel, *point in zip(points["kernel"], points["intensity"], points["rate"], strict=True):
        is_free = all(np.abs(np.log10(point) - np.log10(other)).max() > _APART for other in labelled_points)
        if is_free and len(labelled_points) < _LABELLED:
            labelled_points.append((point[0], point[1]))
            label = fit([names[str(kernel)]], _LONGEST)[0]
            axes.annotate(
                label, labelled_points[-1], xytext=(6, 4), textcoords="offset points", fontsize=8, color="#333333"
            )
    entries = [("o", colour, layer) for layer, colour in colours.items()]
    entries += [(marker, "#777777", phase) for phase, marker in _MARKERS.items() if (phases == phase).any()]
    entries += [] if phases.isin(list(_MARKERS)).all() else [("D", "#777777", "other phases")]
    handles = [
        Line2D([], [], linestyle="", marker=marker, color=colour, alpha=0.6, markersize=8, label=label)
        for marker, colour, label in entries
    ]
    axes.legend(handles=handles, loc="lower right", frameon=False, fontsize=9)
