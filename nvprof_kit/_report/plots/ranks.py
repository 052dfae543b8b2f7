"""Plots of the ranks of a job: waiting by late rank and cause, and slow ranks by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._report.plots.plots import PALETTE, canvas, legend_above
from nvprof_kit._result.result import no_plot

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from nvprof_kit._ranks.answer import Ranks, RankTable

MOST = 40
"""Maximum number of ranks or layers; those with the largest values are kept."""


def job_figure(result: Ranks) -> Figure:
    """How long the other ranks waited for each rank, split by cause.

    Raises:
        UsageError: Nobody waited.
    """
    if not len(result.charges):
        raise no_plot("a job without waiting")
    return _waits(result.charges)


def table_figure(result: RankTable) -> Figure:
    """``waits`` and ``charges`` as one bar per late rank, split by cause; ``layers`` as a heat map by rank.

    Raises:
        UsageError: The table is another one, or empty.
    """
    draw = {"waits": _waits, "charges": _waits, "layers": _layers}.get(result.name)
    if draw is None or not len(result.rows):
        raise no_plot(f"the table {result.name}" if len(result.rows) else f"an empty table {result.name}")
    return draw(result.rows)


def _waits(table: pd.DataFrame) -> Figure:
    """A bar for each rank that others waited for, its causes stacked, of waits or charges."""
    rank = table["rank"] if "rank" in table else table["cause_rank"]
    sums = table.groupby([rank.rename("rank"), "cause"])["wait_ns"].sum().unstack(fill_value=0) / 1e6
    chosen = sums.loc[sums.sum(axis=1).nlargest(MOST).index].sort_index()
    figure, axes = canvas((10, 4.6), "Waiting by late rank and cause", "rank that the others waited for", "waiting, ms")
    places, bottom = np.arange(len(chosen)), np.zeros(len(chosen))
    for number, cause in enumerate(chosen.sum().sort_values(ascending=False).index):
        axes.bar(places, chosen[cause], 0.78, bottom=bottom, color=PALETTE[number % len(PALETTE)], label=cause)
        bottom += chosen[cause].to_numpy()
    axes.set_xticks(places, [str(label) for label in chosen.index], rotation=90 if len(chosen) > 20 else 0)
    legend_above(axes)
    return figure


def _layers(table: pd.DataFrame) -> Figure:
    """A heat map of layers and ranks: how much longer each layer computes than on equal ranks."""
    table = table.assign(row=table["layer"] + " " + table["phase"])
    wide = table.pivot_table(index="row", columns="rank", values="excess_ns", aggfunc="sum") / 1e6
    chosen = wide.loc[wide.abs().max(axis=1).nlargest(MOST).index]
    title = "Layers that compute longer than on equal ranks"
    figure, axes = canvas((10, 1.5 + 0.24 * len(chosen)), title, "rank")
    limit = float(chosen.abs().max(axis=None)) or 1.0
    image = axes.imshow(chosen.to_numpy(), aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit)
    axes.set_yticks(np.arange(len(chosen)), chosen.index.tolist(), fontsize=8)
    ranks = np.arange(0, len(chosen.columns), max(len(chosen.columns) // 20, 1))
    axes.set_xticks(ranks, [str(label) for label in chosen.columns[ranks]])
    figure.colorbar(image, label="longer than its equals, ms")
    return figure
