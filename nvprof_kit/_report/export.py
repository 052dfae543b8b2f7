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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from nvprof_kit._report.page.timeline import begins_run, lane_label
from nvprof_kit._trace.joins import Int64Array
from nvprof_kit._trace.schema import CaptureInfo

if TYPE_CHECKING:
    from nvprof_kit._analysis.timeline import Timeline

SUFFIXES: Mapping[str, tuple[str, ...]] = {"json.gz": (".json.gz", ".gz"), "json": (".json",)}
"""The suffixes of each format."""

_BLOCK = 1 << 16

_RANK_PROCESSES = 100_000
"""Distance between the process numbers of two ranks."""


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


class _Slices(NamedTuple):
    """Slices of one category: their times (start_ns, end_ns), their names, and their arguments by name."""

    category: str
    rows: pd.DataFrame
    names: Any
    arguments: Mapping[str, Any]


Tracks = list[tuple[str, list[_Slices]]]
"""The tracks of a process: the name of each, and its slices, outer ones first."""


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
    return _packed(_events([(_processes(drawn, info), lambda times: times)], origin, about), file_format)


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

    def of_rank(clock: RankClock, read: Callable[[], tuple[Timeline, CaptureInfo]]) -> Iterator[tuple[str, Tracks]]:
        name = f"rank {clock.rank}" if clock.offset_ns is not None else f"rank {clock.rank}, on a clock of its own"
        return ((f"{name} · {process}", tracks) for process, tracks in _processes(*read()))

    return _packed(_events(((of_rank(clock, read), clock) for clock, read in readers), origin, about), file_format)


