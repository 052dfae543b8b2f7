"""Timeline data for the page's script: groups of rows, each with columns of starts and durations without overlaps."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._report.text.texts import MS

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.timeline import Lane, Timeline


Column = list[Any]
"""Position of a column: type, offset in bytes, number of values, and whether they are differences."""


class Drawing:
    """What a page's script draws of one capture or job: columns of numbers in one block, and the texts they refer to.

    Attributes:
        texts: The number of each text.
    """

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, values: npt.ArrayLike, *, rising: bool = False) -> Column:
        """Add a column in the smallest type for its values.

        Args:
            values: Integers up to 2^53, or floats.
            rising: Whether the values never decrease; then their differences are stored.
        """
        column = np.asarray(values)
        if rising and len(column):
            column = np.diff(column, prepend=column.dtype.type(0))
        kind = "f8"
        if column.dtype.kind in "iub" and int(column.min(initial=0)) >= 0:
            largest = int(column.max(initial=0))
            kind = next((name for name in ("u1", "u2", "u4") if largest <= np.iinfo(name).max), "f8")
        data = column.astype(f"<{kind}").tobytes()
        entry = [kind, self._size, len(column), int(rising)]
        self._pieces.append(data + bytes(-len(data) % 8))
        self._size += len(self._pieces[-1])
        return entry

    def add_texts(self, values: pd.Series[Any]) -> Column:
        """Add a column of texts by their numbers."""
        distinct = values.astype("category").cat
        numbers = [self.texts.setdefault(str(text), len(self.texts)) for text in distinct.categories]
        return self.add(np.array([*numbers, 0], dtype=np.int64)[distinct.codes])

    def row(self, kind: str, frame: pd.DataFrame, origin: int, texts: dict[str, str]) -> dict[str, Any]:
        """A row of a timeline: start since `origin` and length of boxes that do not overlap, and texts.

        Args:
            kind: ``idle``, ``layer``, ``op``, ``range``, …
            frame: The boxes, with start_ns and end_ns.
            origin: Time zero.
            texts: The columns of texts by their names in the row.
        """
        start, end = (frame[name].to_numpy(dtype=np.int64) for name in ("start_ns", "end_ns"))
        columns = {name: self.add_texts(frame[column]) for name, column in texts.items()}
        times = {"start": self.add(start - origin, rising=True), "length": self.add(end - start)}
        return {"kind": kind, **times, **columns}

    def packed(self) -> str:
        """The block as base64."""
        return base64.b64encode(gzip.compress(b"".join(self._pieces), compresslevel=6, mtime=0)).decode()


MAX_BOXES = 250_000
"""Maximum number of operation boxes of all captures on a page; half as many for layer spans, ranges and gaps."""

_SHORTEST_NS = 1_000
_LONGEST_NS = 1 << 40


class ShownStep(NamedTuple):
    """A selectable step.

    Attributes:
        instance: The step instance; None for the whole capture.
        number: Number of the step.
        title: Label in the selection.
        start_ns, end_ns: The first and last time on the CPU or GPU.
        idle: A sentence about the idle time of each device, by ordinal.
        is_titled: Whether it is highlighted: its operations are never merged.
    """

    instance: int | None
    number: int | None
    title: str
    start_ns: int
    end_ns: int
    idle: dict[int, str]
    is_titled: bool = True

    def drawn(self, origin: int) -> dict[str, Any]:
        """The step as the page's script reads it, its start since `origin`."""
        times = {"start": self.start_ns - origin, "length": self.end_ns - self.start_ns}
        return {"step": self.number, "instance": self.instance, "title": self.title, **times, "idle": self.idle}


