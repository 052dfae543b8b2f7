"""Plot of the model tree: a box for each layer below its parent's, as wide as its time, with a stripe per phase."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from nvprof_kit._report.plots.plots import PHASE_COLOURS
from nvprof_kit._report.plots.timeline import last_words
from nvprof_kit._report.text.layers import heading, time_name
from nvprof_kit._report.text.table.units import counted
from nvprof_kit.names import NO_LAYER

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nvprof_kit._analysis.layers.layers import LayersResult

_LETTER = 0.0098
"""Width of a character of a label, as a fraction of the plot's width."""


class Box(NamedTuple):
    """A layer in the plot: label, left edge, level, and time in each phase, in ns."""

    label: str
    left: int
    level: int
    times: dict[str, int]

    @property
    def width(self) -> int:
        """Time in all phases."""
        return sum(self.times.values())


def tree_figure(result: LayersResult, depth: int | None = None) -> Figure:
    """The model tree, with widths proportional to time.

    Args:
        result: The per-layer table.
        depth: Levels of the tree to draw; None for all.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    boxes = tree_boxes(result.tree, depth)
    levels = max((box.level for box in boxes), default=0) + 1
    figure = Figure(figsize=(10, 1.7 + 0.46 * levels), layout="constrained")
    axes = figure.add_subplot()
    scale = 1e6 * max(result.summary.steps, 1)
    whole = max((box.left + box.width for box in boxes), default=1)
    for box in boxes:
        _draw(axes, box, scale, whole)
    axes.set_xlim(0, whole / scale)
    axes.set_ylim(levels, 0)
    axes.set_yticks([])
    per_step = " per step" if result.summary.steps > 1 else ""
    axes.set_xlabel(f"{heading(time_name(result))}, ms{per_step}", fontsize=13)
    axes.tick_params(axis="x", labelsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    present = [phase for phase in PHASE_COLOURS if any(box.times[phase] for box in boxes)]
    marks = [Patch(color=PHASE_COLOURS[phase], label=phase) for phase in present]
    axes.legend(handles=marks, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize=12)
    gpu = f" on {counted(result.info.gpus)}" if result.info.gpus else ""
    figure.suptitle(f"{heading(time_name(result))} by part of the model{gpu}", fontsize=15)
    return figure


def tree_boxes(tree: pd.DataFrame, depth: int | None = None) -> list[Box]:
    """The boxes in tree order; children are side by side below their parent, from its left edge."""
    boxes = []
    ends = {"": 0}  # right edge of the children of each layer
    for row in tree.to_dict("records"):
        times = {phase: int(row[f"{phase}_ns"]) for phase in PHASE_COLOURS}
        left = ends[row["parent"]]
        ends[row["parent"]] = left + sum(times.values())
        outside = row["layer"] == NO_LAYER
        if not outside:
            ends[row["layer"]] = left
        if sum(times.values()) and (depth is None or row["depth"] < depth):
            label = f"{NO_LAYER} {row['phase']}" if outside else last_words(row["layer"])
            boxes.append(Box(label, left, int(row["depth"]), times))
    return boxes


def _draw(axes: Axes, box: Box, scale: float, whole: int) -> None:
    left, width = box.left / scale, box.width / scale
    axes.broken_barh([(left, width)], (box.level, 0.94), facecolors="#DCE6EF", edgecolors="white")
    at = left
    for phase, ns in box.times.items():
        axes.broken_barh([(at, ns / scale)], (box.level + 0.74, 0.2), facecolors=PHASE_COLOURS[phase], linewidth=0)
        at += ns / scale
    if len(box.label) * _LETTER * whole < box.width:
        axes.text(left + width / 2, box.level + 0.38, box.label, ha="center", va="center", fontsize=11)
