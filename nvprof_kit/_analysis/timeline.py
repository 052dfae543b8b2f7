"""Timeline: layers over the GPU streams, ranges on the CPU, and the idle time between.

A layer is drawn over its operations: a span on a stream covers consecutive operations inside one call of the layer.
Spans nest like layers, and spans on one lane and level never overlap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution
from nvprof_kit._analysis.attribution.intervals import NONE, Cover, Int64Array, Line, begins, outer_layers
from nvprof_kit._analysis.attribution.ranges import Ranges
from nvprof_kit._analysis.attribution.steps import step_times, step_windows
from nvprof_kit._trace.frames import distinct_rows
from nvprof_kit._trace.schema import Trace
from nvprof_kit.names import NO_LAYER

if TYPE_CHECKING:
    import pandas as pd

OPTIONAL = ("name", "stream")
"""Optional columns of the operations that a timeline needs."""


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
        step: Number of the shown step, None for the whole capture.
        instance: Its step instance (`nvprof_kit._analysis.attribution.steps`).
        start_ns, end_ns: The window: from the first start to the last end in the step, on the CPU or the GPU.
        lanes: Streams, by process, device and first operation.
        ops: One row per operation that overlaps the window: start_ns, end_ns, lane (index), layer, phase, step (number,
            -1 outside steps), instance (-1 outside steps), name; by lane and start.
        spans: Layers over the lanes: start_ns, end_ns, lane, level (0 is the outermost layer), layer, phase.
        ranges: CPU ranges: start_ns, end_ns, pid, tid, level, text, category; by thread and start.
        idle: Gaps in which a device was idle: device, start_ns, end_ns, after (layer before the gap), before (layer
            after it).
        windows: Start and end of the step by device.
        steps: The steps as `nvprof_kit._analysis.attribution.steps` divides each device's time: start_ns, end_ns,
            device, place (0, 1, … among the processes that use a device of this ordinal), step; by device and start.
    """

    step: int | None
    instance: int | None
    start_ns: int
    end_ns: int
    lanes: tuple[Lane, ...]
    ops: pd.DataFrame
    spans: pd.DataFrame
    ranges: pd.DataFrame
    idle: pd.DataFrame
    windows: Mapping[int, tuple[int, int]]
    steps: pd.DataFrame

    def own_window(self, device: int | None = None) -> tuple[int, int]:
        """When the step ran, on one device or on all, as defined by `nvprof_kit._analysis.attribution.steps`; for the
        whole capture from the first operation to the last. Other steps may run before and after it while its range is
        open on the CPU.
        """
        device_windows = [window for window_device, window in self.windows.items() if device in (None, window_device)]
        return (
            (min(start for start, _ in device_windows), max(end for _, end in device_windows))
            if device_windows
            else (0, 0)
        )

    def idle_in_step(self, device: int) -> Int64Array:
        """Length of each of a device's gaps within the step, in ns; gaps outside it are left out."""
        window_start, end = self.own_window(device)
        gaps = self.idle[self.idle["device"] == device]
        start, stop = (gaps[name].clip(window_start, end).to_numpy() for name in ("start_ns", "end_ns"))
        lengths: Int64Array = (stop - start)[stop > start]
        return lengths


@dataclass(frozen=True)
class StepWindows:
    """When each step ran on each device, and its idle time there.

    Attributes:
        devices: Device ordinals.
        start_ns, end_ns: Shape ``(devices, instances)``; both 0 if the device did not run the step.
        idle_ns: Idle time in the step.
        gaps: Number of gaps in the step.
    """

    devices: tuple[int, ...]
    start_ns: Int64Array
    end_ns: Int64Array
    idle_ns: Int64Array
    gaps: Int64Array


