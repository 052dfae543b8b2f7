"""GPU operations of several tables, processes, devices and graphs; columns with one value are not read row by row."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile, thread

from nvprof_kit._trace.open import open_capture
from nvprof_kit.errors import CaptureError


def _file(folder: Path, more: Callable[[NsysFile], object] = lambda _: None) -> Path:
    file = NsysFile(folder / "run.sqlite")
    file.range_("layers.0", 100, 900)
    for start in (300, 400):
        file.kernel(start, start + 10, launched=(start - 100, start - 90))
    file.kernel(500, 520, launched=(450, 460), table="MEMCPY")
    more(file)
    return file.write()


@pytest.mark.parametrize(
    ("table", "what", "expected"),
    [
        ("KERNEL", {"device": 1}, {"device": [0, 0, 1, 0]}),
        ("KERNEL", {"node": 5}, {"graph_node": [-1, -1, 5, -1]}),
        ("KERNEL", {"pid": 8}, {"pid": [thread(0, 7), thread(0, 7), thread(0, 8), thread(0, 7)]}),
        ("MEMCPY", {"device": 1}, {"device": [0, 0, 0, 1]}),
        ("MEMSET", {"device": 2}, {"device": [0, 0, 0, 2]}),
    ],
)
def test_one_row_of_another_value_is_read(
    tmp_path: Path, table: str, what: dict[str, int], expected: dict[str, list[int]]
) -> None:
    # the added row is the last of its table: kernels come before copies, and these before memsets
    path = _file(tmp_path, lambda file: file.kernel(600, 610, launched=(550, 560), table=table, **what))  # type: ignore[arg-type]
    ops = open_capture(path).ops
    assert {name: ops[name].tolist() for name in expected} == expected


@pytest.mark.parametrize("value", ["'0'", "'x'", "NULL", "0.5", "x'00'"])
@pytest.mark.parametrize("column", ["deviceId", "globalPid"])
@pytest.mark.parametrize("which", ["1", "start = (SELECT max(start) FROM CUPTI_ACTIVITY_KIND_KERNEL)"])
def test_a_wrong_value_is_refused_in_all_rows_and_in_one(tmp_path: Path, value: str, column: str, which: str) -> None:
    path = _file(tmp_path)
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET {column} = {value} WHERE {which}")
    db.close()
    if value == "NULL" and column == "globalPid" and which != "1":
        assert any("globalPid is NULL in 1 of 2" in one for one in open_capture(path).info.warnings)
        return
    with pytest.raises(CaptureError, match=f"{column} is (not a whole number|NULL)"):
        open_capture(path)


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("layers.0", 100, 200)
    file.kernel(300, 330, launched=(110, 115))
    file.call("cudaStreamSynchronize_v3020", 120, 340)
    file.overhead("CUPTI: Buffer flush", 150, 160)
    file.kernel(350, 360, launched=(130, 132), table="MEMCPY", memory=(0, 2))
    file.kernel(360, 361, launched=(140, 142), table="MEMCPY", memory=(2, 1))
    file.kernel(370, 371, launched=(150, 152), table="MEMCPY", memory=(2, 2))
    return file.write()


def test_calls_and_overheads_of_an_nsys_file(capture: Path) -> None:
    calls = open_capture(capture, optional=("calls",)).calls
    assert calls is not None
    calls = calls.sort_values("start_ns", ignore_index=True)
    assert calls[["start_ns", "end_ns"]].to_numpy().tolist()[:2] == [[110, 115], [120, 340]]
    assert calls["name"].tolist()[:2] == ["cudaLaunchKernel", "cudaStreamSynchronize"]
    assert set(calls["tid"]) == {thread()}
    overhead = calls[calls["kind"] == 1]
    assert overhead[["start_ns", "end_ns", "correlation"]].to_numpy().tolist() == [[150, 160, -1]]


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "pageable"),
        ("Memcpy DtoH (Device -> Pinned)", "pinned"),
        ("Memcpy DtoD (Device -> Device)", ""),
        ("void kernel(int)", ""),
    ],
)
def test_calls_and_the_hosts_end_of_a_pytorch_trace(tmp_path: Path, name: str, memory: str) -> None:
    call = {"ts": 1.5, "dur": 2.25, "tid": 3, "name": "cudaLaunchKernel", "args": {"correlation": 7}}
    flush = {"ts": 9, "dur": 1, "tid": "3", "name": "Buffer Flush"}
    operation = {"ts": 5, "dur": 1, "tid": 7, "name": name, "args": {"correlation": 7, "stream": 7, "device": 0}}
    events = [
        call | {"ph": "X", "pid": 5, "cat": "cuda_runtime"},
        flush | {"ph": "X", "pid": 5, "cat": "overhead"},
        operation | {"ph": "X", "pid": 0, "cat": "gpu_memcpy" if name.startswith("Memcpy") else "kernel"},
    ]
    (path := tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events, "deviceProperties": []}))
    trace = open_capture(path, optional=("calls", "host_memory"))
    calls = trace.calls
    assert calls is not None and trace.ops["host_memory"].tolist() == [memory]
    assert calls["start_ns"].tolist() == [0, 7500] and calls["end_ns"].tolist() == [2250, 8500]
    assert calls["correlation"].tolist() == [7, -1] and calls["kind"].tolist() == [0, 1]
    assert calls["tid"].nunique() == calls["pid"].nunique() == 1
