"""The per-layer table as a plot: a bar for each layer, its phases stacked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvprof_kit._report.plots.plots import PHASE_COLOURS, canvas, legend_above
from nvprof_kit._report.text.layers import capitalized, row_names, time_name
from nvprof_kit._report.text.texts import counted, fit, percent

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from nvprof_kit._analysis.layers.layers import Layers

MAX_BARS = 40
"""Without a given depth, the plot shows as many levels as this number of bars allows."""

_LONGEST = 60
"""Maximum number of characters of a label, to leave room for the bars."""

_PHASES = list(PHASE_COLOURS)


def figure(result: Layers) -> Figure:
    """A bar for each layer in model order, down to the result's depth, its phases stacked; the bars add up to the
    capture's total: there is one for each layer at the lowest shown level, for the self time of each layer above, and
    for the time outside layers.
    """
    deepest = int(result.tree["depth"].max()) + 1 if len(result.tree) else 1
    fitting = (levels for levels in range(deepest, 1, -1) if len(_bars(result.tree, levels)) <= MAX_BARS)
    bars = _bars(result.tree, result.depth or next(fitting, 1))
    steps = max(result.summary.steps, 1)
    gpu = f" on {counted(result.info.gpus)}" if result.info.gpus else ""
    times = f"{capitalized(time_name(result))}, ms{' per step' if steps > 1 else ''}"
    size = (10, 1.7 + 0.28 * len(bars))
    drawn, axes = canvas(size, f"{capitalized(time_name(result))} by layer{gpu}", times, grid="x")
    left = 0 * bars["forward"]
    for phase in _PHASES:
        lengths = bars[phase] / steps / 1e6
        if lengths.any():
            axes.barh(bars.index, lengths, left=left, color=PHASE_COLOURS[phase], label=phase, height=0.78)
            left = left + lengths
    longest = left.max() if len(bars) else 1.0
    for row, length in enumerate(left):
        axes.text(length + 0.006 * longest, row, percent(length / left.sum()), va="center", fontsize=10)
    axes.set_yticks(bars.index, fit(bars["label"].tolist(), _LONGEST, paths=True), fontsize=11)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlim(right=1.12 * longest)
    if len(bars):
        legend_above(axes)
    return drawn


def _bars(tree: pd.DataFrame, levels: int) -> pd.DataFrame:
    """Partition the total: each layer of the first levels without its children among them."""
    cut_tree = tree[tree["depth"] < levels].reset_index(drop=True)
    times = cut_tree[[f"{phase}_ns" for phase in _PHASES]].set_axis(_PHASES, axis=1)
    in_children = times.groupby(cut_tree["parent"]).sum().reindex(cut_tree["layer"], fill_value=0)
    label = row_names(cut_tree)
    bars = times - in_children.to_numpy()
    bars = bars.assign(label=label.mask(cut_tree["layer"].isin(cut_tree["parent"]), label + " (itself)"))
    return bars[bars[_PHASES].sum(axis=1) > 0].reset_index(drop=True)
