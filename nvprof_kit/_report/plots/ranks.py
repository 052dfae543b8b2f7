"""The plot of the ranks of a job: waiting by late rank and cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._ranks.answer import Ranks, RankTable
from nvprof_kit._report.plots.plots import PALETTE, canvas, legend_above
from nvprof_kit._result.result import no_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_BARS = 40
"""Maximum number of ranks; those that others waited for most are kept."""


def waits_figure(result: Ranks | RankTable) -> Figure:
    """A bar for each rank that others waited for, its causes stacked; of a job, its ``waits`` or ``charges``.

    Raises:
        UsageError: Nobody waited, or the table is another one.
    """
    rows, name = (result.charges, "charges") if isinstance(result, Ranks) else (result.rows, result.name)
    if name not in ("waits", "charges") or not len(rows):
        raise no_plot(f"the table {name}" if len(rows) else f"a table {name} without rows")
    rank = rows["rank"] if name == "charges" else rows["cause_rank"]
    sums = rows.groupby([rank.rename("rank"), "cause"])["wait_ns"].sum().unstack(fill_value=0) / 1e6
    bars = sums.loc[sums.sum(axis=1).nlargest(MAX_BARS).index].sort_index()
    figure, axes = canvas((10, 4.6), "Waiting by late rank and cause", "rank that the others waited for", "waiting, ms")
    positions, bottom = np.arange(len(bars)), np.zeros(len(bars))
    for number, cause in enumerate(bars.sum().sort_values(ascending=False).index):
        axes.bar(positions, bars[cause], 0.78, bottom=bottom, color=PALETTE[number % len(PALETTE)], label=cause)
        bottom += bars[cause].to_numpy()
    axes.set_xticks(positions, [str(label) for label in bars.index], rotation=90 if len(bars) > 20 else 0)
    legend_above(axes)
    return figure
