"""The graph of a job replayed: unchanged it takes as long, without its fault it takes what the same job took."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support.captures.synthetic_job import Fault, SyntheticJob, play, write_maps

from nvprof_kit import open_job
from nvprof_kit.errors import UsageError


def mean_step(job: SyntheticJob) -> float:
    ended = play(job).ended.max(axis=1)[job.per_step - 1 :: job.per_step]
    return float((ended[-1] - ended[0]) / (job.steps - 1))


@pytest.mark.parametrize(
    ("kind", "changed"),
    [("slow_gpu", "rank 5"), ("slow_layer", "rank 5 in model.layers.2"), ("data_loading", "every data loader")],
)
def test_a_fault_that_is_repaired(kind: str, changed: str, tmp_path: Path) -> None:
    job = SyntheticJob(3, 3, 6, 20, fault=Fault(kind, rank=5, layer=2), seed=3)
    write_maps(job, tmp_path, 9)
    table = open_job(tmp_path).what_if().to_frame().set_index("what")
    row = table.loc[changed]
    assert row["replayed_ns"] == pytest.approx(row["measured_ns"], rel=0.02)
    assert row["measured_ns"] == pytest.approx(mean_step(job), rel=0.01)
    # the same job, the same random numbers, and no fault
    assert row["step_ns"] == pytest.approx(mean_step(replace(job, fault=Fault())), rel=0.03)


def test_a_slow_link_that_is_repaired(tmp_path: Path) -> None:
    job = SyntheticJob(4, 3, 6, 20, fault=Fault("slow_link", rank=4), seed=5)
    write_maps(job, tmp_path, 12)
    row = open_job(tmp_path).what_if().to_frame().set_index("what").loc["every transfer"]
    assert row["step_ns"] == pytest.approx(mean_step(replace(job, fault=Fault())), rel=0.03)


def test_a_rank_that_is_not_there(tmp_path: Path) -> None:
    job = SyntheticJob(2, 2, 3, 10)
    write_maps(job, tmp_path, 4)
    with pytest.raises(UsageError, match="no rank 9"):
        open_job(tmp_path).what_if(rank=9)


TESTS = Path(__file__).parents[3]


DATA = TESTS / "data" / "stragglers"


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_what_if", TESTS / "bench" / "compare_what_if.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_replay_agrees_with_a_published_analysis(compare: ModuleType) -> None:
    theirs = json.loads((DATA / "result-ST.json").read_text())
    found = compare.slowdowns(compare.read(DATA / "trace-ST.parquet"))
    # the first step only begins the timeline
    measured = np.mean(list(theirs["step_t_base"].values())[1:])
    assert found["measured"] == pytest.approx(measured, rel=0.001)
    assert found["replayed"] == pytest.approx(found["measured"], rel=0.02)
    # theirs are of all 32 steps
    assert found["slowdown"] == pytest.approx(theirs["blocking_slowdown"], rel=0.05)
    stages = {int(stage): value for stage, value in theirs["blocking_decompose_by_stage"].items()}
    assert found["stage"] == pytest.approx(stages, rel=0.05)
    assert max(found["stage"], key=found["stage"].get) == max(stages, key=stages.__getitem__) == 3