def drawn_timeline(timeline: Timeline, steps: Sequence[ShownStep], drawing: Drawing, limit: int) -> dict[str, Any]:
    """The timeline as columns of a drawing; times are ns since ``start``.

    Args:
        timeline: The timeline of the whole capture or of one step.
        steps: The selectable steps, starting with the one shown first.
        drawing: The drawing to add texts and columns to.
        limit: Maximum number of operation boxes.

    Returns:
        start: time zero; steps: number, title, start, duration and idle time of each; groups: a label and rows each, a
        row being kind (``idle``, ``layer``, ``op``, ``range``) and columns start, length, text, phase (both numbers of
        texts), and for operations layer, instance (0 outside steps), count and busy; note: what is merged or omitted.
    """
    left_out: list[str] = []
    ops = _merged(timeline, [step.instance for step in steps if step.is_titled], limit, left_out)
    spans, ranges, gaps = (
        _longest(getattr(timeline, name), [step for step in steps if step.is_titled], limit // 2, noun, left_out)
        for name, noun in (("spans", "layers' spans"), ("ranges", "ranges"), ("idle", "gaps"))
    )
    starts = [int(rows["start_ns"].min()) for rows in (timeline.ops, timeline.ranges, timeline.idle) if len(rows)]
    origin = min([timeline.start_ns, *starts])
    groups: list[dict[str, Any]] = []
    for device in sorted({lane.device for lane in timeline.lanes}):
        device_gaps = gaps[gaps["device"] == device]
        if len(device_gaps) and any(lane.on_gpu for lane in timeline.lanes if lane.device == device):
            row = drawing.row("idle", device_gaps, origin, {"text": "before", "layer": "after"})
            groups.append({"label": f"GPU {device}", "idle": device, "rows": [row]})
        for number, lane in enumerate(timeline.lanes):
            if lane.device == device:
                rows = [
                    drawing.row("layer", level, origin, {"text": "layer", "phase": "phase"})
                    for _, level in spans[spans["lane"] == number].groupby("level", sort=True)
                ]
                boxes = ops[ops["lane"] == number]
                row = drawing.row("op", boxes, origin, {"text": "name", "phase": "phase", "layer": "layer"})
                row["instance"] = drawing.add(boxes["instance"] + 1)
                if (boxes["count"] > 1).any():
                    row |= {name: drawing.add(boxes[name]) for name in ("count", "busy")}
                rows.append(row)
                groups.append({"label": lane_label(lane, timeline), "rows": rows})
    for number, (_, thread) in enumerate(ranges.groupby("tid", sort=True)):
        levels = (level for _, level in thread.groupby("level", sort=True))
        rows = [drawing.row("range", level, origin, {"text": "text", "phase": "category"}) for level in levels]
        groups.append({"label": f"CPU thread {number}: when its ranges were open", "rows": rows})
    note = f"{'; '.join(left_out)}. All numbers and tables include them." if left_out else ""
    return {"start": origin, "steps": [step.drawn(origin) for step in steps], "groups": groups, "note": note}


def begins_run(rows: pd.DataFrame, names: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Which rows differ from the one before them in any of these columns; the first row does."""
    columns = (rows[name].cat.codes if rows[name].dtype == "category" else rows[name] for name in names)
    is_first = np.ones(len(rows), dtype=bool)
    is_first[1:] = np.any([np.diff(column) != 0 for column in columns], axis=0)
    return is_first


def _merged(timeline: Timeline, separate: Sequence[Any], limit: int, left_out: list[str]) -> pd.DataFrame:
    """The boxes of operations, with the number of operations in each (count) and their total duration (busy). If there
    are more than the limit, consecutive short operations of a layer share one, except in some step instances.
    """
    ops = timeline.ops
    start, end = ops["start_ns"].to_numpy(), ops["end_ns"].to_numpy()
    length = end - start
    if len(ops) <= limit:
        return ops.assign(count=1, busy=length)
    changes = begins_run(ops, ("lane", "instance", "layer", "phase"))
    alone, short, first = np.isin(ops["instance"], separate), _SHORTEST_NS, np.arange(len(ops))
    while len(first) > limit and short < _LONGEST_NS:
        is_long = alone | (length > short)
        is_first = changes | is_long
        is_first[1:] |= is_long[:-1] | (start[1:] - end[:-1] > short)
        first, short = np.flatnonzero(is_first), 2 * short
    count, longest = np.diff(np.append(first, len(ops))), np.maximum.reduceat(length, first)
    longest_row = np.where(length == np.repeat(longest, count), np.arange(len(ops)), len(ops))
    boxes: pd.DataFrame = ops.iloc[np.minimum.reduceat(longest_row, first)].assign(
        start_ns=start[first], end_ns=end[first + count - 1], count=count, busy=np.add.reduceat(length, first)
    )
    merged = count > 1
    at_most = MS.with_unit(int(longest[merged].max(initial=0)))
    left_out.append(
        f"{int(count[merged].sum()):,} operations, of at most {at_most} each, "
        f"are drawn in {int(merged.sum()):,} boxes that tell how many they hold"
    )
    if len(boxes) <= limit:
        return boxes
    drawn: pd.DataFrame = boxes.iloc[np.sort(np.argsort(-boxes["busy"].to_numpy(), kind="stable")[:limit])]
    omitted, at_most = len(ops) - int(drawn["count"].sum()), MS.with_unit(int(drawn["busy"].min()))
    left_out.append(f"{omitted:,} operations of at most {at_most} are not drawn")
    return drawn


def _longest(
    frame: pd.DataFrame, titled: Sequence[ShownStep], limit: int, noun: str, left_out: list[str]
) -> pd.DataFrame:
    """Rows to draw: those in the windows of highlighted steps, and the longest."""
    if len(frame) <= limit:
        return frame
    start, end = frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()
    length = end - start
    rank = length.copy()
    for step in titled:
        rank[(start < step.end_ns) & (end > step.start_ns)] += _LONGEST_NS
    ranked = np.argsort(-rank, kind="stable")
    at_most = MS.with_unit(int(length[ranked[limit:]].max()))
    left_out.append(f"{len(frame) - limit:,} {noun} of at most {at_most} are not drawn")
    return frame.iloc[np.sort(ranked[:limit])]


def lane_label(lane: Lane, timeline: Timeline) -> str:
    """The shortest unique name of a stream."""
    processes = sorted({other.pid for other in timeline.lanes})
    parts = [f"GPU {lane.device}", f"stream {lane.stream}"] if lane.on_gpu else ["CPU operators"]
    if len(processes) > 1:
        parts.append(f"process {processes.index(lane.pid)}")
    if lane.part:
        parts.append(f"beside it, {lane.part + 1}")
    return " · ".join(parts)
