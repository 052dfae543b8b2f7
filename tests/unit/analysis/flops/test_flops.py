"""Operations counted, time captured: what each layer gets out of the GPU."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.captures.nsys_file import NsysFile
from support.cli import run
from support.golden import Golden

import nvprof_kit
from nvprof_kit._analysis.hardware import DTYPES, known_gpus, parse_peak, peaks_of
from nvprof_kit._trace.flops_file import flops_beside, flops_of_rank, read_flops
from nvprof_kit.errors import CaptureError, UsageError

TESTS = Path(__file__).parents[3]
ONE = {"bf16": 1e9, "fp32": 0.5e9}
"""A GPU of one operation a nanosecond in bf16, and a half in fp32."""


def counts(path, ranges, operators, unknown=(), **more):
    """A file of counts: of ranges layer, phase, the range around it and calls; of operators range, type of number,
    operations and perhaps bytes.
    """
    said = {"format": "nvprof_kit flops", "version": 3, "torch": "2.13.0", "gpu": "", "rank": 0, "steps": 1}
    said |= {
        "ranges": [dict(zip(("layer", "phase", "inside", "calls"), row, strict=True), fused_bytes=0) for row in ranges],
        "operators": [
            {"range": at, "name": "aten::x", "dtype": dtype, "runs": 1, "flops": flops, "least_flops": flops}
            | {"bytes": 2 * sum(traffic), "dram_bytes": sum(traffic)}
            for at, dtype, flops, *traffic in operators
        ],
        "unknown": [{"range": at, "name": name, "runs": 1} for at, name in unknown],
    }
    path.write_text(json.dumps(said | more))
    return path


TRAINING = [
    ("m", "forward", None, 1),
    ("m.a", "forward", 0, 1),
    ("m", "backward", None, 1),
    ("m.a", "recompute", 2, 1),
    ("m.a", "backward", 2, 1),
    ("(none)", "optimizer", None, 1),
]


def training(path: Path, *, steps: int = 2, gpu: str = "Test GPU") -> Path:
    """Steps of 1000 ns: m holds m.a, forward and backward, and its recompute inside m's backward; the optimizer.

    Kernels of a step: m.a forward 100, m forward 20, m.a recompute 100, m.a backward 200, optimizer 50.
    """
    file = NsysFile(path)
    file.gpu = gpu
    for number in range(steps):
        at = 1000 * number
        file.range_(f"step {number}", at, at + 1000, category="step", payload=number)
        file.range_("m", at + 0, at + 200, category="forward")
        file.range_("m.a", at + 10, at + 100, category="forward")
        file.kernel(at + 110, at + 210, launched=(at + 20, at + 30))
        file.kernel(at + 220, at + 240, launched=(at + 110, at + 120), name="vectorized_elementwise_kernel")
        file.range_("m backward", at + 300, at + 600, category="backward")
        file.range_("m.a recompute", at + 310, at + 400, category="recompute")
        file.kernel(at + 400, at + 500, launched=(at + 320, at + 330))
        file.range_("m.a backward", at + 410, at + 500, category="backward")
        file.kernel(at + 500, at + 700, launched=(at + 420, at + 430))
        file.range_("optimizer", at + 700, at + 800, category="phase")
        file.kernel(at + 800, at + 850, launched=(at + 710, at + 720), name="multi_tensor_apply")
    return file.write()


def table(result: nvprof_kit.Flops) -> dict[tuple[str, str], dict[Any, Any]]:
    return {(row["layer"], row["phase"]): row for row in result.rows.to_dict("records")}


def joined(folder, operators, options=ONE, **more):
    capture = training(folder / "run.sqlite")
    file = counts(folder / "run.flops.json", TRAINING, operators, **more)
    return nvprof_kit.open(capture).flops(file, peak=options)


def test_the_least_time_is_the_longer_of_operations_and_traffic(tmp_path):
    capture = training(tmp_path / "run.sqlite", gpu="NVIDIA H200")  # 4.8e3 bytes a ns, 989.4e3 operations in bf16
    operators = [
        (1, "bf16", 989_400 * 80, 4800),  # m.a forward: 80 ns of operations
        (1, "", 0, 4800 * 4),  # and 4 ns of traffic: a norm
        (0, "", 0, 4800 * 15),  # m forward
        (4, "bf16", 989_400 * 10, 4800 * 150),  # m.a backward: limited by memory
        (5, "", 0, 4800 * 45),  # the optimizer
        (3, "int32", 989_400, 4800),  # m.a recompute: of an unknown peak
    ]
    rows = table(nvprof_kit.open(capture).flops(counts(tmp_path / "run.flops.json", TRAINING, operators)))
    limits = {key: (row["limit_ns"], row["of_limit"], row["bound"]) for key, row in rows.items()}
    assert limits["m.a", "forward"] == pytest.approx((2 * 84, 0.84, "compute"))
    assert limits["m", "forward"] == pytest.approx((2 * 99, 99 / 120, "compute"))  # with m.a
    assert limits["m.a", "backward"] == pytest.approx((2 * 150, 0.75, "memory"))
    assert limits["(none)", "optimizer"] == pytest.approx((2 * 45, 0.9, "memory"))
    assert math.isnan(limits["m.a", "recompute"][0]) and limits["m.a", "recompute"][2] == ""
    assert rows["m.a", "forward"]["bytes"] == 2 * 2 * 5 * 4800


def test_where_the_count_has_other_layers_no_row_has_a_rate(tmp_path, file):
    file.range_("forward", 0, 500, category="phase")
    file.range_("aten::mm", 10, 100, category="forward")
    for at in (20, 300):
        file.kernel(at + 100, at + 200, launched=(at, at + 10))
    counted = counts(tmp_path / "run.flops.json", [("(none)", "forward", None, 1)], [(0, "bf16", 50)])
    result = nvprof_kit.open(file.write()).flops(counted, peak=ONE)
    assert math.isnan(table(result)["(none)", "forward"]["mfu"]) and result.totals.flops == 50
    assert "the count has none of the capture's layers" in str(result)


MODELS = sorted(path.name.partition(".")[0] for path in (TESTS / "data" / "limits").glob("*.sqlite.xz"))


@pytest.mark.parametrize("model", [*MODELS, "../ncu/limits/run"])
def test_no_layer_of_ten_models_is_faster_than_its_limit(model):
    """Dense, MoE, SSM, ViT, diffusion, encoder-decoder, LoRA, checkpointed, compiled and decode on an H100; and a Llama
    of 7B shape and five models beside each other on an H200.
    """
    result = nvprof_kit.open(TESTS / "data" / "limits" / f"{model}.sqlite.xz").flops()
    rows = result.rows
    assert "of limit" in str(result), "also of equal blocks that are one row"
    long = rows[rows["gpu_busy_ns"] > 20_000 * rows["calls"].clip(lower=1)]
    assert len(MODELS) == 10 and len(long) > 10 and long["limit_ns"].notna().all()
    assert long["of_limit"].max() < 1.0 and not rows["unknown"].any()
    assert (long["fused_limit_ns"] / long["gpu_busy_ns"]).max() < 1.0
    ran = rows[(rows["calls"] > 0) | (rows["layer"] == "(none)")]
    is_less = ran["fused_limit_ns"] <= ran["limit_ns"] * (1 + 1e-9)
    assert ran["fused_limit_ns"].notna().all() and (model == "compiled" or is_less.all())


def test_layers_have_the_limit_where_counts_lie_beside(tmp_path):
    source = TESTS / "data" / "limits" / "llama.sqlite.xz"
    shutil.copy(source, tmp_path / "run.sqlite.xz")
    capture, keys = nvprof_kit.open(source), ["layer", "phase"]
    rows = capture.layers().to_frame().set_index(keys)
    expected = capture.flops().rows.set_index(keys).rename(columns={"flops": "flop"})
    columns = ["flop", "bytes", "limit_ns", "of_limit"]
    common = rows.index.intersection(expected.index)
    assert len(common) == len(expected) > 40
    # near the truth where kernels are good: large products, and AdamW
    assert rows["of_limit"]["model.layers.0.mlp", "forward"] == pytest.approx(0.79, abs=0.01)
    assert rows["of_limit"]["(none)", "optimizer"] == pytest.approx(0.74, abs=0.01)
    pd.testing.assert_frame_equal(rows.loc[common, columns], expected.loc[common, columns])
    printed = str(capture.layers())
    assert "of limit" in printed and "80.3 %" in printed
    assert not set(columns) & set(capture.layers(by="step").to_frame())
    without = nvprof_kit.open(tmp_path / "run.sqlite.xz").layers()
    assert not set(columns) & set(without.to_frame()) and "of limit" not in str(without)
    (tmp_path / "run.flops.json").write_text("{")
    damaged = nvprof_kit.open(tmp_path / "run.sqlite.xz").layers()
    assert any("no limits: " in warning and "not JSON" in warning for warning in damaged.warnings)
    pd.testing.assert_frame_equal(damaged.to_frame(), without.to_frame())


def test_advise_names_the_layers_that_are_far_from_their_limit(tmp_path):
    source = TESTS / "data" / "limits" / "llama.sqlite.xz"
    found = [finding for finding in nvprof_kit.open(source).advise().findings if finding.rule == "far-from-limit"]
    assert [(finding.layer, finding.phase) for finding in found] == [("model.layers.0.self_attn", "backward")]
    rows = table(nvprof_kit.open(source).flops())
    attention = [rows[f"model.layers.{number}.self_attn", "backward"] for number in range(4)]
    excess = sum(row["gpu_busy_ns"] - row["limit_ns"] for row in attention) / 3
    assert found[0].saves_ns == pytest.approx(excess, abs=1) and "in 4 of them" in found[0].evidence
    assert "44.0 %), limited by compute; their kernels: nvjet_sm90" in found[0].evidence
    alone = shutil.copy(source, tmp_path / "run.sqlite.xz")
    assert all(finding.rule != "far-from-limit" for finding in nvprof_kit.open(alone).advise().findings)
    experts = nvprof_kit.open(TESTS / "data" / "limits" / "qwen3moe.sqlite.xz").advise()
    places = [finding.layer for finding in experts.findings if finding.rule == "far-from-limit"]
    assert places == ["model.layers.0.self_attn", "model.layers.0.mlp"], "of nested layers the innermost"


def test_diff_tells_more_work_from_less_efficiency(tmp_path):
    base, new = (nvprof_kit.open(TESTS / "data" / "limits" / f"llama{name}.sqlite.xz") for name in ("", "-ckpt"))
    result = base.diff(new)
    step = result.rows.query("level == 'step'").iloc[0]
    recompute = result.rows.query("level == 'phase' and phase == 'recompute'").iloc[0]
    # checkpointing computes the forward of the blocks again
    assert (recompute["verdict"], recompute["cause"], recompute["base_flops"]) == ("new", "work", 0)
    assert recompute["work_ns"] == pytest.approx(recompute["change_ns"])
    for side, capture in (("base", base), ("new", new)):
        counted = json.loads(Path(capture.flops().counts).read_text())
        least = sum(row["least_flops"] for row in counted["operators"]) / counted["steps"]
        assert step[f"{side}_flops"] == pytest.approx(least)
    assert "13.6 → 16.21 TFLOP (+19.2 %)" in str(result) and "new, by work" in str(result)
    classes = result.rows[result.rows["level"].isin(("class", "layer class"))]
    assert classes[["base_flops", "new_bytes", "work_ns"]].isna().all(axis=None) and not classes["cause"].any()
    # the same counts beside both: what changed is efficiency, also where the layer computes nothing that was counted
    for name in ("llama", "llama-ckpt"):
        shutil.copy(TESTS / "data" / "limits" / f"{name}.sqlite.xz", tmp_path)
        shutil.copy(TESTS / "data" / "limits" / "llama.flops.json", tmp_path / f"{name}.flops.json")
    alike = nvprof_kit.open(tmp_path / "llama.sqlite.xz").diff(tmp_path / "llama-ckpt.sqlite.xz")
    layers = alike.rows.query("level == 'layer' and phase != 'recompute'")
    assert (layers["work_ns"].dropna().abs() < 1e-3).all() and layers["work_ns"].notna().sum() > 30
    assert not (alike.rows["cause"] == "work").any()


def test_diff_measures_the_change_of_work_at_the_efficiency_of_base(tmp_path):
    sides = []
    for name, flops in (("base", 40), ("new", 60)):
        folder = tmp_path / name
        folder.mkdir()
        training(folder / "run.sqlite", steps=8, gpu="NVIDIA H200")
        work = [(1, "bf16", 989_400 * flops, 0), (4, "bf16", 989_400 * 100, 0)]
        counts(folder / "run.flops.json", TRAINING, work)
        sides.append(nvprof_kit.open(folder / "run.sqlite"))
    rows = sides[0].diff(sides[1]).rows.query("level == 'layer'").set_index(["layer", "phase"])
    # half more work in the same 100 ns: +50 of work, -50 of efficiency
    assert rows.loc["m.a", "forward"][["change_ns", "work_ns"]].tolist() == [0, pytest.approx(50)]
    assert rows.loc["m.a", "backward"][["change_ns", "work_ns"]].tolist() == [0, 0]
    assert math.isnan(rows.loc["m", "forward"]["work_ns"])
    (tmp_path / "new" / "run.flops.json").write_text("{")
    damaged = sides[0].diff(tmp_path / "new" / "run.sqlite")
    assert any("work is not compared: " in warning for warning in damaged.warnings)
    assert "work_ns" not in damaged.rows
    (tmp_path / "new" / "run.flops.json").unlink()
    assert "work_ns" not in sides[0].diff(tmp_path / "new" / "run.sqlite").rows


def test_ncu_plan_prefers_the_kernels_with_most_time_above_their_limit(tmp_path):
    source = TESTS / "data" / "limits" / "llama.sqlite.xz"
    alone = nvprof_kit.open(shutil.copy(source, tmp_path / "run.sqlite.xz")).ncu_plan()
    preferred = nvprof_kit.open(source).ncu_plan()
    assert alone.above_limit_ns is None and "above_limit_ns" not in alone.rows and "least time" not in str(alone)
    # the products take most time, but are nearer to their limit than others
    assert "nvjet" in alone.rows["kernel"][0] and "SoftMaxForward" in preferred.rows["kernel"][0]
    rows, above_limit_ns = preferred.rows, preferred.above_limit_ns
    assert rows["above_limit_ns"].is_monotonic_decreasing and (rows["above_limit_ns"] < rows["gpu_ns"]).all()
    assert above_limit_ns and rows["above_limit_ns"].sum() / above_limit_ns == pytest.approx(preferred.covered)
    assert "above the least time for the counted work" in str(preferred) and preferred.gpu_ns == alone.gpu_ns
    mlp = nvprof_kit.open(source).ncu_plan(layer="model.layers.0.mlp", share=0.5)
    limits = table(nvprof_kit.open(source).flops())
    limit_ns = sum(limits["model.layers.0.mlp", phase]["limit_ns"] for phase in ("forward", "backward"))
    assert mlp.above_limit_ns == pytest.approx(mlp.gpu_ns - limit_ns, rel=1e-6)


@pytest.mark.parametrize(
    ("counted", "least"),
    [([(1, "bf16", 50), (3, "bf16", 50)], True), ([(1, "bf16", 50), (3, "bf16", 50), (4, "bf16", 50)], False)],
)
def test_a_step_of_which_not_all_is_counted_says_at_least(tmp_path, counted, least):
    """The kernels of m.a's backward are matrix products of which no operation was counted, or all are counted."""
    result = joined(tmp_path, counted)
    notes = {key: row["note"] for key, row in table(result).items() if row["note"]}
    assert set(notes) == ({("m.a", "backward")} if least else set())
    assert not least or "100% of its own time is in matrix kernels that were not counted" in notes["m.a", "backward"]
    uncounted = [warning for warning in result.warnings if "was not counted" in warning]
    assert ("a" in result.uncounted) == least
    assert ("at least" in str(result).partition("layer")[0]) == least
    assert (["(a " in warning for warning in uncounted] == [True]) == least
    # of unknown work, it has been said already
    rows = table(joined(tmp_path, counted, unknown=[(4, "my::op")]))
    assert "not counted" not in rows["m.a", "backward"]["note"]


