"""Maps of captures: which rank they are, when they are reused, what is in them, and damaged ones."""

import gzip
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from support.captures.tiny_ranks import MS, capture
from support.data import DATA

from nvprof_kit import Job, map_captures, open_job
from nvprof_kit._cli import group
from nvprof_kit._trace.jobs.schema import TABLES
from nvprof_kit.errors import CaptureError, UsageError


def test_the_segments_hold_all_of_the_device_s_time(tmp_path):
    map_captures([capture(tmp_path, 0)], tmp_path / "maps")
    segments = pd.concat(map(pd.read_parquet, (tmp_path / "maps" / "segments").iterdir()))
    assert segments["ns"].sum() == (20 + 18 - 2) * MS  # from the first kernel's start to the last one's end
    assert segments.groupby("doing")["ns"].sum()["compute"] == 8 * MS


def test_a_map_is_reused_while_its_capture_is_unchanged(tmp_path):
    file, maps = capture(tmp_path, 0), tmp_path / "maps"
    (name,) = map_captures([file], maps)
    first = (maps / "ranks" / name).stat().st_mtime_ns
    assert map_captures([file], maps) == [name]
    assert (maps / "ranks" / name).stat().st_mtime_ns == first
    os.utime(file, ns=(1, 1))
    (changed,) = map_captures([file], maps)
    assert changed != name
    assert all([file.name for file in table.iterdir()] == [changed] for table in maps.iterdir())  # the old map is gone
    (maps / "segments" / changed).unlink()  # one that is not whole is made again
    map_captures([file], maps)
    assert (maps / "segments" / changed).is_file()


@pytest.mark.slow
def test_maps_are_the_same_in_memory_in_threads_in_files_and_in_an_executor(tmp_path):
    captures = [capture(tmp_path, 0), capture(tmp_path, 1, slower=3 * MS, shift=70 * MS)]
    seen: list[str] = []
    map_captures(captures, tmp_path / "maps")
    with ThreadPoolExecutor(1) as executor:
        jobs = [
            open_job(captures),
            open_job(tmp_path / "maps"),
            open_job(captures, executor=executor, notify=seen.append),
        ]
    assert sorted(seen) == [str(path) for path in captures]
    answers = [job.answer().to_dict() for job in jobs]
    assert all(answer == answers[0] for answer in answers)


def test_the_error_of_a_capture_is_that_of_the_job(tmp_path):
    (tmp_path / "broken.rank1.sqlite").write_text("nothing")
    with pytest.raises(CaptureError, match=r"broken\.rank1\.sqlite"):
        open_job([capture(tmp_path, 0), tmp_path / "broken.rank1.sqlite"])


def test_maps_of_another_release_are_refused_in_one_line(tmp_path):
    maps = tmp_path / "maps"
    (name,) = map_captures([capture(tmp_path, 0)], maps)
    file = maps / "ranks" / name
    whole = pd.read_parquet(file)
    (version,) = whole["version"]
    whole.assign(version=version - 1).to_parquet(file)
    with pytest.raises(CaptureError, match=f"maps of version {version - 1}, this release reads {version}; map again"):
        open_job(maps)
    whole.drop(columns="tool").to_parquet(file)
    with pytest.raises(CaptureError, match=r"a damaged map .*tool.*; map again"):
        open_job(maps)


def test_a_rank_that_is_there_twice_is_refused(tmp_path):
    files = [capture(tmp_path, 0), capture(tmp_path, 0, name="again.rank0.sqlite")]
    with pytest.raises(UsageError, match="rank 0 is there 2 times"):
        open_job(files)


def test_a_folder_without_captures_is_refused(tmp_path):
    done = CliRunner().invoke(group, ["ranks", str(tmp_path)])
    assert isinstance(done.exception, UsageError) and "no capture in it" in str(done.exception)


@pytest.mark.parametrize(
    ("name", "rank"), [("run.rank3", 3), ("rank_0012-2024.2", 12), ("host7_rank-5", 5), ("run", None), ("frank3", None)]
)
def test_ranks_in_names(name, rank, tmp_path):
    file = capture(tmp_path, 0, name=(name := f"{name}.sqlite"))
    if rank is None:
        with pytest.raises(CaptureError, match=rf"--rank {re.escape(name)}=3"):
            open_job([file])
        assert open_job([file], ranks={name: 3}).ranks["rank"].tolist() == [3]
    else:
        assert open_job([file]).ranks["rank"].tolist() == [rank]


def test_the_rank_of_a_pytorch_trace_is_in_it(tmp_path):
    file = shutil.copy(DATA / "kineto" / "ddp.rank0.json.xz", tmp_path / "trace.json.xz")
    ranks = open_job([file]).ranks
    assert ranks[["rank", "world_size", "rank_told_by"]].to_numpy().tolist() == [[0, 2, "capture"]]


@pytest.fixture
def captures(tmp_path: Path) -> list[Path]:
    return [capture(tmp_path, rank, slower=rank * MS, shift=rank * 7 * MS) for rank in (0, 1, 2)]


