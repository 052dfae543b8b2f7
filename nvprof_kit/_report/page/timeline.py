"""A timeline as the page's script draws it: groups of rows, each row columns of starts and lengths that never overlap.

One set of rows holds every step; to show a step is to look through its window. Where a capture has more operations
than a page may hold, short ones that follow each other in one layer are drawn as one box that says how many they are
and how long they ran; those of the steps that are told of first stay apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.nesting import Int64Array
from nvprof_kit._report.page.packing import Block, Column
from nvprof_kit._report.text.table.units import Milliseconds, percent

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.timeline import Lane, Timeline

MAX_ROWS = 250_000
"""Most boxes of operations that a page holds, over all its captures; of layers' spans, ranges and gaps half as many."""

_SHORTEST_NS = 1_000
_LONGEST_NS = 1 << 40


class ShownStep(NamedTuple):
    """A step that can be chosen.

    Attributes:
        instance: Which instance it is, None for the whole capture.
        number: Its number.
        title: What the reader chooses it by.
        start_ns, end_ns: From its first to its last moment, on the CPU or the GPU.
        idle: How idle each device was, a sentence by ordinal.
    """

    instance: int | None
    number: int | None
    title: str
    start_ns: int
    end_ns: int
    idle: dict[int, str]


@dataclass(frozen=True)
class Moments:
    """What a page shows in time.

    Attributes:
        shown: What ran, in the whole capture or in the one step.
        steps: The steps to choose from, the one that is shown first first.
        apart: Instances whose operations are never drawn together.
    """

    shown: Timeline
    steps: Sequence[ShownStep]
    apart: Sequence[int] = ()


def idle_sentence(device: int, idle_ns: int, window_ns: int, gaps: int) -> str:
    """How idle a device was in a step."""
    return f"GPU {device}: idle {percent(idle_ns / max(window_ns, 1))} of the time, in {gaps:,} gap{'s' * (gaps != 1)}"


class Texts:
    """Every text once; columns name it by its number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """The number of a text."""
        return self.numbers.setdefault(text, len(self.numbers))

    def of(self, values: pd.Series[Any]) -> Int64Array:
        """The numbers of some texts."""
        distinct = values.astype("category").cat
        numbers = [self.number(str(text)) for text in distinct.categories]
        found: Int64Array = np.array([*numbers, 0], dtype=np.int64)[distinct.codes]
        return found


def drawn_timeline(moments: Moments, texts: Texts, block: Block, limit: int = MAX_ROWS) -> dict[str, Any]:
    """The timeline as columns of a block; times are ns since ``start``.

    Args:
        moments: What is shown.
        texts: Where texts go.
        block: Where columns go.
        limit: Most boxes of operations.

    Returns:
        start: what times count from; steps: number, title, start, length and idle of each; groups: a label and rows
        each, a row being kind (``idle``, ``layer``, ``op``, ``range``) and columns start, length, text, phase (both
        numbers of texts), and for operations layer, instance (0 outside steps), count and busy; note: what is not drawn
        one by one.
    """
    shown = moments.shown
    left_out: list[str] = []
    drawing = _Drawing(shown, texts, block, [(step.start_ns, step.end_ns) for step in moments.steps if step.instance in
                                             set(moments.apart)])  # fmt: skip
    ops = _together(shown, set(moments.apart), limit, left_out)
    spans, ranges, idle = (
        drawing.longest(getattr(shown, name), limit // 2, what, left_out)
        for name, what in (("spans", "layers' spans"), ("ranges", "ranges"), ("idle", "gaps"))
    )
    groups = []
    for device in sorted({lane.device for lane in shown.lanes}):
        if any(lane.on_gpu for lane in shown.lanes if lane.device == device):
            groups.append(drawing.idle(idle, device))
        for place, lane in enumerate(shown.lanes):
            if lane.device == device:
                groups.append(drawing.stream(place, spans, ops))
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
        for step in moments.steps
    ]
    note = f"{'; '.join(left_out)}. All numbers and tables include them." if left_out else ""
    return {"start": drawing.start, "steps": steps, "groups": [one for one in groups if one["rows"]], "note": note}


class _Ops(NamedTuple):
    """Boxes of operations: the columns of the timeline's, how many each holds, and how long they ran."""

    frame: pd.DataFrame
    held: Int64Array
    busy: Int64Array


