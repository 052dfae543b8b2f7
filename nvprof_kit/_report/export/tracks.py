"""Content of an exported trace in any format: processes, tracks and slices.

Each GPU is a process with tracks for idle gaps, for steps (as long as the step time in all tables) and, per stream, for
the operations of steps and phases, layers, and operations. Each process of the program is a process with a track per
thread for its ranges. Slices of a track nest and never partially overlap; of two that begin together, the outer one
comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._report.page.timeline import lane_label
from nvprof_kit._trace.schema import CaptureInfo

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.timeline import Timeline

Int64Array = npt.NDArray[np.int64]

_BLOCK = 1 << 16
_STEPS, _LANES = 2, 100
"""First track of the steps of a GPU, and of its streams."""

_OF_STEP = "operations of a step"

_CPU = 1000
"""First id of CPU processes; ids of GPUs start at 1."""


class Process(NamedTuple):
    """A process of the trace and its sort order."""

    pid: int
    order: int
    name: str


class Track(NamedTuple):
    """A track of a process; tracks are sorted by number."""

    pid: int
    tid: int
    name: str


class Labels(NamedTuple):
    """A text for each slice: indices into distinct texts, shared by all blocks of a column."""

    codes: npt.NDArray[np.integer[Any]]
    texts: tuple[str, ...]


class Slices(NamedTuple):
    """A block of slices of one category.

    Attributes:
        category: Category of all slices.
        names: Name of each slice.
        process, track: Position of each slice.
        start_ns, end_ns: Time of each slice in ns since the trace's first event.
        args: Arguments of each slice, texts or integers.
    """

    category: str
    names: Labels
    process: Int64Array
    track: Int64Array
    start_ns: Int64Array
    end_ns: Int64Array
    args: Mapping[str, Labels | Int64Array]


class Part(NamedTuple):
    """A capture in a trace: its processes and tracks, and their slices."""

    tracks: Iterable[Process | Track]
    slices: Iterable[Slices]


# ---------------------------------------------------------------- tracks


def tracks(drawn: Timeline, info: CaptureInfo) -> Iterator[Process | Track]:
    """The processes and tracks with their names and order."""
    for index, device in enumerate(_devices(drawn)):
        name = f"GPU {device} {info.gpu_name(device)}".strip() if info.on_gpu else "CPU operators"
        yield Process(index + 1, index, name)
        if (drawn.idle["device"] == device).any():
            yield Track(index + 1, 1, "idle")
        for number in drawn.steps["place"][drawn.steps["device"] == device].unique().tolist():
            yield Track(index + 1, _STEPS + number, f"steps, process {number}" if number else "steps")
    with_layers = set(drawn.spans["lane"].tolist())
    for index, lane in enumerate(drawn.lanes):
        pid = _devices(drawn).index(lane.device) + 1
        for offset, sort in enumerate(("phases", "layers", "operations")):
            if offset != 1 or index in with_layers:
                yield Track(pid, _lane_track(index) + offset, f"{lane_label(lane, drawn)} · {sort}")
    processes = sorted({pid for pid, _ in _threads(drawn)})
    for index, _ in enumerate(processes):
        yield Process(_CPU + index, _CPU + index, f"Process {index}: ranges on the CPU")
    for index, (pid, _) in enumerate(_threads(drawn)):
        yield Track(_CPU + processes.index(pid), _thread_track(index), f"thread {index}")


def _devices(drawn: Timeline) -> list[int]:
    return sorted({lane.device for lane in drawn.lanes})


def _threads(drawn: Timeline) -> list[tuple[int, int]]:
    """(process, thread) of every thread with ranges, in order."""
    pairs = drawn.ranges[["pid", "tid"]].drop_duplicates().sort_values(["pid", "tid"])
    return [(int(pid), int(tid)) for pid, tid in pairs.itertuples(index=False)]


def _lane_track(lane: Any) -> Any:
    """The first of the three tracks of one or many lanes."""
    return _LANES + 3 * lane


def _thread_track(number: int) -> int:
    return 100_000 + number


# ---------------------------------------------------------------- slices


def slices(
    drawn: Timeline, moved: Callable[[Slices], Slices] | None = None, origin: int | None = None
) -> Iterator[Slices]:
    """All slices, block by block, to limit memory.

    Args:
        drawn: The timeline.
        moved: Moves slices to other tracks or to another clock.
        origin: Time zero; the first event's time by default.
    """
    origin = _origin(drawn) if origin is None else origin
    for kind in _kinds(drawn):
        moved_slices = kind if moved is None else moved(kind)
        for start in range(0, len(moved_slices.start_ns), _BLOCK):
            yield _block(moved_slices, start, origin)


def _block(of_kind: Slices, start: int, origin: int) -> Slices:
    """A part of some slices, with times since the trace's first event."""

    def part(values: Any) -> Any:
        if isinstance(values, Labels):
            return Labels(values.codes[start : start + _BLOCK], values.texts)
        return values[start : start + _BLOCK]

    return Slices(
        category=of_kind.category,
        names=part(of_kind.names),
        process=part(of_kind.process),
        track=part(of_kind.track),
        start_ns=part(of_kind.start_ns) - origin,
        end_ns=part(of_kind.end_ns) - origin,
        args={name: part(labels) for name, labels in of_kind.args.items()},
    )


