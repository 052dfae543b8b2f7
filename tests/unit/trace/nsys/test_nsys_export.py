"""When a report is exported anew, and the one line that says why it is not; a script stands in for nsys."""

import errno
import itertools
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.captures.as_folder import as_folder
from support.captures.nsys_file import NsysFile
from support.cli import executable

from nvprof_kit._trace.open import open_capture
from nvprof_kit.errors import CaptureError, ToolError

REPORT = b"NVIDIA Tegra Profiler Report 2023@4@4@54-1v0.\n" + b"\x00" * 100
NSYS = """#!/bin/bash
if [ "$1" = --version ]; then echo "NVIDIA Nsight Systems version {version}-233437838938v0"; exit; fi
if [ "$2" = --help ]; then echo "sqlite {kinds}"; exit; fi
echo "$@" >> "{folder}/calls"
{export}
"""
WORKS = 'if [ "$3" = parquetdir ]; then cp -r "{folder}/export_pqtdir" "$5"; else cp "{folder}/export" "$5"; fi'
FAILS = "echo 'Importing'; echo 'Error: the report is cut off'; exit 1"


@pytest.fixture
def report(tmp_path: Path) -> Path:
    file = NsysFile(tmp_path / "export")
    file.range_("layers.0", 100, 200)
    file.kernel(300, 310, launched=(110, 115))
    file.write()
    as_folder(tmp_path / "export", tmp_path / "export_pqtdir")
    (path := tmp_path / "run.nsys-rep").write_bytes(REPORT)
    return path


def install(folder, monkeypatch, export=WORKS, version="2023.4.4.54", kinds="arrowdir, and parquetdir"):
    (folder / "bin").mkdir(exist_ok=True)
    script = NSYS.format(folder=folder, export=export.format(folder=folder), version=version, kinds=kinds)
    executable(folder / "bin" / "nsys", script)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text().splitlines())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith((".", "run")))


@pytest.mark.parametrize("kinds", ["sqlite", "sqlite --include-blobs=true|false"])
def test_payloads_are_asked_for_where_nsys_would_leave_them_out(tmp_path, report, monkeypatch, kinds):
    install(tmp_path, monkeypatch, kinds=kinds)
    assert len(open_capture(report).ops) == 1
    assert ("--include-blobs=true" in (tmp_path / "calls").read_text()) == ("blobs" in kinds)


def test_large_tables_are_exported_beside_the_rest(tmp_path, report, monkeypatch):
    export = """set -f; mkdir -p "$5"; IFS=,
        for name in $(cd "{folder}/export_pqtdir" && ls | sed s/.parquet// | tr '\\n' ,); do
            for pattern in ${{6#--tables=}}; do
                if grep -qx "$pattern" <<< "$name"; then cp "{folder}/export_pqtdir/$name.parquet" "$5/"; fi
            done
        done"""
    install(tmp_path, monkeypatch, export, kinds="parquetdir --tables= --append")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert len(open_capture(report).ops) == 1
    exported, whole = tmp_path / "run_pqtdir", tmp_path / "export_pqtdir"
    assert calls(tmp_path) == 2 and names(tmp_path) == ["run.nsys-rep", "run_pqtdir"]
    assert {path.name for path in exported.iterdir()} == {path.name for path in whole.iterdir()}


@pytest.mark.parametrize(("kinds", "export"), [("parquetdir", "run_pqtdir"), ("hdf", "run.sqlite")])
def test_a_report_is_exported_once_and_anew_when_it_is_newer(tmp_path, report, monkeypatch, kinds, export):
    install(tmp_path, monkeypatch, kinds=kinds)
    assert len(open_capture(report).ops) == len(open_capture(report).ops) == 1
    assert calls(tmp_path) == 1
    install(tmp_path, monkeypatch)  # an export of either type is read
    open_capture(report)
    assert calls(tmp_path) == 1
    install(tmp_path, monkeypatch, kinds=kinds)
    later = report.stat().st_mtime + 100
    os.utime(report, (later, later))
    open_capture(report)
    assert calls(tmp_path) == 2
    assert names(tmp_path) == sorted(["run.nsys-rep", export])


