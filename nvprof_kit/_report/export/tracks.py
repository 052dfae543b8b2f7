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


def tracks(shown: Timeline, info: CaptureInfo) -> Iterator[Process | Track]:
    """The processes and tracks with their names and order."""
    for place, device in enumerate(_devices(shown)):
        name = f"GPU {device} {info.gpu_name(device)}".strip() if info.on_gpu else "CPU operators"
        yield Process(place + 1, place, name)
        if (shown.idle["device"] == device).any():
            yield Track(place + 1, 1, "idle")
        for number in shown.steps["place"][shown.steps["device"] == device].unique().tolist():
            yield Track(place + 1, _STEPS + number, f"steps, process {number}" if number else "steps")
    with_layers = set(shown.spans["lane"].tolist())
    for place, lane in enumerate(shown.lanes):
        pid = _devices(shown).index(lane.device) + 1
        for offset, what in enumerate(("phases", "layers", "operations")):
            if offset != 1 or place in with_layers:
                yield Track(pid, _lane_track(place) + offset, f"{lane_label(lane, shown)} · {what}")
    processes = sorted({pid for pid, _ in _threads(shown)})
    for place, _ in enumerate(processes):
        yield Process(_CPU + place, _CPU + place, f"Process {place}: ranges on the CPU")
    for place, (pid, _) in enumerate(_threads(shown)):
        yield Track(_CPU + processes.index(pid), _thread_track(place), f"thread {place}")


def _devices(shown: Timeline) -> list[int]:
    return sorted({lane.device for lane in shown.lanes})


def _threads(shown: Timeline) -> list[tuple[int, int]]:
    """(process, thread) of every thread with ranges, in order."""
    pairs = shown.ranges[["pid", "tid"]].drop_duplicates().sort_values(["pid", "tid"])
    return [(int(pid), int(tid)) for pid, tid in pairs.itertuples(index=False)]


def _lane_track(lane: Any) -> Any:
    """The first of the three tracks of one or many lanes."""
    return _LANES + 3 * lane


def _thread_track(place: int) -> int:
    return 100_000 + place


# ---------------------------------------------------------------- slices


def slices(
    shown: Timeline, moved: Callable[[Slices], Slices] | None = None, origin: int | None = None
) -> Iterator[Slices]:
    """All slices, block by block, to limit memory.

    Args:
        shown: The timeline.
        moved: Moves slices to other tracks or to another clock.
        origin: Time zero; the first event's time by default.
    """
    origin = _origin(shown) if origin is None else origin
    for kind in _kinds(shown):
        made = kind if moved is None else moved(kind)
        for start in range(0, len(made.start_ns), _BLOCK):
            yield _block(made, start, origin)


def _block(made: Slices, start: int, origin: int) -> Slices:
    """A part of some slices, with times since the trace's first event."""

    def part(values: Any) -> Any:
        if isinstance(values, Labels):
            return Labels(values.codes[start : start + _BLOCK], values.texts)
        return values[start : start + _BLOCK]

    return Slices(
        category=made.category,
        names=part(made.names),
        process=part(made.process),
        track=part(made.track),
        start_ns=part(made.start_ns) - origin,
        end_ns=part(made.end_ns) - origin,
        args={name: part(one) for name, one in made.args.items()},
    )


def _origin(shown: Timeline) -> int:
    starts = [int(frame["start_ns"].min()) for frame in (shown.ops, shown.ranges) if len(frame)]
    return min([shown.start_ns, *starts])


def _kinds(shown: Timeline) -> Iterator[Slices]:
    """All slices of one kind at a time, with the capture's times."""
    yield _idle(shown)
    yield _steps(shown)
    for runs, category in _runs(shown):
        yield _on_lane(shown, runs, _labels(runs["text"]), category, {"step": _numbers(runs["step"])})
    spans = shown.spans.sort_values(["lane", "start_ns", "level"])
    level: dict[str, Labels | Int64Array] = {"phase": _labels(spans["phase"]), "level": _numbers(spans["level"])}
    yield _on_lane(shown, spans, _labels(spans["layer"]), "layer", level)
    ops = shown.ops
    owner: dict[str, Labels | Int64Array] = {
        "layer": _labels(ops["layer"]),
        "phase": _labels(ops["phase"]),
        "step": _numbers(ops["step"]),
        "ns": _numbers(ops["end_ns"]) - _numbers(ops["start_ns"]),
    }
    yield _on_lane(shown, ops, _labels(ops["name"]), "operation", owner)
    yield _cpu(shown)


def _idle(shown: Timeline) -> Slices:
    gaps = shown.idle
    device = np.searchsorted(_devices(shown), _numbers(gaps["device"])) + 1
    return Slices(
        "idle", Labels(np.zeros(len(gaps), dtype=np.int8), ("idle",)), device, np.ones_like(device), *_times(gaps),
        {"after": _labels(gaps["after"]), "before": _labels(gaps["before"])},
    )  # fmt: skip


def _steps(shown: Timeline) -> Slices:
    """The steps of each GPU, as long as their step time."""
    steps = shown.steps
    device = np.searchsorted(_devices(shown), _numbers(steps["device"])) + 1
    number = _numbers(steps["step"])
    length = _numbers(steps["end_ns"]) - _numbers(steps["start_ns"])
    return Slices(
        "step", _labels("step " + steps["step"].astype(str)), device, _STEPS + _numbers(steps["place"]),
        *_times(steps), {"step": number, "ns": length},
    )  # fmt: skip


def _runs(shown: Timeline) -> Iterator[tuple[pd.DataFrame, str]]:
    """The operations of a step as runs on a lane, from the first to the last, and phases as runs inside them: start_ns,
    end_ns, lane, text, step. Such a run is shorter than the step time, and a step can have several.
    """
    ops = shown.ops
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
    shown: Timeline, frame: pd.DataFrame, names: Labels, category: str, args: Mapping[str, Labels | Int64Array]
) -> Slices:
    """Slices of a frame with a column lane, on one of the lane's tracks."""
    offset = {"layer": 1, "operation": 2}.get(category, 0)
    lane = _numbers(frame["lane"])
    process = np.array([_devices(shown).index(one.device) + 1 for one in shown.lanes], dtype=np.int64)
    return Slices(category, names, process[lane], _lane_track(lane) + offset, *_times(frame), args)


def _cpu(shown: Timeline) -> Slices:
    """The ranges of the CPU's threads."""
    threads, ranges = _threads(shown), shown.ranges
    processes = sorted({pid for pid, _ in threads})
    lines = {tid: _thread_track(place) for place, (_, tid) in enumerate(threads)}
    places = {pid: _CPU + place for place, pid in enumerate(processes)}
    process, track = (_numbers(ranges[key].map(known)) for key, known in (("pid", places), ("tid", lines)))
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
