"""Roofline plot: a dot for each measured kernel, sized by its time, below the GPU's peaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._report.plots.plots import canvas
from nvprof_kit._report.text.shorten import fit, kernel_names

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nvprof_kit._analysis.ncu.layers import NcuLayers
    from nvprof_kit._analysis.ncu.roofline import Roofline

_OTHERS = "other layers"
_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#882255",
    "#117733",
    "#44AA99",
    "#AA4499",
)
_OTHER_COLOUR = "#999999"
_MARKERS = {"forward": "o", "backward": "s", "recompute": "^"}
_NAMED = 12
_LONGEST = 40
_APART = 0.15  # as a fraction of a power of ten
_SAME = 1.02
_LARGEST = 600.0  # area in square points of the kernel with the most time


def layers_roofline(result: NcuLayers) -> Figure:
    """The roofline: FLOP/s over arithmetic intensity of each measured kernel."""
    from nvprof_kit._analysis.ncu.roofline import roofline

    assert result.report is not None
    return roofline_figure(roofline(result.report, result))


def roofline_figure(roofline: Roofline) -> Figure:
    """FLOP/s over arithmetic intensity (FLOP/byte), both logarithmic."""
    title = "Roofline: a dot is a kernel of a layer, as large as its GPU time"
    figure, axes = canvas((10, 6.5), title, "both")
    _ceilings(axes, roofline)
    _dots(axes, roofline)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations by byte of DRAM", fontsize=13)
    axes.set_ylabel("operations a second", fontsize=13)
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
    center = float(np.sqrt(slope.prod()))
    label = f"DRAM {roofline.bandwidth / 1e12:.1f} TB/s "
    axes.text(center, center * roofline.bandwidth, label, ha="right", va="bottom", fontsize=10)


def _heights(peaks: dict[str, float]) -> list[tuple[str, float]]:
    """The peaks with their names; equal peaks share one line."""
    heights: list[tuple[str, float]] = []
    for name, peak in sorted(peaks.items(), key=lambda one: one[1]):
        if heights and peak < _SAME * heights[-1][1]:
            heights[-1] = (f"{heights[-1][0]}, {name}", heights[-1][1])
        else:
            heights.append((name, peak))
    return heights


def _dots(axes: Axes, roofline: Roofline) -> None:
    """A dot for each kernel, colored by layer and shaped by phase; the costliest have labels."""
    points = roofline.points
    longest = points["gpu_ns"].max() or 1.0
    colours = _layer_colours(points)
    layers = points["layer"].astype(str).where(points["layer"].astype(str).isin(list(colours)), _OTHERS)
    phases = points["phase"].astype(str)
    for (layer, phase), group in points.groupby([layers, phases], sort=False):
        axes.scatter(
            group["intensity"],
            group["rate"],
            s=8 + _LARGEST * group["gpu_ns"] / longest,
            color=colours[str(layer)],
            marker=_MARKERS.get(str(phase), "D"),
            alpha=0.6,
            linewidths=0,
        )
    labelled = points.iloc[_named(points)]
    names = kernel_names(labelled["kernel"].astype(str))
    labels = fit([names[name] for name in labelled["kernel"]], _LONGEST)
    for label, (_, kernel) in zip(labels, labelled.iterrows(), strict=True):
        axes.annotate(
            label,
            (kernel["intensity"], kernel["rate"]),
            xytext=(6, 4),
            textcoords="offset points",
            fontsize=8,
            color="#333333",
        )
    phases_present = [phase for phase in _MARKERS if (phases == phase).any()]
    _legend(axes, colours, phases_present, has_others=not phases.isin(list(_MARKERS)).all())


def _layer_colours(points: pd.DataFrame) -> dict[str, str]:
    """Colors of the costliest layers, and of all others together."""
    time_of_layer = (
        points.groupby(points["layer"].astype(str))["gpu_ns"].sum().sort_values(ascending=False, kind="stable")
    )
    colours = dict(zip(map(str, time_of_layer.index), _COLOURS, strict=False))
    return colours | ({_OTHERS: _OTHER_COLOUR} if len(time_of_layer) > len(colours) else {})


def _named(points: pd.DataFrame) -> list[int]:
    """Rows of the costliest kernels, except those with overlapping labels."""
    where = np.log10(points[["intensity", "rate"]].to_numpy(dtype=np.float64))
    labelled: list[int] = []
    for point in np.argsort(-points["gpu_ns"].to_numpy(), kind="stable").tolist():
        if all(np.abs(where[point] - where[other]).max() > _APART for other in labelled):
            labelled.append(point)
    return labelled[:_NAMED]


def _legend(axes: Axes, colours: dict[str, str], phases: list[str], *, has_others: bool) -> None:
    from matplotlib.lines import Line2D

    def entry(marker: str, colour: str, text: str) -> Line2D:
        return Line2D([], [], linestyle="", marker=marker, color=colour, alpha=0.6, markersize=8, label=text)

    handles = [entry("o", colour, layer) for layer, colour in colours.items()]
    handles += [entry(_MARKERS[phase], "#777777", phase) for phase in phases]
    handles += [entry("D", "#777777", "other phases")] if has_others else []
    axes.legend(handles=handles, loc="lower right", frameon=False, fontsize=9)
