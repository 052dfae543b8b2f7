"""The exported trace, judged by the rules of the Trace Event Format and by queries that must give our tables' numbers.

Perfetto itself is asked in ``tests/integration/pages/test_perfetto_ui.py``. What it needs of a
trace is checked here: complete events on named tracks, whose slices nest and never overlap, at exact nanoseconds.
"""

import gzip
import json
import sqlite3
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.captures.nsys_file import NsysFile
from support.data import DATA
from support.lane import examples

import nvprof_kit

ARGUMENTS = ("layer", "phase", "step", "ns")
CAPTURES = ["llama-2023.4", "graph-2023.4", "checkpoint-2023.4", "hooks-ddp-2024.2"]


def exported(path: Path, step: int | None = None) -> dict[str, Any]:
    return json.loads(gzip.decompress(nvprof_kit.open(path).export(steps=step).data), parse_float=Decimal)


def ns(microseconds: Decimal | int) -> int:
    exact = Decimal(microseconds) * 1000
    assert exact == exact.to_integral_value()
    return int(exact)


def check(document: dict[str, Any]) -> None:
    """What the viewer asks of a trace."""
    assert document["displayTimeUnit"] == "ns"
    processes, tracks, slices = set(), set(), defaultdict(list)
    for event in document["traceEvents"]:
        key = (event["pid"], event["tid"])
        if event["ph"] == "M":
            known = {"process_name": processes, "thread_name": tracks}.get(event["name"])
            if known is not None:
                assert key not in known and event["args"]["name"]
                known.add(key)
            continue
        assert event["ph"] == "X" and isinstance(event["name"], str) and event["cat"]
        assert all(isinstance(event[field], int) for field in ("pid", "tid"))
        slices[key].append((ns(event["ts"]), ns(event["dur"]), event["name"]))
    assert set(slices) == tracks
    assert {(pid, 0) for pid, _ in slices} == processes
    for track in slices.values():
        open_until: list[int] = []
        # viewers sort by start and keep the file's order where two begin together: the outer one has to come first
        for start, length, name in sorted(track, key=lambda one: one[0]):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert start >= 0 and length >= 0
            assert not open_until or start + length <= open_until[-1], name
            open_until.append(start + length)


@pytest.mark.parametrize("name", CAPTURES)
def test_a_query_of_the_trace_gives_the_tables_numbers(name):
    document, opened = exported(DATA / f"{name}.sqlite.xz"), nvprof_kit.open(DATA / f"{name}.sqlite.xz")
    check(document)
    db = sqlite3.connect(":memory:")
    db.execute("CREATE TABLE slice (category, name, ts, dur, layer, phase, step, ns)")
    slices = [
        (event["cat"], event["name"], ns(event["ts"]), ns(event["dur"]), *map(event["args"].get, ARGUMENTS))
        for event in document["traceEvents"]
        if event["ph"] == "X"
    ]
    db.executemany("INSERT INTO slice VALUES (?, ?, ?, ?, ?, ?, ?, ?)", slices)
    rows = opened.layers(steps="all", by="step").rows
    rows = rows[rows["gpu_ops"] > 0]
    keys = zip(rows["step"].fillna(-1).astype(int), rows["layer"], rows["phase"], strict=True)
    expected = dict(zip(keys, zip(rows["gpu_ops"], rows["gpu_self_ns"], strict=True), strict=True))
    query = """SELECT step, layer, phase, count(*), sum(dur), sum(ns)
                 FROM slice WHERE category = 'operation' GROUP BY step, layer, phase"""
    found = db.execute(query).fetchall()
    assert {row[:3]: row[3:5] for row in found} == expected
    assert all(row[4] == row[5] for row in found)
    ranges = db.execute("SELECT count(*) FROM slice WHERE category = 'range'").fetchone()[0]
    assert ranges == len(opened.tables["ranges"])


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=30))
def test_operations_that_overlap_on_a_stream_are_on_tracks_of_their_own(tmp_path, operations):
    file = NsysFile(tmp_path / "any.sqlite")
    for stream, start, length in operations:
        file.kernel(100 + start, 100 + start + length, launched=(start, start + 1), stream=stream)
    document = exported(file.write())
    check(document)
    drawn = [event for event in document["traceEvents"] if event.get("cat") == "operation"]
    assert sum(ns(event["dur"]) for event in drawn) == sum(length for *_, length in operations)


def test_tracks_and_slices(file):
    file.range_("step 1", 50, 900, category="step", payload=1)
    file.range_('a"<', 100, 700, category="forward")
    file.kernel(1_000, 3_345, launched=(130, 131), name="k")
    file.kernel(3_345, 3_400, launched=(720, 721), name="late")
    file.kernel(4_000, 5_000, launched=(740, 741), stream=9)
    file.kernel(4_500, 5_500, launched=(750, 751), stream=9)  # overlaps the one before on its stream
    document = exported(file.write())
    check(document)
    events = document["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(names.values()) == [
        "idle",
        "steps",
        *(f"GPU 0 · stream 7 · {what}" for what in ("phases", "layers", "operations")),
        *(f"GPU 0 · stream 9 · {what}" for what in ("phases", "operations")),
        *(f"GPU 0 · stream 9 · beside it, 2 · {what}" for what in ("phases", "operations")),
        "thread 0",
    ]
    found = {(names[event["pid"], event["tid"]], event["name"]): event for event in events if event["ph"] == "X"}
    layer = found["GPU 0 · stream 7 · layers", 'a"<']
    assert (ns(layer["ts"]), ns(layer["dur"])) == (950, 2345)  # since the step's begin at 50
    operation = found["GPU 0 · stream 7 · operations", "k"]
    assert operation["args"] == {"layer": 'a"<', "phase": "forward", "step": 1, "ns": 2345}
    idle = found["idle", "idle"]
    assert (ns(idle["ts"]), ns(idle["dur"])) == (3350, 600)
    # the step begins with its range at 50 and ends with its last kernel at 5500; stream 7 works from 1000 to 3400
    step, part = found["steps", "step 1"], found["GPU 0 · stream 7 · phases", "operations of step 1"]
    assert (ns(step["ts"]), ns(step["dur"]), step["args"]) == (0, 5450, {"step": 1, "ns": 5450})
    assert (ns(part["ts"]), ns(part["dur"]), part["cat"]) == (950, 2400, "operations of a step")
    assert ("GPU 0 · stream 7 · phases", "forward") in found
