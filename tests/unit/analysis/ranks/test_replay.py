"""The graph of a job replayed: unchanged it takes as long, without its fault it takes what the same job took."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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
