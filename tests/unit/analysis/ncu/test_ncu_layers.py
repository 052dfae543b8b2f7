"""The hardware table: owners, means and sums, the bound and its reason, and the road back over an nsys capture."""

import csv
import lzma
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support.data import ROOT

import nvprof_kit
from nvprof_kit.errors import CaptureError

DATA = ROOT / "tests" / "data" / "ncu"
ELAPSED = ".avg.pct_of_peak_sustained_elapsed"
NAMES = {
    "ns": "gpu__time_duration.sum",
    "dram": "dram__bytes.sum",
    "compute": f"sm__throughput{ELAPSED}",
    "memory": f"gpu__compute_memory_throughput{ELAPSED}",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "l1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
}


def report(folder: Path, *kernels: dict[str, object]) -> nvprof_kit.NcuReports:
    """A raw page: of each kernel its stack, name, grid, tid, and any metric by its short name in `NAMES` or its own."""
    known = ("kernel", "grid", "stack", "tid")
    metrics = list(dict.fromkeys(name for kernel in kernels for name in kernel if name not in known))
    head = ["ID", "Process ID", "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"]
    head += ["Kernel Name", "Block Size", "Grid Size", "Device", "CC"]
    units = {"ns": "ns", "dram": "byte"}
    names = [NAMES.get(name, name) for name in metrics]
    lines = [[*head, *names], [""] * 8 + [units.get(name, "") for name in metrics]]
    for number, kernel in enumerate(kernels):
        stack = "".join(
            f'  "nvprof_kit:{text}:none:none:RGB:0xff:REGISTERED:{text}"' for text in kernel.get("stack", ())
        )
        cells = [number, 7, f"{kernel.get('tid', 7)}{stack} " if stack else "", kernel.get("kernel", "gemm")]
        cells += ["(32, 1, 1)", kernel.get("grid", "(1, 1, 1)"), 0, "9.0"]
        lines.append([*cells, *(kernel.get(name, "") for name in metrics)])
    path = folder / "page.csv"
    with path.open("w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(lines)
    return nvprof_kit.open_ncu(path)


def rows(result, *columns: str) -> list[list[object]]:
    return result.rows[["layer", "phase", *columns]].values.tolist()


@pytest.mark.parametrize(
    ("capture", "page"), [("run-2023.4", "plan-2025.3"), ("encoder-2024.2", "encoder-plan-2025.3")]
)
def test_times_are_those_of_layers(capture, page):
    """Also of the outermost module, which is named by its class: no path begins with that."""
    table = nvprof_kit.open(DATA / f"{capture}.sqlite.xz").layers().rows
    known = {(row.layer, row.phase): row.gpu_total_ns for row in table.itertuples() if row.gpu_total_ns}
    made = nvprof_kit.open_ncu(DATA / f"{page}.csv.xz").layers(DATA / f"{capture}.sqlite.xz").rows
    assert {(row.layer, row.phase): row.gpu_ns for row in made.itertuples()} == known


@pytest.mark.parametrize(
    ("stack", "owner"),
    [
        ((), ("(none)", "other")),
        (("step 3",), ("(none)", "other")),
        (("step 3", "optimizer"), ("(none)", "optimizer")),
        (("step 3", "forward", "a.0"), ("a.0", "forward")),
        (("a.0 backward",), ("a.0", "backward")),
        (("a.0 backward", "a.0 recompute", "a.0.mlp"), ("a.0.mlp", "recompute")),
        (("forward", "a.0 recompute"), ("a.0", "recompute")),
    ],
)
def test_owners(stack, owner, tmp_path):
    (row,) = report(tmp_path, {"stack": stack, "ns": 1}).kernels().rows.to_dict("records")
    assert (row["layer"], row["phase"]) == owner


def test_without_ranges_there_is_a_warning(tmp_path):
    warnings = report(tmp_path, {"ns": 1}).layers().warnings
    assert any("no kernel has a range of the domain" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("metrics", "bound", "reason"),
    [
        ({"compute": 60.0, "memory": 10}, "compute", "the SMs at 60 % of their peak, tensor cores at ?"),
        ({"compute": 80, "memory": 10, "tensor": 75}, "compute", "tensor cores at 75 % of their peak"),
        ({"compute": 61, "memory": 61}, "memory", "memory at 61 % of its peak"),
        ({"compute": 61, "memory": 90, "l1": 90}, "memory", "the L1 cache at 90 % of its peak"),
        (
            {"compute": 59, "memory": 3, "launch__waves_per_multiprocessor": 0.25},
            "latency",
            "compute at 59 %, memory at 3 % of peak; grids fill 0.2 of the GPU",
        ),
        ({}, "not measured", "the report lacks sm__throughput and gpu__compute_memory_throughput (SpeedOfLight)"),
    ],
)
def test_bound(metrics, bound, reason, tmp_path):
    row = report(tmp_path, {"ns": 10, **metrics}).layers().rows.iloc[0]
    assert (row["bound"], row["reason"]) == (bound, "100 % of its time: " * bool(metrics) + reason)


def test_amounts_from_rates_and_cycles(tmp_path):
    kernel = {
        "ns": 2000,
        # 2 µs at 1e9 bytes a second: 2000 bytes; of 1e9 cycles a second 2000 cycles with 3 additions each
        "dram__bytes_read.sum": 500,
        "dram__bytes_write.sum.per_second": 1e9,
        "smsp__cycles_elapsed.avg.per_second": 1e9,
        "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum.per_cycle_elapsed": 3,
        "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum": 100,
        "lts__t_sectors.sum": 10,
        "sm__ops_path_tensor_src_bf16_dst_fp32.sum": 4096,
        "sm__ops_path_tensor_src_bf16_dst_fp32_sparsity_on.sum": 1,
        "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": 7,
        "smsp__average_warps_issue_stalled_selected_per_issue_active.ratio": 9,
    }
    row = report(tmp_path, kernel).layers().rows.iloc[0]
    assert row["dram_bytes"] == pytest.approx(2500)
    assert row["flop"] == pytest.approx(3 * 2000 + 2 * 100)
    assert row["l2_bytes"] == 320
    assert row["tensor_flop"] == 4096
    assert np.isnan(row["l1_bytes"])
    assert row["stall"] == "long_scoreboard"


def test_a_report_of_other_kernels(file, tmp_path):
    """Another grid is another signature."""
    for number in range(2):
        at = 1000 * number
        file.kernel(at, at + 100 - 40 * number, launched=(at, at + 1), name="at::native::gemm<(int)4>(int)")
    capture = file.write()
    gemm, add = ({"kernel": name, "ns": 1, "compute": 9, "memory": 1} for name in ("at::gemm<4>(int)", "add"))
    made = report(tmp_path, gemm, add).layers(capture)
    assert (made.gpu_ns, made.covered, made.unused) == (160, 1, 1)
    with pytest.raises(CaptureError, match="no kernel of it is in"):
        report(tmp_path, {**gemm, "grid": "(3, 1, 1)"}, add).layers(capture)


def test_a_report_without_times(tmp_path):
    with pytest.raises(CaptureError, match="no gpu__time_duration"):
        report(tmp_path, {"compute": 3}).layers()


@pytest.mark.parametrize(
    ("page", "capture"),
    [
        ("layer-2025.3", ""),
        ("roofline-2025.3", ""),
        ("communication-2025.3", ""),
        ("plan-2025.3", "run-2023.4"),
        ("encoder-plan-2025.3", "encoder-2024.2"),
    ],
)
def test_the_golden_tables(page, capture, golden):
    """Also of a live page: what ncu prints while it measures, grouped numbers, ranges in front of kernels' names."""
    made = nvprof_kit.open_ncu(DATA / f"{page}.csv.xz").layers(DATA / f"{capture}.sqlite.xz" if capture else None)
    assert made.gpu_ns > 0 and not made.unused
    golden(f"ncu/{page}.csv", made.rows.to_csv(index=False, float_format="%.6g"))


@pytest.mark.parametrize("page", ["roofline-details-2025.3", "roofline-details-units-2025.3"])
def test_the_pages_of_one_report_give_one_table(page):
    """Raw, details in base units, and details in units that ncu chose row by row, to the two digits behind the point
    that pages have.
    """
    raw = nvprof_kit.open_ncu(DATA / "roofline-2025.3.csv.xz").layers()
    details = nvprof_kit.open_ncu(DATA / f"{page}.csv.xz").layers()
    assert (raw.measured, details.measured, raw.warnings, details.warnings) == (38, 38, (), ())
    # occupancy is on the raw page only, which names it in a reason
    shared = [name for name in raw.rows if details.rows[name].notna().any() and name != "reason"]
    assert {"compute_pct", "memory_pct", "dram_pct", "l2_pct", "dram_bytes", "flop", "tensor_flop"} < set(shared)
    pd.testing.assert_frame_equal(raw.rows[shared], details.rows[shared], rtol=2e-3, check_dtype=False)


def test_the_bytes_of_collectives():
    """What DDP's all-reduces sent on rank 0 of 2: the gradients' bytes, of the 17 of 18 links that ncu counted there.

    A ring of two sends each byte once. The first bucket is lm_head's weight alone, the next ones a whole layer and the
    one above's down_proj; both in bf16.
    """
    made = nvprof_kit.open_ncu(DATA / "communication-2025.3.csv.xz").layers()
    assert made.measured == 4
    assert made.warnings == ("ncu counted 17 of the 18 NVLinks that the GPU has: its bytes are of these alone",)
    width, inner, vocabulary = 1024, 1024 * 11 // 4, 32_000
    layer = 2 * (4 * width * width + 3 * width * inner + 2 * width)
    sent = made.rows.set_index(["layer", "phase"])["nvlink_sent_bytes"]
    assert sent["lm_head", "backward"] == pytest.approx(2 * vocabulary * width * 17 / 18, rel=1e-3)
    assert sent["model.layers.2.mlp", "backward"] == pytest.approx((layer + 2 * width * inner) * 17 / 18, rel=1e-3)
    assert sent["model", "backward"] == sent["model.layers.1", "backward"] + sent["model.layers.2", "backward"]
    received = made.rows["nvlink_received_bytes"]
    assert (received < made.rows["nvlink_sent_bytes"]).all()  # the peer began before
    assert (made.rows["nvlink_bytes"] > made.rows["nvlink_sent_bytes"] + received).all()


def test_a_thread_without_phases_is_autograds_where_ranges_do_not_say(tmp_path):
    forward = {"stack": ("step 0", "forward", "a.0"), "tid": 1, "ns": 1}
    made = report(tmp_path, forward, {"stack": ("a.0",), "tid": 2, "ns": 1}).layers()
    assert rows(made) == [["a.0", "forward"], ["a.0", "backward"]]
    assert any(warning.startswith("1 kernels are taken for backward") for warning in made.warnings)
    # a suffix says it, so nothing is guessed
    others = {"stack": ("a.0 backward",), "tid": 2, "ns": 1}, {"stack": ("a.0",), "tid": 3, "ns": 1}
    told = report(tmp_path, forward, *others).layers()
    assert rows(told, "launches") == [["a.0", "forward", 2], ["a.0", "backward", 1]]
    assert told.warnings == ()


def ceilings(made: nvprof_kit.NcuLayers) -> dict[str, str]:
    """The peaks that the plot names, in 10^12 a second."""
    pytest.importorskip("matplotlib")
    texts = (text.get_text().strip().rsplit(" ", 2) for text in made.figure().axes[0].texts)
    return {name: number for name, number, unit in (text for text in texts if len(text) == 3) if unit.endswith("/s")}


TENSOR = "sm__ops_path_tensor_src_bf16_dst_fp32"
SPLIT = "sm__ops_path_tensor_op_hgmma_src_bf16_dst_fp32_sparsity"


@pytest.mark.parametrize(
    ("more", "tensor"),
    [
        ({}, {"tensor bf16 to fp32": "8,192"}),  # as the report states it
        ({f"{SPLIT}_off.sum.peak_sustained": 4096, f"{SPLIT}_on.sum": 0}, {"tensor bf16 to fp32": "4,096"}),
        (
            {f"{SPLIT}_off.sum.peak_sustained": 4096, f"{SPLIT}_on.sum": 7},
            {"tensor bf16 to fp32": "4,096", "tensor bf16 to fp32, sparse": "8,192"},
        ),
    ],
)
def test_ceilings_of_tensor_cores_are_dense(more, tensor, tmp_path):
    """Of the types that were used, here one of two; with sparsity only where a kernel used it."""
    kernel = {
        "ns": 1000,
        "dram": 100,
        f"{TENSOR}.sum": 200,
        f"{TENSOR}.sum.peak_sustained": 8192,
        "sm__ops_path_tensor_src_fp8.sum": 0,
        "sm__ops_path_tensor_src_fp8.sum.peak_sustained": 16384,
        "sm__sass_thread_inst_executed_op_ffma_pred_on.sum.peak_sustained": 16,
        "sm__sass_thread_inst_executed_op_dfma_pred_on.sum.peak_sustained": 8,
        "dram__bytes.sum.peak_sustained": 2,
        "sm__cycles_elapsed.avg.per_second": 1e12,
        "dram__cycles_elapsed.avg.per_second": 3e12,
        **more,
    }
    assert ceilings(report(tmp_path, kernel).layers()) == {"DRAM": "6.0", "FP32": "32", **tensor}


LISTED = DATA / "metrics-2025.3.1.txt.xz"
CHIPS = {
    "sm_80": ("ga100", "ga102"),
    "sm_89": ("ad102", "ad104"),
    "sm_90": ("gh100",),
    "sm_100": ("gb100", "gb102"),
    "sm_120": ("gb202", "gb203", "gb205", "gb206", "gb207"),
}


@pytest.fixture(scope="module")
def chips_with() -> dict[str, frozenset[str]]:
    """The chips that have a metric, by its name."""
    lines = lzma.decompress(LISTED.read_bytes()).decode().splitlines()
    return {name: frozenset(chips) for name, *chips in map(str.split, lines)}


@pytest.mark.parametrize("arch", CHIPS)
def test_every_metric_exists_on_every_chip(arch, chips_with):
    lacking = []
    for path in sorted((ROOT / "recipes" / "ncu" / "sets").glob("*.txt")):
        for line in path.read_text(encoding="utf-8").splitlines():
            kind, name, *only = line.split() if line.strip() else ["#", ""]
            if kind != "metric" or name.startswith("launch__") or (only and arch not in only):
                continue  # metrics of the launch are not counted, so ncu does not list them
            there = chips_with.get(name, frozenset()) | chips_with.get(name.split(".")[0], frozenset())
            lacking += [f"{path.name}: {name} on {chip}" for chip in CHIPS[arch] if chip not in there]
    assert lacking == []


def test_what_moves_through_dram_is_asked_of_every_architecture():
    lines = (ROOT / "recipes" / "ncu" / "sets" / "memory.txt").read_text(encoding="utf-8").splitlines()
    told = [line.split() for line in lines if line.startswith("metric dram__bytes")]
    for arch in CHIPS:
        assert sum(not only or arch in only for _, _, *only in told) == 2, arch
