"""When a report is exported anew, and the one line that says why it is not; a script stands in for nsys."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest
from support.captures.nsys_file import NsysFile

from nvprof_kit._trace.files.sqlite import SqliteFile
from nvprof_kit._trace.open import open_capture
from nvprof_kit.errors import CaptureError, ToolError

REPORT = b"NVIDIA Tegra Profiler Report 2023@4@4@54-1v0.\n" + b"\x00" * 100
NSYS = """#!/bin/bash
if [ "$1" = --version ]; then echo "NVIDIA Nsight Systems version {version}-233437838938v0"; exit; fi
echo "$@" >> "{folder}/calls"
{export}
"""
WORKS = 'cp "{folder}/export" "$5"'
FAILS = "echo 'Importing'; echo 'Error: the report is cut off'; exit 1"


@pytest.fixture
def report(tmp_path: Path) -> Path:
    file = NsysFile(tmp_path / "export")
    file.range_("layers.0", 100, 200)
    file.kernel(300, 310, launched=(110, 115))
    file.write()
    (path := tmp_path / "run.nsys-rep").write_bytes(REPORT)
    return path


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, export: str = WORKS, version: str = "2023.4.4.54") -> None:
    (folder / "bin").mkdir(exist_ok=True)
    script = folder / "bin" / "nsys"
    script.write_text(NSYS.format(folder=folder, export=export.format(folder=folder), version=version))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text().splitlines())


def test_a_report_is_exported_once_and_anew_when_it_is_newer(
    tmp_path: Path, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    assert len(open_capture(report).ops) == len(open_capture(report).ops) == 1
    assert calls(tmp_path) == 1
    os.utime(tmp_path / "run.sqlite", (1, 1))
    open_capture(report)
    assert calls(tmp_path) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "calls", "export", "run.nsys-rep", "run.sqlite"]


def test_a_report_of_a_newer_nsys_needs_that(tmp_path: Path, report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, FAILS, version="2022.4.2.50")
    with pytest.raises(ToolError, match=r"written by nsys 2023\.4\.4, newer than the 2022\.4\.2 on PATH; export it"):
        open_capture(report)


def test_a_report_that_nsys_cannot_export(tmp_path: Path, report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, FAILS)
    with pytest.raises(CaptureError, match=r"could not export the report \(Error: the report is cut off\); record"):
        open_capture(report)
    install(tmp_path, monkeypatch, "exit 1")
    with pytest.raises(CaptureError, match=r"could not export the report \(it gave no reason\)"):
        open_capture(report)
    assert not (tmp_path / "run.sqlite").exists()


@pytest.mark.parametrize("reason", [errno.EACCES, errno.EROFS])
def test_a_report_in_a_folder_that_is_not_writable(
    tmp_path: Path, report: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    install(tmp_path, monkeypatch)

    def refuse(**_: object) -> NoReturn:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(
        CaptureError, match=r"is not writable; run `nsys export --type sqlite --output FOLDER/run\.sqlite"
    ):
        open_capture(report)


def test_a_file_that_is_refused_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(SqliteFile, "close", lambda self: closed.append(self.path.name))
    (path := tmp_path / "cut.sqlite").write_bytes(b"SQLite format 3\x00" + b"\x00" * 200)
    with pytest.raises(CaptureError, match="not a whole SQLite file"):
        SqliteFile(path)
    assert closed == ["cut.sqlite"]
