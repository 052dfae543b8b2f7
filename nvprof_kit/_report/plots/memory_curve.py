"""Line chart of allocated and reserved memory at the end of each layer call in a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvprof_kit._report.plots.plots import encode
from nvprof_kit._result.writer import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIB = 1 << 20
_LABELS = 48


def write_curve(path: Path, boundaries: Sequence[Any]) -> None:
    """Write the chart of the last complete step; the file suffix selects the format."""
    write_file(path, encode(curve_figure(boundaries), path.suffix[1:]))


def curve_figure(boundaries: Sequence[Any]) -> Figure:
    """The chart of the last complete step.

    Args:
        boundaries: The layer calls in order of their ends, as `nvprof_kit._instrument.memory.boundaries.Boundary`.
    """
    from matplotlib.figure import Figure

    steps = sorted({boundary.step for boundary in boundaries})
    with_backward = [b.step for b in boundaries if b.phase == "backward"]
    step = max(with_backward, default=steps[-1])
    step_boundaries = [boundary for boundary in boundaries if boundary.step == step]
    places = range(len(step_boundaries))
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    axes = figure.add_subplot()
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
    axes.grid(axis="y", color="#DDDDDD")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(0, 1.12), ncols=3, frameon=False, fontsize=11)
    figure.suptitle(f"Memory at the layers' ends, step {step}", fontsize=14)
    return figure
