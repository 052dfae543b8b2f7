"""Timeline plot of one step: idle gaps of each GPU, and for each stream the layers above their operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nvprof_kit._report.page.timeline import lane_label
from nvprof_kit._report.plots.plots import PHASE_COLOURS, canvas, legend_above
from nvprof_kit._report.text.texts import counted, percent

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nvprof_kit._analysis.timeline import Timeline

IDLE = "#D55E00"
"""Color of idle gaps: the one in the palette of Okabe and Ito that no phase uses."""

_LETTER = 0.0085
"""Width of a character of a label, as a fraction of the plot's width."""


_GRAINS = 4000
"""Resolution of the plot's width."""


class Band(NamedTuple):
    """One row of the plot: its label, and its boxes (columns start_ns, end_ns, colour, label)."""

    name: str
    boxes: pd.DataFrame


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
    figure, axes = canvas((10, 1.75 + 0.36 * len(bands)), title, "x")
    axes.spines["left"].set_visible(False)
    start, end = drawn.own_window()
    for row, band in enumerate(bands):
        _draw(axes, row, band, start, (end - start) / 1e6)
    axes.set_yticks(range(len(bands)), [band.name for band in bands], fontsize=11)
    axes.set_ylim(len(bands) - 0.4, -0.6)
    axes.set_xlim(0, (end - start) / 1e6)
    axes.set_xlabel("time, ms", fontsize=13)
    axes.tick_params(axis="x", labelsize=11)
    axes.tick_params(axis="y", length=0)
    present = {colour for band in bands for colour in band.boxes["colour"].unique()}
    named = {**PHASE_COLOURS, "idle": IDLE}
    marks = [Patch(color=colour, label=name) for name, colour in named.items() if colour in present]
    legend_above(axes, 5, handles=marks)
    return figure


def timeline_bands(drawn: Timeline, depth: int | None = None) -> list[Band]:
    """The rows of the plot from top to bottom: idle gaps of each GPU; layers and operations of each stream."""
    bands = []
    for device in sorted({lane.device for lane in drawn.lanes}):
        start, end = drawn.own_window(device)
        share = int(drawn.idle_in_step(device).sum()) / max(end - start, 1)
        gaps = drawn.idle[drawn.idle["device"] == device]
        if any(lane.on_gpu for lane in drawn.lanes if lane.device == device):
            bands.append(Band(f"GPU {device} idle, {percent(share)}", _boxes(drawn, gaps, IDLE, "")))
        for row, lane in enumerate(drawn.lanes):
            if lane.device == device:
                bands += [band for band in _stream(drawn, row, lane_label(lane, drawn), depth) if len(band.boxes)]
    return bands


def _stream(drawn: Timeline, lane: int, name: str, depth: int | None) -> list[Band]:
    spans = drawn.spans[drawn.spans["lane"] == lane]
    bands = []
    for level, spans_of_level in spans.groupby("level", sort=True):
        if depth is None or int(level) < depth:
            label = spans_of_level["layer"].astype(str).map(last_words)
            colour = spans_of_level["phase"].map(lambda phase: PHASE_COLOURS.get(phase, PHASE_COLOURS["other"]))
            bands.append(
                Band("layers" if level == 0 else "", _boxes(drawn, spans_of_level, colour.to_numpy(), label.to_numpy()))
            )
    ops = drawn.ops[drawn.ops["lane"] == lane]
    colours = [PHASE_COLOURS.get(phase, PHASE_COLOURS["other"]) for phase in ops["phase"].cat.categories]
    bands.append(Band(name, _boxes(drawn, ops, np.array(colours, dtype=object)[ops["phase"].cat.codes], "")))
    return bands


def _boxes(drawn: Timeline, frame: pd.DataFrame, colour: np.ndarray | str, label: np.ndarray | str) -> pd.DataFrame:
    """Clip boxes to the step."""
    window_start, end = drawn.own_window()
    boxes = frame[["start_ns", "end_ns"]].assign(colour=colour, label=label)
    inside = boxes[(boxes["end_ns"] > window_start) & (boxes["start_ns"] < end)]
    clipped: pd.DataFrame = inside.assign(
        **{name: inside[name].clip(window_start, end) for name in ("start_ns", "end_ns")}
    )
    return clipped


def last_words(path: str) -> str:
    """The last part of a layer's path: ``self_attn``, ``layers.3``."""
    parts = path.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdecimal() else parts[-1]


def _draw(axes: Axes, row: int, band: Band, window_start: int, whole_ms: float) -> None:
    boxes = _merged(band.boxes, whole_ms * 1e6 / _GRAINS)
    start = (boxes["start_ns"].to_numpy() - window_start) / 1e6
    length = (boxes["end_ns"] - boxes["start_ns"]).to_numpy() / 1e6
    height = 0.82
    # a white edge separates neighbors; narrow boxes get an edge in their own color to stay visible
    parted = boxes["label"].astype(bool).to_numpy() & (length > whole_ms / 300)
    for colour in boxes["colour"].unique():
        for white in (False, True):
            these = (boxes["colour"] == colour).to_numpy() & (parted == white)
            axes.broken_barh(
                list(zip(start[these], length[these], strict=True)),
                (row - height / 2, height),
                facecolors=colour,
                edgecolors="white" if white else colour,
                linewidth=0.5 if white else 0.15,
            )
    for at, wide, label, colour in zip(start, length, boxes["label"], boxes["colour"], strict=True):
        letters = wide / (_LETTER * whole_ms)
        text = next((candidate for candidate in (label, label.rpartition(".")[2]) if len(candidate) <= letters), "")
        if text:
            dark = "black" if colour == PHASE_COLOURS["backward"] else "white"
            axes.text(at + wide / 2, row, text, ha="center", va="center", fontsize=9, color=dark, clip_on=True)


def _merged(boxes: pd.DataFrame, grain_ns: float) -> pd.DataFrame:
    """Merge unlabeled boxes of the same color that are too close to be told apart."""
    if len(boxes) < _GRAINS or boxes["label"].astype(bool).any():
        return boxes
    boxes = boxes.sort_values("start_ns", kind="stable")
    colour = boxes["colour"].to_numpy()
    near = boxes["start_ns"].to_numpy()[1:] - boxes["end_ns"].to_numpy()[:-1] < grain_ns
    first = np.flatnonzero(np.concatenate(([True], ~(near & (colour[1:] == colour[:-1])))))
    last = np.append(first[1:], len(boxes)) - 1
    merged: pd.DataFrame = boxes.iloc[first].assign(end_ns=boxes["end_ns"].to_numpy()[last])
    return merged
