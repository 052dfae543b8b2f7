"""A capture as a trace of the Trace Event Format, which the Perfetto UI and chrome://tracing open.

Each GPU is a process whose tracks are its idle gaps and, for every stream, steps and phases, layers, and operations;
each process of the program is one whose tracks are its threads' ranges. Slices of a track nest and never overlap.
Times are microseconds since the capture's first event, with three decimals: exact nanoseconds. Every operation also
carries its length in whole nanoseconds, its layer, phase and step as arguments, so that a query gives our tables'
numbers.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvprof_kit._report.page.timeline import lane_label
from nvprof_kit._trace.schema import CaptureInfo

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.timeline import Timeline

Lines = Any
"""An array of texts, one for each row."""

Part = Any
"""A text that every line has, or an array with a text for each."""

FORMATS = {".gz": "json.gz", ".json": "json"}
"""Forms of the trace by the suffix of its file."""

_BLOCK = 1 << 16
_CPU = 1000
"""Ids of the CPU's processes begin here, those of the GPUs at 1."""


def perfetto_trace(shown: Timeline, info: CaptureInfo, form: str = "json.gz") -> bytes:
    """The trace as JSON, packed or not.

    Args:
        shown: What ran, in the whole capture or in one step.
        info: What the capture says of itself.
        form: One of the values of `FORMATS`.
    """
    buffer = io.BytesIO()
    if form == "json":
        buffer.writelines(_pieces(shown, info))
    else:
        with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=4, mtime=0) as packed:
            packed.writelines(_pieces(shown, info))
    return buffer.getvalue()


def _pieces(shown: Timeline, info: CaptureInfo) -> Iterator[bytes]:
    """The file from its head to its end."""
    about = {"capture": info.path, "tool": info.tool, "gpus": list(info.gpus), "warnings": list(info.warnings)}
    yield f'{{"displayTimeUnit":"ns","otherData":{_quoted(about)},"traceEvents":[\n'.encode()
    names = list(_track_names(shown, info))
    yield ",\n".join(_quoted(event) for event in names).encode()
    for lines in _slices(shown):
        yield (",\n" + ",\n".join(lines.to_pylist())).encode()
    yield b"\n]}\n"


# ---------------------------------------------------------------- tracks


def _devices(shown: Timeline) -> list[int]:
    return sorted({lane.device for lane in shown.lanes})


def _threads(shown: Timeline) -> list[tuple[int, int]]:
    """(process, thread) of every thread with ranges, in order."""
    pairs = shown.ranges[["pid", "tid"]].drop_duplicates().sort_values(["pid", "tid"])
    return [(int(pid), int(tid)) for pid, tid in pairs.itertuples(index=False)]


def _track_names(shown: Timeline, info: CaptureInfo) -> Iterator[dict[str, Any]]:
    """The names and the order of processes and tracks."""
    for place, device in enumerate(_devices(shown)):
        name = f"GPU {device} {info.gpu_name(device)}".strip() if info.on_gpu else "CPU operators"
        yield from _process(place + 1, place, name)
        if (shown.idle["device"] == device).any():
            yield from _track(place + 1, 1, "idle")
    with_layers = set(shown.spans["lane"].tolist())
    for place, lane in enumerate(shown.lanes):
        pid = _devices(shown).index(lane.device) + 1
        for offset, what in enumerate(("phases", "layers", "operations")):
            if offset != 1 or place in with_layers:
                yield from _track(pid, _lane_track(place) + offset, f"{lane_label(lane, shown)} · {what}")
    processes = sorted({pid for pid, _ in _threads(shown)})
    for place, _ in enumerate(processes):
        yield from _process(_CPU + place, _CPU + place, f"Process {place}: ranges on the CPU")
    for place, (pid, _) in enumerate(_threads(shown)):
        yield from _track(_CPU + processes.index(pid), _thread_track(place), f"thread {place}")


def _lane_track(lane: Any) -> Any:
    """The first of a lane's three tracks, or of many lanes'."""
    return 10 + 3 * lane


def _thread_track(place: int) -> int:
    return 100_000 + place


