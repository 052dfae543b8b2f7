"""Traces in the JSON Trace Event Format, plain or gzipped, for the Perfetto UI and chrome://tracing."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvprof_kit._report.export.tracks import Int64Array, Labels, Part, Process, Slices, Track, slices, tracks
from nvprof_kit._trace.schema import CaptureInfo
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    from nvprof_kit._analysis.timeline import Timeline


_Part = Any
"""A string for all lines, or an array with one per line."""

_Quoted = dict[int, tuple[tuple[str, ...], pa.Array]]


BY_SUFFIX: Mapping[str, str] = MappingProxyType({".json.gz": "json.gz", ".gz": "json.gz", ".json": "json"})
"""Formats by suffix, longer suffixes first."""


def form_of(path: Path) -> str:
    """The format for a file name.

    Raises:
        UsageError: The suffix is unknown.
    """
    for suffix, file_format in BY_SUFFIX.items():
        if path.name.lower().endswith(suffix):
            return file_format
    raise UsageError(f"{path}: no format has this suffix; needed one of {' '.join(BY_SUFFIX)}")


def suffixes_of(file_format: str) -> tuple[str, ...]:
    """The file suffixes of a format."""
    return tuple(suffix for suffix in BY_SUFFIX if BY_SUFFIX[suffix] == file_format)


def packed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Gzip chunks of bytes, without a timestamp."""
    packer = zlib.compressobj(2, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    for piece in pieces:
        yield packer.compress(piece)
    yield packer.flush()


def trace_events(drawn: Timeline, info: CaptureInfo, file_format: str) -> Iterator[bytes]:
    """The file in chunks.

    Args:
        drawn: The timeline of the whole capture or of one step.
        info: Information about the capture.
        file_format: ``json`` or ``json.gz``.
    """
    about = {"capture": info.path, "tool": info.tool, "gpus": list(info.gpus), "warnings": list(info.warnings)}
    return events([Part(tracks(drawn, info), slices(drawn))], about, file_format)


def events(parts: Iterable[Part], about: Mapping[str, Any], file_format: str) -> Iterator[bytes]:
    """The file of several captures in chunks, one capture after the other.

    Args:
        parts: The captures, with distinct process and track numbers.
        about: Metadata of the trace.
        file_format: ``json`` or ``json.gz``.
    """
    lines = _events(parts, about)
    return packed(lines) if file_format == "json.gz" else lines


def _events(parts: Iterable[Part], about: Mapping[str, Any]) -> Iterator[bytes]:
    yield f'{{"displayTimeUnit":"ns","otherData":{_quoted(about)},"traceEvents":[\n'.encode()
    quoted: _Quoted = {}  # caches each quoted text
    before = ""
    for job_part in parts:
        named = [event for track in job_part.tracks for event in _named(track)]
        yield (before + ",\n".join(_quoted(event) for event in named)).encode()
        before = ",\n"
        for block in job_part.slices:
            yield _lines(block, quoted)
    yield b"\n]}\n"


def _named(track: Process | Track) -> Iterator[dict[str, Any]]:
    """Metadata events with the name and sort order of a process or track."""
    sort, tid, order = ("process", 0, track.order) if isinstance(track, Process) else ("thread", track.tid, track.tid)
    ids = {"pid": track.pid, "tid": tid}
    yield {"ph": "M", "name": f"{sort}_name", **ids, "args": {"name": track.name}}
    yield {"ph": "M", "name": f"{sort}_sort_index", **ids, "args": {"sort_index": order}}


def _lines(block: Slices, quoted: _Quoted) -> bytes:
    """A complete event for each slice, one per line, each after a comma."""
    args: list[_Part] = []
    for name, values in block.args.items():
        args += [f'{"," if args else ""}"{name}":', _texts(values, quoted) if isinstance(values, Labels)
                 else _number(values)]  # fmt: skip
    lines = _joined(
        ',\n{"ph":"X","name":', _texts(block.names, quoted), f',"cat":"{block.category}","ts":',
        *_microseconds(block.start_ns), ',"dur":', *_microseconds(block.end_ns - block.start_ns), ',"pid":',
        _number(block.process), ',"tid":', _number(block.track), ',"args":{', *args, "}}",
    )  # fmt: skip
    # the array stores all texts in one buffer, so no Python string per line is needed
    return bytes(lines.buffers()[2])


def _joined(*parts: _Part) -> Any:
    return pc.binary_join_element_wise(*parts, "")


def _number(values: Any) -> pa.Array:
    return pc.cast(pa.array(np.asarray(values, dtype=np.int64)), pa.string())


def _microseconds(ns: Int64Array) -> tuple[pa.Array, str, pa.Array]:
    """Nanoseconds as microseconds with three decimals, without floating point."""
    return _number(ns // 1000), ".", _THOUSANDTHS.take(pa.array(ns % 1000))


_THOUSANDTHS = pa.array([f"{value:03}" for value in range(1000)])


def _texts(labels: Labels, quoted: _Quoted) -> pa.Array:
    """Texts as JSON strings."""
    key = id(labels.texts)
    if key not in quoted:  # keeps the texts alive, so that their `id` is not reused
        quoted[key] = labels.texts, pa.array([_quoted(text) for text in labels.texts], pa.string())
    return quoted[key][1].take(pa.array(labels.codes))


def _quoted(value: Any) -> str:
    """JSON without escaping non-ASCII letters, because Perfetto shows escapes as is. Lone surrogates become ``?``."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()


_APART = 100_000
"""Distance between the process numbers of two ranks; ten times as much for tracks."""


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

    @property
    def name(self) -> str:
        """Name of the rank's processes."""
        return f"rank {self.rank}" if self.offset_ns is not None else f"rank {self.rank}, on a clock of its own"


def job_trace(
    ranks: Iterable[tuple[RankClock, Callable[[], tuple[Timeline, CaptureInfo]]]], origin: int, file_format: str
) -> Iterator[bytes]:
    """The trace in chunks; each rank is read when needed.

    Args:
        ranks: The ranks in order, each with a function that reads it.
        origin: Time zero on the common clock.
        file_format: ``json`` or ``json.gz``.
    """
    named = list(ranks)
    about = {"ranks": ", ".join(str(clock.rank) for clock, _ in named)}
    parts = (_part(number, clock, read, origin) for number, (clock, read) in enumerate(named))
    return events(parts, about, file_format)


def _part(number: int, clock: RankClock, read: Callable[[], tuple[Timeline, CaptureInfo]], origin: int) -> Part:
    drawn, info = read()
    shift = number * _APART

    def renamed(track: Process | Track) -> Process | Track:
        if isinstance(track, Process):
            return Process(track.pid + shift, track.order + shift, f"{clock.name} · {track.name}")
        return Track(track.pid + shift, track.tid + 10 * shift, track.name)

    def moved(own_slices: Slices) -> Slices:
        start, end = (np.maximum(clock(times), origin) for times in (own_slices.start_ns, own_slices.end_ns))
        return own_slices._replace(
            process=own_slices.process + shift, track=own_slices.track + 10 * shift, start_ns=start, end_ns=end
        )

    return Part(map(renamed, tracks(drawn, info)), slices(drawn, moved, origin))