def test_a_range_that_the_capture_lacks_goes_with_the_one_around_it(tmp_path):
    capture = training(tmp_path / "run.sqlite")
    inside = [*TRAINING, ("m.a.b", "forward", 1, 3), ("lost", "forward", None, 1)]
    file = counts(tmp_path / "run.flops.json", inside, [(6, "bf16", 60), (7, "bf16", 20)])
    result = nvprof_kit.open(capture).flops(file, peak=ONE)
    # compiled into m.a, it is m.a's: 2 x 60 operations, whatever its own calls; a step is 60
    assert table(result)["m.a", "forward"]["flops"] == 120 and result.totals.flops == 60
    assert "not counted" not in table(result)["m.a", "forward"]["note"]
    assert any("25.0 % of the operations counted" in warning for warning in result.warnings)  # 20 of 80


def test_figures_go_by_the_call(tmp_path):
    capture = training(tmp_path / "run.sqlite")
    ranges = [(layer, phase, inside, 4) for layer, phase, inside, _ in TRAINING]
    ranges[1] = ("m.a", "forward", 0, 8)
    file = counts(tmp_path / "run.flops.json", ranges, [(1, "bf16", 800)], steps=2)
    result = nvprof_kit.open(capture).flops(file, peak=ONE)
    assert table(result)["m.a", "forward"]["flops"] == 800 * 2 / 8
    assert any("0.25 to 0.5 times as often" in warning for warning in result.warnings)


