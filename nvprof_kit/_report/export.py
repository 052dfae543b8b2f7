"""Traces in the JSON Trace Event Format, plain or gzipped, for the Perfetto UI.

Each GPU is a process with tracks for idle gaps, for steps (as long as the step time in all tables) and, per stream, for
the operations of steps and phases, layers, and operations. Each process of the program is a process with a track per
thread for its ranges. Slices of a track nest and never partially overlap; of two that begin together, the outer one
comes first.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from nvprof_kit._report.page.timeline import lane_label
from nvprof_kit._trace.schema import CaptureInfo

if TYPE_CHECKING:
    from nvprof_kit._analysis.timeline import Timeline

Int64Array = npt.NDArray[np.int64]

SUFFIXES: Mapping[str, tuple[str, ...]] = MappingProxyType({"json.gz": (".json.gz", ".gz"), "json": (".json",)})
"""The suffixes of each format."""

_BLOCK = 1 << 16
_STEPS, _LANES, _THREADS = 2, 100, 100_000
"""First track of the steps of a GPU, of its streams, and of threads."""

_CPU = 1000
"""First id of CPU processes; ids of GPUs start at 1."""

_RANK_PROCESSES = 100_000
"""Distance between the process numbers of two ranks; ten times as much for tracks."""

_PLACE = ("name", "pid", "tid", "start_ns", "end_ns")
"""Columns of slices; those behind them are arguments."""


@dataclass(frozen=True)
class RankClock:
    """A rank and the conversion of its times to the common clock.

    Attributes:
        rank: The rank.
        offset_ns: Offset to add to its times at `at_ns`; None if unknown, which the trace then says.
        drift: Additional offset per nanosecond after `at_ns`.
        at_ns: Reference time on the rank's clock.
    """

    rank: int
    offset_ns: int | None
    drift: float = 0.0
    at_ns: int = 0

    def __call__(self, times: Int64Array) -> Int64Array:
        """Convert times of the rank to the common clock."""
        moved: Int64Array = times + (self.offset_ns or 0)
        return moved if not self.drift else moved + np.round(self.drift * (times - self.at_ns)).astype(np.int64)


class _Track(NamedTuple):
    """A track, or a process if it has no `tid`; sorted by `order`."""

    pid: int
    tid: int | None
    order: int
    name: str


def trace_events(drawn: Timeline, info: CaptureInfo, file_format: str) -> Iterator[bytes]:
    """The file in chunks.

    Args:
        drawn: The timeline of the whole capture or of one step.
        info: Information about the capture.
        file_format: ``json`` or ``json.gz``.
    """
    about = {"capture": info.path, "tool": info.tool, "gpus": list(info.gpus), "warnings": list(info.warnings)}
    starts = [int(frame["start_ns"].min()) for frame in (drawn.ops, drawn.ranges) if len(frame)]
    origin = min([drawn.start_ns, *starts])
    return _packed(_events([(_tracks(drawn, info), _slices(drawn), origin)], about), file_format)


def job_trace(
    ranks: Iterable[tuple[RankClock, Callable[[], tuple[Timeline, CaptureInfo]]]], origin: int, file_format: str
) -> Iterator[bytes]:
    """The trace in chunks; each rank is read when needed.

    Args:
        ranks: The ranks in order, each with a function that reads it.
        origin: Time zero on the common clock.
        file_format: ``json`` or ``json.gz``.
    """
    readers = list(ranks)
    about = {"ranks": ", ".join(str(clock.rank) for clock, _ in readers)}
    parts = ((*_of_rank(number, clock, read, origin), origin) for number, (clock, read) in enumerate(readers))
    return _packed(_events(parts, about), file_format)


def _of_rank(
    number: int, clock: RankClock, read: Callable[[], tuple[Timeline, CaptureInfo]], origin: int
) -> tuple[Iterator[_Track], Iterator[tuple[str, pd.DataFrame]]]:
    """The tracks and slices of a rank, with numbers of its own and on the common clock."""
    drawn, info = read()
    shift = number * _RANK_PROCESSES
    name = f"rank {clock.rank}" if clock.offset_ns is not None else f"rank {clock.rank}, on a clock of its own"
    tracks = (
        track._replace(pid=track.pid + shift, order=track.order + shift, name=f"{name} · {track.name}")
        if track.tid is None
        else track._replace(pid=track.pid + shift, tid=track.tid + 10 * shift, order=track.order + 10 * shift)
        for track in _tracks(drawn, info)
    )
    slices = (
        (
            category,
            rows.assign(
                pid=rows["pid"] + shift,
                tid=rows["tid"] + 10 * shift,
                **{time: np.maximum(clock(rows[time].to_numpy()), origin) for time in ("start_ns", "end_ns")},
            ),
        )
        for category, rows in _slices(drawn)
    )
    return tracks, slices


def _packed(pieces: Iterable[bytes], file_format: str) -> Iterator[bytes]:
    """Chunks of bytes, if asked for gzipped without a timestamp."""
    if file_format == "json":
        yield from pieces
        return
    packer = zlib.compressobj(2, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    for piece in pieces:
        yield packer.compress(piece)
    yield packer.flush()


# ---------------------------------------------------------------- tracks and slices


def _tracks(drawn: Timeline, info: CaptureInfo) -> Iterator[_Track]:
    """The processes and tracks with their names and order."""
    devices = _devices(drawn)
    for index, device in enumerate(devices):
        name = f"GPU {device} {info.gpu_name(device)}".strip() if info.on_gpu else "CPU operators"
        yield _Track(index + 1, None, index, name)
        if (drawn.idle["device"] == device).any():
            yield _Track(index + 1, 1, 1, "idle")
        for number in drawn.steps["place"][drawn.steps["device"] == device].unique().tolist():
            track = _STEPS + number
            yield _Track(index + 1, track, track, f"steps, process {number}" if number else "steps")
    with_layers = set(drawn.spans["lane"].tolist())
    for index, lane in enumerate(drawn.lanes):
        for offset, sort in enumerate(("phases", "layers", "operations")):
            if offset != 1 or index in with_layers:
                track = _LANES + 3 * index + offset
                yield _Track(devices.index(lane.device) + 1, track, track, f"{lane_label(lane, drawn)} · {sort}")
    threads = _threads(drawn)
    for index in range(threads["process"].nunique()):
        yield _Track(_CPU + index, None, _CPU + index, f"Process {index}: ranges on the CPU")
    for index, process in enumerate(threads["process"].tolist()):
        yield _Track(_CPU + process, _THREADS + index, _THREADS + index, f"thread {index}")


def _devices(drawn: Timeline) -> list[int]:
    return sorted({lane.device for lane in drawn.lanes})


def _threads(drawn: Timeline) -> pd.DataFrame:
    """Every thread with ranges, in order: pid, tid, and the number of its process."""
    threads = drawn.ranges[["pid", "tid"]].drop_duplicates().sort_values(["pid", "tid"], ignore_index=True)
    with_process: pd.DataFrame = threads.assign(process=threads["pid"].rank(method="dense").astype("int64") - 1)
    return with_process


def _slices(drawn: Timeline) -> Iterator[tuple[str, pd.DataFrame]]:
    """The slices of one category at a time, with the columns `_PLACE` and their arguments, on the capture's clock."""
    devices = np.array(_devices(drawn), dtype=np.int64)
    process_of_lane: Any = np.searchsorted(devices, [lane.device for lane in drawn.lanes]) + 1

    def rows(frame: pd.DataFrame, name: Any, pid: Any, tid: Any, **args: Any) -> pd.DataFrame:
        times = {time: frame[time].to_numpy(dtype=np.int64) for time in ("start_ns", "end_ns")}
        columns = {"name": name, "pid": pid, "tid": tid, **times, **args}
        table: pd.DataFrame = pd.DataFrame({column: _plain(values) for column, values in columns.items()})
        return table

    def on_lanes(frame: pd.DataFrame, offset: int, name: Any, **args: Any) -> pd.DataFrame:
        lane = frame["lane"].to_numpy(dtype=np.int64)
        return rows(frame, name, process_of_lane[lane], _LANES + 3 * lane + offset, **args)

    gaps, steps, ops, ranges = drawn.idle, drawn.steps, drawn.ops, drawn.ranges
    idle = pd.Series(["idle"] * len(gaps), dtype="category")
    device = np.searchsorted(devices, gaps["device"].to_numpy(dtype=np.int64)) + 1
    yield "idle", rows(gaps, idle, device, np.ones_like(device), after=gaps["after"], before=gaps["before"])
    device = np.searchsorted(devices, steps["device"].to_numpy(dtype=np.int64)) + 1
    text, length = "step " + steps["step"].astype(str), steps["end_ns"] - steps["start_ns"]
    yield "step", rows(steps, text, device, _STEPS + steps["place"], step=steps["step"], ns=length)
    for category, keys in (("operations of a step", ["lane", "instance"]), ("phase", ["lane", "instance", "phase"])):
        runs = _runs(ops, keys)
        runs = runs[runs["step"] >= 0] if category != "phase" else runs
        text = runs["phase"] if category == "phase" else "operations of step " + runs["step"].astype(str)
        yield category, on_lanes(runs, 0, text, step=runs["step"])
    spans = drawn.spans.sort_values(["lane", "start_ns", "level"])
    yield "layer", on_lanes(spans, 1, spans["layer"], phase=spans["phase"], level=spans["level"])
    owner = {name: ops[name] for name in ("layer", "phase", "step")}
    yield "operation", on_lanes(ops, 2, ops["name"], **owner, ns=ops["end_ns"] - ops["start_ns"])
    threads = _threads(drawn)
    thread_of_tid = pd.Series(threads.index, index=threads["tid"])
    thread = ranges["tid"].map(thread_of_tid).to_numpy(dtype=np.int64)
    process = ranges["pid"].map(dict(zip(threads["pid"], threads["process"], strict=True))).to_numpy(dtype=np.int64)
    yield "range", rows(ranges, ranges["text"], _CPU + process, _THREADS + thread, category=ranges["category"])


