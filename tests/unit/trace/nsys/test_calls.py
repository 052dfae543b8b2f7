"""Every CUDA call, the profiler's own interruptions, and the memory that copies touch, read when asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile, thread

from nvprof_kit._trace.open import open_capture


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