def idle_by_step(trace: Trace, attribution: Attribution, drawn: Timeline) -> StepWindows:
    """The idle time of every step, from a timeline of the whole capture with gaps from the first to the last step."""
    cut = step_windows(trace, attribution)
    count = len(attribution.ranges.steps)
    devices = tuple(sorted({cut_device.device for cut_device in cut.devices}))
    device_index = np.array([devices.index(cut_device.device) for cut_device in cut.devices], dtype=np.int64)[
        cut.device
    ]
    inside = np.flatnonzero(cut.in_step)
    key = (device_index[inside], cut.instance[inside])
    start = np.full((len(devices), count), np.iinfo(np.int64).max)
    end = np.zeros_like(start)
    np.minimum.at(start, key, cut.start[inside])
    np.maximum.at(end, key, cut.end[inside])
    start[end == 0] = 0
    idle, gaps = np.zeros_like(start), np.zeros_like(start)
    for row, device in enumerate(devices):
        device_gaps = drawn.idle[drawn.idle["device"] == device]
        starts, ends = device_gaps["start_ns"].to_numpy(dtype=np.int64), device_gaps["end_ns"].to_numpy(dtype=np.int64)
        idle[row] = Cover(np.zeros_like(starts), starts, ends).inside(np.zeros_like(start[row]), start[row], end[row])
        gaps[row] = np.searchsorted(starts, end[row]) - np.searchsorted(ends, start[row], side="right")
    return StepWindows(devices, start, end, idle, np.maximum(gaps, 0))


def timeline(
    trace: Trace,
    attribution: Attribution,
    instance: int | None = None,
    *,
    steps_idle: bool = False,
    chosen: npt.NDArray[np.bool_] | None = None,
) -> Timeline:
    """Build the timeline of one step, some steps, or the whole capture.

    Args:
        trace: The capture, with the columns of `OPTIONAL`.
        attribution: The owner of each operation.
        instance: The step instance, None for the whole capture.
        steps_idle: Whether gaps of a whole capture extend to the start of its first and the end of its last step.
        chosen: The step instances, if `instance` is None; None for the whole capture. Operations between two adjacent
            instances are included.

    Raises:
        KeyError: The capture has no such instance.
    """
    if instance is not None:
        chosen = np.arange(len(attribution.ranges.steps)) == instance
    runs = _runs(chosen)
    window_start, end = _windows(trace, attribution, runs, instance)
    starts, ends = trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
    rows = np.flatnonzero(_touch(window_start, end, starts, ends))
    lanes, lane = _lanes(trace, rows)
    by_device = _by_device(trace, attribution, runs, rows)
    windows = {device: (int(edges.min()), int(edges.max())) for device, edges in by_device.items()}
    order = np.lexsort((starts[rows], lane))
    rows, lane = rows[order], lane[order]
    if steps_idle:
        cut = step_windows(trace, attribution)
        ordinal = np.array([device.device for device in cut.devices], dtype=np.int64)[cut.device]
        for device in np.unique(ordinal[cut.in_step]).tolist():
            of_steps, edges = cut.in_step & (ordinal == device), by_device[device]
            by_device[device] = np.array(
                [[min(edges.min(), cut.start[of_steps].min()), max(edges.max(), cut.end[of_steps].max())]]
            )
    return Timeline(
        step=None if instance is None else int(attribution.ranges.steps[instance]),
        instance=instance,
        start_ns=int(window_start.min()),
        end_ns=int(end.max()),
        lanes=lanes,
        ops=_ops(trace, attribution, rows, lane),
        spans=_spans(attribution, rows, lane, starts[rows], ends[rows]),
        ranges=_cpu_ranges(attribution.ranges, window_start, end),
        idle=_idle(trace, attribution, rows, by_device),
        windows=windows,
        steps=_steps(trace, attribution, chosen),
    )


def _steps(trace: Trace, attribution: Attribution, chosen: npt.NDArray[np.bool_] | None) -> pd.DataFrame:
    """The windows of the chosen step instances, None for all; see `Timeline.steps`."""
    import pandas as pd

    cut = step_windows(trace, attribution)
    rows = np.flatnonzero(cut.in_step & (cut.end > cut.start))
    rows = rows if chosen is None else rows[chosen[cut.instance[rows]]]
    ordinals = [ordinal.device for ordinal in cut.devices]
    turn = np.array([ordinals[:number].count(ordinal) for number, ordinal in enumerate(ordinals)], dtype=np.int64)
    frame = pd.DataFrame(
        {
            "start_ns": cut.start[rows],
            "end_ns": cut.end[rows],
            "device": np.array(ordinals, dtype=np.int64)[cut.device[rows]],
            "place": turn[cut.device[rows]],
            "step": attribution.ranges.steps[cut.instance[rows]],
        }
    )
    ordered: pd.DataFrame = frame.sort_values(["device", "place", "start_ns"], ignore_index=True)
    return ordered


