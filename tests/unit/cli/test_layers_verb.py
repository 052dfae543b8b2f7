"""``nvprof-kit layers``: what is asked for, in which form, and where it goes."""

from __future__ import annotations

import csv
import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile
from support.cli import run

from nvprof_kit._cli.verb import Output
from nvprof_kit.errors import UsageError

CONTRACT = [
    "layer",
    "phase",
    "calls",
    "gpu_ops",
    "gpu_self_ns",
    "compute_ns",
    "comm_ns",
    "copy_ns",
    "gpu_total_ns",
    "gpu_busy_ns",
    "cpu_ns",
    "share",
    "total_share",
    "steps",
]


@pytest.fixture
def capture(tmp_path: Path) -> str:
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("step 7", 50, 250, category="step", payload=7)
    file.range_("layers.0", 100, 200, category="forward")
    file.kernel(300, 330, launched=(110, 115))
    file.kernel(400, 410, launched=(220, 225))
    return str(file.write())


def answer(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert run("layers", *argv) == 0
    captured = capsys.readouterr()
    assert all(line.startswith("! ") for line in captured.err.splitlines())
    return captured.out


ROWS = [
    ["layers.0", "forward", "1", "1", "30", "30", "0", "0", "30", "30", "100", "0.75", "0.75", "1"],
    ["(none)", "other", "0", "1", "10", "10", "0", "0", "10", "10", "0", "0.25", "0.25", "1"],
]


def test_csv_has_the_columns_of_the_contract(capture: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(csv.reader(io.StringIO(answer(capsys, capture, "--format", "csv")))) == [CONTRACT, *ROWS]


@pytest.mark.parametrize("form", ["csv", "json", "md"])
def test_several_captures_in_one_table(form: str, capture: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = answer(capsys, capture, capture, "--format", form)
    # two rows of each; the warning, which is the same of both, and in json what it was made of
    assert out.count(capture) == {"csv": 4, "md": 5, "json": 7}[form]


@pytest.mark.parametrize("suffix", ["csv", "json", "md", "txt"])
def test_the_file_holds_what_stdout_would(
    suffix: str, capture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # the width of stdout alone
    form = "table" if suffix == "txt" else suffix
    printed = answer(capsys, capture, "--format", form)
    path = tmp_path / f"out.{suffix}"
    path.write_text("something else, and longer than the answer\n" * 100)
    assert answer(capsys, capture, "-o", path) == ""
    assert path.read_text(encoding="utf-8") == printed


def test_what_has_no_place_for_warnings_leaves_them_on_stderr(
    capture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table ends with them; data and pictures are data and pictures alone."""
    run("layers", capture)
    table = capsys.readouterr()
    warnings = [line for line in table.out.splitlines() if line.startswith("! ")]
    assert len(warnings) == 1 and table.err == ""
    for argv in (("--format", "csv"), ("-o", tmp_path / "a.parquet"), ("-o", tmp_path / "a.svg")):
        run("layers", capture, *argv)
        data = capsys.readouterr()
        assert data.err.splitlines() == warnings and "! " not in data.out
    run("layers", capture, "--format", "json")
    data = capsys.readouterr()
    assert data.err == "" and json.loads(data.out)["warnings"] == [warnings[0][2:]]
    run("layers", capture, "--format", "md")
    data = capsys.readouterr()
    assert data.err == "" and data.out.endswith(f"\n> {warnings[0][2:]}\n")
    run("layers", capture, capture, "--format", "csv")
    assert capsys.readouterr().err.splitlines() == [f"! {capture}: {warnings[0][2:]}"]


@pytest.mark.parametrize("stderr", ["/dev/full", "|true"])
def test_a_stderr_that_takes_nothing_changes_no_status(stderr: str, capture: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "nvprof_kit", "layers", capture, "-o", str(tmp_path / "a.csv")]
    where = f"2>&1 >/dev/null {stderr}" if stderr.startswith("|") else f"2>{stderr}"
    done = subprocess.run(["bash", "-c", f"{shlex.join(words)} {where}; exit ${{PIPESTATUS[0]}}"], check=False)
    assert done.returncode == 0
    assert (tmp_path / "a.csv").stat().st_size


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("CAPTURE CAPTURE -o a.png", "a plot shows one capture, not 2"),
        (
            "CAPTURE -o a.xlsx",
            "no format has this suffix; needed one of .txt .csv .json .md .parquet .png .svg .pdf, or",
        ),
        ("CAPTURE -o no/a.csv", "cannot write it: No such file or directory"),
        ("CAPTURE -o . --format table", "cannot write it: Is a directory"),
        ("CAPTURE --rules nowhere.toml", "no such file, and no preset; available: deepspeed, emit-nvtx"),
        ("CAPTURE --memory", "no memory in this capture; record it with"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    words: str, complaint: str, capture: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(capture).parent)
    assert run("layers", *words.replace("CAPTURE", capture).split()) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == "" and complaint in line


def test_parquet_is_not_for_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    with pytest.raises(UsageError, match=r"with -o \(.*\.parquet"):
        Output.of("parquet", None)
