"""Traces in Perfetto's protocol buffer format, which its UI and trace processor read fastest.

The file is a stream of packets; only one block is in memory at a time. Tracks are described once. Names, categories and
strings are interned at first use. The packets of a block are written as rows of a byte matrix and compressed together,
as in Perfetto's tracing service (``compressed_packets``). Times are exact nanoseconds.

Field numbers are from ``protos/perfetto/trace`` of Perfetto.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._report.export import wire
from nvprof_kit._report.export.tracks import Int64Array, Labels, Part, Process, Slices, Track, slices, tracks
from nvprof_kit._trace.schema import CaptureInfo

if TYPE_CHECKING:
    from nvprof_kit._analysis.timeline import Timeline

_PACKET = 1
_TIMESTAMP, _SEQUENCE, _EVENT, _INTERNED, _FLAGS = 8, 10, 11, 12, 13
_CHROME, _COMPRESSED, _DESCRIPTOR = 5, 50, 60
_CLEARED, _NEEDED = 1, 2
_BEGIN, _END = 1, 2
_CATEGORIES, _NAMES, _KEYS, _VALUES = 1, 2, 3, 29
"""Fields of InternedData, each with its own ids."""

_ONLY_SEQUENCE = wire.number(_SEQUENCE, 1)
_LEVEL = 1
"""zlib level: the packets are similar, so higher levels cost more time than they save in size."""


def perfetto_packets(shown: Timeline, info: CaptureInfo) -> Iterator[bytes]:
    """The file in chunks.

    Args:
        shown: The timeline of the whole capture or of one step.
        info: Information about the capture.
    """
    about = {
        "capture": info.path,
        "tool": info.tool,
        "gpus": ", ".join(info.gpus),
        "warnings": "\n".join(info.warnings),
    }
    return packets([Part(tracks(shown, info), slices(shown))], about)


def packets(parts: Iterable[Part], about: Mapping[str, str]) -> Iterator[bytes]:
    """The file of several captures in chunks, one capture after the other.

    Args:
        parts: The captures, with distinct process and track numbers.
        about: Content of the trace processor's table ``metadata``.
    """
    head = [_ONLY_SEQUENCE + wire.number(_FLAGS, _CLEARED), *_about(about)]
    uuids: dict[tuple[int, int], int] = {}
    interned = _Interned()
    for part in parts:
        for one in part.tracks:
            uuids[one.pid, 0 if isinstance(one, Process) else one.tid] = uuid = len(uuids) + 1
            head.append(_ONLY_SEQUENCE + wire.text(_DESCRIPTOR, _described(one, uuid)))
        yield b"".join(wire.text(_PACKET, packet) for packet in head)
        head = []
        for block in part.slices:
            yield _squeezed(_packets(block, _uuids_of(block, uuids), interned))


def _about(facts: Mapping[str, str]) -> Iterator[bytes]:
    """Packets for the trace processor's table ``metadata``."""
    bundle = b"".join(wire.text(2, wire.text(1, name) + wire.text(2, value)) for name, value in facts.items() if value)
    yield wire.text(_CHROME, bundle)


def _described(one: Process | Track, uuid: int) -> bytes:
    """A TrackDescriptor."""
    if isinstance(one, Process):
        about = wire.number(1, one.pid) + wire.number(3, one.order) + wire.text(6, one.name)
        return wire.number(1, uuid) + wire.text(3, about)
    about = wire.number(1, one.pid) + wire.number(2, one.tid) + wire.number(3, one.tid) + wire.text(5, one.name)
    return wire.number(1, uuid) + wire.text(4, about)


def _uuids_of(block: Slices, uuids: dict[tuple[int, int], int]) -> Int64Array:
    """The track of each slice; a block has few tracks, mostly in contiguous runs."""
    key = block.process << 32 | block.track
    known, which = np.unique(key, return_inverse=True)
    return np.array([uuids[one >> 32, one & 0xFFFFFFFF] for one in known.tolist()], dtype=np.int64)[which]


def _packets(block: Slices, uuid: Int64Array, interned: _Interned) -> bytes:
    """The packets that begin and end each slice, after a packet with new interned strings.

    Each end directly follows its begin, even if other slices lie between them in time: the reader sorts packets by time
    and keeps the order of packets with equal times.
    """
    event = [
        *wire.numbers(11, uuid),
        wire.number(3, interned.id(_CATEGORIES, block.category)),
        *wire.numbers(10, interned.ids(_NAMES, block.names.texts)[block.names.codes]),
    ]
    for name, values in block.args.items():
        value = (
            wire.numbers(17, interned.ids(_VALUES, values.texts)[values.codes])
            if isinstance(values, Labels)
            else wire.numbers(4, values)
        )
        event += wire.message(4, [wire.number(1, interned.id(_KEYS, name)), *value])
    both = [
        *_packet(block.start_ns, [wire.number(9, _BEGIN), *event]),
        *_packet(block.end_ns, [wire.number(9, _END), *wire.numbers(11, uuid)]),
    ]
    return interned.news() + wire.rows(both, len(uuid))


def _packet(moment: Int64Array, event: Sequence[wire.Part]) -> list[wire.Part]:
    frame = _ONLY_SEQUENCE + wire.number(_FLAGS, _NEEDED)
    return wire.message(_PACKET, [*wire.numbers(_TIMESTAMP, moment), frame, *wire.message(_EVENT, event)])


def _squeezed(packets: bytes) -> bytes:
    return wire.text(_PACKET, wire.text(_COMPRESSED, zlib.compress(packets, _LEVEL)))


class _Interned:
    """The strings interned so far, by field of InternedData."""

    def __init__(self) -> None:
        self._known: dict[int, dict[str, int]] = {}
        self._columns: dict[tuple[int, int], tuple[tuple[str, ...], Int64Array]] = {}
        self._new: list[bytes] = []

    def ids(self, field: int, texts: tuple[str, ...]) -> Int64Array:
        """The ids of strings; new strings are queued for `news`."""
        column = field, id(texts)
        if column not in self._columns:
            found = np.array([self.id(field, one) for one in texts], dtype=np.int64)
            self._columns[column] = texts, found  # keeps the strings alive, so that their `id` is not reused
        return self._columns[column][1]

    def id(self, field: int, value: str) -> int:
        """The id of a string; a new string is queued for `news`."""
        known = self._known.setdefault(field, {})
        if value not in known:
            known[value] = len(known) + 1
            self._new.append(wire.text(field, wire.number(1, known[value]) + wire.text(2, value)))
        return known[value]

    def news(self) -> bytes:
        """A packet with the strings added since the last call; empty if there are none."""
        new, self._new = self._new, []
        if not new:
            return b""
        frame = _ONLY_SEQUENCE + wire.number(_FLAGS, _NEEDED)
        return wire.text(_PACKET, frame + wire.text(_INTERNED, b"".join(new)))