def test_a_type_without_a_peak_and_a_gpu_without_peaks(tmp_path):
    rows = table(joined(tmp_path, [(1, "bf16", 10), (1, "complex64", 10)]))
    assert math.isnan(rows["m.a", "forward"]["mfu"]) and "no peak for complex64" in rows["m.a", "forward"]["note"]
    assert rows["m.a", "forward"]["tflops_per_s"] == 40 / 200 / 1000
    result = joined(tmp_path, [(1, "bf16", 10)], {})
    assert result.peaks is None and result.rows["mfu"].isna().all()
    assert any("no peak is known of Test GPU" in warning and "--peak bf16=" in warning for warning in result.warnings)


def test_the_peak_is_that_of_the_captures_gpu(tmp_path):
    capture = training(tmp_path / "run.sqlite", gpu="NVIDIA H200")
    file = counts(tmp_path / "run.flops.json", TRAINING, [(1, "bf16", 989_400)], gpu="NVIDIA A100-SXM4-80GB")
    result = nvprof_kit.open(capture).flops(file)
    assert result.peaks is not None and result.peaks.name == "H200 SXM"
    # 989,400 operations a call take 1 ns at 989.4e12 a second, and took 100
    assert table(result)["m.a", "forward"]["mfu"] == pytest.approx(0.01)
    assert any("counted on NVIDIA A100-SXM4-80GB, captured on NVIDIA H200" in warning for warning in result.warnings)


