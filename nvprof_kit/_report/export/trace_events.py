"""A trace as JSON of the Trace Event Format, which the Perfetto UI and chrome://tracing open.

Times are microseconds since the trace's first event, with three decimals: exact nanoseconds. Every operation also
carries its length in whole nanoseconds, its layer, phase and step as arguments, so that a query gives our tables'
numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvprof_kit._report.export.tracks import Int64Array, Labels, Part, Process, Slices, Track, slices, tracks
from nvprof_kit._trace.schema import CaptureInfo

if TYPE_CHECKING:
    from nvprof_kit._analysis.timeline import Timeline

_Part = Any
"""A text that every line has, or an array with a text for each."""

_Quoted = dict[int, tuple[tuple[str, ...], pa.Array]]


def trace_events(shown: Timeline, info: CaptureInfo) -> Iterator[bytes]:
    """The file from its head to its end, piece by piece.

    Args:
        shown: What ran, in the whole capture or in one step.
        info: What the capture says of itself.
    """
    about = {"capture": info.path, "tool": info.tool, "gpus": list(info.gpus), "warnings": list(info.warnings)}
    return events([Part(tracks(shown, info), slices(shown))], about)


def events(parts: Iterable[Part], about: Mapping[str, Any]) -> Iterator[bytes]:
    """The same of several captures, one after the other.

    Args:
        parts: The captures, whose processes and tracks have numbers of their own.
        about: What the trace says of itself.
    """
    yield f'{{"displayTimeUnit":"ns","otherData":{_quoted(about)},"traceEvents":[\n'.encode()
    known: _Quoted = {}  # each distinct text is quoted once
    before = ""
    for part in parts:
        named = [event for one in part.tracks for event in _named(one)]
        yield (before + ",\n".join(_quoted(event) for event in named)).encode()
        before = ",\n"
        for block in part.slices:
            yield _lines(block, known)
    yield b"\n]}\n"


def _named(one: Process | Track) -> Iterator[dict[str, Any]]:
    """The events that name a process or a track, and say where it stands."""
    what, tid, order = ("process", 0, one.order) if isinstance(one, Process) else ("thread", one.tid, one.tid)
    place = {"pid": one.pid, "tid": tid}
    yield {"ph": "M", "name": f"{what}_name", **place, "args": {"name": one.name}}
    yield {"ph": "M", "name": f"{what}_sort_index", **place, "args": {"sort_index": order}}


def _lines(block: Slices, known: _Quoted) -> bytes:
    """A complete event for each slice, a line each, each behind a comma."""
    args: list[_Part] = []
    for name, values in block.args.items():
        args += [f'{"," if args else ""}"{name}":', _texts(values, known) if isinstance(values, Labels)
                 else _number(values)]  # fmt: skip
    lines = _joined(
        ',\n{"ph":"X","name":', _texts(block.names, known), f',"cat":"{block.category}","ts":',
        *_microseconds(block.start_ns), ',"dur":', *_microseconds(block.end_ns - block.start_ns), ',"pid":',
        _number(block.process), ',"tid":', _number(block.track), ',"args":{', *args, "}}",
    )  # fmt: skip
    # the array's texts stand one behind the other in one buffer: no Python string for each
    return bytes(lines.buffers()[2])


def _joined(*parts: _Part) -> Any:
    return pc.binary_join_element_wise(*parts, "")


def _number(values: Any) -> pa.Array:
    return pc.cast(pa.array(np.asarray(values, dtype=np.int64)), pa.string())


def _microseconds(ns: Int64Array) -> tuple[pa.Array, str, pa.Array]:
    """Nanoseconds as microseconds with three decimals, without a detour by floating point."""
    return _number(ns // 1000), ".", _THOUSANDTHS.take(pa.array(ns % 1000))


_THOUSANDTHS = pa.array([f"{value:03}" for value in range(1000)])


def _texts(labels: Labels, known: _Quoted) -> pa.Array:
    """Texts as JSON strings."""
    key = id(labels.texts)
    if key not in known:  # with the texts, so that nothing else takes their id
        known[key] = labels.texts, pa.array([_quoted(text) for text in labels.texts], pa.string())
    return known[key][1].take(pa.array(labels.codes))


def _quoted(value: Any) -> str:
    """JSON with its letters as they are: Perfetto shows an escaped one escaped. Half a letter becomes ``?``."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()
