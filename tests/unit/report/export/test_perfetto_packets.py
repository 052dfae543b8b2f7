"""Perfetto's own form of a trace, read back by Perfetto's own definition of it; and the bytes it is made of."""

from __future__ import annotations

import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.captures.nsys_file import NsysFile

from nvprof_kit._analysis.attribution.attribution import attribute
from nvprof_kit._analysis.layers.layers import LayersOptions, layers
from nvprof_kit._analysis.timeline import OPTIONAL, timeline
from nvprof_kit._report.export import tracks, wire
from nvprof_kit._report.export.perfetto import perfetto_packets
from nvprof_kit._report.export.trace_events import trace_events
from nvprof_kit._trace.open import open_capture
from nvprof_kit._trace.schema import Trace

DATA = Path(__file__).parents[3] / "data"
pb2 = pytest.importorskip(
    "perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="no definition of the format (pip install perfetto)"
)
Slice = tuple[str, str, str, int, int, tuple[tuple[str, object], ...]]


def packets(data: bytes) -> list[Any]:
    found = []
    for packet in pb2.Trace.FromString(data).packet:
        found += packets(zlib.decompress(packet.compressed_packets)) if packet.compressed_packets else [packet]
    return found


def slices(data: bytes) -> list[Slice]:
    """Category, track, name, begin, end, arguments of each slice, as a reader puts them together."""
    names: dict[str, dict[int, Any]] = defaultdict(dict)
    tracks: dict[int, str] = {}
    open_: dict[int, list[tuple[Any, int]]] = defaultdict(list)
    found: list[Slice] = []
    all_packets = packets(data)
    assert all(packet.trusted_packet_sequence_id == 1 for packet in all_packets if not packet.HasField("chrome_events"))
    events = []
    for packet in all_packets:
        for space in ("event_categories", "event_names", "debug_annotation_names"):
            names[space] |= {one.iid: one.name for one in getattr(packet.interned_data, space)}
        values = packet.interned_data.debug_annotation_string_values
        names["values"] |= {one.iid: one.str.decode() for one in values}
        if packet.HasField("track_descriptor"):
            about = packet.track_descriptor
            assert about.uuid not in tracks
            tracks[about.uuid] = about.process.process_name or about.thread.thread_name
        elif packet.HasField("track_event"):
            assert packet.sequence_flags == pb2.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
            events.append((packet.timestamp, packet.track_event))
    for moment, event in sorted(events, key=lambda one: one[0]):  # by time, and where it is equal, as they stand
        stack = open_[event.track_uuid]
        if event.type == pb2.TrackEvent.TYPE_SLICE_BEGIN:
            stack.append((event, moment))
            continue
        begun, since = stack.pop()
        args = tuple(
            (names["debug_annotation_names"][one.name_iid],
             names["values"][one.string_value_iid] if one.string_value_iid else one.int_value)
            for one in begun.debug_annotations
        )  # fmt: skip
        (category,) = begun.category_iids
        found.append((names["event_categories"][category], tracks[begun.track_uuid],
                      names["event_names"][begun.name_iid], since, moment, args))  # fmt: skip
    assert not any(open_.values())
    return found


def exported(trace: Trace) -> bytes:
    return b"".join(perfetto_packets(timeline(trace, attribute(trace)), trace.info))


@pytest.mark.parametrize("name", ["llama-2023.4", "graph-2023.4"])
def test_operations_add_up_to_the_table(name: str) -> None:
    trace = open_capture(DATA / f"{name}.sqlite.xz", optional=OPTIONAL)
    sums: dict[tuple[object, object], int] = defaultdict(int)
    for category, _, _, begin, end, args in slices(exported(trace)):
        if category == "operation":
            assert dict(args)["ns"] == end - begin
            sums[dict(args)["layer"], dict(args)["phase"]] += end - begin
    rows = layers(trace, LayersOptions()).rows
    rows = rows[rows["gpu_ops"] > 0]
    assert sums == {(row.layer, row.phase): row.gpu_self_ns for row in rows.itertuples()}


def tiny(path: Path) -> Trace:
    file = NsysFile(path)
    file.range_("step 1", 50, 900, category="step", payload=1)
    file.range_('a"<', 100, 700, category="forward")
    file.kernel(1_000, 3_345, launched=(130, 131), name="Ω")
    file.kernel(3_345, 3_400, launched=(720, 721), name="late")
    file.kernel(4_000, 5_000, launched=(740, 741), stream=9)
    file.kernel(4_500, 5_500, launched=(750, 751), stream=9)  # overlaps the one before on its stream
    file.kernel(9_000, 9_100, launched=(950, 951), name="outside")
    return open_capture(file.write(), optional=OPTIONAL)


def test_tracks_slices_and_arguments(tmp_path: Path) -> None:
    found = {(track, name): (begin, end, dict(args)) for _, track, name, begin, end, args in
             slices(exported(tiny(tmp_path / "run.sqlite")))}  # fmt: skip
    # times are since the step's begin, at 50
    own = {"layer": 'a"<', "phase": "forward", "step": 1, "ns": 2345}
    assert found["GPU 0 · stream 7 · operations", "Ω"] == (950, 3295, own)
    assert found["GPU 0 · stream 7 · layers", 'a"<'] == (950, 3295, {"phase": "forward", "level": 0})
    assert found["GPU 0 · stream 7 · operations", "outside"][2]["step"] == -1
    assert found["idle", "idle"] == (5450, 8950, {"after": "(none)", "before": "(none)"})
    assert found["thread 0", "step 1"] == (0, 850, {"category": "step"})


def test_no_more_than_a_block_is_made_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tiny(tmp_path / "run.sqlite")
    whole = slices(exported(trace))
    monkeypatch.setattr(tracks, "_BLOCK", 2)
    shown = timeline(trace, attribute(trace))
    pieces = list(perfetto_packets(shown, trace.info))
    assert len(pieces) > 6 and slices(b"".join(pieces)) == whole
    assert all(len(block.start_ns) <= 2 for block in tracks.slices(shown))
    assert b'"name":"outside"' in b"".join(trace_events(shown, trace.info))


def test_half_a_letter_does_no_harm() -> None:
    assert wire.text(2, "k\ud800") == b"\x12\x02k?"


def test_rows_of_varints_of_one_width() -> None:
    """Padded varints are read as any others: 1 in two bytes is 81 00, since 300 (AC 02) needs two."""
    assert wire.rows(wire.numbers(4, np.array([1, 300])), 2) == bytes.fromhex("208100 20ac02")
    assert wire.rows(wire.message(2, [b"\x08\x07"]), 2) == bytes.fromhex("12020807" * 2)
    negative = wire.rows(wire.numbers(4, np.array([-1])), 1)
    assert negative == wire.number(4, -1) == bytes.fromhex("20" + "ff" * 9 + "01")
    large = np.array([(1 << 63) - 1, 0])
    read = [pb2.DebugAnnotation.FromString(row.tobytes()).int_value for row in
            np.frombuffer(wire.rows(wire.numbers(4, large), 2), dtype=np.uint8).reshape(2, -1)]  # fmt: skip
    assert read == large.tolist()
