"""What is read, and the one line that says why something is not."""

import gzip
import json
import lzma
import os
import sqlite3
import stat
from pathlib import Path

import pytest
from support.captures.nsys_file import SCHEMAS, NsysFile
from support.cli import run

from nvprof_kit._trace.open import open_capture
from nvprof_kit._trace.schema import TABLES
from nvprof_kit.errors import CaptureError, NvprofKitError, ToolError

REPORT = b"NVIDIA Tegra Profiler Report 2031@1@1@1-1v0.\n" + b"\x00" * 100


def small(path: Path, release: str = "2023.4") -> NsysFile:
    file = NsysFile(path, release)
    file.range_("layers.0", 100, 200, payload=0)
    file.kernel(300, 310, launched=(110, 115))
    return file


def refusal(path: Path, **options: str) -> str:
    """The message of the error that opening a file gives; one line, naming the file."""
    with pytest.raises(NvprofKitError) as error:
        open_capture(path, **options)
    message = str(error.value)
    assert "\n" not in message
    assert path.name in message
    return message


@pytest.mark.parametrize("release", SCHEMAS)
def test_every_schema_gives_the_documented_tables(tmp_path, release):
    optional = [name for schema in TABLES.values() for name, column in schema.items() if column.optional]
    trace = open_capture(small(tmp_path / "a.sqlite", release).write(), optional=[*optional, *TABLES])
    assert trace.operators is None  # those of a Kineto trace: test_kineto.py
    for table, schema in TABLES.items():
        if table == "operators":
            continue
        frame = getattr(trace, table)
        absent = {"operator_call", "operation", "captured_by", "kernel"}  # of a CPU, of NCCL, of compiled graphs
        schema = {name: column for name, column in schema.items() if name not in absent}  # noqa: PLW2901
        assert list(frame.columns) == list(schema)
        assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == {
            name: column.dtype for name, column in schema.items()
        }
    assert trace.info.tool == f"nsys {release}.0"
    assert trace.info.gpus == ("Test GPU",)


def test_a_capture_is_never_written_to(tmp_path):
    path = small(tmp_path / "a.sqlite").write()
    path.chmod(stat.S_IRUSR)
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    before = path.read_bytes(), path.stat().st_mtime_ns
    try:
        open_capture(path)
        assert (path.read_bytes(), path.stat().st_mtime_ns) == before
        assert os.listdir(tmp_path) == ["a.sqlite"]
    finally:
        tmp_path.chmod(stat.S_IRWXU)


def of_something_else(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE t (x)")


def cut_off(path: Path) -> None:
    plain = small(path.with_name("whole.sqlite")).write()
    packed = lzma.compress(plain.read_bytes())
    path.write_bytes(packed[: len(packed) // 2])


@pytest.mark.parametrize(
    ("name", "write", "said"),
    [
        ("a.sqlite", lambda _: None, "no such file"),
        ("a.sqlite", Path.mkdir, "a directory"),
        ("a.sqlite", Path.touch, "0 bytes"),
        ("a.sqlite", of_something_else, "not an nsys export"),
        ("packed.sqlite.xz", cut_off, "cut off"),
        ("a.json", lambda path: path.write_text('{"a": 1}'), "no traceEvents"),
        ("a.json", lambda path: path.write_text('{"traceEvents": []}'), "without operators"),
    ],
)
def test_what_is_no_capture_is_refused_in_one_line(tmp_path, name, write, said):
    write(tmp_path / name)
    message = refusal(tmp_path / name)
    assert said in message and message.startswith(str(tmp_path / name))


def test_a_file_without_permission_is_refused(tmp_path, monkeypatch):
    path = small(tmp_path / "a.sqlite").write()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")  # root, as which tests often run, may read everything

    monkeypatch.setattr(Path, "open", refuse)
    assert "no permission" in refusal(path)


def test_a_capture_without_ranges_is_read_unless_a_domain_is_named(tmp_path):
    file = NsysFile(tmp_path / "without.sqlite")
    file.kernel(1, 2, launched=(0, 1))
    assert len(open_capture(file.write()).ranges) == 0
    file = small(tmp_path / "a.sqlite")
    message = refusal(file.write(), domain="megatron")
    assert "'megatron'" in message and "found: nvprof_kit" in message
    # what nvtx >= 0.2.12 leaves: a domain without its ranges
    file.rows["NVTX_EVENTS"] = [row for row in file.rows["NVTX_EVENTS"] if row["eventType"] == 75]
    assert len(open_capture(file.write()).ranges) == 0
    assert "has no ranges in this capture" in refusal(file.write(), domain="nvprof_kit,other")


def test_a_report_needs_nsys(tmp_path, monkeypatch):
    (path := tmp_path / "a.nsys-rep").write_bytes(REPORT)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolError, match="needs nsys, and there is none on PATH"):
        open_capture(path)
    assert (CaptureError.exit_code, ToolError.exit_code) == (2, 3)


@pytest.mark.parametrize("verb", ["layers", "doctor", "advise", "ranks", "export"])
def test_a_gzip_file_whose_bits_are_wrong_is_one_line(verb, tmp_path, capsys):
    """zlib raises an error of its own, which is neither an OSError nor an EOFError."""
    whole = gzip.compress(json.dumps({"traceEvents": [{"name": f"event {n}"} for n in range(9999)]}).encode())
    (path := tmp_path / "run.json.gz").write_bytes(whole[:12] + b"\xff" * 40 + whole[52:])
    assert run(verb, path) in (1, 2) and "Traceback" not in "".join(capsys.readouterr())
