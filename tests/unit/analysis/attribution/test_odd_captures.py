"""Captures as they come from programs that people really run: cut off, crowded, repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.captures.nsys_file import START_END, NsysFile, thread

import nvprof_kit
from nvprof_kit.errors import CaptureError


@pytest.fixture
def file(tmp_path: Path) -> NsysFile:
    return NsysFile(tmp_path / "capture.sqlite")


def table(file: NsysFile, **options: Any) -> nvprof_kit.Layers:
    return nvprof_kit.open(file.write()).layers(**{"steps": "all", **options})


def sums(result: nvprof_kit.Layers) -> dict[tuple[Any, ...], int]:
    keys = [name for name in ("step", "layer", "phase") if name in result.rows]
    rows = result.rows[result.rows["gpu_self_ns"] > 0]
    return {
        tuple(None if pd.isna(value) else value for value in key): int(ns)
        for key, ns in zip(rows[keys].astype(object).itertuples(index=False), rows["gpu_self_ns"], strict=True)
    }


def test_a_capture_that_began_inside_a_step(file: NsysFile) -> None:
    """The ranges that were open when the window opened are not in it: what they held is told as far as it goes."""
    file.kernel(500, 501, launched=(10, 11))  # of step 3 and its layers, which nothing tells
    file.range_("layers.7", 100, 150)  # still step 3
    file.kernel(510, 512, launched=(110, 111))
    file.range_("step 4", 200, 400, category="step", payload=4)
    file.range_("layers.0", 250, 300)
    file.kernel(520, 524, launched=(260, 261))
    result = table(file, by="step")
    assert sums(result) == {
        (None, "(none)", "other"): 1,
        (None, "layers.7", "forward"): 2,
        (4, "layers.0", "forward"): 4,
    }
    left_out = [warning for warning in table(file, steps=None).warnings if "outside steps" in warning]
    assert left_out == ["42.9 % of the time is outside steps and left out; --steps all includes it"]


def test_windows_repeated(file: NsysFile) -> None:
    """Steps and correlation ids begin anew in the second window: one step 0 that ran twice, each launch its own."""
    for window, layer in enumerate(("layers.0", "layers.1")):
        zero = 10_000 * window
        file.range_("step 0", zero, zero + 500, category="step", payload=0)
        file.range_(layer, zero + 100, zero + 200)
        file.kernel(zero + 1000, zero + 1001 + window, launched=(zero + 110, zero + 111), correlation=5)
    result = table(file, by="step")
    assert sums(result) == {(0, "layers.0", "forward"): 1, (0, "layers.1", "forward"): 2}


def test_a_range_that_ends_on_another_thread(file: NsysFile) -> None:
    """It holds what its own thread launches; what the other launches meanwhile is not its."""
    file.range_("layers.0", 100, 300, style=START_END)
    file.rows["NVTX_EVENTS"][-1]["endGlobalTid"] = thread(9)
    file.kernel(500, 501, launched=(150, 151))
    file.kernel(510, 512, launched=(160, 161), tid=9)
    result = table(file)
    assert sums(result) == {("layers.0", "forward"): 1, ("(none)", "other"): 2}
    assert any("1 ranges ended on another thread than they began on" in warning for warning in result.warnings)


def test_ranges_of_another_programs_domain_under_the_same_id_are_not_counted(file: NsysFile) -> None:
    file.range_("layers.0", 100, 300, pid=1)
    file.kernel(500, 501, launched=(150, 151), pid=1)
    file.range_("theirs", 100, 300, pid=2, domain="other", style=START_END)  # id 1 there, as ours is here
    file.rows["NVTX_EVENTS"][-1]["endGlobalTid"] = thread(9, 2)
    assert not any("ended on another thread" in warning for warning in table(file).warnings)


def test_a_call_that_is_not_named_a_launch_where_another_process_has_its_id(file: NsysFile) -> None:
    """Loading a module copies its constants: the call's name does not say so, its correlation id does."""
    file.range_("layers.0", 0, 100, pid=1)
    file.range_("layers.1", 0, 100, pid=2)
    file.kernel(200, 210, launched=(50, 51), pid=1, correlation=77)
    file.call("cuModuleLoadData", 50, 51, pid=2, correlation=77)
    file.kernel(300, 330, pid=2, correlation=77, table="MEMCPY")
    assert sums(table(file)) == {("layers.0", "forward"): 10, ("layers.1", "forward"): 30}


def test_operations_of_a_device_that_is_not_told_are_refused(file: NsysFile) -> None:
    file.range_("layers.0", 0, 100)
    for n, device in enumerate((0, None)):
        file.kernel(500, 510, launched=(50 + 2 * n, 51 + 2 * n), device=device)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"KERNEL\.deviceId is NULL in 1 of 2 rows"):
        table(file)


def test_start_end_ranges_around_push_pop_ranges(file: NsysFile) -> None:
    """A step that ends a little late holds the next step's first layer only until it ends."""
    file.range_("step 0", 0, 120, category="step", payload=0, style=START_END)
    file.range_("step 1", 90, 200, category="step", payload=1, style=START_END)
    file.range_("layers.0", 100, 180)
    for start in (50, 95, 110, 150):
        file.kernel(1000 + start, 1000 + start + 1, launched=(start, start + 1))
    assert sums(table(file, by="step")) == {
        (0, "(none)", "other"): 1,
        (1, "(none)", "other"): 1,
        (1, "layers.0", "forward"): 2,
    }