def _packed(pieces: Iterable[bytes], file_format: str) -> Iterator[bytes]:
    """Chunks of bytes, if asked for gzipped without a timestamp."""
    if file_format == "json":
        yield from pieces
        return
    packer = zlib.compressobj(2, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    for piece in pieces:
        yield packer.compress(piece)
    yield packer.flush()


def _processes(drawn: Timeline, info: CaptureInfo) -> Iterator[tuple[str, Tracks]]:
    """The processes with their tracks, in their order: GPUs, then the program's processes."""
    for device in sorted({lane.device for lane in drawn.lanes}):
        gaps, steps = (frame[frame["device"] == device] for frame in (drawn.idle, drawn.steps))
        idle = pd.Categorical.from_codes(np.zeros(len(gaps), dtype=np.int8), pd.Index(["idle"]))
        tracks = [("idle", [_Slices("idle", gaps, idle, {"after": gaps["after"], "before": gaps["before"]})])]
        for process, rows in steps.groupby("place", sort=True):
            arguments = {"step": rows["step"], "ns": rows["end_ns"] - rows["start_ns"]}
            slices = _Slices("step", rows, "step " + rows["step"].astype(str), arguments)
            tracks.append((f"steps, process {process!s}" if process else "steps", [slices]))
        for number, lane in enumerate(drawn.lanes):
            if lane.device == device:
                ops, spans = (frame[frame["lane"] == number] for frame in (drawn.ops, drawn.spans))
                spans = spans.sort_values(["start_ns", "level"])
                phases, runs = _runs(ops, ["instance", "phase"]), _runs(ops, ["instance"])
                runs = runs[runs["step"] >= 0]
                titles, label = "operations of step " + runs["step"].astype(str), lane_label(lane, drawn)
                of_runs = _Slices("operations of a step", runs, titles, {"step": runs["step"]})
                of_phases = _Slices("phase", phases, phases["phase"], {"step": phases["step"]})
                of_layers = _Slices("layer", spans, spans["layer"], {"phase": spans["phase"], "level": spans["level"]})
                arguments = {name: ops[name] for name in ("layer", "phase", "step")}
                arguments["ns"] = ops["end_ns"] - ops["start_ns"]
                tracks.append((f"{label} · phases", [of_runs, of_phases]))
                tracks.append((f"{label} · layers", [of_layers]))
                tracks.append((f"{label} · operations", [_Slices("operation", ops, ops["name"], arguments)]))
        yield f"GPU {device} {info.gpu_name(device)}".strip() if info.on_gpu else "CPU operators", tracks
    threads = 0
    for number, (_, ranges) in enumerate(drawn.ranges.groupby("pid", sort=True)):
        tracks = []
        for _, rows in ranges.groupby("tid", sort=True):
            slices = _Slices("range", rows, rows["text"], {"category": rows["category"]})
            tracks.append((f"thread {threads}", [slices]))
            threads += 1
        yield f"Process {number}: ranges on the CPU", tracks


def _runs(ops: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Consecutive operations with equal keys as one row each, from the first to the last. Such a run is shorter than
    the step time, and a step can have several.
    """
    first = np.flatnonzero(begins_run(ops, keys))
    last = np.append(first[1:], len(ops)) - 1
    return ops.iloc[first].assign(end_ns=ops["end_ns"].to_numpy()[last])


# ---------------------------------------------------------------- JSON


def _events(
    captures: Iterable[tuple[Iterable[tuple[str, Tracks]], Callable[[Int64Array], Int64Array]]],
    origin: int,
    about: Mapping[str, Any],
) -> Iterator[bytes]:
    """The file of several captures, one after the other: of each its processes, and the clock that its times go to."""
    yield f'{{"displayTimeUnit":"ns","otherData":{_quoted(about)},"traceEvents":[\n'.encode()
    before = ""
    for number, (processes, clock) in enumerate(captures):
        tid = 0
        for pid, (process, tracks) in enumerate(processes, 1 + number * _RANK_PROCESSES):
            yield (before + _named("process", pid, 0, process, pid)).encode()
            before = ",\n"
            for track, slices in tracks:
                if any(len(of.rows) for of in slices):
                    tid += 1
                    yield (before + _named("thread", pid, tid, track, tid)).encode()
                    for of in slices:
                        yield from _lines(of, pid, tid, clock, origin)
    yield b"\n]}\n"


def _named(kind: str, pid: int, tid: int, name: str, order: int) -> str:
    """The events that name a process or track, and give its place."""
    facts = {"name": name, "sort_index": order}
    events = (
        {"ph": "M", "name": f"{kind}_{fact}", "pid": pid, "tid": tid, "args": {fact: facts[fact]}} for fact in facts
    )
    return ",\n".join(map(_quoted, events))


def _lines(
    slices: _Slices, pid: int, tid: int, clock: Callable[[Int64Array], Int64Array], origin: int
) -> Iterator[bytes]:
    """A complete event for each slice, one per line, each after a comma."""
    columns = {name: _json(values) for name, values in {"name": slices.names, **slices.arguments}.items()}
    start, end = (
        np.maximum(clock(slices.rows[name].to_numpy(dtype=np.int64)), origin) for name in ("start_ns", "end_ns")
    )
    for first in range(0, len(start), _BLOCK):
        block = slice(first, first + _BLOCK)
        args: list[Any] = []
        for name in slices.arguments:
            args += [f'{"," if args else ""}"{name}":', columns[name](block)]
        lines = pc.binary_join_element_wise(
            ',\n{"ph":"X","name":', columns["name"](block), f',"cat":"{slices.category}","ts":',
            *_microseconds(start[block] - origin), ',"dur":', *_microseconds(end[block] - start[block]),
            f',"pid":{pid},"tid":{tid},"args":{{', *args, "}}", "",
        )  # fmt: skip
        # the array stores all texts in one buffer, so no Python string per line is needed
        yield bytes(lines.buffers()[2])


def _json(values: Any) -> Callable[[slice], pa.Array]:
    """The values of a column as JSON, block by block: numbers, or texts that are written once each."""
    column = pd.Series(values)
    if pd.api.types.is_integer_dtype(column.dtype):
        numbers = column.to_numpy(dtype=np.int64)
        return lambda block: pc.cast(pa.array(numbers[block]), pa.string())
    distinct = column.astype("category").cat
    texts, codes = pa.array(map(_quoted, map(str, distinct.categories)), pa.string()), distinct.codes.to_numpy()
    return lambda block: texts.take(pa.array(codes[block]))


def _microseconds(ns: Int64Array) -> tuple[pa.Array, str, pa.Array]:
    """Nanoseconds as microseconds with three decimals, without floating point."""
    return pc.cast(pa.array(ns // 1000), pa.string()), ".", _THOUSANDTHS.take(pa.array(ns % 1000))


_THOUSANDTHS = pa.array([f"{value:03}" for value in range(1000)])


def _quoted(value: Any) -> str:
    """JSON without escaping non-ASCII letters, because Perfetto shows escapes as is. Lone surrogates become ``?``."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()
