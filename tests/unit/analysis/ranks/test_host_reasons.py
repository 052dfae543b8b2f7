"""Why a host is late: garbage collection, data loading, loading of code; told apart from a slow GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile
from support.captures.tiny_ranks import AR, MS

from nvprof_kit import Job, open_job

HELD_UP = 6 * MS


def capture(folder: Path, rank: int, held_up_by: str) -> Path:
    """Five steps of 30 ms of a layer and an all-reduce. The host is held up for 6 ms before it launches the layer."""
    file = NsysFile(folder / f"run.rank{rank}.sqlite", nsys="2024.2")
    late = HELD_UP if held_up_by else 0
    for step in range(5):
        at = step * 30 * MS
        file.range_(f"step {step}", at, at + 29 * MS, category="step", payload=step)
        if held_up_by in ("gc", "data"):
            category = {"gc": "user", "data": "data"}[held_up_by]
            file.range_(held_up_by, at + MS, at + MS + late, category=category)
        file.range_("layers.0", at + MS, at + 8 * MS + late, category="forward")
        begin = at + 2 * MS + late
        file.kernel(begin, begin + 4 * MS, launched=(begin - 100_000, begin - 90_000))
        # rank 1 comes 6 ms later: all all-reduces end at 20 ms of the step
        file.kernel(begin + 4 * MS, at + 20 * MS, launched=(begin, begin + 10_000), name=AR, stream=9)
    file.write()
    return file.path


def job_of(folder: Path, held_up_by: str) -> Job:
    return open_job([capture(folder, 0, ""), capture(folder, 1, held_up_by)], workers=1)


@pytest.mark.parametrize(("held_up_by", "cause"), [("gc", "garbage_collection"), ("data", "data_loading")])
def test_what_held_the_host_up(tmp_path: Path, held_up_by: str, cause: str) -> None:
    job = job_of(tmp_path, held_up_by)
    waits = job.waits().to_frame()
    assert set(waits["late_rank"]) == {1}
    assert waits["wait_ns"].tolist() == [HELD_UP] * 5  # 6 ms later in every step
    assert waits["cause"].tolist()[1:] == [cause] * 4  # the first has no common point before it
    assert (job.verdict.rank, job.verdict.cause) == (1, cause)
    assert 5 * MS < job.verdict.cost_ns_per_step <= HELD_UP


def test_a_host_that_nothing_is_seen_of_is_a_late_host(tmp_path: Path) -> None:
    assert job_of(tmp_path, "something").verdict.cause == "slow_host"
