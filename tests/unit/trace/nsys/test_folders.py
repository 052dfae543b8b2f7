"""Folders that ``nsys export --type=parquetdir`` or ``arrowdir`` writes: the same tables as the SQLite file of the same
report, and one line for each that is damaged, partial or of somebody else.
"""

import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner
from support.captures.as_folder import as_folder
from support.captures.nsys_file import NsysFile
from support.data import DATA, unpacked

from nvprof_kit._cli import group
from nvprof_kit._trace.open import open_capture
from nvprof_kit._trace.schema import BUSY_CALLS, OPS, TABLES
from nvprof_kit.errors import CaptureError

CAPTURES = sorted(path for path in DATA.rglob("*.sqlite.xz") if path.parent.parent.name != "faults")
EVERYTHING = (*(name for name, column in OPS.items() if column.optional), *TABLES, "duration_ns")
READS = (EVERYTHING, ("name", "calls", BUSY_CALLS), ())
FORMS = (("parquet", 1 << 20), ("parquet", 1000), ("arrow", 5000))


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: str(path.relative_to(DATA)))
def test_a_folder_has_the_tables_of_the_file(capture, tmp_path):
    export = unpacked(capture, tmp_path / "run.sqlite")
    number = zlib.crc32(capture.name.encode())  # each capture in one of the forms, and all forms among them
    kind, rows_of_group = FORMS[number % len(FORMS)]
    folder = as_folder(export, tmp_path / "run_pqtdir", kind, rows_of_group=rows_of_group)
    optional = READS[number // len(FORMS) % 4 % len(READS)]
    expected, trace = (open_capture(path, optional=optional, cpu_only=True) for path in (export, folder))
    assert replace(trace.info, path="") == replace(expected.info, path="")
    for name in TABLES:
        table, expected_table = getattr(trace, name), getattr(expected, name)
        assert (table is None) == (expected_table is None), name
        if table is not None:
            pd.testing.assert_frame_equal(table, expected_table)


@pytest.fixture
def folder(file: NsysFile, tmp_path: Path) -> Path:
    file.range_("layers.0", 100, 900)
    file.kernel(300, 310, launched=(200, 210))
    file.kernel(500, 520, launched=(450, 460), table="MEMCPY")
    written = file.write()
    return written if written.is_dir() else as_folder(written, tmp_path / "run_pqtdir")


KERNELS, STRINGS = "CUPTI_ACTIVITY_KIND_KERNEL.parquet", "StringIds.parquet"


def changed(name: str, change: Callable[[pyarrow.Table], pyarrow.Table]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        pyarrow.parquet.write_table(change(pyarrow.parquet.read_table(folder / name)), folder / name)

    return write


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size]) and None


def with_column(column: str, values: pyarrow.Array) -> Callable[[pyarrow.Table], pyarrow.Table]:
    return lambda table: table.set_column(table.column_names.index(column), column, values)


def emptied(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def of_others(folder: Path) -> None:
    emptied(folder)
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), folder / "part-0.parquet")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut(KERNELS, 200), f"{KERNELS} in it is not a whole file"),
        (cut(KERNELS, 0), f"{KERNELS} in it is not a whole file"),
        (cut(STRINGS, 100), f"{STRINGS} in it is not a whole file"),
        (lambda folder: (folder / STRINGS).unlink(), "but not an nsys export (no StringIds table)"),
        (lambda folder: (folder / "META_DATA_EXPORT.parquet").unlink(), "only part of an export (no META_DATA_EXPORT"),
        (lambda folder: (folder / KERNELS).rename(folder / "x") and (folder / "CUPTI_ACTIVITY_KIND_MEMCPY.parquet")
         .unlink(), "no kernel, copy or memset"),
        (emptied, "a directory without tables of nsys"),
        (of_others, "a directory without tables of nsys"),
        (changed(KERNELS, with_column("deviceId", pyarrow.array(["0"]))), "deviceId is not a whole number in 1 of 1"),
        (changed(KERNELS, with_column("start", pyarrow.array([1.5]))), "start is not a whole number in 1 of 1"),
        (changed(KERNELS, with_column("start", pyarrow.array([None], pyarrow.int64()))), "start is NULL in 1 of 1"),
        (changed(STRINGS, lambda table: pyarrow.table({"id": [1, 1], "value": ["a", "b"]})), "several values for 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_folder_is_said_in_one_line(folder, damage, said):
    damage(folder)
    with pytest.raises(CaptureError) as refused:
        open_capture(folder)
    assert said in str(refused.value) and str(refused.value).startswith(f"{folder}: ")
    assert "\n" not in str(refused.value)


def test_a_damaged_arrow_file_is_refused(file, tmp_path):
    file.range_("layers.0", 100, 900)
    file.kernel(300, 310, launched=(200, 210))
    file.write()
    folder = as_folder(tmp_path / "run.sqlite", tmp_path / "run_arwdir", "arrow")
    kernels = folder / "CUPTI_ACTIVITY_KIND_KERNEL.arrow"
    for size in (0, 3, 100, kernels.stat().st_size * 3 // 4):
        (copy := tmp_path / f"cut{size}").mkdir()
        for path in folder.iterdir():
            shutil.copy(path, copy)
        cut(kernels.name, size)(copy)
        with pytest.raises(CaptureError, match=r"CUPTI_ACTIVITY_KIND_KERNEL\.arrow in it is not a whole file"):
            open_capture(copy)


def test_a_text_in_any_encoding_is_read(folder):
    def change(table: pyarrow.Table) -> pyarrow.Table:
        texts = [text.encode().replace(b"layers.0", b"layers.\xff") for text in table["value"].to_pylist()]
        raw = pyarrow.array(texts, pyarrow.binary())
        value = pyarrow.Array.from_buffers(pyarrow.string(), len(raw), raw.buffers())
        return pyarrow.table({"id": table["id"], "value": value})

    changed(STRINGS, change)(folder)
    assert open_capture(folder).ranges["text"].tolist() == ["layers.\ufffd"]


@pytest.mark.parametrize(
    ("verb", "code", "said"),
    [
        ("layers", 0, "layers.0"),
        ("breakdown", 0, "step"),
        ("doctor", 1, "1 kernels, 2 CUDA calls"),
        ("summary", 0, "kernel"),
        ("memory", 1, "a folder of tables, as nsys exports"),
        ("scrub", 1, "only an .sqlite export can be scrubbed"),
    ],
)
def test_verbs_take_folders(folder, verb, code, said):
    done = CliRunner().invoke(group, [*verb.format(folder).split(), str(folder)])
    assert (done.exit_code, said in f"{done.output} {done.exception}") == (code, True), done.output


def test_a_folder_of_folders_is_a_job(tmp_path):
    for rank in range(2):
        file = NsysFile(tmp_path / f"run.rank{rank}.sqlite")
        for step in range(4):
            file.range_(f"step {step}", 1000 * step, 1000 * step + 900, category="step", payload=step)
            file.range_("layers.0", 1000 * step + 10, 1000 * step + 400)
            file.kernel(1000 * step + 300, 1000 * step + 310, launched=(1000 * step + 200, 1000 * step + 210))
        file.write()
        as_folder(tmp_path / f"run.rank{rank}.sqlite", tmp_path / "job" / f"run.rank{rank}_pqtdir")
    done = CliRunner().invoke(group, ["ranks", str(tmp_path / "job")])
    assert done.exit_code == 0 and "2 ranks" in done.output, done.output