def _runs(chosen: npt.NDArray[np.bool_] | None) -> Int64Array | None:
    """First and last instance of each run of adjacent instances, shape ``(runs, 2)``; None for the whole capture."""
    if chosen is None:
        return None
    edges = np.flatnonzero(np.diff(np.concatenate(([0], chosen.astype(np.int8), [0]))))
    runs: Int64Array = edges.reshape(-1, 2) - np.array([0, 1])
    return runs


def _windows(
    trace: Trace, attribution: Attribution, runs: Int64Array | None, instance: int | None
) -> tuple[Int64Array, Int64Array]:
    """First start and last end of each run of instances, or of the capture; sorted."""
    if runs is None:
        starts = np.concatenate([trace.ops["start_ns"].to_numpy(), attribution.ranges.start])
        ends = np.concatenate([trace.ops["end_ns"].to_numpy(), attribution.ranges.end])
        return (starts.min(keepdims=True), ends.max(keepdims=True)) if len(starts) else (np.zeros(1, np.int64),) * 2
    times = step_times(trace, attribution)
    if instance is not None and instance not in times.index:
        raise KeyError(instance)
    indexed = times.reindex(np.arange(len(attribution.ranges.steps)))
    windows = [indexed.iloc[first : last + 1].dropna(subset=["start_ns"]) for first, last in runs.tolist()]
    first_starts, end = (
        np.array([int(frame[name].agg(how)) for frame in windows if len(frame)], dtype=np.int64)
        for name, how in (("start_ns", "min"), ("end_ns", "max"))
    )
    return first_starts, np.maximum.accumulate(end)


def _touch(window_start: Int64Array, end: Int64Array, starts: Int64Array, ends: Int64Array) -> npt.NDArray[np.bool_]:
    """Which intervals overlap one of the sorted windows; one of zero length must start inside a window."""
    window = np.minimum(np.searchsorted(end, starts, side="right"), len(end) - 1)
    window_start, end = window_start[window], end[window]
    touched: npt.NDArray[np.bool_] = (starts < end) & ((ends > window_start) | (starts >= window_start))
    return touched


