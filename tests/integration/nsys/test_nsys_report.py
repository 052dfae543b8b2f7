"""An .nsys-rep, read through the installed nsys: exported once beside it, used again, refused in one line."""

import os
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
from support.cli import execute
from support.nsys import run_nsys

from nvprof_kit._trace.open import open_capture
from nvprof_kit.errors import CaptureError, ToolError

pytestmark = pytest.mark.nsys

PROGRAM = """
from nvprof_kit import layer_range
with layer_range("layers.0"):
    pass
"""


@cache
def recorded(nsys: str) -> bytes:
    """A real report of a program without a GPU, recorded once for all tests with a release."""
    folder = tempfile.TemporaryDirectory()
    report = Path(folder.name) / "run.nsys-rep"
    with folder:
        options = ["-t", "nvtx,osrt", "-s", "none", "--cpuctxsw=none", "-o", report]
        run_nsys(nsys, "profile", *options, sys.executable, "-c", PROGRAM)
        return report.read_bytes()


def version(nsys: str) -> str:
    return execute(nsys, "--version", check=True).stdout.split("version ")[-1]


@pytest.fixture
def report(nsys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", os.path.dirname(nsys) + os.pathsep + os.environ["PATH"])
    copy = tmp_path / "run.nsys-rep"
    copy.write_bytes(recorded(nsys))
    return copy


@pytest.mark.every_nsys
def test_the_export_is_made_once_and_kept_beside(nsys, report):
    before = report.read_bytes()
    with pytest.raises(CaptureError, match=r"run\.nsys-rep: no GPU operations.*--trace=cuda,nvtx"):
        open_capture(report)
    (export,) = (path for path in report.parent.iterdir() if path != report)
    assert export.name == ("run.sqlite" if "2022" in version(nsys) else "run_pqtdir")
    made = export.stat().st_mtime_ns
    for is_new in (False, True):
        if is_new:
            os.utime(report, ns=(made + 10**12, made + 10**12))  # recorded anew
        with pytest.raises(CaptureError, match="no GPU operations"):
            open_capture(report)
        assert (export.stat().st_mtime_ns != made) == is_new
    assert report.read_bytes() == before
    assert sorted(path for path in report.parent.iterdir()) == sorted([report, export])


def test_the_reports_of_a_job_are_exported_and_mapped(report):
    """Without a GPU the way ends where ranks would be compared; tests/gpu/test_captures.py goes all of it."""
    job = [Path(report.rename(report.with_name("run.rank0.nsys-rep")))]
    job.append(report.with_name("run.rank1.nsys-rep"))
    job[1].write_bytes(job[0].read_bytes())
    command = [sys.executable, "-m", "nvprof_kit", "ranks", *map(str, job)]
    for _ in range(2):  # the second uses what the first exported
        done = execute(*command)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1, done.stderr
        assert ".nsys-rep: no GPU operations" in done.stderr
    made = {path.name for path in report.parent.iterdir()} - {path.name for path in job}
    assert made and made <= {"run.rank0_pqtdir", "run.rank1_pqtdir"}


@pytest.mark.every_nsys
def test_a_cut_off_report(report):
    report.write_bytes(report.read_bytes()[:3000])
    with pytest.raises(
        CaptureError, match=r"run\.nsys-rep: nsys could not export the report \(.*rror.*\); record or copy it again"
    ):
        open_capture(report)
    assert [path.name for path in report.parent.iterdir()] == ["run.nsys-rep"]


def test_a_report_newer_than_the_installed_nsys(tmp_path, monkeypatch):
    versions = {path: version(path) for path in os.environ.get("NVPROF_KIT_NSYS", "").split(os.pathsep) if path}
    if len(versions) < 2:
        pytest.skip("needs two releases of nsys in NVPROF_KIT_NSYS")
    old, new = min(versions, key=lambda path: versions[path]), max(versions, key=lambda path: versions[path])
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(recorded(new))
    monkeypatch.setenv("PATH", os.path.dirname(old))
    with pytest.raises(ToolError, match=r"written by nsys 202\d\.\d\.\d, newer than the 202\d\.\d\.\d on PATH"):
        open_capture(report)


@pytest.mark.parametrize(
    ("export", "names"),
    [
        ("parquetdir", {"run.nsys-rep", "run_pqtdir"}),
        ("sqlite", {"run.nsys-rep", "run.sqlite"}),
        ("none", {"run.nsys-rep"}),
    ],
)
def test_profile_exports_to_the_form_that_is_asked_for(nsys, tmp_path, monkeypatch, export, names):
    monkeypatch.setenv("PATH", os.path.dirname(nsys) + os.pathsep + os.environ["PATH"])
    command = [sys.executable, "-m", "nvprof_kit", "profile", "-f", "-x", "--trace=nvtx", "--export", export]
    for _ in range(2):  # the second overwrites the first
        run = [*command, "-o", str(tmp_path / "run"), "--", sys.executable, "-c", PROGRAM]
        done = execute(*run)
        assert done.returncode == 0, done.stderr
        assert {path.name for path in tmp_path.iterdir()} == names
    suffix = {"parquetdir": "_pqtdir", "none": ".nsys-rep"}.get(export, f".{export}")
    assert f"next: nvprof-kit layers {tmp_path / 'run'}{suffix}" in done.stderr
    with pytest.raises(CaptureError, match="no GPU operations"):
        open_capture(tmp_path / f"run{suffix}")