def test_what_is_not_the_export_of_the_report_is_left_alone(tmp_path, report, monkeypatch):
    install(tmp_path, monkeypatch)
    (tmp_path / "run_pqtdir").mkdir()
    (tmp_path / "run_pqtdir" / "notes.txt").write_text("mine")
    with pytest.raises(CaptureError, match="run_pqtdir beside it is a folder of something else"):
        open_capture(report)
    assert names(tmp_path) == ["run.nsys-rep", "run_pqtdir"]
    with sqlite3.connect(tmp_path / "export") as db:
        db.execute("INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_PARAM_INPUT_FILE', 'other.nsys-rep')")
    db.close()
    shutil.rmtree(tmp_path / "run_pqtdir")
    as_folder(tmp_path / "export", tmp_path / "run_pqtdir")
    with pytest.raises(CaptureError, match=r"run_pqtdir beside it is the export of other\.nsys-rep"):
        open_capture(report)


@pytest.mark.parametrize("damage", ["StringIds.parquet", "META_DATA_EXPORT.parquet"])
def test_a_damaged_export_is_made_again(tmp_path, report, monkeypatch, damage):
    install(tmp_path, monkeypatch)
    open_capture(report)
    (tmp_path / "run_pqtdir" / damage).write_bytes(b"PAR1")
    assert len(open_capture(report).ops) == 1
    assert calls(tmp_path) == 2 and names(tmp_path) == ["run.nsys-rep", "run_pqtdir"]


def test_nothing_stays_of_an_export_that_is_ended(tmp_path, report, monkeypatch):
    install(tmp_path, monkeypatch, 'mkdir "$5"; touch "{folder}/began"; exec sleep 60')
    program = f"from nvprof_kit._trace.open import open_capture; open_capture({str(report)!r})"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        while not (tmp_path / "began").exists():
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) == 143
    assert names(tmp_path) == ["run.nsys-rep"]


@pytest.mark.parametrize(
    ("export", "version", "error", "said"),
    [
        (FAILS, "2022.4.2.50", ToolError, r"written by nsys 2023\.4\.4, newer than the 2022\.4\.2 on PATH; export it"),
        (FAILS, "2023.4.4.54", CaptureError, r"could not export the report \(Error: the report is cut off\); record"),
        ("exit 1", "2023.4.4.54", CaptureError, r"could not export the report \(it gave no reason\)"),
        ("exit 0", "2023.4.4.54", CaptureError, "nsys wrote no export of it"),
    ],
)
def test_a_report_that_nsys_cannot_export(tmp_path, report, monkeypatch, export, version, error, said):
    install(tmp_path, monkeypatch, export, version=version)
    with pytest.raises(error, match=said):
        open_capture(report)
    assert names(tmp_path) == ["run.nsys-rep"]


@pytest.mark.parametrize("reason", [errno.EACCES, errno.EROFS])
def test_a_report_in_a_read_only_folder_is_exported_to_the_cache(tmp_path, report, monkeypatch, reason):
    install(tmp_path, monkeypatch)
    real, read_only = tempfile.TemporaryDirectory, [tmp_path]

    def folder(*, dir: Path, **options: Any) -> Any:  # root, as which tests often run, may write everywhere
        if dir in read_only:
            raise OSError(reason, os.strerror(reason))
        return real(dir=dir, **options)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", folder)
    assert len(open_capture(report).ops) == len(open_capture(report).ops) == 1
    assert calls(tmp_path) == 1 and names(tmp_path) == ["run.nsys-rep"]
    (cached,) = (tmp_path / "cache" / "nvprof_kit").iterdir()
    assert cached.name.endswith("-run_pqtdir")
    shutil.rmtree(cached)
    read_only.append(cached.parent)
    with pytest.raises(CaptureError, match=r"writable; run `nsys export --type parquetdir --output FOLDER/run_pqtdir"):
        open_capture(report)


@pytest.mark.parametrize(("free", "together"), [(1 << 40, 3), (1, 1)])
def test_reports_are_exported_in_parallel_as_far_as_memory_allows(tmp_path, report, monkeypatch, free, together):
    log = "{folder}/log"
    install(tmp_path, monkeypatch, f'echo +1 >> "{log}"; sleep 0.5; {WORKS}; echo -1 >> "{log}"')
    monkeypatch.setattr("nvprof_kit._trace.nsys.export.free_memory", lambda: free)
    reports = [tmp_path / f"rank{rank}.nsys-rep" for rank in range(3)]
    for path in reports:
        path.write_bytes(REPORT)
    with ThreadPoolExecutor(3) as threads:
        assert [len(trace.ops) for trace in threads.map(open_capture, reports)] == [1, 1, 1]
    running = list(itertools.accumulate(map(int, (tmp_path / "log").read_text().split())))
    assert max(running) == together and running[-1] == 0
