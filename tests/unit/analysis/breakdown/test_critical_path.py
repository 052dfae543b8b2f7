"""The chain of waiting that made a step as long as it was, with its arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.captures.nsys_file import NsysFile

import nvprof_kit

if TYPE_CHECKING:
    import pandas as pd


@pytest.fixture
def file(tmp_path: Path) -> NsysFile:
    return NsysFile(tmp_path / "run.sqlite")


def path_of(file: NsysFile) -> pd.DataFrame:
    return nvprof_kit.open(file.write()).breakdown().critical_path


def test_the_path_goes_through_the_host_and_the_device(file: NsysFile) -> None:
    file.range_("step 1", 0, 400, category="step", payload=1)
    file.range_("layers.0", 0, 100)
    file.range_("layers.1", 100, 300)
    file.kernel(50, 150, launched=(40, 45))
    file.kernel(150, 200, launched=(60, 65))
    file.kernel(290, 400, launched=(270, 280))
    path = path_of(file).set_index("layer")
    # backwards: the kernel 290-400; 280-290 its launch's way to the device; the host from there to the step's begin,
    # since it never waited: layers.1 from 280 back to 100, where it began, and layers.0 before
    assert path.loc["layers.1", ["gpu_ns", "wait_ns", "host_ns"]].tolist() == [110, 10, 180]
    assert path.loc["layers.0", "host_ns"] == 100
    assert path["share"].sum() == pytest.approx(1)


def test_the_path_passes_an_operation_that_took_no_time(file: NsysFile) -> None:
    file.range_("step 1", 0, 400, category="step", payload=1)
    file.range_("layers.0", 0, 100)
    file.kernel(50, 200, launched=(10, 15))
    file.kernel(300, 300, launched=(20, 25), stream=9)
    file.kernel(300, 400, launched=(30, 35))
    row = path_of(file).iloc[0]
    # 100 and 150 on the device, 200-300 and 15-50 before them, 0-15 on the host
    assert row[["gpu_ns", "wait_ns", "host_ns"]].tolist() == [250, 135, 15]
