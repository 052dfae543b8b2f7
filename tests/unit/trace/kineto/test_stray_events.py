"""Events of a PyTorch trace whose time cannot be: refused, or warned of by key and category."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nvprof_kit._trace.open import open_capture
from nvprof_kit.errors import CaptureError

BOOTED_US = 51 * 86_400 * 1e6
"""Kineto counts from when the machine was booted, here 51 days ago."""


def trace(path: Path, changed: int = -1, **change: Any) -> Path:
    """30 calls, each 10 µs after the other, and the kernels that they launch; one of the calls changed."""
    events = []
    for number in range(30):
        at = BOOTED_US + 10 * number
        call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": at, "dur": 2.0}
        call |= {"args": {"correlation": number + 1}} | (change if number == changed else {})
        kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": at + 5, "dur": 4.0}
        events += [call, kernel | {"args": {"correlation": number + 1, "device": 0, "stream": 7}}]
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


@pytest.mark.parametrize("moment", [-1.0, 0.0, 99.0, BOOTED_US + 86_400e6])
def test_a_call_hours_away_from_all_others(tmp_path: Path, moment: float) -> None:
    warnings = open_capture(trace(tmp_path / "run.json", 7, ts=moment)).info.warnings
    assert any("ts of cuda_runtime lies hours away from the rest of the trace in 1 events" in text for text in warnings)


def test_a_call_of_a_hundred_days_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="more than 100 days apart"):
        open_capture(trace(tmp_path / "run.json", 7, dur=1e13))


def test_a_category_of_another_release_is_warned_of(tmp_path: Path) -> None:
    """A kernel that is not read is missing in every sum."""
    (said,) = open_capture(trace(tmp_path / "run.json", 7, cat="gpu_runtime")).info.warnings[:1]
    assert said == "cat is 'gpu_runtime' in 1 events, a category that is not known: they are not read"
    assert open_capture(trace(tmp_path / "run.json", 7, cat="cuda_sync")).info.warnings == ()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("{}", "a second trace begins"),
        ("\n[1]", "a second trace begins"),
        (" end", "other text begins"),
        ("\0", "other"),
    ],
)
def test_what_follows_the_trace_is_refused(tmp_path: Path, more: str, said: str) -> None:
    """Of two traces in one file only the first was read."""
    path = trace(tmp_path / "run.json")
    path.write_text(path.read_text() + "\r\n")
    assert open_capture(path).info.warnings == ()
    path.write_text(path.read_text() + more)
    with pytest.raises(CaptureError, match=f"{said}.* after the end of the trace; needed one trace in a file"):
        open_capture(path)
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps(json.loads(trace(tmp_path / "run.json").read_text())["traceEvents"]) + more)
    with pytest.raises(CaptureError, match=said):
        open_capture(listed)


def test_two_lists_of_events_are_refused(tmp_path: Path) -> None:
    path = trace(tmp_path / "run.json")
    path.write_text(path.read_text().removesuffix("}") + ', "traceEvents": []}')
    with pytest.raises(CaptureError, match="traceEvents is in it twice"):
        open_capture(path)
