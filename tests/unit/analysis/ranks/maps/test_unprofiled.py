"""Ranks of which there is a Flight Recorder dump or an inspector's log, and no profile, beside profiles of others."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from nvprof_kit import open_job
from nvprof_kit._api.job import Job
from nvprof_kit.errors import CaptureError

DATA = Path(__file__).parents[4] / "data" / "ranks"
KINETO = DATA / "kineto" / "ddp-layer.rank0.json.xz"


@pytest.fixture(scope="module")
def both_profiled() -> Job:
    return open_job([DATA / "kineto" / f"ddp-layer.rank{rank}.json.xz" for rank in (0, 1)], workers=1)


@pytest.mark.parametrize(
    ("other", "tolerance_ns"), [("flight/ddp-layer.rank1.flight", 120_000), ("inspector/ddp.rank1.log.xz", 120_000)]
)
def test_a_dump_tells_what_a_profile_tells_of_who_came_last(both_profiled: Job, other: str, tolerance_ns: int) -> None:
    job = open_job([KINETO, DATA / other], workers=1)
    found, right = job.waits().to_frame(), both_profiled.waits().to_frame()
    assert found["step"].tolist() == right["step"].tolist()
    for mine, its in zip(found.to_dict("records"), right.to_dict("records"), strict=True):
        if its["wait_ns"] > tolerance_ns:
            assert mine["late_rank"] == its["late_rank"] == 1
            assert abs(mine["wait_ns"] - its["wait_ns"]) <= tolerance_ns
            assert mine["cause"] == "not_profiled"
    assert job.verdict.rank == 1 and job.verdict.cause == "not_profiled"
    assert any("not what it did before" in said for said in job.warnings)


def test_a_profiled_rank_is_late_beside_a_dump() -> None:
    job = open_job([DATA / "flight/ddp-layer.rank0.flight", DATA / "kineto/ddp-layer.rank1.json.xz"], workers=1)
    waits = job.waits().to_frame()
    assert waits[waits["late_rank"] == 1]["wait_ns"].sum() > 100e6
    assert job.verdict.rank is None or job.verdict.rank == 1


def test_dumps_alone_are_matched_by_their_numbers() -> None:
    job = open_job([DATA / "flight" / f"ddp-layer.rank{rank}.flight" for rank in (0, 1)], workers=1)
    waits = job.waits().to_frame()
    assert len(waits) == 127 and set(waits["cause"]) == {"not_profiled"}
    assert job.charges().to_frame()["wait_ns"].sum() == waits["wait_ns"].sum()
    assert job.verdict.rank == 1


def entry(number: int, took_ms: float | None, **said: Any) -> dict[str, Any]:
    sizes = [[1024]]
    return {
        "collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False, "process_group": ("0", "default_pg"),
        "profiling_name": "nccl:all_reduce", "input_sizes": sizes, "input_dtypes": ["Float"], "output_sizes": sizes,
        "output_dtypes": ["Float"], "state": "completed", "time_created_ns": 10**18 + number * 10**6,
        "time_discovered_started_ns": None, "time_discovered_completed_ns": None, "duration_ms": took_ms, **said,
    }  # fmt: skip


def dumps(folder: Path, *ranks: list[dict[str, Any]]) -> Path:
    for rank, entries in enumerate(ranks):
        held = {
            "version": "2.10",
            "pg_config": {"0": {"name": "0", "desc": "x", "ranks": "[0, 1]"}},
            "entries": entries,
        }
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(held, 2))
    return folder


def test_the_shortest_came_last(tmp_path: Path) -> None:
    # rank 1's all-reduces take 1 ms, rank 0's 1 + 2 ms and 1 + 4 ms: it waited 6 ms
    folder = dumps(tmp_path, [entry(1, 3.0), entry(2, 5.0)], [entry(1, 1.0), entry(2, 1.0)])
    waits = open_job(folder, workers=1).waits().to_frame()
    assert waits["late_rank"].tolist() == [1, 1]
    assert waits["wait_ns"].tolist() == [2_000_000, 4_000_000]


def test_what_did_not_end_and_what_was_not_timed_is_said(tmp_path: Path) -> None:
    stuck = entry(2, None, state="scheduled")
    job = open_job(dumps(tmp_path, [entry(1, 3.0), stuck], [entry(1, None), stuck]), workers=1)
    said = "\n".join(job.warnings)
    assert "1 collectives had not ended" in said and "TORCH_NCCL_ENABLE_TIMING=1" in said
    assert not len(job.waits().to_frame())


def test_a_dump_without_a_rank_is_asked_for_it(tmp_path: Path) -> None:
    shutil.copy(DATA / "flight/ddp-layer.rank1.flight", tmp_path / "dump.bin")
    with pytest.raises(CaptureError, match=r"pass --rank dump\.bin=3"):
        open_job([tmp_path / "dump.bin"], workers=1)
    assert open_job([tmp_path / "dump.bin"], ranks={"dump.bin": 1}, workers=1).ranks["rank"].tolist() == [1]


def test_other_files_of_a_folder_are_left_alone(tmp_path: Path) -> None:
    dumps(tmp_path, [entry(1, 3.0)], [entry(1, 1.0)])
    (tmp_path / "notes.txt").write_text("entries of pg_config")
    assert open_job(tmp_path, workers=1).ranks["source"].tolist() == ["flight_recorder"] * 2
