"""Timeline plot of one step: idle gaps of each GPU, and for each stream the layers above their operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nvprof_kit._report.page.timeline import lane_label
from nvprof_kit._report.plots.plots import PHASE_COLOURS, canvas, legend_above
from nvprof_kit._report.text.texts import counted, percent

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from nvprof_kit._analysis.timeline import Timeline

IDLE = "#D55E00"
"""Color of idle gaps: the one in the palette of Okabe and Ito that no phase uses."""

_LETTER = 0.0085
"""Width of a character of a label, as a fraction of the plot's width."""


_LAST_PART = r"([^.]*(?:\.\d+)?)$"
"""The last part of a layer's path: ``self_attn``, ``layers.3``."""


def timeline_figure(drawn: Timeline, gpus: Sequence[str] = (), depth: int | None = None) -> Figure:
    """The timeline of one step.

    Args:
        drawn: The timeline data.
        gpus: Names of the GPUs, for the title.
        depth: Levels of the model to draw; None for all.
    """
    from matplotlib.patches import Patch

    bands = timeline_bands(drawn, depth)
    step = f"Step {drawn.step}" if drawn.step is not None else "The capture"
    title = f"{step} in time{f' on {counted(gpus)}' if gpus else ''}"
    figure, axes = canvas((10, 1.75 + 0.36 * len(bands)), title, "time, ms", grid="x")
    axes.spines["left"].set_visible(False)
    window_start, window_end = drawn.window()
    window_ms = (window_end - window_start) / 1e6
    for row, (_, boxes) in enumerate(bands):
        start = (boxes["start_ns"].to_numpy() - window_start) / 1e6
        length = (boxes["end_ns"] - boxes["start_ns"]).to_numpy() / 1e6
        # a white edge separates neighbors; narrow boxes get an edge in their own color to stay visible
        parted = boxes["label"].astype(bool).to_numpy() & (length > window_ms / 300)
        edges, widths = np.where(parted, "white", boxes["colour"]).tolist(), np.where(parted, 0.5, 0.15).tolist()
        spans, faces = list(zip(start, length, strict=True)), boxes["colour"].tolist()
        axes.broken_barh(spans, (row - 0.41, 0.82), facecolors=faces, edgecolors=edges, linewidth=widths)
        for at, wide, label, colour in zip(start, length, boxes["label"], boxes["colour"], strict=True):
            letters = wide / (_LETTER * window_ms)
            text = next((candidate for candidate in (label, label.rpartition(".")[2]) if len(candidate) <= letters), "")
            if text:
                dark = "black" if colour == PHASE_COLOURS["backward"] else "white"
                axes.text(at + wide / 2, row, text, ha="center", va="center", fontsize=9, color=dark, clip_on=True)
    axes.set_yticks(range(len(bands)), [name for name, _ in bands], fontsize=11)
    axes.set_ylim(len(bands) - 0.4, -0.6)
    axes.set_xlim(0, window_ms)
    axes.tick_params(axis="y", length=0)
    present = {colour for _, boxes in bands for colour in boxes["colour"].unique()}
    named = {**PHASE_COLOURS, "idle": IDLE}
    marks = [Patch(color=colour, label=name) for name, colour in named.items() if colour in present]
    legend_above(axes, 5, handles=marks)
    return figure


def timeline_bands(drawn: Timeline, depth: int | None = None) -> list[tuple[str, pd.DataFrame]]:
    """The rows of the plot from top to bottom, idle gaps of each GPU, layers and operations of each stream: the label
    of each, and its boxes, clipped to the step: start_ns, end_ns, colour, label.
    """
    window_start, window_end = drawn.window()
    bands = []

    def add(name: str, frame: pd.DataFrame, colour: str | list[str], label: Any = "") -> None:
        boxes = frame[["start_ns", "end_ns"]].assign(colour=colour, label=label)
        boxes = boxes[(boxes["end_ns"] > window_start) & (boxes["start_ns"] < window_end)]
        if len(boxes) or colour == IDLE:
            times = {time: boxes[time].clip(window_start, window_end) for time in ("start_ns", "end_ns")}
            bands.append((name, boxes.assign(**times)))

    def colours(rows: pd.DataFrame) -> list[str]:
        return [PHASE_COLOURS.get(phase, PHASE_COLOURS["other"]) for phase in rows["phase"]]

    idle = drawn.idle_times()
    for device in sorted({lane.device for lane in drawn.lanes}):
        times = idle[idle["device"] == device]
        share = times["idle_ns"].sum() / max((times["end_ns"] - times["start_ns"]).sum(), 1)
        if any(lane.on_gpu for lane in drawn.lanes if lane.device == device):
            add(f"GPU {device} idle, {percent(share)}", drawn.idle[drawn.idle["device"] == device], IDLE)
        for number, lane in enumerate(drawn.lanes):
            if lane.device == device:
                spans = drawn.spans[drawn.spans["lane"] == number]
                for level, rows in spans.groupby("level", sort=True):
                    if depth is None or int(str(level)) < depth:
                        last_parts = rows["layer"].astype(str).str.extract(_LAST_PART, expand=False)
                        add("" if level else "layers", rows, colours(rows), last_parts)
                rows = drawn.ops[drawn.ops["lane"] == number]
                add(lane_label(lane, drawn), rows, colours(rows))
    return bands