def _together(shown: Timeline, apart: set[int], limit: int, left_out: list[str]) -> _Ops:
    """The operations, short ones that follow each other in one layer as one box where there are more than the limit."""
    ops = shown.ops
    start, end = ops["start_ns"].to_numpy(), ops["end_ns"].to_numpy()
    length = end - start
    if len(ops) <= limit:
        return _Ops(ops, np.ones(len(ops), dtype=np.int64), length)
    keys = [ops["lane"].to_numpy(), ops["instance"].to_numpy()]
    owner = [ops["layer"].cat.codes.to_numpy(), ops["phase"].cat.codes.to_numpy()]
    alone = np.isin(keys[1], list(apart)) if apart else np.zeros(len(ops), dtype=bool)
    first = np.arange(len(ops))
    for part in (_fresh(keys + owner), None):  # those of a layer; if that is not enough those of a stretch of time
        short = _SHORTEST_NS
        while len(first) > limit and short < _LONGEST_NS:
            changes = _fresh([*keys, start // (4 * short)]) if part is None else part
            first = _boxes(start, end, changes, alone, short)
            short *= 2
    count = np.diff(np.append(first, len(ops)))
    busy = np.add.reduceat(length, first)
    longest = np.maximum.reduceat(length, first)
    place = np.where(length == np.repeat(longest, count), np.arange(len(ops)), len(ops))
    frame = ops.iloc[np.minimum.reduceat(place, first)].copy()
    frame["start_ns"], frame["end_ns"] = start[first], end[first + count - 1]
    many = int((count > 1).sum())
    at_most = Milliseconds(1, 3)(int(longest[count > 1].max(initial=0)))
    left_out.append(
        f"{int(count[count > 1].sum()):,} operations, of at most {at_most} ms each, are drawn in {many:,} boxes that "
        "tell how many they hold"
    )
    if len(first) > limit:
        kept = np.sort(np.argpartition(-busy, limit - 1)[:limit])
        gone = int(count.sum() - count[kept].sum())
        left_out.append(f"{gone:,} operations of at most {Milliseconds(1, 3)(int(busy[kept].min()))} ms are not drawn")
        return _Ops(frame.iloc[kept], count[kept], busy[kept])
    return _Ops(frame, count, busy)


def _fresh(keys: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
    changes = np.ones(len(keys[0]), dtype=bool)
    changes[1:] = np.any([np.diff(key) != 0 for key in keys], axis=0)
    return changes


def _boxes(
    start: Int64Array, end: Int64Array, changes: npt.NDArray[np.bool_], alone: npt.NDArray[np.bool_], short: int
) -> Int64Array:
    """Where a box begins: what is long stands alone, and what follows after a long gap begins another."""
    long = alone | (end - start > short)
    fresh = changes | long
    fresh[1:] |= long[:-1] | (start[1:] - end[:-1] > short)
    return np.flatnonzero(fresh)


class _Drawing:
    """Rows of a timeline as columns of a block."""

    def __init__(self, shown: Timeline, texts: Texts, block: Block, windows: Sequence[tuple[int, int]]) -> None:
        self._shown, self._texts, self._block, self._windows = shown, texts, block, windows
        starts = [int(one["start_ns"].min()) for one in (shown.ops, shown.ranges, shown.idle) if len(one)]
        self.start = min([shown.start_ns, *starts])

    def longest(self, frame: pd.DataFrame, limit: int, what: str, left_out: list[str]) -> pd.DataFrame:
        """The rows of a frame that are drawn: those in the windows that are told of first, and the longest."""
        if len(frame) <= limit:
            return frame
        length = (frame["end_ns"] - frame["start_ns"]).to_numpy()
        start, end = frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()
        rank = length.copy()
        for begin, finish in self._windows:
            rank[(start < finish) & (end > begin)] += _LONGEST_NS
        kept = np.sort(np.argpartition(-rank, limit - 1)[:limit])
        gone = np.ones(len(frame), dtype=bool)
        gone[kept] = False
        at_most = Milliseconds(1, 3)(int(length[gone].max()))
        left_out.append(f"{len(frame) - limit:,} {what} of at most {at_most} ms are not drawn")
        chosen: pd.DataFrame = frame.iloc[kept]
        return chosen

    def _row(
        self, kind: str, frame: pd.DataFrame, text: Int64Array, phase: Int64Array | None, **more: Int64Array
    ) -> Any:
        start, end = frame["start_ns"].to_numpy(dtype=np.int64), frame["end_ns"].to_numpy(dtype=np.int64)
        columns: dict[str, Column] = {
            "start": self._block.add(start - self.start, rising=True),
            "length": self._block.add(end - start),
            "text": self._block.add(text),
        }
        if phase is not None:
            columns["phase"] = self._block.add(phase)
        return {"kind": kind, **columns, **{name: self._block.add(values) for name, values in more.items()}}

    def idle(self, gaps: pd.DataFrame, device: int) -> dict[str, Any]:
        """The gaps of a device."""
        mine = gaps[gaps["device"] == device]
        rows = [self._row("idle", mine, self._texts.of(mine["before"]), None, layer=self._texts.of(mine["after"]))]
        return {"label": f"GPU {device}", "idle": device, "rows": rows if len(mine) else []}

    def stream(self, place: int, spans: pd.DataFrame, ops: _Ops) -> dict[str, Any]:
        """The layers over a lane, and its operations."""
        texts, shown = self._texts, self._shown
        above = spans[spans["lane"] == place]
        rows = [
            self._row("layer", level, texts.of(level["layer"]), texts.of(level["phase"]))
            for _, level in above.groupby("level", sort=True)
        ]
        lane = ops.frame["lane"].to_numpy() == place
        mine = ops.frame[lane]
        more = {
            "layer": texts.of(mine["layer"]),
            "instance": mine["instance"].to_numpy(dtype=np.int64) + 1,
            "count": ops.held[lane],
            "busy": ops.busy[lane],
        }
        if (ops.held[lane] == 1).all():
            del more["count"], more["busy"]
        rows.append(self._row("op", mine, texts.of(mine["name"]), texts.of(mine["phase"]), **more))
        return {"label": lane_label(shown.lanes[place], shown), "rows": rows}

    def threads(self, ranges: pd.DataFrame) -> list[dict[str, Any]]:
        """The ranges of the CPU's threads."""
        texts = self._texts
        groups = []
        for number, (_, mine) in enumerate(ranges.groupby("tid", sort=True)):
            rows = [
                self._row("range", level, texts.of(level["text"]), texts.of(level["category"]))
                for _, level in mine.groupby("level", sort=True)
            ]
            groups.append({"label": f"CPU thread {number}: when its ranges were open", "rows": rows})
        return groups


def lane_label(lane: Lane, shown: Timeline) -> str:
    """A stream by name, as short as tells it from the others."""
    processes = sorted({one.pid for one in shown.lanes})
    parts = [f"GPU {lane.device}", f"stream {lane.stream}"] if lane.on_gpu else ["CPU operators"]
    if len(processes) > 1:
        parts.append(f"process {processes.index(lane.pid)}")
    if lane.part:
        parts.append(f"beside it, {lane.part + 1}")
    return " · ".join(parts)