def test_gpus_by_the_name_that_cuda_gives_them():
    names = {
        "NVIDIA H200": "H200 SXM",
        "NVIDIA H100 80GB HBM3": "H100 SXM",
        "NVIDIA H100 PCIe": "H100 PCIe",
        "A100-PCIE-40GB": "A100 40 GB",
        "NVIDIA A100 80GB PCIe": "A100 80 GB PCIe",
        "NVIDIA GeForce RTX 4090": "RTX 4090",
        "NVIDIA H20": "H20 96 GB",
        "NVIDIA GH200 480GB": "GH200 96 GB",
        "NVIDIA GH200 144G HBM3e": "GH200 144 GB",
        "NVIDIA B300 SXM6 AC": "B300",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000 Blackwell Server",
        "AMD Instinct MI300X VF": "MI300X",
    }
    for gpu, name in names.items():
        peaks = peaks_of([gpu, gpu])
        assert peaks and peaks.name == name
        assert peaks_of([gpu, "NVIDIA Tesla M40"]) is None  # two kinds
    others = "H200 NVL, L40, A10G, GeForce RTX 4090 Laptop GPU, RTX PRO 6000 Blackwell Max-Q Workstation Edition"
    for gpu in (*others.split(", "), "H200 MIG 1g.18gb"):
        assert peaks_of([f"NVIDIA {gpu}"]) is None, gpu


