"""Bar chart of the time per step, its phases stacked, with a mark at the step's duration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._report.plots.plots import PHASE_COLOURS
from nvprof_kit._report.text.layers import heading, time_name
from nvprof_kit._report.text.table.units import counted

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from nvprof_kit._analysis.layers.layers import LayersResult


def steps_figure(result: LayersResult, lengths: pd.DataFrame) -> Figure:
    """A bar for each step.

    Args:
        result: The per-layer table by step.
        lengths: Durations of the steps (`nvprof_kit._analysis.attribution.step_times.step_times`).
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    bars = steps_bars(result, lengths)
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes = figure.add_subplot()
    places = np.arange(len(bars))
    bottom = np.zeros(len(bars))
    for phase, colour in PHASE_COLOURS.items():
        values = bars[phase].to_numpy() / 1e6
        if (values > 0).any():
            axes.bar(places, values, 0.78, bottom=bottom, color=colour, label=phase)
            bottom += values
    length = bars["length"].to_numpy() / 1e6
    axes.hlines(length, places - 0.46, places + 0.46, color="black", linewidth=2.2, label="length of the step")
    axes.set_xticks(places, bars["step"])
    if len(bars) > 20:
        axes.xaxis.set_major_locator(MaxNLocator(20, integer=True))
        axes.xaxis.set_major_formatter(lambda at, _: str(bars["step"].get(round(at), "")))
    axes.set_xlabel("step", fontsize=13)
    axes.set_ylabel(f"{heading(time_name(result))}, ms", fontsize=13)
    axes.tick_params(labelsize=11)
    axes.grid(axis="y", color="#DDDDDD")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, frameon=False, fontsize=12)
    gpu = f" on {counted(result.info.gpus)}" if result.info.gpus else ""
    figure.suptitle(f"Time per step{gpu}", fontsize=15)
    return figure


def steps_bars(result: LayersResult, lengths: pd.DataFrame) -> pd.DataFrame:
    """The bars: columns step, length, forward, backward, recompute, other, in ns; a row for each step in order."""
    rows = result.rows[result.rows["step"].notna()]
    phase = rows["phase"].where(rows["phase"].isin(PHASE_COLOURS), "other")
    times = rows.groupby([rows["instance"].astype("int64"), phase])["gpu_self_ns"].sum().unstack(fill_value=0)
    times = times.reindex(index=lengths.index, columns=list(PHASE_COLOURS), fill_value=0).reset_index(drop=True)
    times.insert(0, "step", lengths["step"].to_numpy())
    times.insert(1, "length", lengths["wall_ns"].to_numpy())
    bars: pd.DataFrame = times
    return bars
