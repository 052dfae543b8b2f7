"""Timeline data for the page's script: groups of rows, each with columns of starts and durations without overlaps."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import Int64Array
from nvprof_kit._report.text.texts import duration, percent

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.timeline import Lane, Timeline


Column = list[Any]
"""Position of a column: type, offset in bytes, number of values, and whether they are differences."""

_SMALL = ("u1", "u2", "u4")


class Block:
    """The columns of one part of the page."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, values: npt.ArrayLike, *, rising: bool = False) -> Column:
        """Add a column.

        Args:
            values: Integers up to 2^53, or floats.
            rising: Whether the values never decrease; then their differences are stored.
        """
        column = np.asarray(values)
        count = len(column)
        if rising and count:
            column = np.diff(column, prepend=column.dtype.type(0))
        kind = _kind(column)
        data = column.astype(f"<{kind}").tobytes()
        entry = [kind, self._size, count, int(rising)]
        padded = data + bytes(-len(data) % 8)
        self._pieces.append(padded)
        self._size += len(padded)
        return entry

    def packed(self) -> str:
        """The block as base64."""
        return base64.b64encode(gzip.compress(b"".join(self._pieces), compresslevel=6, mtime=0)).decode()


def _kind(column: npt.NDArray[Any]) -> str:
    """The smallest type for the values of a column."""
    if not len(column):
        return "u1"
    if column.dtype.kind not in "iub" or int(column.min()) < 0:
        return "f8"
    largest = int(column.max())
    return next((kind for kind in _SMALL if largest <= np.iinfo(kind).max), "f8")


MAX_ROWS = 250_000
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
    """

    instance: int | None
    number: int | None
    title: str
    start_ns: int
    end_ns: int
    idle: dict[int, str]


@dataclass(frozen=True)
class Moments:
    """The content of the timeline.

    Attributes:
        timeline: The timeline of the whole capture or of one step.
        steps: The selectable steps, starting with the one shown first.
        unmerged: Step instances whose operations are never merged.
    """

    timeline: Timeline
    steps: Sequence[ShownStep]
    unmerged: Sequence[int] = ()


def idle_sentence(device: int, idle_ns: int, window_ns: int, gaps: int) -> str:
    """A sentence about a device's idle time in a step."""
    return f"GPU {device}: idle {percent(idle_ns / max(window_ns, 1))} of the time, in {gaps:,} gap{'s' * (gaps != 1)}"


