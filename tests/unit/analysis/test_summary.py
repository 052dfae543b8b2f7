"""The eight views: tiny captures with their arithmetic, and sums that must hold on real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.nsys_file import NsysFile

from nvprof_kit.analysis.summary import OPTIONAL, VIEWS, SummaryOptions, SummaryResult, summary
from nvprof_kit.cli import group
from nvprof_kit.cli.summary import VIEWS as OFFERED
from nvprof_kit.trace.open import open_capture

DATA = Path(__file__).parents[2] / "data"


def small(path: Path) -> Path:
    """Two steps of 1000 ns: a gemm in layers.0, a collective that overlaps it by half, a copy."""
    file = NsysFile(path)
    for number in (0, 1):
        at = 1000 * number
        file.range_(f"step {number}", at, at + 1000, category="step", payload=number)
        file.range_("forward", at, at + 50, category="phase")
        file.range_("layers.0", at + 10, at + 40)
        file.range_("aten::mm, seq = 3", at + 12, at + 20, category=None, domain="", registered=False)
        file.kernel(at + 100, at + 300 + 100 * number, launched=(at + 14, at + 18), name="nvjet_a")
        file.range_("optimizer", at + 60, at + 90, category="optimizer")
        file.kernel(at + 250, at + 350, launched=(at + 62, at + 64), name="ncclDevKernel_AllReduce", stream=9)
        file.kernel(at + 600, at + 620, launched=(at + 70, at + 75), table="MEMCPY", memory=(0, 2), size=400)
    return file.write()


def analysed(path: Path, **options: Any) -> SummaryResult:
    return summary(open_capture(path, optional=OPTIONAL), SummaryOptions(**options))


@pytest.fixture
def result(tmp_path: Path) -> SummaryResult:
    return analysed(small(tmp_path / "run.sqlite"))


def test_there_are_eight(result: SummaryResult) -> None:
    assert tuple(result.views) == tuple(VIEWS) == OFFERED
    assert result.steps == 2


def test_device(result: SummaryResult) -> None:
    # busy: step 0 100-350 and 600-620; step 1 1100-1400 and 1600-1620
    row = result.views["device"].iloc[0]
    assert row[["wall_ns", "busy_ns", "utilisation", "name"]].tolist() == [2000, 590, 0.295, "Test GPU"]


def test_overview_counts_overlap_once(result: SummaryResult) -> None:
    rows = result.views["overview"].set_index("event")
    assert rows["gpu_total_ns"].drop("CUDA API").to_dict() == {"kernel": 500, "communication": 200, "memcpy": 40}
    assert rows.loc["CUDA API", ["calls", "cpu_total_ns"]].tolist() == [6, 22]  # twice 4 + 2 + 5
    assert rows.loc["kernel", "gpu_ratio"] == 500 / 2000


def test_model(result: SummaryResult) -> None:
    rows = result.views["model"].set_index("part")
    assert rows.loc["forward", ["cpu_total_ns", "gpu_total_ns", "gpu_ops"]].tolist() == [100, 500, 2]
    assert rows.loc["optimizer", ["cpu_total_ns", "gpu_total_ns", "gpu_ops"]].tolist() == [60, 240, 4]


def test_distributed(result: SummaryResult) -> None:
    row = result.views["distributed"].iloc[0]
    # overlap: 250-300, and 1250-1350 whole
    assert row[["comm_ns", "overlap_ns", "exposed_comm_ns", "overlap_ratio"]].tolist() == [200, 150, 50, 0.75]


def test_operators_with_their_kernels_below(result: SummaryResult) -> None:
    rows = result.views["operator"]
    assert rows[["operator", "kernel", "calls", "cpu_total_ns", "gpu_total_ns"]].to_numpy().tolist() == [
        ["aten::mm", "", 2, 16, 500],
        ["aten::mm", "nvjet_a", 2, 8, 500],
    ]


def test_kernel_statistics(result: SummaryResult) -> None:
    row = result.views["kernel"].set_index("name").loc["nvjet_a"]
    names = ["calls", *(f"gpu_{what}_ns" for what in ("total", "avg", "max", "min", "p50", "p95"))]
    assert row[names].tolist() == [2, 500, 250, 300, 200, 250, 295]  # p95 of 200 and 300
    assert row[["kernel_class", "family"]].tolist() == ["gemm", "cuBLAS nvjet"]
    assert row["gpu_ratio"] == pytest.approx(500 / 740)


def test_memory(result: SummaryResult) -> None:
    row = result.views["memory"].iloc[0]
    assert row[["copy", "memory", "calls", "bytes", "gpu_total_ns", "cpu_total_ns", "gb_per_s"]].tolist() == [
        "memcpy HtoD", "pageable", 2, 800, 40, 10, 20.0,
    ]  # fmt: skip


def test_user_ranges_hold_what_is_nested(result: SummaryResult) -> None:
    rows = result.views["user"].set_index("range")
    assert rows.loc["layers.0", ["calls", "cpu_total_ns", "gpu_total_ns"]].tolist() == [2, 60, 500]
    assert rows.loc["forward", "gpu_total_ns"] == 500
    assert rows.loc["step 1", "gpu_total_ns"] == 300 + 100 + 20


def test_by_step_and_sorted(tmp_path: Path) -> None:
    views = analysed(small(tmp_path / "run.sqlite"), by_step=True).views
    assert views["kernel"][["step", "name", "gpu_total_ns"]].to_numpy().tolist() == [
        [0, "nvjet_a", 200], [0, "ncclDevKernel_AllReduce", 100],
        [1, "nvjet_a", 300], [1, "ncclDevKernel_AllReduce", 100],
    ]  # fmt: skip
    assert views["device"][["step", "busy_ns"]].to_numpy().tolist() == [[0, 270], [1, 320]]
    ordered = analysed(small(tmp_path / "run.sqlite"), sort="calls", views=("kernel",)).views["kernel"]
    assert ordered["calls"].is_monotonic_decreasing


@pytest.mark.parametrize("capture", ["eager-2023.4", "hooks-ddp-2024.2", "graph-2023.4"])
@pytest.mark.parametrize("by_step", [False, True])
def test_real_captures_lose_nothing(capture: str, by_step: bool) -> None:
    trace = open_capture(DATA / f"{capture}.sqlite.xz", optional=OPTIONAL)
    views = summary(trace, SummaryOptions(by_step=by_step)).views
    spent = int((trace.ops["end_ns"] - trace.ops["start_ns"]).sum())
    assert views["kernel"]["gpu_total_ns"].sum() + views["memory"]["gpu_total_ns"].sum() == spent
    assert views["kernel"]["calls"].sum() + views["memory"]["calls"].sum() == len(trace.ops)
    assert views["model"]["gpu_ops"].sum() == len(trace.ops)
    distributed = views["distributed"]
    assert (distributed["overlap_ns"] + distributed["exposed_comm_ns"] == distributed["comm_ns"]).all()
    assert np.all(views["device"]["utilisation"] <= 1)


@pytest.mark.parametrize("capture", ["eager-2023.4", "hooks-ddp-2024.2"])
@pytest.mark.parametrize("view", ["kernel", "model", "memory"])
def test_the_golden_tables(capture: str, view: str, request: pytest.FixtureRequest) -> None:
    golden = DATA.parent / "golden" / "summary" / f"{capture}.{view}.csv"
    found = analysed(DATA / f"{capture}.sqlite.xz", views=(view,)).views[view].to_csv(index=False, float_format="%.6g")
    if request.config.getoption("--update-golden"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(found)
    assert found == golden.read_text()


def test_an_empty_view_says_which_switch_gives_it() -> None:
    result = analysed(DATA / "eager-2023.4.sqlite.xz", views=("operator", "distributed"))
    assert not len(result.views["operator"])
    assert "emit_nvtx" in result.notes["operator"] and "--pytorch" in result.notes["operator"]
    assert "no communication" in result.notes["distributed"]


def test_the_verb(tmp_path: Path) -> None:
    path = str(small(tmp_path / "run.sqlite"))
    run = CliRunner().invoke
    assert "nvjet_a" in run(group, ["summary", path]).output
    csv = run(group, ["summary", path, "--view", "memory", "--format", "csv"]).output
    assert csv.splitlines()[0].startswith("copy,memory,calls,cpu_total_ns")
    assert "name it with --view" in str(run(group, ["summary", path, "--format", "csv"]).exception)
    assert "no such column" in str(run(group, ["summary", path, "--sort", "x"]).exception)
