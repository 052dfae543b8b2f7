"""The roofline as a plot: a dot for each measured kernel, as large as its time, under the GPU's ceilings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._report.plots.plots import PHASE_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nvprof_kit._analysis.ncu.roofline import Roofline

_SAME = 1.02
_LARGEST = 600.0  # square points of the dot of the kernel that takes most time


def roofline_figure(roofline: Roofline) -> Figure:
    """Operations a second over operations a byte, both logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.add_subplot()
    _ceilings(axes, roofline)
    _dots(axes, roofline)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations by byte of DRAM", fontsize=13)
    axes.set_ylabel("operations a second", fontsize=13)
    axes.grid(color="#DDDDDD")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=11)
    figure.suptitle("Roofline: a dot is a kernel, as large as its GPU time", fontsize=15)
    return figure


def _ceilings(axes: Axes, roofline: Roofline) -> None:
    points = roofline.points["intensity"]
    highest = max(roofline.peaks.values())
    span = np.array([points.min() / 4, max(points.max() * 4, 4 * highest / roofline.bandwidth)])
    for names, peak in _heights(roofline.peaks):
        knee = peak / roofline.bandwidth
        if knee < span[1]:
            axes.plot([max(knee, span[0]), span[1]], [peak, peak], color="#444444", linewidth=1.2)
            axes.text(span[1], peak, f"{names} {peak / 1e12:,.0f} T/s ", ha="right", va="bottom", fontsize=10)
    slope = np.array([span[0], highest / roofline.bandwidth])
    axes.plot(slope, slope * roofline.bandwidth, color="#444444", linewidth=1.2)
    middle = float(np.sqrt(slope.prod()))
    what = f"DRAM {roofline.bandwidth / 1e12:.1f} TB/s "
    axes.text(middle, middle * roofline.bandwidth, what, ha="right", va="bottom", fontsize=10)


def _heights(peaks: dict[str, float]) -> list[tuple[str, float]]:
    """Ceilings with their names; the same height is one line with all their names."""
    heights: list[tuple[str, float]] = []
    for name, peak in sorted(peaks.items(), key=lambda one: one[1]):
        if heights and peak < _SAME * heights[-1][1]:
            heights[-1] = (f"{heights[-1][0]}, {name}", heights[-1][1])
        else:
            heights.append((name, peak))
    return heights


def _dots(axes: Axes, roofline: Roofline) -> None:
    longest = roofline.points["gpu_ns"].max() or 1.0
    phases = roofline.points["phase"].where(roofline.points["phase"].isin(list(PHASE_COLOURS)), "other")
    for phase, points in roofline.points.groupby(phases, sort=False):
        axes.scatter(
            points["intensity"],
            points["rate"],
            s=8 + _LARGEST * points["gpu_ns"] / longest,
            color=PHASE_COLOURS[str(phase)],
            alpha=0.6,
            linewidths=0,
            label=str(phase),
        )