def _by_device(
    trace: Trace, attribution: Attribution, runs: Int64Array | None, rows: Int64Array
) -> dict[int, Int64Array]:
    """When each run of instances ran on each device of the given operations, shape ``(r, 2)``, sorted; for the whole
    capture from the first operation to the last.
    """
    device, start, end = (trace.ops[name].to_numpy()[rows] for name in ("device", "start_ns", "end_ns"))
    if runs is None:
        here = {ordinal_value: device == ordinal_value for ordinal_value in np.unique(device).tolist()}
        return {
            ordinal_value: np.array([[start[device_rows].min(), end[device_rows].max()]])
            for ordinal_value, device_rows in here.items()
        }
    cut = step_windows(trace, attribution)
    ordinal = np.array([ordinal_value.device for ordinal_value in cut.devices], dtype=np.int64)[cut.device]
    run = np.searchsorted(runs[:, 0], cut.instance, side="right") - 1
    inside = (run >= 0) & (cut.instance <= runs[run, 1])
    edges_of_device: dict[int, Int64Array] = {}
    for ordinal_value in np.unique(ordinal[inside]).tolist():
        device_rows = np.flatnonzero(inside & (ordinal == ordinal_value))
        device_rows = device_rows[np.argsort(run[device_rows], kind="stable")]
        first = np.flatnonzero(np.diff(run[device_rows], prepend=-1))
        edges = np.minimum.reduceat(cut.start[device_rows], first), np.maximum.reduceat(cut.end[device_rows], first)
        edges_of_device[ordinal_value] = np.stack(edges, axis=1)
    return edges_of_device


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
    import pandas as pd

    frame: pd.DataFrame = pd.DataFrame(
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
    return frame


def _names(ops: pd.DataFrame, rows: Int64Array) -> pd.Categorical:
    """The names of operations; an interval in which an operator continues has its own name, and is not another call."""
    import pandas as pd

    names = ops["name"].astype("category").cat
    codes, texts = names.codes.to_numpy()[rows].astype(np.int64), names.categories
    first = begins(ops)[rows]
    if first.all():
        plain: pd.Categorical = pd.Categorical.from_codes(codes, texts)
        return plain
    both = pd.Index([*texts, *(f"{name} (continued)" for name in texts)])
    numbered = pd.Categorical.from_codes(np.where(first, codes, codes + len(texts)), both)
    used: pd.Categorical = numbered.remove_unused_categories()
    return used


def _layer_names(attribution: Attribution, layer_range: npt.NDArray[np.integer]) -> pd.Categorical:
    import pandas as pd

    texts, code = np.unique(
        np.array([*(named.text for named in attribution.ranges.names), NO_LAYER], dtype=object), return_inverse=True
    )
    names = code.astype(np.int32)[np.append(attribution.ranges.name, -1)]
    return pd.Categorical.from_codes(names[layer_range], pd.Index(texts))


def _spans(
    attribution: Attribution, rows: Int64Array, lane: Int64Array, start: Int64Array, end: Int64Array
) -> pd.DataFrame:
    """Runs of operations inside one call of a layer, level by level from the innermost outward."""
    import pandas as pd

    ranges = attribution.ranges
    outer = outer_layers(ranges.layer_range, ranges.nesting)
    level = _levels(ranges, outer)
    current = attribution.layer_range[rows].astype(np.int64)
    replay = attribution.replay[rows]
    levels = []
    for here in range(int(level[current].max(initial=NONE)), -1, -1):
        current = np.where(level[current] > here, outer[current], current)
        inside = level[current] == here
        changes = np.flatnonzero(
            np.concatenate(([True], (np.diff(lane) != 0) | (np.diff(current) != 0) | (np.diff(replay) != 0)))
        )
        last = np.append(changes[1:], len(rows)) - 1
        is_span = inside[changes]
        first, last = changes[is_span], last[is_span]
        levels.append((start[first], end[last], lane[first], np.full(len(first), here), current[first]))
    columns = [np.concatenate(parts) for parts in zip(*levels, strict=True)] or [np.zeros(0, dtype=np.int64)] * 5
    spans = pd.DataFrame(dict(zip(("start_ns", "end_ns", "lane", "level"), columns[:4], strict=True)))
    spans["layer"] = _layer_names(attribution, columns[4])
    spans["phase"] = ranges.phase_text[columns[4]]
    ordered: pd.DataFrame = spans.sort_values(["lane", "level", "start_ns"], ignore_index=True)
    return ordered


def _levels(ranges: Ranges, outer: Int64Array) -> Int64Array:
    """The number of layer ranges that enclose each layer range, with `NONE` appended for index `NONE`."""
    level = np.full(len(outer), NONE, dtype=np.int64)
    current = np.append(ranges.layer_range, NONE)
    while (current >= 0).any():
        level += current >= 0
        current = outer[current]
    return level


def _cpu_ranges(ranges: Ranges, window_start: Int64Array, end: Int64Array) -> pd.DataFrame:
    import pandas as pd

    window = np.minimum(np.searchsorted(end, ranges.start, side="right"), len(end) - 1)
    rows = np.flatnonzero((ranges.start < end[window]) & (ranges.end > window_start[window]))
    rows = rows[np.lexsort((ranges.nesting.depth[rows], ranges.start[rows], ranges.tid[rows]))]
    named = [ranges.names[name] for name in ranges.name[rows].tolist()]
    frame: pd.DataFrame = pd.DataFrame(
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
    return frame


def _idle(trace: Trace, attribution: Attribution, rows: Int64Array, windows: Mapping[int, Int64Array]) -> pd.DataFrame:
    """Gaps between the operations of each device, across streams and processes, and at the edges of its windows; the
    time between two windows is not a gap.
    """
    import pandas as pd

    device, start, end = (trace.ops[name].to_numpy()[rows] for name in ("device", "start_ns", "end_ns"))
    frames: list[pd.DataFrame] = []
    for ordinal in np.unique(device).tolist():
        device_rows = np.flatnonzero(device == ordinal)
        device_windows = windows.get(ordinal, np.zeros((0, 2), dtype=np.int64))
        edge = np.append(
            device_windows.ravel(), (start[device_rows].min(), end[device_rows].max())
        )  # as operations of zero length
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
        frames.append(
            pd.DataFrame(columns).assign(
                after=_layer_names(attribution, layer[after]), before=_layer_names(attribution, layer[before])
            )
        )
    empty = pd.DataFrame({name: [] for name in ("device", "start_ns", "end_ns", "after", "before")})
    return pd.concat(frames, ignore_index=True) if frames else empty
