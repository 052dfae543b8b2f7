"""What a job writes: a trace of its ranks on one clock, and the page."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.captures.tiny_ranks import MS, capture

from nvprof_kit import Job, open_job
from nvprof_kit._cli import group
from nvprof_kit.errors import UsageError


@pytest.fixture
def captures(tmp_path: Path) -> list[Path]:
    return [capture(tmp_path, rank, slower=rank * MS, shift=rank * 7 * MS) for rank in (0, 1, 2)]


@pytest.fixture
def job(captures: list[Path]) -> Job:
    return open_job(captures, workers=1)


def processes(path: Path) -> set[str]:
    data = path.read_bytes()
    events = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    return {event["args"]["name"] for event in events if event.get("name") == "process_name"}


def test_the_trace_is_that_of_the_command_line(job: Job, captures: list[Path], tmp_path: Path) -> None:
    ours = job.export(tmp_path / "ours.json")
    done = CliRunner().invoke(group, ["export", *map(str, captures), "-o", str(tmp_path / "theirs.json")])
    assert done.exit_code == 0, done.output
    assert ours.read_bytes() == (tmp_path / "theirs.json").read_bytes()
    assert len(processes(ours)) >= 3


def test_some_ranks_and_one_step(job: Job, tmp_path: Path) -> None:
    two = job.export(tmp_path / "two.json.gz", ranks=[0, 2], step=1)
    names = " ".join(sorted(processes(two)))
    assert "rank 0" in names and "rank 2" in names and "rank 1" not in names
    assert two.stat().st_size < job.export(tmp_path / "all.json.gz").stat().st_size
    with pytest.raises(UsageError, match="no rank 7 in the job; it has 3 ranks"):
        job.export(tmp_path / "x.json", ranks=[7])
    with pytest.raises(UsageError, match=r"x\.pftrace: no format has this suffix"):
        job.export(tmp_path / "x.pftrace")


def test_a_job_of_maps_whose_captures_are_gone(captures: list[Path], tmp_path: Path) -> None:
    open_job(captures, maps=tmp_path / "maps", workers=1)
    captures[1].unlink()
    with pytest.raises(UsageError, match=r"run\.rank1\.sqlite: the map's capture is not here"):
        open_job(tmp_path / "maps").export(tmp_path / "x.json")


def test_an_answer_as_html_is_the_page(job: Job, tmp_path: Path) -> None:
    page = job.report(tmp_path / "page.html").read_text()
    answer = job.answer().save(tmp_path / "answer.html").read_text()
    assert answer == page and "<script" in page
    # a table alone is a table
    assert "<script" not in job.waits().save(tmp_path / "waits.html").read_text()


def test_rules_are_told_by_name_as_for_one_capture(captures: list[Path]) -> None:
    job = open_job(captures, rules="vllm", domain="nvprof_kit", workers=1)
    assert job.ranks["reading"].str.contains("vllm|Rules").all()
    with pytest.raises(UsageError, match="no-such"):
        open_job(captures, rules="no-such")