FP4_TIMES = {"B300": 3.1, "GB300": 3, "RTX 5090": 4}
"""Where FP4 is more than twice as fast as FP8: Blackwell Ultra, and GeForce, whose FP8 that sums in fp32 is halved."""


def test_every_peak_has_a_source_and_is_dense():
    for match, peaks in known_gpus():
        assert peaks.source and match.pattern.startswith("^") and 1e11 < peaks.bandwidth < 1e13
        assert set(peaks.flops) <= set(DTYPES)
        # half the width, twice the rate, on every tensor core: a figure with sparsity among them would stand out
        fp4_times = FP4_TIMES.get(peaks.name, 2)
        for wide, narrow, times in (("tf32", "bf16", 2), ("bf16", "fp8", 2), ("fp8", "fp4", fp4_times)):
            if wide in peaks.flops and narrow in peaks.flops:
                assert peaks.flops[narrow] / peaks.flops[wide] == pytest.approx(times, rel=0.05), (peaks.name, narrow)
        assert "not checked" not in peaks.source
        assert peaks.flops.get("bf16", peaks.flops["fp16"]) == peaks.flops["fp16"]


def test_peaks_that_the_user_gives():
    own = dict([parse_peak("bf16=989e12")])
    found = peaks_of(["NVIDIA H200"], own)
    assert found is not None and found.flops["bf16"] == 989e12 and found.flops["fp8"] == 1978.9e12
    assert peaks_of(["Something new"], own) is not None
    for wrong in ("bf16", "bf16=", "bf16=fast", "bf16=-1", "bf16=nan", "bf16=inf", "bf16=989", "half=1e12", ""):
        with pytest.raises(UsageError, match="--peak"):
            parse_peak(wrong)


