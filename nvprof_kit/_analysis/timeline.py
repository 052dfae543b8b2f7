"""Timeline: layers over the GPU streams, ranges on the CPU, and the idle time between.

A layer is drawn over its operations: a span on a stream covers consecutive operations inside one call of the layer.
Spans nest like layers, and spans on one lane and level never overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from nvprof_kit._analysis.attribution.attribution import Attribution
from nvprof_kit._analysis.attribution.intervals import NONE, Bools, Cover, Int64Array, Line, begins, outer_layers
from nvprof_kit._analysis.attribution.ranges import Ranges
from nvprof_kit._analysis.attribution.steps import step_times, step_windows
from nvprof_kit._trace.joins import distinct_rows
from nvprof_kit._trace.schema import Trace
from nvprof_kit.names import NO_LAYER


class Lane(NamedTuple):
    """A row of operations: a stream of a device. If operations of one stream overlap, the stream has several lanes."""

    pid: int
    device: int
    stream: int
    part: int

    @property
    def on_gpu(self) -> bool:
        """Whether it is a stream, and not the operators of a CPU-only capture."""
        return self.stream >= 0


@dataclass(frozen=True)
class Timeline:
    """Timeline of a window; times in ns since the start of the capture.

    Attributes:
        step: Number of the step, if a single one is shown.
        start_ns, end_ns: The window: from the first start to the last end in the steps, on the CPU or the GPU.
        lanes: Streams, by process, device and first operation.
        ops: One row per operation that overlaps the window: start_ns, end_ns, lane (index), layer, phase, step (number,
            -1 outside steps), instance (-1 outside steps), name; by lane and start.
        spans: Layers over the lanes: start_ns, end_ns, lane, level (0 is the outermost layer), layer, phase.
        ranges: CPU ranges: start_ns, end_ns, pid, tid, level, text, category; by thread and start.
        idle: Gaps in which a device was idle: device, start_ns, end_ns, after (layer before the gap), before (layer
            after it); by device and start.
        windows: When each run of adjacent steps ran on each device, or the whole capture: device, run, start_ns,
            end_ns.
        steps: The steps as `nvprof_kit._analysis.attribution.steps` divides each device's time: start_ns, end_ns,
            device, place (0, 1, … among the processes that use a device of this ordinal), instance, step; by device and
            start.
    """

    step: int | None
    start_ns: int
    end_ns: int
    lanes: tuple[Lane, ...]
    ops: pd.DataFrame
    spans: pd.DataFrame
    ranges: pd.DataFrame
    idle: pd.DataFrame
    windows: pd.DataFrame
    steps: pd.DataFrame

    def window(self) -> tuple[int, int]:
        """When the steps ran on the devices. Other steps may run before and after while their ranges are open on the
        CPU.
        """
        if self.windows.empty:
            return 0, 0
        return int(self.windows["start_ns"].min()), int(self.windows["end_ns"].max())

    def idle_times(self) -> pd.DataFrame:
        """The idle time of each step on each device; of the whole window in a capture without steps.

        Returns:
            device, instance (-1 without steps), start_ns, end_ns, idle_ns, gaps; by device and instance.
        """
        steps = self.steps if len(self.steps) else self.windows.assign(instance=NONE)
        ends = {"start_ns": ("start_ns", "min"), "end_ns": ("end_ns", "max")}
        times: pd.DataFrame = steps.groupby(["device", "instance"], as_index=False).agg(**ends)
        device, start, end = (times[name].to_numpy(dtype=np.int64) for name in ("device", "start_ns", "end_ns"))
        gaps = {name: self.idle[name].to_numpy(dtype=np.int64) for name in ("device", "start_ns", "end_ns")}
        line = Line.over((gaps["start_ns"], start), (gaps["end_ns"], end))
        first = np.searchsorted(line.at(gaps["device"], gaps["end_ns"]), line.at(device, start), side="right")
        last = np.searchsorted(line.at(gaps["device"], gaps["start_ns"]), line.at(device, end))
        times["idle_ns"] = Cover(*gaps.values()).inside(device, start, end)
        times["gaps"] = np.maximum(last - first, 0)
        return times


def timeline(trace: Trace, attribution: Attribution, chosen: Bools | None = None) -> Timeline:
    """Build the timeline of some steps, or the whole capture.

    Args:
        trace: The capture, with ``name`` and ``stream`` of the operations.
        attribution: The owner of each operation.
        chosen: The step instances, shape ``(s,)``; None for the whole capture. Operations between two adjacent
            instances are included.
    """
    cut = step_windows(trace, attribution)
    is_inside = np.ones(len(cut.start), dtype=bool)
    run = np.zeros(len(cut.start), dtype=np.int64)
    if chosen is None:
        starts = np.concatenate([trace.ops["start_ns"].to_numpy(), attribution.ranges.start])
        ends = np.concatenate([trace.ops["end_ns"].to_numpy(), attribution.ranges.end])
        window_start, window_end = np.array([starts.min(initial=_LAST)]), np.array([ends.max(initial=0)])
        window_start = np.minimum(window_start, window_end)
    else:
        edges = np.flatnonzero(np.diff(np.concatenate(([0], chosen.astype(np.int8), [0]))))
        first, last = edges[::2], edges[1::2]  # of each run of adjacent instances
        run = np.searchsorted(first, cut.instance, side="right") - 1
        is_inside = (run >= 0) & (cut.instance < last[run])
        times = step_times(trace, attribution)
        window_start = np.minimum.reduceat(np.append(times["start_ns"], _LAST), edges)[::2]
        window_end = np.maximum.accumulate(np.maximum.reduceat(np.append(times["end_ns"], 0), edges)[::2])
    ordinals = [device.device for device in cut.devices]
    device = np.array(ordinals, dtype=np.int64)[cut.device]
    windows = pd.DataFrame({"device": device, "run": run, "start_ns": cut.start, "end_ns": cut.end})
    bounds = {"start_ns": ("start_ns", "min"), "end_ns": ("end_ns", "max")}
    device_windows = windows[is_inside].groupby(["device", "run"], as_index=False).agg(**bounds)
    of_steps = np.flatnonzero(cut.in_step & is_inside)
    turn = np.array([ordinals[:number].count(ordinal) for number, ordinal in enumerate(ordinals)], dtype=np.int64)
    steps = windows.drop(columns="run").iloc[of_steps].assign(
        place=turn[cut.device[of_steps]],
        instance=cut.instance[of_steps],
        step=attribution.ranges.steps[cut.instance[of_steps]],
    )  # fmt: skip
    starts, ends = trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
    rows = np.flatnonzero(_touch(window_start, window_end, starts, ends))
    lanes, lane = _lanes(trace, rows)
    order = np.lexsort((starts[rows], lane))
    rows, lane = rows[order], lane[order]
    return Timeline(
        step=int(attribution.ranges.steps[chosen][0]) if chosen is not None and chosen.sum() == 1 else None,
        start_ns=int(window_start.min()),
        end_ns=int(window_end.max()),
        lanes=lanes,
        ops=_ops(trace, attribution, rows, lane),
        spans=_spans(attribution, rows, lane, starts[rows], ends[rows]),
        ranges=_cpu_ranges(attribution.ranges, window_start, window_end),
        idle=_idle(trace, attribution, rows, device_windows),
        windows=device_windows,
        steps=steps.sort_values(["device", "place", "start_ns"], ignore_index=True),
    )


_LAST = np.iinfo(np.int64).max


def _touch(window_start: Int64Array, window_end: Int64Array, starts: Int64Array, ends: Int64Array) -> Bools:
    """Which intervals overlap one of the sorted windows; one of zero length must start inside a window."""
    window = np.minimum(np.searchsorted(window_end, starts, side="right"), len(window_end) - 1)
    window_start, window_end = window_start[window], window_end[window]
    return (starts < window_end) & ((ends > window_start) | (starts >= window_start))


def _lanes(trace: Trace, rows: Int64Array) -> tuple[tuple[Lane, ...], Int64Array]:
    """The lanes of operations, and the lane index of each."""
    names = ("pid", "device", "stream")
    start, end = (trace.ops[name].to_numpy()[rows] for name in ("start_ns", "end_ns"))
    streams, codes = distinct_rows(*(trace.ops[name].to_numpy()[rows] for name in names))
    stream = codes.astype(np.int64)
    lane_number = _parts(start, end, stream)
    (of_stream, parts), lane = distinct_rows(stream, lane_number)
    keys = np.stack(streams, axis=1).tolist()
    lanes = [
        Lane._make((*keys[number], lane_number))
        for number, lane_number in zip(of_stream.tolist(), parts.tolist(), strict=True)
    ]
    # sort a device's streams by their first operation, so that the main stream comes first
    when = {tuple(key): int(start[stream == code].min()) for code, key in enumerate(keys)}
    order = sorted(range(len(lanes)), key=lambda one: (lanes[one][:2], when[lanes[one][:3]], lanes[one].part))
    code = np.argsort(np.array(order, dtype=np.int64))
    return tuple(lanes[number] for number in order), code[lane]


def _parts(start: Int64Array, end: Int64Array, lane: Int64Array) -> Int64Array:
    """A number for each interval such that intervals of one lane and number do not overlap; 0 for most.

    Overlapping intervals form a cluster; each cluster uses as many numbers as it needs in turn.
    """
    order = np.lexsort((start, lane))
    starts, finishes, lanes = start[order], end[order], lane[order]
    line = Line.over((start,), (end,))
    latest_end = np.maximum.accumulate(line.at(lanes, finishes))
    is_free = line.at(lanes, starts) >= np.concatenate(([0], latest_end))[: len(order)]
    is_free[:1] = True
    if is_free.all():  # most captures
        return np.zeros(len(order), dtype=np.int64)
    turn_index = np.arange(len(order)) - np.maximum.accumulate(np.where(is_free, np.arange(len(order)), 0))
    for turns in range(1, int(turn_index.max(initial=0)) + 2):
        lane_part = turn_index % turns
        by_part = np.lexsort((starts, lane_part, lanes))
        same = (np.diff(lanes[by_part]) == 0) & (np.diff(lane_part[by_part]) == 0)
        if not (same & (starts[by_part][1:] < finishes[by_part][:-1])).any():
            break
    result = np.empty(len(order), dtype=np.int64)
    result[order] = lane_part if len(order) else turn_index
    return result


def _ops(trace: Trace, attribution: Attribution, rows: Int64Array, lane: Int64Array) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "start_ns": trace.ops["start_ns"].to_numpy()[rows],
            "end_ns": trace.ops["end_ns"].to_numpy()[rows],
            "lane": lane,
            "layer": _layer_names(attribution, attribution.layer_range[rows]),
            "phase": pd.Categorical.from_codes(attribution.phase[rows], pd.Index(attribution.phases)),
            "step": np.append(attribution.ranges.steps, NONE)[attribution.step[rows]],
            "instance": attribution.step[rows],
            "name": _names(trace.ops, rows),
        }
    )


def _names(ops: pd.DataFrame, rows: Int64Array) -> pd.Categorical:
    """The names of operations; an interval in which an operator continues has its own name, and is not another call."""
    names = ops["name"].astype("category").cat
    codes, texts = names.codes.to_numpy()[rows].astype(np.int64), names.categories
    first = begins(ops)[rows]
    if first.all():
        return pd.Categorical.from_codes(codes, texts)
    both = pd.Index([*texts, *(f"{name} (continued)" for name in texts)])
    numbered = pd.Categorical.from_codes(np.where(first, codes, codes + len(texts)), both)
    return numbered.remove_unused_categories()


def _layer_names(attribution: Attribution, layer_range: npt.NDArray[np.integer]) -> pd.Categorical:
    all_texts = [*(named.text for named in attribution.ranges.names), NO_LAYER]
    texts, code = np.unique(np.array(all_texts, dtype=object), return_inverse=True)
    names = code.astype(np.int32)[np.append(attribution.ranges.name, -1)]
    return pd.Categorical.from_codes(names[layer_range], pd.Index(texts))


def _spans(
    attribution: Attribution, rows: Int64Array, lane: Int64Array, start: Int64Array, end: Int64Array
) -> pd.DataFrame:
    """Runs of operations inside one call of a layer, level by level from the innermost outward."""
    ranges = attribution.ranges
    outer = outer_layers(ranges.layer_range, ranges.nesting)
    level = _levels(ranges, outer)
    current = attribution.layer_range[rows].astype(np.int64)
    replay = attribution.replay[rows]
    levels = []
    for here in range(int(level[current].max(initial=NONE)), -1, -1):
        current = np.where(level[current] > here, outer[current], current)
        inside = level[current] == here
        is_change = np.any([np.diff(column) != 0 for column in (lane, current, replay)], axis=0)
        changes = np.flatnonzero(np.append(True, is_change))
        last = np.append(changes[1:], len(rows)) - 1
        is_span = inside[changes]
        first, last = changes[is_span], last[is_span]
        levels.append((start[first], end[last], lane[first], np.full(len(first), here), current[first]))
    columns = [np.concatenate(parts) for parts in zip(*levels, strict=True)] or [np.zeros(0, dtype=np.int64)] * 5
    spans = pd.DataFrame(dict(zip(("start_ns", "end_ns", "lane", "level"), columns[:4], strict=True)))
    spans["layer"] = _layer_names(attribution, columns[4])
    spans["phase"] = ranges.phase_text[columns[4]]
    return spans.sort_values(["lane", "level", "start_ns"], ignore_index=True)


def _levels(ranges: Ranges, outer: Int64Array) -> Int64Array:
    """The number of layer ranges that enclose each layer range, with `NONE` appended for index `NONE`."""
    level = np.full(len(outer), NONE, dtype=np.int64)
    current = np.append(ranges.layer_range, NONE)
    while (current >= 0).any():
        level += current >= 0
        current = outer[current]
    return level


def _cpu_ranges(ranges: Ranges, window_start: Int64Array, window_end: Int64Array) -> pd.DataFrame:
    rows = np.flatnonzero(_touch(window_start, window_end, ranges.start, ranges.end))
    rows = rows[np.lexsort((ranges.nesting.depth[rows], ranges.start[rows], ranges.tid[rows]))]
    named = [ranges.names[name] for name in ranges.name[rows].tolist()]
    return pd.DataFrame(
        {
            "start_ns": ranges.start[rows],
            "end_ns": ranges.end[rows],
            "pid": ranges.pid[rows],
            "tid": ranges.tid[rows],
            "level": ranges.nesting.depth[rows],
            "text": pd.Categorical([range_name.text for range_name in named]),
            "category": pd.Categorical([range_name.category.value for range_name in named]),
        }
    )


def _idle(trace: Trace, attribution: Attribution, rows: Int64Array, windows: pd.DataFrame) -> pd.DataFrame:
    """Gaps between the operations of each device, across streams and processes, and at the edges of its windows; the
    time between two windows is not a gap.
    """
    device, start, end = (trace.ops[name].to_numpy()[rows] for name in ("device", "start_ns", "end_ns"))
    frames: list[pd.DataFrame] = []
    for ordinal in np.unique(device).tolist():
        device_rows = np.flatnonzero(device == ordinal)
        device_windows = windows.loc[windows["device"] == ordinal, ["start_ns", "end_ns"]].to_numpy()
        # as operations of zero length
        edge = np.append(device_windows.ravel(), (start[device_rows].min(), end[device_rows].max()))
        starts, ends = np.append(start[device_rows], edge), np.append(end[device_rows], edge)
        layer = np.append(attribution.layer_range[rows[device_rows]], np.full(len(edge), NONE, dtype=np.int32))
        order = np.argsort(starts, kind="stable")
        starts, ends, layer = starts[order], ends[order], layer[order]  # the old ones are freed: they are large
        latest_end = np.maximum.accumulate(ends)
        gap = np.flatnonzero(starts[1:] > latest_end[:-1])
        gap = gap[~(np.isin(latest_end[gap], device_windows[:-1, 1]) & np.isin(starts[gap + 1], device_windows[1:, 0]))]
        latest = np.flatnonzero(ends == latest_end)  # the operations with the last end so far
        before, after = gap + 1, latest[np.searchsorted(latest, gap, side="right") - 1]
        columns = {"device": np.full(len(gap), ordinal), "start_ns": latest_end[gap], "end_ns": starts[before]}
        del order, device_rows, ends, latest_end, starts
        names = {"after": _layer_names(attribution, layer[after]), "before": _layer_names(attribution, layer[before])}
        frames.append(pd.DataFrame({**columns, **names}))
    empty = pd.DataFrame({name: [] for name in ("device", "start_ns", "end_ns", "after", "before")})
    return pd.concat(frames, ignore_index=True) if frames else empty