def _process(pid: int, order: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": order}}


def _track(pid: int, tid: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


# ---------------------------------------------------------------- slices


def _slices(shown: Timeline) -> Iterator[Lines]:
    """Every slice as a line of JSON, block by block; of two that begin together the outer one comes first."""
    origin = _origin(shown)
    for gaps in _blocks(shown.idle):
        device = np.searchsorted(_devices(shown), gaps["device"].to_numpy(dtype=np.int64)) + 1
        args = ('{"after":', _json(gaps["after"]), ',"before":', _json(gaps["before"]), "}")
        yield _lines(_Slices("idle", '"idle"', device, np.ones_like(device), args), gaps, origin)
    for runs, category in _runs(shown):
        for frame in _blocks(runs):
            step = ('{"step":', _number(frame["step"]), "}")
            yield _lines(_on_lane(shown, frame, 0, category, "text", *step), frame, origin)
    for spans in _blocks(shown.spans.sort_values(["lane", "start_ns", "level"])):
        level = ('{"phase":', _json(spans["phase"]), ',"level":', _number(spans["level"]), "}")
        yield _lines(_on_lane(shown, spans, 1, "layer", "layer", *level), spans, origin)
    for ops in _blocks(shown.ops):
        owner = (
            '{"layer":', _json(ops["layer"]), ',"phase":', _json(ops["phase"]), ',"step":', _number(ops["step"]),
            ',"ns":', _number(ops["end_ns"] - ops["start_ns"]), "}",
        )  # fmt: skip
        yield _lines(_on_lane(shown, ops, 2, "operation", "name", *owner), ops, origin)
    yield from _cpu(shown, origin)


def _blocks(frame: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """A frame in parts, so that no more than one part's text is in memory."""
    for start in range(0, len(frame), _BLOCK):
        yield frame.iloc[start : start + _BLOCK]


def _on_lane(shown: Timeline, frame: pd.DataFrame, offset: int, category: str, name: str, *args: Part) -> _Slices:
    """Slices of a frame with a column lane, on one of the lane's tracks."""
    lane = frame["lane"].to_numpy(dtype=np.int64)
    process = np.array([_devices(shown).index(one.device) + 1 for one in shown.lanes], dtype=np.int64)
    return _Slices(category, _json(frame[name]), process[lane], _lane_track(lane) + offset, args)


def _origin(shown: Timeline) -> int:
    starts = [int(frame["start_ns"].min()) for frame in (shown.ops, shown.ranges) if len(frame)]
    return min([shown.start_ns, *starts])


def _runs(shown: Timeline) -> Iterator[tuple[pd.DataFrame, str]]:
    """Steps as runs of operations on a lane, and phases as runs inside them: start_ns, end_ns, lane, text, step."""
    ops = shown.ops
    lane, step, phase = (ops["lane"].to_numpy(), ops["instance"].to_numpy(), ops["phase"].cat.codes.to_numpy())
    for category, keys in (("step", (lane, step)), ("phase", (lane, step, phase))):
        changes = np.ones(len(ops), dtype=bool)
        changes[1:] = np.any([np.diff(key) != 0 for key in keys], axis=0)
        first = np.flatnonzero(changes)
        last = np.append(first[1:], len(ops)) - 1
        frame = ops.iloc[first][["start_ns", "lane", "step", "phase"]].assign(end_ns=ops["end_ns"].to_numpy()[last])
        if category == "step":
            frame = frame[frame["step"] >= 0]
            yield frame.assign(text="step " + frame["step"].astype(str)), category
        else:
            yield frame.assign(text=frame["phase"]), category


def _cpu(shown: Timeline, origin: int) -> Iterator[Lines]:
    """The ranges of the CPU's threads."""
    threads = _threads(shown)
    processes = sorted({pid for pid, _ in threads})
    tracks = {tid: _thread_track(place) for place, (_, tid) in enumerate(threads)}
    places = {pid: _CPU + place for place, pid in enumerate(processes)}
    for ranges in _blocks(shown.ranges):
        args = ('{"category":', _json(ranges["category"]), "}")
        process, track = ranges["pid"].map(places), ranges["tid"].map(tracks)
        yield _lines(_Slices("range", _json(ranges["text"]), process, track, args), ranges, origin)


# ---------------------------------------------------------------- lines of JSON, a whole column at a time


class _Slices(NamedTuple):
    """What the slices of one kind are called and where they go; a `Part` each, or a number for each slice."""

    category: str
    name: Part
    process: Any
    track: Any
    args: tuple[Part, ...]


def _lines(slices: _Slices, frame: pd.DataFrame, origin: int) -> Lines:
    """A complete event for each row of a frame with start_ns and end_ns."""
    start, end = frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()
    return _joined(
        '{"ph":"X","name":', slices.name, f',"cat":"{slices.category}","ts":', _microseconds(start - origin),
        ',"dur":', _microseconds(end - start), ',"pid":', _number(slices.process), ',"tid":', _number(slices.track),
        ',"args":', *slices.args, "}",
    )  # fmt: skip


def _joined(*parts: Part) -> Lines:
    return pc.binary_join_element_wise(*parts, "")


def _number(values: Any) -> pa.Array:
    return pc.cast(pa.array(np.asarray(values, dtype=np.int64)), pa.string())


def _microseconds(ns: np.ndarray) -> pa.Array:
    """Nanoseconds as microseconds with three decimals, without a detour by floating point."""
    return _joined(_number(ns // 1000), ".", pc.utf8_lpad(_number(ns % 1000), 3, "0"))


def _json(values: pd.Series[Any]) -> pa.Array:
    """Texts as JSON strings, each distinct one written once."""
    texts = values.astype("category").cat
    written = pa.array([_quoted(str(text)) for text in texts.categories], pa.string())
    return written.take(pa.array(texts.codes.to_numpy()))


def _quoted(value: Any) -> str:
    """JSON with its letters as they are: Perfetto shows an escaped one escaped. Half a letter becomes ``?``."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()
