"""Plot of the launch queue in a step: launched but not started operations by stream, and idle gaps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._report.plots.plots import PALETTE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from nvprof_kit._analysis.breakdown.breakdown import BreakdownResult

_STREAMS = 6
"""Number of streams with their own color; the others share one."""


def queue_figure(result: BreakdownResult) -> Figure:
    """Queued operations in the step of median duration, and the idle gaps of the GPU.

    Args:
        result: The breakdown of a capture.
    """
    from matplotlib.figure import Figure

    areas, window = queue_areas(result.queue), result.steps.iloc[result.critical_window]
    origin, length = int(window["start_ns"]), int(window["wall_ns"])
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes, strip = figure.subplots(2, 1, sharex=True, height_ratios=(10, 1))
    bottom = np.zeros(len(areas))
    edges = (np.append(areas.index, origin + length) - origin) / 1e6
    for colour, name in zip(PALETTE, areas.columns, strict=False):
        top = bottom + areas[name].to_numpy()
        axes.stairs(top, edges, baseline=bottom, fill=True, color=colour, label=name)
        bottom = top
    axes.set_ylabel("launched, not begun", fontsize=13)
    axes.set_ylim(0, max(float(bottom.max(initial=0)) * 1.05, 1))
    axes.grid(axis="y", color="#DDDDDD")
    axes.set_axisbelow(True)
    if len(areas.columns):
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize=12)
    gaps = result.gaps[result.gaps["window"] == result.critical_window]
    spans = [
        ((start - origin) / 1e6, length / 1e6) for start, length in zip(gaps["start_ns"], gaps["idle_ns"], strict=True)
    ]
    strip.broken_barh(spans, (0, 1), color="#D55E00", linewidth=0)
    strip.set_yticks([0.5], ["GPU idle"], fontsize=12)
    strip.set_xlabel("time in the step, ms", fontsize=13)
    strip.set_xlim(0, length / 1e6)
    strip.set_ylim(0, 1)
    for one in (axes, strip):
        one.tick_params(labelsize=11)
        one.spines[["top", "right"]].set_visible(False)
    step = result.steps["step"].iloc[result.critical_window]
    names = dict(zip(sorted(set(result.steps["device"])), result.info.gpus, strict=False))
    where = f" on {names.get(window['device'], result.info.gpus[0])}" if result.info.gpus else ""
    figure.suptitle(f"Queue of launched operations, {_named(step)}{where}", fontsize=15)
    return figure


def _named(step: object) -> str:
    return "outside steps" if str(step) in ("<NA>", "nan") else f"step {step}"


def queue_areas(queue: pd.DataFrame) -> pd.DataFrame:
    """Mean queue depth by time slice and stream.

    A row for each slice by start in ns; a column for each stream, the deepest first, the last for all streams without
    their own color.
    """
    table = queue.pivot(index="start_ns", columns="stream", values="queue_mean")
    table = table[table.mean().sort_values(ascending=False, kind="stable").index]
    shown = table.iloc[:, :_STREAMS].rename(columns=lambda stream: f"stream {stream}")
    rest = table.iloc[:, _STREAMS:]
    if rest.shape[1]:
        shown = shown.assign(**{f"{rest.shape[1]} other streams": rest.sum(axis=1)})
    made: pd.DataFrame = shown
    return made
