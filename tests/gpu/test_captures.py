"""Captures taken now: every number of their tables equals an independent computation, and layers hold the work."""

import json
import sys
from pathlib import Path

import pytest
from support.brute_force.layers import BruteForce
from support.cli import NVPROF_KIT
from support.gpu import PROGRAMS, Profiled, need, run

import nvprof_kit

NUMBERS = ["calls", "gpu_ops", "gpu_self_ns", "gpu_total_ns", "gpu_busy_ns", "cpu_ns"]
SMALL = ("--layers", "2", "--width", "512", "--vocabulary", "4096", "--steps", "2")


def check(capture: Path) -> None:
    """The table against brute force; all of forward and backward but a fill kernel per step is in a layer."""
    result = nvprof_kit.open(capture).layers(steps="all")
    parent = dict(zip(result.tree["layer"], result.tree["parent"], strict=True))
    truth = BruteForce(capture).table(parent=parent)
    ours = {(row["layer"], row["phase"]): row for row in result.rows.to_dict("records")}
    assert set(ours) == {key for key, row in truth.items() if row["calls"] or row["gpu_total_ns"]}
    for key, row in ours.items():
        assert {name: row[name] for name in NUMBERS} == {name: truth[key][name] for name in NUMBERS}, key
    loop = result.rows[result.rows["phase"].isin(["forward", "backward", "recompute"])]
    outside = loop[loop["layer"] == "(none)"]
    assert loop["gpu_self_ns"].sum() > 0
    assert outside.loc[outside["phase"] != "backward", "gpu_ops"].sum() == 0
    assert outside["gpu_ops"].sum() <= result.summary.all_steps


@pytest.mark.parametrize("model", ["llama", "gpt2", "encoder"])
def test_a_training_step(model: str, profiled: Profiled) -> None:
    check(profiled("train.py", model, *SMALL))


@pytest.mark.parametrize(
    "variant", ["checkpoint", "checkpoint-inside", "graph", "compile-blocks", "compile-model-parts", "generate"]
)
def test_the_ways_in_which_people_train(variant: str, profiled: Profiled) -> None:
    check(profiled("variants.py", variant))


def test_the_reports_of_two_processes_are_compared(tmp_path: Path) -> None:
    need("nsys")
    reports = [tmp_path / f"run.rank{rank}.nsys-rep" for rank in range(2)]
    for rank, report in enumerate(reports):
        run(*NVPROF_KIT, "profile", "--export", "none", "-o", report.with_suffix(""),
            "-x", "--capture-range=cudaProfilerApi", "--",
            sys.executable, PROGRAMS / "train.py", "encoder", *SMALL, RANK=str(rank), WORLD_SIZE="2")  # fmt: skip
    run(*NVPROF_KIT, "ranks", *reports, "-o", tmp_path / "job.json")
    answer = json.loads((tmp_path / "job.json").read_text())
    assert {row["rank"] for row in answer["layers"]} == {0, 1}


def test_two_kernels_of_our_own(profiled: Profiled) -> None:
    """A kernel a layer, and nothing else on the GPU."""
    rows = nvprof_kit.open(profiled("own_kernel.py")).layers().rows.set_index(["layer", "phase"])
    assert [rows.loc[(f"layers.{index}", "forward"), "gpu_ops"] for index in (0, 1)] == [1, 1]
    assert rows["gpu_ops"].sum() == 2