class Texts:
    """A string table; columns refer to texts by number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """The number of a text; adds it if needed."""
        return self.numbers.setdefault(text, len(self.numbers))

    def of(self, values: pd.Series[Any]) -> Int64Array:
        """The numbers of texts."""
        distinct = values.astype("category").cat
        numbers = [self.number(str(text)) for text in distinct.categories]
        numbers_of_rows: Int64Array = np.array([*numbers, 0], dtype=np.int64)[distinct.codes]
        return numbers_of_rows


def drawn_timeline(content: Moments, texts: Texts, block: Block, limit: int = MAX_ROWS) -> dict[str, Any]:
    """The timeline as columns of a block; times are ns since ``start``.

    Args:
        content: What is on it.
        texts: The string table to add texts to.
        block: The block to add columns to.
        limit: Maximum number of operation boxes.

    Returns:
        start: time zero; steps: number, title, start, duration and idle time of each; groups: a label and rows each, a
        row being kind (``idle``, ``layer``, ``op``, ``range``) and columns start, length, text, phase (both numbers of
        texts), and for operations layer, instance (0 outside steps), count and busy; note: what is merged or omitted.
    """
    timeline = content.timeline
    left_out: list[str] = []
    separate = set(content.unmerged)
    windows = [(step.start_ns, step.end_ns) for step in content.steps if step.instance in separate]
    drawing = _Drawing(timeline, texts, block, windows)
    ops = _together(timeline, separate, limit, left_out)
    spans, ranges, idle = (
        drawing.longest(getattr(timeline, name), limit // 2, noun, left_out)
        for name, noun in (("spans", "layers' spans"), ("ranges", "ranges"), ("idle", "gaps"))
    )
    groups = []
    for device in sorted({lane.device for lane in timeline.lanes}):
        if any(lane.on_gpu for lane in timeline.lanes if lane.device == device):
            groups.append(drawing.idle(idle, device))
        for lane_index, lane in enumerate(timeline.lanes):
            if lane.device == device:
                groups.append(drawing.stream(lane_index, spans, ops))
    groups += drawing.threads(ranges)
    steps = [
        {
            "step": step.number,
            "instance": step.instance,
            "title": step.title,
            "start": step.start_ns - drawing.start,
            "length": step.end_ns - step.start_ns,
            "idle": step.idle,
        }
        for step in content.steps
    ]
    note = f"{'; '.join(left_out)}. All numbers and tables include them." if left_out else ""
    return {
        "start": drawing.start,
        "steps": steps,
        "groups": [group for group in groups if group["rows"]],
        "note": note,
    }


class _Ops(NamedTuple):
    """Operation boxes: their columns, the number of operations in each, and their total duration."""

    frame: pd.DataFrame
    counts: Int64Array
    busy: Int64Array


def _together(timeline: Timeline, separate: set[int], limit: int, left_out: list[str]) -> _Ops:
    """The operations; if there are more than the limit, consecutive short ones in one layer are merged."""
    ops = timeline.ops
    start, end = ops["start_ns"].to_numpy(), ops["end_ns"].to_numpy()
    length = end - start
    if len(ops) <= limit:
        return _Ops(ops, np.ones(len(ops), dtype=np.int64), length)
    keys = [ops["lane"].to_numpy(), ops["instance"].to_numpy()]
    owner = [ops["layer"].cat.codes.to_numpy(), ops["phase"].cat.codes.to_numpy()]
    alone = np.isin(keys[1], list(separate)) if separate else np.zeros(len(ops), dtype=bool)
    first = np.arange(len(ops))
    for layer_changes in (
        _fresh(keys + owner),
        None,
    ):  # merge within a layer; if that is not enough, within a time range
        short = _SHORTEST_NS
        while len(first) > limit and short < _LONGEST_NS:
            changes = _fresh([*keys, start // (4 * short)]) if layer_changes is None else layer_changes
            first = _boxes(start, end, changes, alone, short)
            short *= 2
    count = np.diff(np.append(first, len(ops)))
    busy = np.add.reduceat(length, first)
    longest = np.maximum.reduceat(length, first)
    longest_row = np.where(length == np.repeat(longest, count), np.arange(len(ops)), len(ops))
    frame = ops.iloc[np.minimum.reduceat(longest_row, first)].copy()
    frame["start_ns"], frame["end_ns"] = start[first], end[first + count - 1]
    merged = int((count > 1).sum())
    at_most = duration(int(longest[count > 1].max(initial=0)))
    left_out.append(
        f"{int(count[count > 1].sum()):,} operations, of at most {at_most} each, are drawn in {merged:,} boxes that "
        "tell how many they hold"
    )
    if len(first) > limit:
        longest_rows = np.sort(np.argpartition(-busy, limit - 1)[:limit])
        gone = int(count.sum() - count[longest_rows].sum())
        left_out.append(f"{gone:,} operations of at most {duration(int(busy[longest_rows].min()))} are not drawn")
        return _Ops(frame.iloc[longest_rows], count[longest_rows], busy[longest_rows])
    return _Ops(frame, count, busy)


def _fresh(keys: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
    changes = np.ones(len(keys[0]), dtype=bool)
    changes[1:] = np.any([np.diff(key) != 0 for key in keys], axis=0)
    return changes


def _boxes(
    start: Int64Array, end: Int64Array, changes: npt.NDArray[np.bool_], alone: npt.NDArray[np.bool_], short: int
) -> Int64Array:
    """Start of each box: long operations have their own, and a long gap starts a new one."""
    long = alone | (end - start > short)
    is_first = changes | long
    is_first[1:] |= long[:-1] | (start[1:] - end[:-1] > short)
    return np.flatnonzero(is_first)


def timeline_row(block: Block, origin: int, kind: str, frame: pd.DataFrame, **columns: Int64Array) -> dict[str, Any]:
    """A row of a timeline: start since `origin`, length and further columns of boxes that do not overlap."""
    start, end = (frame[name].to_numpy(dtype=np.int64) for name in ("start_ns", "end_ns"))
    times = {"start": block.add(start - origin, rising=True), "length": block.add(end - start)}
    return {"kind": kind, **times, **{name: block.add(values) for name, values in columns.items()}}


class _Drawing:
    """Adds rows of a timeline to a block."""

    def __init__(self, timeline: Timeline, texts: Texts, block: Block, windows: Sequence[tuple[int, int]]) -> None:
        self._shown, self._texts, self._block, self._windows = timeline, texts, block, windows
        starts = [
            int(table["start_ns"].min()) for table in (timeline.ops, timeline.ranges, timeline.idle) if len(table)
        ]
        self.start = min([timeline.start_ns, *starts])

    def longest(self, frame: pd.DataFrame, limit: int, noun: str, left_out: list[str]) -> pd.DataFrame:
        """Rows to draw: those in the windows of highlighted steps, and the longest."""
        if len(frame) <= limit:
            return frame
        length = (frame["end_ns"] - frame["start_ns"]).to_numpy()
        start, end = frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()
        rank = length.copy()
        for window_start, window_end in self._windows:
            rank[(start < window_end) & (end > window_start)] += _LONGEST_NS
        longest_rows = np.sort(np.argpartition(-rank, limit - 1)[:limit])
        gone = np.ones(len(frame), dtype=bool)
        gone[longest_rows] = False
        at_most = duration(int(length[gone].max()))
        left_out.append(f"{len(frame) - limit:,} {noun} of at most {at_most} are not drawn")
        chosen: pd.DataFrame = frame.iloc[longest_rows]
        return chosen

    def _row(self, kind: str, frame: pd.DataFrame, **columns: Int64Array) -> dict[str, Any]:
        return timeline_row(self._block, self.start, kind, frame, **columns)

    def idle(self, gaps: pd.DataFrame, device: int) -> dict[str, Any]:
        """The idle gaps of a device."""
        device_gaps = gaps[gaps["device"] == device]
        before, after = (self._texts.of(device_gaps[side]) for side in ("before", "after"))
        rows = [self._row("idle", device_gaps, text=before, layer=after)] if len(device_gaps) else []
        return {"label": f"GPU {device}", "idle": device, "rows": rows}

    def stream(self, lane_index: int, spans: pd.DataFrame, ops: _Ops) -> dict[str, Any]:
        """The layers of a lane, and its operations."""
        texts, timeline = self._texts, self._shown
        above = spans[spans["lane"] == lane_index]
        rows = [
            self._row("layer", level, text=texts.of(level["layer"]), phase=texts.of(level["phase"]))
            for _, level in above.groupby("level", sort=True)
        ]
        lane = ops.frame["lane"].to_numpy() == lane_index
        lane_ops = ops.frame[lane]
        columns = {
            "text": texts.of(lane_ops["name"]),
            "phase": texts.of(lane_ops["phase"]),
            "layer": texts.of(lane_ops["layer"]),
            "instance": lane_ops["instance"].to_numpy(dtype=np.int64) + 1,
            "count": ops.counts[lane],
            "busy": ops.busy[lane],
        }
        if (ops.counts[lane] == 1).all():
            del columns["count"], columns["busy"]
        rows.append(self._row("op", lane_ops, **columns))
        return {"label": lane_label(timeline.lanes[lane_index], timeline), "rows": rows}

    def threads(self, ranges: pd.DataFrame) -> list[dict[str, Any]]:
        """The ranges of CPU threads."""
        texts = self._texts
        groups = []
        for number, (_, thread_ranges) in enumerate(ranges.groupby("tid", sort=True)):
            rows = [
                self._row("range", level, text=texts.of(level["text"]), phase=texts.of(level["category"]))
                for _, level in thread_ranges.groupby("level", sort=True)
            ]
            groups.append({"label": f"CPU thread {number}: when its ranges were open", "rows": rows})
        return groups


def lane_label(lane: Lane, timeline: Timeline) -> str:
    """The shortest unique name of a stream."""
    processes = sorted({other.pid for other in timeline.lanes})
    parts = [f"GPU {lane.device}", f"stream {lane.stream}"] if lane.on_gpu else ["CPU operators"]
    if len(processes) > 1:
        parts.append(f"process {processes.index(lane.pid)}")
    if lane.part:
        parts.append(f"beside it, {lane.part + 1}")
    return " · ".join(parts)
