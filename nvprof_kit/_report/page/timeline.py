"""A timeline as the page's script draws it: groups of rows, each row lists of starts and lengths that never overlap."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nvprof_kit._report.page.data import PHASES, short_text
from nvprof_kit._report.text.units import Milliseconds, percent

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.timeline import Lane, Timeline

MAX_OPS = 30_000
"""Most operations of a timeline that the page holds, and most layers' spans, ranges, gaps; of more, the longest."""

_DRAWN_PHASES = (*PHASES, "other")


class _Texts:
    """Every text once; rows name it by its number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def of(self, values: pd.Series[Any]) -> list[int]:
        """The numbers of some texts."""
        distinct = values.astype("category").cat
        numbers = [self.numbers.setdefault(str(text), len(self.numbers)) for text in distinct.categories]
        found: list[int] = np.array([*numbers, 0], dtype=np.int64)[distinct.codes].tolist()
        return found


def drawn_timeline(shown: Timeline) -> dict[str, Any]:
    """The timeline as lists; starts are ns since the window's, so what began before it has one below 0.

    Returns:
        start, length: the window; texts: what ``text`` and ``layer`` of the rows index; phases: what ``phase`` does;
        groups: a label and rows each, a row being kind (``idle``, ``layer``, ``op``, ``range``), start, length, text,
        phase, and for operations layer and own (0 where it is another step's); note: what is not drawn.
    """
    texts = _Texts()
    idle_labels = {device: _idle_label(shown, device) for device in {lane.device for lane in shown.lanes}}
    shown, note = _longest(shown)
    groups = []
    for device in sorted({lane.device for lane in shown.lanes}):
        if any(lane.on_gpu for lane in shown.lanes if lane.device == device):
            groups.append(_idle_group(shown, device, idle_labels[device], texts))
        for place, lane in enumerate(shown.lanes):
            if lane.device == device:
                groups.append(_stream_group(shown, place, texts))
    groups += _thread_groups(shown, texts)
    return {
        "step": shown.step,
        "start": shown.start_ns,
        "length": shown.end_ns - shown.start_ns,
        "texts": [short_text(text) for text in texts.numbers],
        "phases": list(_DRAWN_PHASES),
        "groups": [group for group in groups if group["rows"]],
        "note": note,
    }


def _longest(shown: Timeline) -> tuple[Timeline, str]:
    """The timeline with what is to be drawn, and a sentence on what is left out."""
    left_out = []
    for field, name in {"ops": "operations", "spans": "layers' spans", "ranges": "ranges", "idle": "gaps"}.items():
        frame = getattr(shown, field)
        if len(frame) > MAX_OPS:
            length = frame["end_ns"] - frame["start_ns"]
            kept = length.nlargest(MAX_OPS).index.sort_values()
            at_most = Milliseconds(1, 3)(int(length[kept].min()))
            left_out.append(f"{len(frame) - MAX_OPS:,} {name} of at most {at_most} ms")
            shown = replace(shown, **{field: frame.loc[kept]})
    note = f"Not drawn: {', '.join(left_out)}. Every number and table holds them." if left_out else ""
    return shown, note


def _row(kind: str, frame: pd.DataFrame, origin: int, text: list[int], phase: list[int], **more: list[int]) -> Any:
    return {
        "kind": kind,
        "start": (frame["start_ns"] - origin).tolist(),
        "length": (frame["end_ns"] - frame["start_ns"]).tolist(),
        "text": text,
        "phase": phase,
        **more,
    }


def _phase_numbers(phases: pd.Series[Any]) -> list[int]:
    return [
        _DRAWN_PHASES.index(phase) if phase in _DRAWN_PHASES else len(_DRAWN_PHASES) - 1 for phase in phases.tolist()
    ]


def _idle_label(shown: Timeline, device: int) -> str:
    gaps, (begin, end) = shown.idle_in_step(device), shown.own_window(device)
    share = percent(int(gaps.sum()) / max(end - begin, 1))
    return f"GPU {device}: idle {share} of the time, in {len(gaps):,} gap{'s' * (len(gaps) != 1)}"


def _idle_group(shown: Timeline, device: int, label: str, texts: _Texts) -> dict[str, Any]:
    gaps = shown.idle[shown.idle["device"] == device]
    row = _row("idle", gaps, shown.start_ns, texts.of(gaps["before"]), [], layer=texts.of(gaps["after"]))
    return {"label": label, "rows": [row] if len(gaps) else []}


def _stream_group(shown: Timeline, place: int, texts: _Texts) -> dict[str, Any]:
    spans = shown.spans[shown.spans["lane"] == place]
    mine = shown.ops[shown.ops["lane"] == place]
    rows = [
        _row("layer", level, shown.start_ns, texts.of(level["layer"]), _phase_numbers(level["phase"]))
        for _, level in spans.groupby("level", sort=True)
    ]
    own = np.ones(len(mine), dtype=int) if shown.step is None else (mine["instance"] == shown.instance).astype(int)
    rows.append(
        _row(
            "op",
            mine,
            shown.start_ns,
            texts.of(mine["name"]),
            _phase_numbers(mine["phase"]),
            layer=texts.of(mine["layer"]),
            own=own.tolist(),
        )
    )
    return {"label": lane_label(shown.lanes[place], shown), "rows": rows}


def lane_label(lane: Lane, shown: Timeline) -> str:
    """A stream by name, as short as tells it from the others."""
    processes = sorted({one.pid for one in shown.lanes})
    parts = [f"GPU {lane.device}", f"stream {lane.stream}"] if lane.on_gpu else ["CPU operators"]
    if len(processes) > 1:
        parts.append(f"process {processes.index(lane.pid)}")
    if lane.part:
        parts.append(f"beside it, {lane.part + 1}")
    return " · ".join(parts)


def _thread_groups(shown: Timeline, texts: _Texts) -> list[dict[str, Any]]:
    ranges = shown.ranges
    groups = []
    for number, (_, mine) in enumerate(ranges.groupby("tid", sort=True)):
        rows = [
            _row("range", level, shown.start_ns, texts.of(level["text"]), _phase_numbers(level["category"]))
            for _, level in mine.groupby("level", sort=True)
        ]
        groups.append({"label": f"CPU thread {number}: when its ranges were open", "rows": rows})
    return groups