def _origin(drawn: Timeline) -> int:
    starts = [int(frame["start_ns"].min()) for frame in (drawn.ops, drawn.ranges) if len(frame)]
    return min([drawn.start_ns, *starts])


def _kinds(drawn: Timeline) -> Iterator[Slices]:
    """All slices of one kind at a time, with the capture's times."""
    yield _idle(drawn)
    yield _steps(drawn)
    for runs, category in _runs(drawn):
        yield _on_lane(drawn, runs, _labels(runs["text"]), category, {"step": _numbers(runs["step"])})
    spans = drawn.spans.sort_values(["lane", "start_ns", "level"])
    level: dict[str, Labels | Int64Array] = {"phase": _labels(spans["phase"]), "level": _numbers(spans["level"])}
    yield _on_lane(drawn, spans, _labels(spans["layer"]), "layer", level)
    ops = drawn.ops
    owner: dict[str, Labels | Int64Array] = {
        "layer": _labels(ops["layer"]),
        "phase": _labels(ops["phase"]),
        "step": _numbers(ops["step"]),
        "ns": _numbers(ops["end_ns"]) - _numbers(ops["start_ns"]),
    }
    yield _on_lane(drawn, ops, _labels(ops["name"]), "operation", owner)
    yield _cpu(drawn)


def _idle(drawn: Timeline) -> Slices:
    gaps = drawn.idle
    device = np.searchsorted(_devices(drawn), _numbers(gaps["device"])) + 1
    return Slices(
        "idle", Labels(np.zeros(len(gaps), dtype=np.int8), ("idle",)), device, np.ones_like(device), *_times(gaps),
        {"after": _labels(gaps["after"]), "before": _labels(gaps["before"])},
    )  # fmt: skip


def _steps(drawn: Timeline) -> Slices:
    """The steps of each GPU, as long as their step time."""
    steps = drawn.steps
    device = np.searchsorted(_devices(drawn), _numbers(steps["device"])) + 1
    number = _numbers(steps["step"])
    length = _numbers(steps["end_ns"]) - _numbers(steps["start_ns"])
    return Slices(
        "step", _labels("step " + steps["step"].astype(str)), device, _STEPS + _numbers(steps["place"]),
        *_times(steps), {"step": number, "ns": length},
    )  # fmt: skip


def _runs(drawn: Timeline) -> Iterator[tuple[pd.DataFrame, str]]:
    """The operations of a step as runs on a lane, from the first to the last, and phases as runs inside them: start_ns,
    end_ns, lane, text, step. Such a run is shorter than the step time, and a step can have several.
    """
    ops = drawn.ops
    lane, step, phase = (ops["lane"].to_numpy(), ops["instance"].to_numpy(), ops["phase"].cat.codes.to_numpy())
    for category, keys in ((_OF_STEP, (lane, step)), ("phase", (lane, step, phase))):
        changes = np.ones(len(ops), dtype=bool)
        changes[1:] = np.any([np.diff(key) != 0 for key in keys], axis=0)
        first = np.flatnonzero(changes)
        last = np.append(first[1:], len(ops)) - 1
        frame = ops.iloc[first][["start_ns", "lane", "step", "phase"]].assign(end_ns=ops["end_ns"].to_numpy()[last])
        if category == _OF_STEP:
            frame = frame[frame["step"] >= 0]
            yield frame.assign(text="operations of step " + frame["step"].astype(str)), category
        else:
            yield frame.assign(text=frame["phase"]), category


def _on_lane(
    drawn: Timeline, frame: pd.DataFrame, names: Labels, category: str, args: Mapping[str, Labels | Int64Array]
) -> Slices:
    """Slices of a frame with a column lane, on one of the lane's tracks."""
    offset = {"layer": 1, "operation": 2}.get(category, 0)
    lane = _numbers(frame["lane"])
    process = np.array([_devices(drawn).index(drawn_lane.device) + 1 for drawn_lane in drawn.lanes], dtype=np.int64)
    return Slices(category, names, process[lane], _lane_track(lane) + offset, *_times(frame), args)


def _cpu(drawn: Timeline) -> Slices:
    """The ranges of the CPU's threads."""
    threads, ranges = _threads(drawn), drawn.ranges
    processes = sorted({pid for pid, _ in threads})
    lines = {tid: _thread_track(number) for number, (_, tid) in enumerate(threads)}
    places = {pid: _CPU + number for number, pid in enumerate(processes)}
    process, track = (_numbers(ranges[key].map(number_of)) for key, number_of in (("pid", places), ("tid", lines)))
    return Slices(
        "range", _labels(ranges["text"]), process, track, *_times(ranges), {"category": _labels(ranges["category"])}
    )


def _labels(values: pd.Series[Any]) -> Labels:
    texts = values.astype("category").cat
    return Labels(texts.codes.to_numpy(), tuple(map(str, texts.categories)))


def _numbers(values: pd.Series[Any]) -> Int64Array:
    return values.to_numpy(dtype=np.int64)


def _times(frame: pd.DataFrame) -> tuple[Int64Array, Int64Array]:
    return _numbers(frame["start_ns"]), _numbers(frame["end_ns"])