def test_peaks_measured_beside_a_capture_go_before_the_table(tmp_path):
    for name in ("decode.sqlite.xz", "decode.flops.json"):
        (tmp_path / name).symlink_to(TESTS / "data" / "limits" / name)
    capture, peaks = tmp_path / "decode.sqlite.xz", tmp_path / "gpu_peaks.json"
    measured = {"gpu": "NVIDIA H100 80GB HBM3", "flops": {"bf16": 989.4e12 / 2}, "bandwidth": 3.35e12 / 2}
    before = nvprof_kit.open(capture).flops()
    peaks.write_text(json.dumps(measured))
    after = nvprof_kit.open(capture)
    assert after.flops().rows["limit_ns"].tolist() == pytest.approx((2 * before.rows["limit_ns"]).tolist(), nan_ok=True)
    assert "of_limit" in after.layers().rows and "peaks measured on this machine" in str(after.layers())
    assert "Peaks measured on this machine: bf16, memory" in str(after.flops())
    with pytest.raises(UsageError, match=r"gpu_peaks\.json"):
        after.layers().save(tmp_path / "gpu_peaks.json")
    assert after.flops(peak={"bf16": 1e15}).peaks.flops["bf16"] == 1e15, "the user's word goes before all"
    peaks.write_text(json.dumps({**measured, "gpu": "NVIDIA L4"}))
    assert nvprof_kit.open(capture).flops().peaks == before.peaks, "that is another GPU"
    for damaged in ("", "[]", json.dumps({**measured, "bandwidth": -1}), json.dumps({"gpu": "NVIDIA H100 80GB HBM3"})):
        peaks.write_text(damaged)
        with pytest.raises(CaptureError, match=r"gpu_peaks\.json.*measure again"):
            nvprof_kit.open(capture).flops()
        assert any("gpu_peaks.json" in str(warning) for warning in nvprof_kit.open(capture).layers().warnings)


def test_the_file_beside_a_capture(tmp_path):
    (tmp_path / "run.flops.json").touch()
    (tmp_path / "train.rank3.flops.json").touch()
    for name in ("run.sqlite", "run.sqlite.xz", "run.nsys-rep", "run.json.gz", "run.json", "run.2.sqlite"):
        assert flops_beside(tmp_path / name).name == "run.flops.json"
    assert flops_beside(tmp_path / "run-host-rank3-20250101-000000.sqlite").name == "train.rank3.flops.json"
    with pytest.raises(CaptureError, match=r"gone\.sqlite: no such file"):
        flops_beside(tmp_path / "gone.sqlite")
    (tmp_path / "other.sqlite").touch()
    with pytest.raises(CaptureError, match=r"no other\.flops\.json next to it.*count_flops.*--counts"):
        flops_beside(tmp_path / "other.sqlite")
    named = flops_of_rank(tmp_path / "train.flops.json", "run-host-rank3-x.sqlite")
    assert named.name == "train.rank3.flops.json"
    assert flops_of_rank(tmp_path / "run.flops.json", "run-host-rank3-x.sqlite").name == "run.flops.json"


def real_flops(name: str, golden: Golden) -> nvprof_kit.Flops:
    """What a capture of the H200 and its operations give, compared with the golden table."""
    capture = TESTS / "data" / "flops" / f"{name}.sqlite.xz"
    result = nvprof_kit.open(capture).flops()
    golden(f"flops/{name}.csv", result.rows.to_csv(index=False))
    return result


def test_a_real_capture_and_its_operations(golden):
    """A Llama of 12 layers on an H200, bf16, 8 sequences of 2048 tokens: `tests/gpu/programs/train.py --flops`."""
    result = real_flops("llama12-2024.2", golden)
    # 4 x 2048^2 and 3 x 2048 x 5632 weights a layer, 2048 x 32000 of the head: six operations a weight and token; the
    # attention's two products of 2048 x 2048 x 2048 a sequence and layer, and five in flash attention's backward
    weights, attention = 12 * (4 * 2048**2 + 3 * 2048 * 5632) + 2048 * 32000, 12 * 8 * 2 * 2048**3
    rotary = 2 * 32 * 2048  # one product, in fp32
    assert result.totals.flops == 6 * weights * 8 * 2048 + 7 * attention + rotary
    assert result.totals.mfu == result.totals.hfu and 0.39 < result.totals.mfu < 0.41
    assert not result.rows["note"].any()


