"""A trace as Perfetto's own protocol buffers: what its UI and its trace processor read fastest.

The file is a stream of packets, of which no more than a block is in memory. Tracks are described once; names,
categories and texts are interned when they first stand; the packets of a block are written as rows of bytes and
packed together, as Perfetto's own tracing service does (``compressed_packets``). Times are exact nanoseconds.

The numbers of the fields are those of ``protos/perfetto/trace`` in Perfetto's sources.
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
"""Fields of InternedData, and the spaces of their ids."""

_ONLY_SEQUENCE = wire.number(_SEQUENCE, 1)
_LEVEL = 1
"""Of zlib: the packets are mostly alike, and more costs more time than it saves bytes."""


def perfetto_packets(shown: Timeline, info: CaptureInfo) -> Iterator[bytes]:
    """The file from its head to its end, piece by piece.

    Args:
        shown: What ran, in the whole capture or in one step.
        info: What the capture says of itself.
    """
    said = {"capture": info.path, "tool": info.tool, "gpus": ", ".join(info.gpus), "warnings": "\n".join(info.warnings)}
    return packets([Part(tracks(shown, info), slices(shown))], said)


def packets(parts: Iterable[Part], about: Mapping[str, str]) -> Iterator[bytes]:
    """The same of several captures, one after the other.

    Args:
        parts: The captures, whose processes and tracks have numbers of their own.
        about: What the trace processor's table ``metadata`` says.
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


def _about(said: Mapping[str, str]) -> Iterator[bytes]:
    """What the trace processor's table ``metadata`` says."""
    bundle = b"".join(wire.text(2, wire.text(1, name) + wire.text(2, value)) for name, value in said.items() if value)
    yield wire.text(_CHROME, bundle)


def _described(one: Process | Track, uuid: int) -> bytes:
    """A TrackDescriptor."""
    if isinstance(one, Process):
        about = wire.number(1, one.pid) + wire.number(3, one.order) + wire.text(6, one.name)
        return wire.number(1, uuid) + wire.text(3, about)
    about = wire.number(1, one.pid) + wire.number(2, one.tid) + wire.number(3, one.tid) + wire.text(5, one.name)
    return wire.number(1, uuid) + wire.text(4, about)


def _uuids_of(block: Slices, uuids: dict[tuple[int, int], int]) -> Int64Array:
    """The track of each slice; a block holds a few tracks' slices, mostly one behind the other."""
    key = block.process << 32 | block.track
    known, which = np.unique(key, return_inverse=True)
    return np.array([uuids[one >> 32, one & 0xFFFFFFFF] for one in known.tolist()], dtype=np.int64)[which]


def _packets(block: Slices, uuid: Int64Array, interned: _Interned) -> bytes:
    """The packets that begin and end each slice, and before them one with the texts that are new.

    The end follows the beginning at once, though others may lie between them in time: the reader sorts packets by their
    times and keeps their order where these are equal, as the order of the slices needs it.
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
    """The texts that were written already, by the field of InternedData that holds them."""

    def __init__(self) -> None:
        self._known: dict[int, dict[str, int]] = {}
        self._columns: dict[tuple[int, int], tuple[tuple[str, ...], Int64Array]] = {}
        self._new: list[bytes] = []

    def ids(self, field: int, texts: tuple[str, ...]) -> Int64Array:
        """The ids of some texts; those that are new are kept for `news`."""
        column = field, id(texts)
        if column not in self._columns:
            found = np.array([self.id(field, one) for one in texts], dtype=np.int64)
            self._columns[column] = texts, found  # the texts too, so that nothing else takes their id
        return self._columns[column][1]

    def id(self, field: int, value: str) -> int:
        """The id of a text, kept for `news` where it is new."""
        known = self._known.setdefault(field, {})
        if value not in known:
            known[value] = len(known) + 1
            self._new.append(wire.text(field, wire.number(1, known[value]) + wire.text(2, value)))
        return known[value]

    def news(self) -> bytes:
        """A packet with what is new since the last, nothing where nothing is."""
        new, self._new = self._new, []
        if not new:
            return b""
        frame = _ONLY_SEQUENCE + wire.number(_FLAGS, _NEEDED)
        return wire.text(_PACKET, frame + wire.text(_INTERNED, b"".join(new)))
