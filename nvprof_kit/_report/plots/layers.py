"""The per-layer table as a plot: a bar for each layer, its phases stacked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvprof_kit._report.plots.plots import PHASE_COLOURS, canvas, legend_above
from nvprof_kit._report.text.layers import heading, time_name
from nvprof_kit._report.text.texts import counted, fit, percent
from nvprof_kit.names import NO_LAYER

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nvprof_kit._analysis.layers.layers import Layers

MAX_BARS = 40
"""Without a given depth, the plot shows as many levels as this number of bars allows."""

_LONGEST = 60
"""Maximum number of characters of a label, to leave room for the bars."""

_PHASES = list(PHASE_COLOURS)


def figure(result: Layers) -> Figure:
    """A bar for each layer, down to the result's depth."""
    return layers_figure(result, result.depth)


def layers_figure(result: Layers, depth: int | None = None) -> Figure:
    """A bar for each layer in model order, its phases stacked; the bars add up to the capture's total.

    Args:
        result: The per-layer table.
        depth: Levels of the tree; None for as many as `MAX_BARS` allows.
    """
    bars = layers_bars(result.tree, depth)
    steps = max(result.summary.steps, 1)
    gpu = f" on {counted(result.info.gpus)}" if result.info.gpus else ""
    title = f"{heading(time_name(result))} by layer{gpu}"
    figure, axes = canvas((10, 1.7 + 0.28 * len(bars)), title, "x")
    _draw(axes, bars, steps)
    axes.set_xlabel(f"{heading(time_name(result))}, ms{' per step' if steps > 1 else ''}", fontsize=13)
    return figure


def layers_bars(tree: pd.DataFrame, depth: int | None = None) -> pd.DataFrame:
    """The bars: columns label, forward, backward, recompute, other, in ns; they add up to the tree's total.

    There is a bar for each layer at the lowest shown level, for the self time of each layer above, and for the time
    outside layers.
    """
    deepest = int(tree["depth"].max()) + 1 if len(tree) else 1
    levels = depth or next((level for level in range(deepest, 1, -1) if len(_cut(tree, level)) <= MAX_BARS), 1)
    return _cut(tree, levels)


def _cut(tree: pd.DataFrame, levels: int) -> pd.DataFrame:
    """Partition the total: each layer of the first levels without its children among them."""
    cut_tree = tree[tree["depth"] < levels].reset_index(drop=True)
    times = cut_tree[[f"{phase}_ns" for phase in _PHASES]].set_axis(_PHASES, axis=1)
    in_children = times.groupby(cut_tree["parent"]).sum().reindex(cut_tree["layer"], fill_value=0)
    self_times = times - in_children.to_numpy()
    label = cut_tree["layer"].mask(cut_tree["layer"] == NO_LAYER, NO_LAYER + " " + cut_tree["phase"])
    label = label.mask(cut_tree["layer"].isin(cut_tree["parent"]), label + " (itself)")
    self_times.insert(0, "label", label)
    bars: pd.DataFrame = self_times[self_times[_PHASES].sum(axis=1) > 0].reset_index(drop=True)
    return bars


def _draw(axes: Axes, bars: pd.DataFrame, steps: int) -> None:
    times = bars[_PHASES].to_numpy() / steps / 1e6
    places = range(len(bars))
    left = 0 * times[:, 0]
    for phase, lengths in zip(_PHASES, times.T, strict=True):
        if (lengths > 0).any():
            axes.barh(places, lengths, left=left, color=PHASE_COLOURS[phase], label=phase, height=0.78)
            left = left + lengths
    longest = left.max(initial=0) or 1.0
    for row, length in enumerate(left):
        axes.text(length + 0.006 * longest, row, percent(length / left.sum()), va="center", fontsize=10)
    axes.set_yticks(places, fit(bars["label"].tolist(), _LONGEST, paths=True), fontsize=11)
    axes.tick_params(axis="x", labelsize=11)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlim(right=1.12 * longest)
    if len(bars):
        legend_above(axes)