def test_a_real_capture_with_checkpointing(golden):
    """4 layers, 4 sequences of 512 tokens, every block run again in backward: HFU beside MFU, each layer once a step.

    A block is run again until all is there that its backward needs: its down_proj is not.
    """
    result = real_flops("checkpoint-2024.2", golden)
    width, inner, tokens = 1024, 2816, 4 * 512
    weights, attention = 4 * (4 * width**2 + 3 * width * inner) + width * 32000, 4 * 4 * 2 * 512**2 * width
    rotary = 2 * 32 * 512
    again = 2 * 4 * (4 * width**2 + 2 * width * inner) * tokens + 2 * attention
    assert result.totals.model_flops == 6 * weights * tokens + 7 * attention + rotary
    assert result.totals.flops == result.totals.model_flops + again
    assert result.totals.hfu > 1.16 * result.totals.mfu
    held = result.rows["layer"].isin(["LlamaForCausalLM", "model"]) & (result.rows["phase"] == "recompute")
    assert set(result.rows["calls"][~held]) == {2}  # two steps
    assert result.rows["calls"][held].tolist() == [0, 0]  # only its blocks are run again: what they do is in its row
    assert result.rows["flops"][held].tolist() == [2 * again, 2 * again]
    assert result.rows["mfu"][held].tolist() == [0, 0]
    # the last module of a block, inside which the block is run again, is as fast as its forward
    mfu = result.rows.set_index(["layer", "phase"])["mfu"]
    assert mfu["model.layers.0.mlp", "backward"] > 0.7 * mfu["model.layers.0.mlp", "forward"]
    assert not result.rows["note"].any()


GOOD = {"format": "nvprof_kit flops", "version": 3, "steps": 1, "ranges": [], "operators": [], "unknown": []}
RANGE = {"layer": "m", "phase": "forward", "inside": None, "calls": 1, "fused_bytes": 0}
HALF = {"range": 0, "name": "x", "dtype": "bf16", "runs": 1, "flops": 1.5}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not JSON"),
        ("\x00\x01", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a file of nvprof_kit.count_flops"),
        ({"format": "other"}, "not a file of nvprof_kit.count_flops"),
        ({"version": 4}, "version 4"),
        ({"operators": None}, "damaged"),
        ({"ranges": [RANGE | {"inside": 0}]}, "does not come before it"),
        ({"ranges": [RANGE | {"calls": -1}]}, "damaged"),
        ({"ranges": [{}]}, "damaged: KeyError"),
        ({"unknown": [{"range": 0, "name": "x", "runs": 1}]}, "there is no range 0"),
        ({"ranges": [RANGE], "operators": [HALF]}, "is not an integer >= 0"),
        ({"steps": True}, "steps = True is not an integer >= 0"),
        ({"ranges": [RANGE | {"layer": None}]}, "layer = None is not a text"),
        ({"unknown": "none"}, "unknown is not a list"),
        ({"ranges": [RANGE] + [RANGE | {"inside": n} for n in range(600)]}, "more than 500"),
    ],
)
def test_a_file_that_is_none_is_one_clear_line(tmp_path, content, says):
    file = tmp_path / "run.flops.json"
    file.write_text(content if isinstance(content, str) else json.dumps(GOOD | content))
    with pytest.raises(CaptureError, match=says) as error:
        read_flops(file)
    assert "\n" not in str(error.value) and str(file) in str(error.value)


def test_the_verb(tmp_path, capsys):
    capture = training(tmp_path / "run.sqlite")
    counts(tmp_path / "run.flops.json", TRAINING, [(1, "bf16", 150), (3, "bf16", 50), (4, "bf16", 80)])
    assert run("flops", capture, "--peak", "bf16=1e9") == 0
    shown = capsys.readouterr().out
    assert "150.0 % " in shown and "[1] above the peak" in shown and "HFU" in shown
    assert run("flops", capture, "--depth", 1) == 0 and "m.a " not in capsys.readouterr().out


