"""The numbers beside ours in docs/accuracy.md: nsys summaries of the same captures, and unchanged reports."""

import csv
import io
from pathlib import Path

import pytest
from support.cli import execute
from support.data import unpacked
from support.nsys import run_nsys

import nvprof_kit

pytestmark = pytest.mark.nsys
OLD_NAMES = {"cuda_gpu_kern_gb_sum": "gpukernsum", "nvtx_pushpop_sum": "nvtxppsum"}
"""What nsys 2022.4 calls its summaries."""


def summary(nsys: str, report: str, path: Path) -> list[dict[str, str]]:
    """A report of `nsys stats`, a row each."""
    reports = execute(nsys, "stats", "--help-reports").stdout
    if report not in reports:
        report = OLD_NAMES[report]
    text = run_nsys(nsys, "stats", "-q", "--report", report, "--format", "csv", path).stdout
    return list(csv.DictReader(io.StringIO(text[text.index("Time (%)") :])))


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """An H200 capture as nsys exported it."""
    return unpacked("llama-2023.4.sqlite.xz", tmp_path / "run.sqlite")


@pytest.mark.every_nsys
def test_kernels_by_launch(nsys, capture):
    """*CUDA GPU Kernel/Grid/Block Summary* has the times and launches of our operations."""
    theirs: dict[tuple[str, str, str], tuple[int, int]] = {}
    for row in summary(nsys, "cuda_gpu_kern_gb_sum", capture):
        key = row["Name"], " ".join(row["GridXYZ"].split()), " ".join(row["BlockXYZ"].split())
        theirs[key] = int(row["Total Time (ns)"]), int(row["Instances"])
    rows = nvprof_kit.open(str(capture)).sql(
        "SELECT name, grid_x, grid_y, grid_z, block_x, block_y, block_z, SUM(end_ns - start_ns), COUNT(*) "
        "FROM ops WHERE grid_x > 0 GROUP BY 1, 2, 3, 4, 5, 6, 7"
    )
    ours: dict[tuple[str, str, str], tuple[int, int]] = {}
    for name, *sizes, time, launches in rows.itertuples(index=False):
        ours[name, " ".join(map(str, sizes[:3])), " ".join(map(str, sizes[3:]))] = int(time), int(launches)
    assert ours == theirs


@pytest.mark.every_nsys
def test_ranges(nsys, capture):
    """*NVTX Push/Pop Range Summary* has the CPU times of our layers."""
    theirs = {row["Range"]: int(row["Total Time (ns)"]) for row in summary(nsys, "nvtx_pushpop_sum", capture)}
    rows = nvprof_kit.open(str(capture)).layers().rows
    named = rows[(rows["layer"] != "(none)") & (rows["cpu_ns"] > 0)]
    assert len(named) > 20
    for layer, phase, cpu in named[["layer", "phase", "cpu_ns"]].itertuples(index=False):
        text = layer if phase == "forward" else f"{layer} {phase}"
        assert theirs[f"nvprof_kit:{text}"] == cpu
