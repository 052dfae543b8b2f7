"""Maps of ranks that were damaged after they were made: refused by name, and made anew where the capture is there."""

from __future__ import annotations

import json
import shutil
import zlib
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.captures.synthetic_job import SyntheticJob, write_maps
from support.captures.tiny_ranks import capture

from nvprof_kit._api.job import open_job
from nvprof_kit._cli.verbs.ranks import _given
from nvprof_kit._trace.jobs import store
from nvprof_kit._trace.jobs import tables as jobs_tables
from nvprof_kit._trace.jobs.schema import TABLES
from nvprof_kit._trace.jobs.store import faults, write_tables
from nvprof_kit.errors import CaptureError, UsageError


@pytest.fixture
def maps(tmp_path: Path) -> Path:
    """The maps of two ranks."""
    captures = [capture(tmp_path, rank) for rank in (0, 1)]
    open_job(captures, maps=tmp_path / "maps", workers=1)
    return tmp_path / "maps"


def of_rank_0(maps: Path, table: str) -> Path:
    (file,) = (maps / table).glob("*rank00000.parquet")
    return file


@pytest.mark.parametrize("table", TABLES)
def test_a_map_that_is_not_whole_is_refused_by_name(maps: Path, table: str) -> None:
    file = of_rank_0(maps, table)
    raw = file.read_bytes()
    told = pq.ParquetFile(file).read()
    empty = told.set_column(0, "rank", pa.array([None] * len(told), pa.int64()))
    text = told.set_column(0, "rank", pa.array(["zero"] * len(told)))

    def refused(what: str) -> None:
        with pytest.raises(CaptureError, match=what):
            open_job([maps], workers=1).answer()

    pq.write_table(told.drop_columns(["rank"]), file)
    refused(f"no column {table}.rank; map again")
    pq.write_table(text, file)
    refused(f"{table}.rank is BYTE_ARRAY, not int64; map again")
    if len(told):
        pq.write_table(empty, file)
        refused(f"{table}.rank lacks {len(told)} values; map again")
    file.write_bytes(raw[: len(raw) // 2])
    refused("a damaged map .*map again")
    file.write_bytes(b"")
    refused("a damaged map .*map again")
    file.unlink()
    refused(f"{table}/.*: no such file, and the map is not whole without it; map again")


@pytest.mark.parametrize("odd", [-(2**63), 2**63 - 1])
@pytest.mark.parametrize("table", ["collectives", "segments", "layers", "steps"])
def test_numbers_that_no_map_has_are_refused_by_name(maps: Path, table: str, odd: int) -> None:
    """Sums and differences of them would overflow in DuckDB."""
    file = of_rank_0(maps, table)
    told = pq.ParquetFile(file).read()
    name = "start_ns" if "start_ns" in told.schema.names else "step"
    made = told.set_column(told.schema.get_field_index(name), name, pa.array([odd] * len(told), pa.int64()))
    pq.write_table(made, file)
    sums = maps / "sums" / f"{file.name}.json"
    of_another_writer = {table: zlib.crc32(file.read_bytes()), "checked": 0}
    sums.write_text(json.dumps(json.loads(sums.read_text()) | of_another_writer))
    with pytest.raises(CaptureError, match=f"{table}.{name} is {odd}, no number of a map; map again"):
        open_job([maps], workers=1).answer()


def test_maps_that_contradict_themselves_are_a_defect_only_if_this_package_checked_them(maps: Path) -> None:
    """The causes of waiting add up to the waiting in every map that was checked when it was written."""
    with closing(jobs_tables.JobTables(maps)) as checked:
        checked.refuse_unchecked("3 ns of waiting have a cause, of 4 ns")
    sums = maps / "sums" / f"{of_rank_0(maps, 'ranks').name}.json"
    sums.write_text(json.dumps(json.loads(sums.read_text()) | {"checked": 0}))
    tables = jobs_tables.JobTables(maps)
    with pytest.raises(CaptureError, match=r"contradict.*3 ns of.* was not checked when it was written"):
        tables.refuse_unchecked("3 ns of waiting have a cause, of 4 ns")


def test_collectives_with_a_gap_are_refused(maps: Path) -> None:
    file = of_rank_0(maps, "collectives")
    told = pq.ParquetFile(file).read()
    pq.write_table(told.slice(1), file)
    sums = maps / "sums" / f"{file.name}.json"
    sums.write_text(json.dumps(json.loads(sums.read_text()) | {"collectives": zlib.crc32(file.read_bytes())}))
    with pytest.raises(CaptureError, match=r"collectives\.index does not count from 0"):
        open_job([maps], workers=1).answer()


@pytest.mark.parametrize(("table", "name"), [("collectives", "ready_segment"), ("segments", "ns")])
def test_a_column_without_values_is_refused_where_the_checksum_holds(maps: Path, table: str, name: str) -> None:
    file = of_rank_0(maps, table)
    told = pq.ParquetFile(file).read()
    nothing = pa.nulls(len(told), pa.int64())
    pq.write_table(told.set_column(told.schema.get_field_index(name), name, nothing), file)
    sums = maps / "sums" / f"{file.name}.json"
    sums.write_text(json.dumps(json.loads(sums.read_text()) | {table: zlib.crc32(file.read_bytes())}))
    with pytest.raises(CaptureError, match=rf"{table}\.{name} lacks \d+ values; map again"):
        open_job([maps], workers=1).answer()


def test_a_map_without_its_checksums_is_refused(maps: Path) -> None:
    """DuckDB takes endless time and memory over some damaged pages, so none is read unchecked."""
    shutil.rmtree(maps / "sums")
    with pytest.raises(CaptureError, match=r"sums/.*: no such file, and the map is not whole without it; map again"):
        open_job([maps], workers=1)


@pytest.mark.parametrize("table", TABLES)
def test_one_flipped_bit_is_found_wherever_it_is(maps: Path, table: str) -> None:
    """Parquet reads most flipped bits of its data as other values."""
    file = of_rank_0(maps, table)
    raw = file.read_bytes()
    for place in range(4, len(raw) - 8, max(len(raw) // 12, 1)):
        file.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        with pytest.raises(CaptureError, match="map again"):
            open_job([maps], workers=1)
    file.write_bytes(raw)
    assert len(open_job([maps], workers=1).ranks) == 2


def test_a_damaged_list_of_checksums_is_refused(maps: Path) -> None:
    (sums,) = (maps / "sums").glob("*rank00000*")
    for text in (b"", b"{}", b"[]", b"null", b"\xff", b'{"ranks": 1'):
        sums.write_bytes(text)
        with pytest.raises(CaptureError, match=r"\.json: damaged .*; map again"):
            open_job([maps], workers=1)


def test_a_damaged_map_is_made_anew_from_its_capture(maps: Path) -> None:
    file = of_rank_0(maps, "collectives")
    raw = file.read_bytes()
    file.write_bytes(raw[:100])
    open_job([maps.parent / f"run.rank{rank}.sqlite" for rank in (0, 1)], maps=maps, workers=1)
    assert file.read_bytes() == raw
    assert not list(maps.rglob("*.tmp"))


def test_no_job_has_as_many_ranks() -> None:
    assert _given(("run.sqlite=3",)) == {"run.sqlite": 3}
    with pytest.raises(UsageError, match="needed FILE=N"):
        _given(("run.sqlite=99999999999999999999",))


def test_columns_that_were_checked_when_they_were_written_are_not_looked_into_again(
    maps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[list[str]] = []

    def look(folder: Path, names: list[str], tables: object = None) -> str:
        looked.append([*names])
        return ""

    monkeypatch.setattr(store, "fault_of", look)
    assert faults(maps) == ("", [])
    assert not looked
    name = of_rank_0(maps, "ranks").name
    sums = maps / "sums" / f"{name}.json"
    sums.write_text(json.dumps({key: value for key, value in json.loads(sums.read_text()).items() if key != "checked"}))
    assert faults(maps) == ("", [name])
    assert looked == [[name]]


@pytest.mark.parametrize("what", ["a missing value", "another type"])
def test_what_does_not_fit_when_it_is_written_is_refused_when_it_is_read(maps: Path, what: str) -> None:
    """Its checksums are right."""
    name = of_rank_0(maps, "ranks").name
    tables = {table: pq.read_table(maps / table / name) for table in TABLES}
    rows = len(tables["collectives"])
    wrong = pa.array([None] * rows, pa.int64()) if what == "a missing value" else pa.array(["zero"] * rows)
    tables["collectives"] = tables["collectives"].set_column(1, "index", wrong)
    write_tables(maps, name, tables)
    with pytest.raises(CaptureError, match=r"collectives\.index (lacks|is BYTE_ARRAY)"):
        open_job([maps], workers=1).answer()


def test_of_a_few_ranks_only_their_maps_are_read(tmp_path: Path) -> None:
    job = SyntheticJob(rows=3, columns=2, steps=2, per_step=6)
    write_maps(job, tmp_path, 1)
    opened = open_job(tmp_path)
    opened.clocks()
    tables = opened._tables
    every = tables.points(range(6))
    alone = every[every["rank"] == 4].reset_index(drop=True)
    segments = tables.segments(range(6))
    (tmp_path / "collectives" / "part-00001.parquet").rename(tmp_path / "away")  # of another rank
    assert tables.points([4]).equals(alone)
    (tmp_path / "away").rename(tmp_path / "collectives" / "part-00001.parquet")
    assert tables.segments([4]).equals(segments[segments["rank"] == 4].reset_index(drop=True))
    assert tables.points(range(6)).equals(every)


def test_medians_do_not_depend_on_how_many_ranks_are_looked_at_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_maps(SyntheticJob(rows=3, columns=2, steps=3, per_step=6), tmp_path, 4)
    whole = open_job(tmp_path).layers().to_frame()
    monkeypatch.setattr(jobs_tables, "_AT_ONCE", 2)
    assert open_job(tmp_path).layers().to_frame().equals(whole)
