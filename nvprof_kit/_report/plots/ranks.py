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
    return waits_figure(result.charges)


def table_figure(result: RankTable) -> Figure:
    """``waits`` and ``charges`` as one bar per late rank, split by cause; ``layers`` as a heat map by rank.

    Raises:
        UsageError: The table is another one, or empty.
    """
    draw = {"waits": waits_figure, "charges": waits_figure, "layers": layers_figure}.get(result.name)
    if draw is None or not len(result.rows):
        raise no_plot(f"the table {result.name}" if len(result.rows) else f"an empty table {result.name}")
    return draw(result.rows)


def waits_figure(table: pd.DataFrame) -> Figure:
    """A bar for each rank that others waited for, its causes stacked.

    Args:
        table: Waits or charges: cause, wait_ns, and rank, or late_rank and cause_rank.
    """
    rank = table["rank"] if "rank" in table else table["cause_rank"]
    sums = table.groupby([rank.rename("rank"), "cause"])["wait_ns"].sum().unstack(fill_value=0) / 1e6
    chosen = sums.loc[sums.sum(axis=1).sort_values(ascending=False).index[:MOST]].sort_index()
    figure, axes = canvas((10, 4.6), "Waiting by late rank and cause")
    places, bottom = np.arange(len(chosen)), np.zeros(len(chosen))
    for number, cause in enumerate(chosen.sum().sort_values(ascending=False).index):
        values = chosen[cause].to_numpy()
        axes.bar(places, values, 0.78, bottom=bottom, color=PALETTE[number % len(PALETTE)], label=cause)
        bottom += values
    axes.set_xticks(places, [str(label) for label in chosen.index], rotation=90 if len(chosen) > 20 else 0)
    axes.set_xlabel("rank that the others waited for", fontsize=13)
    axes.set_ylabel("waiting, ms", fontsize=13)
    legend_above(axes)
    return figure


def layers_figure(table: pd.DataFrame) -> Figure:
    """A heat map of layers and ranks: how much longer each layer computes than on equal ranks.

    Args:
        table: See `nvprof_kit._ranks.stages.layer_table`.
    """
    wide = table.assign(row=table["layer"] + " " + table["phase"]).pivot_table(
        index="row", columns="rank", values="excess_ns", aggfunc="sum"
    )
    chosen = wide.loc[wide.abs().max(axis=1).sort_values(ascending=False).index[:MOST]] / 1e6
    figure, axes = canvas((10, 1.5 + 0.24 * len(chosen)), "Layers that compute longer than on equal ranks")
    limit = float(np.nanmax(np.abs(chosen.to_numpy()))) or 1.0
    image = axes.imshow(chosen.to_numpy(), aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit)
    axes.set_yticks(np.arange(len(chosen)), [str(label) for label in chosen.index], fontsize=8)
    stride = max(len(chosen.columns) // 20, 1)
    axes.set_xticks(np.arange(len(chosen.columns))[::stride], [str(label) for label in chosen.columns][::stride])
    axes.set_xlabel("rank", fontsize=13)
    figure.colorbar(image, label="longer than its equals, ms")
    return figure