@pytest.fixture
def job(captures: list[Path]) -> Job:
    return open_job(captures)


def test_some_ranks_and_one_step(job, tmp_path):
    two = job.export(ranks=[0, 2], steps=1).save(tmp_path / "two.json.gz")
    events = json.loads(gzip.decompress(two.read_bytes()))["traceEvents"]
    names = " ".join(event["args"]["name"] for event in events if event["name"] == "process_name")
    assert "rank 0" in names and "rank 2" in names and "rank 1" not in names
    assert two.stat().st_size < job.export().save(tmp_path / "all.json.gz").stat().st_size
    for unknown in (lambda: job.export(ranks=[7]), lambda: job.what_if(rank=7)):
        with pytest.raises(UsageError, match="no rank 7 in the job; it has 3 ranks"):
            unknown()
    with pytest.raises(UsageError, match=r"x\.pftrace: no format has this suffix"):
        job.export().save(tmp_path / "x.pftrace")


def test_a_job_of_maps_whose_captures_are_gone(captures, tmp_path):
    map_captures(captures, tmp_path / "maps")
    captures[1].unlink()
    with pytest.raises(UsageError, match=r"run\.rank1\.sqlite: the map's capture is not here"):
        open_job(tmp_path / "maps").export()


def test_an_answer_as_html_is_the_page(job, tmp_path):
    page = job.report().save(tmp_path / "page.html").read_text()
    answer = job.answer().save(tmp_path / "answer.html").read_text()
    assert answer == page and "<script" in page
    # a table alone is a table
    assert "<script" not in job.waits().save(tmp_path / "waits.html").read_text()


def test_rules_are_told_by_name_as_for_one_capture(captures):
    job = open_job(captures, rules="vllm", domain="nvprof_kit")
    assert job.ranks["reading"].str.contains("vllm|Rules").all()
    with pytest.raises(UsageError, match="no-such"):
        open_job(captures, rules="no-such")


def test_marks_of_groups_that_contradict_each_other_are_left_out_with_one_warning(tmp_path):
    for other, warnings in (("0-1", 0), ("0,2", 1)):
        marks = "groups 0 mesh_cp 0-1", f"groups 0 mesh_cp {other}"
        job = open_job([capture(tmp_path, rank, mark=mark) for rank, mark in enumerate(marks)])
        assert job.groups().to_frame()["name"].tolist() == ["" if warnings else "mesh_cp"]
        assert sum("contradict" in warning for warning in job.warnings) == warnings


@pytest.fixture
def maps(tmp_path: Path) -> Path:
    """The maps of two ranks."""
    captures = [capture(tmp_path, rank) for rank in (0, 1)]
    map_captures(captures, tmp_path / "maps")
    return tmp_path / "maps"


def of_rank_0(maps: Path, table: str) -> Path:
    (file,) = (maps / table).glob("*rank00000.parquet")
    return file


@pytest.mark.parametrize("table", TABLES)
def test_a_map_that_is_not_whole_is_refused_by_name(maps, table):
    file = of_rank_0(maps, table)
    raw = file.read_bytes()
    without_rank = pq.ParquetFile(file).read().drop_columns(["rank"])

    def refused(what: str) -> None:
        with pytest.raises(CaptureError, match=what):
            open_job([maps]).answer()

    pq.write_table(without_rank, file)
    refused("a damaged map .*rank.*map again")
    for cut in (len(raw) // 2, 0):
        file.write_bytes(raw[:cut])
        refused(f"a damaged map .*{table}/.*map again")
    file.unlink()
    refused(f"{table}/.*: no such file, and the map is not whole without it; map again")


def test_collectives_with_a_gap_are_refused(maps):
    file = of_rank_0(maps, "collectives")
    told = pq.ParquetFile(file).read()
    pq.write_table(told.slice(1), file)
    with pytest.raises(CaptureError, match=r"collectives\.index does not count from 0"):
        open_job([maps]).answer()


@pytest.mark.parametrize(("table", "name"), [("collectives", "ready_segment"), ("segments", "ns")])
def test_a_column_without_values_is_refused(maps, table, name):
    file = of_rank_0(maps, table)
    told = pq.ParquetFile(file).read()
    nothing = pa.nulls(len(told), pa.int64())
    pq.write_table(told.set_column(told.schema.get_field_index(name), name, nothing), file)
    with pytest.raises(CaptureError, match=rf"{table}\.{name} lacks \d+ values; map again"):
        open_job([maps]).answer()


def test_a_damaged_map_is_made_anew_from_its_capture(maps):
    file = of_rank_0(maps, "collectives")
    raw = file.read_bytes()
    file.write_bytes(raw[:100])
    map_captures([maps.parent / f"run.rank{rank}.sqlite" for rank in (0, 1)], maps)
    assert file.read_bytes() == raw
    assert not list(maps.rglob("*.tmp"))
