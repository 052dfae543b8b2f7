"""Maps of ranks that were damaged after they were made: refused by name, and made anew where the capture is there."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from support.captures.tiny_ranks import capture

from nvprof_kit import map_captures, open_job
from nvprof_kit._cli import group
from nvprof_kit._trace.jobs.schema import TABLES
from nvprof_kit.errors import CaptureError, UsageError


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


def test_no_job_has_as_many_ranks():
    words = ["ranks", "map", "none.sqlite", "-o", "maps", "--rank", "run.sqlite=99999999999999999999"]
    error = CliRunner().invoke(group, words).exception
    assert isinstance(error, UsageError) and "needed FILE=N" in str(error)