def test_the_page_has_it_on_top_where_the_counts_lie_beside(tmp_path, capsys):
    capture, page = training(tmp_path / "run.sqlite", gpu="NVIDIA H200"), tmp_path / "page.html"
    for counted in (False, True):
        if counted:  # a step's 247,350,000 operations take 250 ns of 1000 at 989.4e12 a second
            counts(tmp_path / "run.flops.json", TRAINING, [(1, "bf16", 247_350_000)])
        assert run("report", capture, "-o", page) == 0
        assert (">MFU<" in page.read_text()) == counted == (">MFU forward<" in page.read_text())
    # m.a takes 100 ns and m 120 of them: more than the peak
    shown = page.read_text()
    assert "25.0 %" in shown and "250.0 % (above the peak)" in shown and "208.3 % (above the peak)" in shown
    counts(tmp_path / "run.flops.json", TRAINING, [(1, "bf16", 989_400 * 10, 4800 * 40)])  # 40 ns of traffic of 100
    assert run("report", capture, "-o", page) == 0
    assert ">of limit forward<" in page.read_text() and "40.0 %" in page.read_text()
    (tmp_path / "run.flops.json").write_text("{")
    assert run("report", capture, "-o", page) == 0
    assert "the page has no MFU" in capsys.readouterr().err and ">MFU<" not in page.read_text()


PATHS = ("a", "a.b", "a.b.c", "a.d", "e")
PHASES = ("forward", "backward", "recompute")


@pytest.fixture(scope="module")
def capture_of_paths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each layer of `PATHS` once in each phase, a kernel in each."""
    file, at = NsysFile(tmp_path_factory.mktemp("paths") / "run.sqlite"), 0

    def open_range(path: str, phase: str) -> None:
        nonlocal at
        begin, at = at, at + 10
        file.kernel(at, at + 5, launched=(at, at + 1))
        for child in PATHS:
            if child.rpartition(".")[0] == path:
                open_range(child, phase)
        at += 10
        file.range_(path if phase == "forward" else f"{path} {phase}", begin, at, category=phase)

    for phase in PHASES:
        for path in ("a", "e"):
            open_range(path, phase)
    return file.write()


@given(
    st.lists(st.tuples(st.sampled_from(PATHS), st.sampled_from(PHASES), st.integers(0, 1000))),
    st.permutations([(path, phase) for path in PATHS for phase in PHASES]),
)
def test_what_is_nested_is_counted_once_wherever_it_lies(capture_of_paths, work, order):
    """Ranges come in any order, so also at the top or in another's; forward lies in forward, as in the model."""
    ranges = []
    for path, phase in sorted(order, key=lambda key: key[0].count(".") if key[1] == "forward" else 9):
        inside = [n for n, range_ in enumerate(ranges) if range_[:2] == (path.rpartition(".")[0], "forward")]
        around = inside[0] if phase == "forward" and inside else len(ranges) - 1 if phase != "forward" else None
        ranges.append((path, phase, around, 1))
    place = {range_[:2]: number for number, range_ in enumerate(ranges)}
    file = capture_of_paths.with_name("run.flops.json")
    counts(file, ranges, [(place[path, phase], "bf16", flops) for path, phase, flops in work], steps=0)
    rows = nvprof_kit.open(capture_of_paths).flops(file, peak=ONE).rows
    for path, phase, flops, model in rows[["layer", "phase", "flops", "model_flops"]].itertuples(index=False):
        inside_of = [row for row in work if row[1] == phase and f"{row[0]}.".startswith(f"{path}.")]
        assert flops == sum(row[2] for row in inside_of)
        assert model <= flops and (phase != "recompute" or model == 0)


def test_fused_limit_is_the_traffic_of_the_layer_as_one_kernel(tmp_path):
    capture = training(tmp_path / "run.sqlite", gpu="NVIDIA H200")
    operators = [(1, "bf16", 989_400 * 30, 4800 * 20), (1, "", 0, 4800 * 50), (0, "", 0, 4800 * 15), (5, "", 0, 480)]
    file = counts(tmp_path / "run.flops.json", TRAINING, operators)
    said = json.loads(file.read_text())
    for row, fused in zip(said["ranges"], [90, 40, 9, 9, 9, 1000], strict=True):
        row["fused_bytes"] = 4800 * fused
    file.write_text(json.dumps(said))
    result = nvprof_kit.open(capture).flops()
    limits = {key: (row["limit_ns"] / 2, row["fused_limit_ns"] / 2) for key, row in table(result).items()}
    assert limits["m.a", "forward"] == pytest.approx((80, 40))  # 40 ns of traffic, 30 of operations
    assert limits["m", "forward"] == pytest.approx((95, 85))  # no more than its operators need
    assert limits["(none)", "optimizer"] == pytest.approx((0.1, 0.1))
    missing = result.rows["layer"][result.rows["fused_limit_ns"].isna()].tolist()
    assert missing == ["m"] and math.isnan(limits["m", "recompute"][1]), "only m.a ran in that phase"
