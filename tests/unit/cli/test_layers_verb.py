"""``nvprof-kit layers``: what is asked for, in which form, and where it goes."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from support.captures.nsys_file import NsysFile
from support.captures.nsys_memory import carry
from support.cli import run

import nvprof_kit
from nvprof_kit._cli.output import Output
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


def refusal(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert run("layers", *argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def test_a_plot_of_two_captures(capture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "a plot shows one capture, not 2" in refusal(capsys, capture, capture, "-o", tmp_path / "a.png")


def test_an_unknown_suffix(capture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, capture, "-o", tmp_path / "a.xlsx")
    assert "no format has this suffix; needed one of .txt .csv .json .md .parquet .png .svg .pdf, or --format" in line


def test_a_file_that_cannot_be_written(capture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot write it: No such file or directory" in refusal(capsys, capture, "-o", tmp_path / "no" / "a.csv")
    assert "cannot write it: Is a directory" in refusal(capsys, capture, "-o", tmp_path, "--format", "table")


def test_parquet_is_not_for_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    with pytest.raises(UsageError, match=r"with -o \(.*\.parquet"):
        Output.of("parquet", None)


@pytest.fixture
def foreign(tmp_path: Path) -> str:
    file = NsysFile(tmp_path / "foreign.sqlite")
    for text, start in (("Batch 7", 50), ("block 3", 100), ("layers.5", 200)):
        file.range_(text, start, start + 50, category=None, domain="", registered=False)
        file.kernel(start + 300, start + 301, launched=(start + 10, start + 11))
    file.range_("fwd mine", 300, 350, category=None, domain="trainer")
    file.kernel(700, 701, launched=(310, 311))
    return str(file.write())


def test_rules_of_a_file(foreign: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own.toml"
    own.write_text("domain = 'trainer'\n[[rule]]\nmatch = 'fwd (?P<layer>.+)'\n")
    table = list(csv.DictReader(io.StringIO(answer(capsys, foreign, "--rules", own, "--format", "csv"))))
    assert [row["layer"] for row in table] == ["mine", "(none)"]
    # a domain on the command line is read instead of the one that the rules name; no rule fits its ranges
    table = list(
        csv.DictReader(io.StringIO(answer(capsys, foreign, "--rules", own, "--domain", "default", "--format", "csv")))
    )
    assert [row["layer"] for row in table] == ["(none)"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [(None, "no such file, and no preset; available: deepspeed, emit-nvtx"), ("match = 'x'", "unknown key 'match'")],
)
def test_rules_that_cannot_be_used(
    foreign: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, complaint: str
) -> None:
    own = tmp_path / "own.toml"
    if text is not None:
        own.write_text(text)
    assert run("layers", foreign, "--rules", own) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


def test_memory_is_appended_and_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("layers.0", 100, 200, category="forward")
    carry(file, (101, 3 << 20), (199, 5 << 20), peak=8 << 20)
    file.kernel(300, 330, launched=(110, 115))
    capture = str(file.write())
    told = [str(count << 20) for count in (3, 5, 2, 8)]
    rows = list(csv.reader(io.StringIO(answer(capsys, capture, "--format", "csv", "--memory"))))
    assert rows == [
        [*CONTRACT, *(name for name in nvprof_kit.Layers.columns["layers"] if name.startswith(("memory_", "cuda_")))],
        ["layers.0", "forward", "1", "1", "30", "30", "0", "0", "30", "30", "100", "1.0", "1.0", "0", *told, "", ""],
    ]
    assert answer(capsys, capture, "--format", "csv").splitlines()[0] == ",".join(CONTRACT)
    (first,) = json.loads(answer(capsys, capture, "--format", "json", "--memory"))["rows"]
    assert (first["memory_peak_bytes"], first["cuda_alloc_bytes"]) == (8 << 20, None)
    for form in ("md", "parquet"):
        assert run("layers", capture, "--memory", "-o", tmp_path / f"a.{form}") == 0
    assert pd.read_parquet(tmp_path / "a.parquet")["memory_retained_bytes"].tolist() == [2 << 20]
    capsys.readouterr()
    text = answer(capsys, capture, "--memory")
    assert re.search("kept MiB +peak MiB", text)
    assert "CUDA MiB" not in text, "nsys traced none"
    assert [line.split()[-2:] for line in text.splitlines() if line.startswith("layers.0")] == [["2.0", "8.0"]]


def test_a_capture_without_memory_is_one_line(capture: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("layers", capture, "--memory") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no memory in this capture; record it with" in captured.err
    assert captured.err.count("\n") == 1