def _plain(values: Any) -> Any:
    """A column by position: integers as int64, texts as categories."""
    if not isinstance(values, pd.Series):
        return values
    is_number = pd.api.types.is_integer_dtype(values.dtype)
    return values.to_numpy(dtype=np.int64) if is_number else values.astype("category").array


def _runs(ops: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Consecutive operations with equal keys as one row each, from the first to the last. Such a run is shorter than
    the step time, and a step can have several.
    """
    changes = np.ones(len(ops), dtype=bool)
    codes = [(ops[key].cat.codes if ops[key].dtype == "category" else ops[key]).to_numpy() for key in keys]
    changes[1:] = np.any([np.diff(code) != 0 for code in codes], axis=0)
    first = np.flatnonzero(changes)
    last = np.append(first[1:], len(ops)) - 1
    runs: pd.DataFrame = ops.iloc[first][["start_ns", "lane", "step", "phase"]].assign(
        end_ns=ops["end_ns"].to_numpy()[last]
    )
    return runs


# ---------------------------------------------------------------- JSON


def _events(
    parts: Iterable[tuple[Iterable[_Track], Iterable[tuple[str, pd.DataFrame]], int]], about: Mapping[str, Any]
) -> Iterator[bytes]:
    """The file of several captures, one after the other: of each its tracks, slices and time zero."""
    yield f'{{"displayTimeUnit":"ns","otherData":{_quoted(about)},"traceEvents":[\n'.encode()
    before = ""
    for tracks, slices, origin in parts:
        names = (
            {"ph": "M", "name": f"{sort}_{fact}", "pid": track.pid, "tid": track.tid or 0, "args": {argument: value}}
            for track in tracks
            for sort in ("process" if track.tid is None else "thread",)
            for fact, argument, value in (("name", "name", track.name), ("sort_index", "sort_index", track.order))
        )
        yield (before + ",\n".join(map(_quoted, names))).encode()
        before = ",\n"
        for category, rows in slices:
            texts = {
                str(name): pa.array(map(_quoted, map(str, column.cat.categories)), pa.string())
                for name, column in rows.items()
                if column.dtype == "category"
            }
            for start in range(0, len(rows), _BLOCK):
                yield _lines(category, rows.iloc[start : start + _BLOCK], texts, origin)
    yield b"\n]}\n"


def _lines(category: str, rows: pd.DataFrame, texts: Mapping[str, pa.Array], origin: int) -> bytes:
    """A complete event for each slice, one per line, each after a comma."""

    def column(name: str) -> pa.Array:
        codes_or_numbers = rows[name].cat.codes if name in texts else rows[name]
        array = pa.array(codes_or_numbers.to_numpy())
        return texts[name].take(array) if name in texts else pc.cast(array, pa.string())

    args: list[Any] = []
    for name in rows.columns[len(_PLACE) :]:
        args += [f'{"," if args else ""}"{name}":', column(name)]
    start, end = rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()
    lines = pc.binary_join_element_wise(
        ',\n{"ph":"X","name":', column("name"), f',"cat":"{category}","ts":', *_microseconds(start - origin),
        ',"dur":', *_microseconds(end - start), ',"pid":', column("pid"), ',"tid":', column("tid"), ',"args":{', *args,
        "}}", "",
    )  # fmt: skip
    # the array stores all texts in one buffer, so no Python string per line is needed
    return bytes(lines.buffers()[2])


def _microseconds(ns: Int64Array) -> tuple[pa.Array, str, pa.Array]:
    """Nanoseconds as microseconds with three decimals, without floating point."""
    return pc.cast(pa.array(ns // 1000), pa.string()), ".", _THOUSANDTHS.take(pa.array(ns % 1000))


_THOUSANDTHS = pa.array([f"{value:03}" for value in range(1000)])


def _quoted(value: Any) -> str:
    """JSON without escaping non-ASCII letters, because Perfetto shows escapes as is. Lone surrogates become ``?``."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()
