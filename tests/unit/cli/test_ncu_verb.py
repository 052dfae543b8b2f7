"""``nvprof-kit ncu``: its verbs, their forms, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli import run

import nvprof_kit

DATA = Path(__file__).parents[2] / "data" / "ncu"
PLAN, RUN = DATA / "plan-2025.3.csv.xz", DATA / "run-2023.4.sqlite.xz"


def answer(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert run("ncu", *argv) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_layers_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    out = answer(capsys, "layers", PLAN, "--capture", RUN, "--depth", 3, "--no-fold")
    assert "71 measured kernels" in out
    assert "they stand for 80.8 % of its 28.06 ms of GPU time" in out
    assert "model.layers.11" in out
    assert "model.layers.11.mlp" not in out


def test_several_reports_are_one_table() -> None:
    alone, both = (nvprof_kit.open_ncu(*[DATA / "own-2025.3.csv.xz"] * count).layers() for count in (1, 2))
    assert (both.measured, both.gpu_ns) == (2 * alone.measured, 2 * alone.gpu_ns)


def test_plan_writes_its_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "plan.sh"
    out = answer(capsys, "plan", RUN, "--every-layer", "--script", script, "--memory-gb", 3.75)
    assert "89 launches represent 90.3 % of the GPU time" in out
    text = script.read_text()
    assert "# 89 launches represent 90.3 % of the GPU time" in text
    assert "--profile-from-start off" in text
    assert script.stat().st_mode & 0o100


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["layers", PLAN, "-o", "a.png"], "no kernel with both operations and bytes of DRAM counted"),
        (["layers", PLAN, "--capture", PLAN], "a page of ncu: `nvprof-kit ncu layers` reads it"),
        (["layers", RUN], "an SQLite file, as nsys exports: `nvprof-kit layers` and similar commands read it"),
        (["layers", "none.csv"], "no such file"),
        (["plan", RUN, RUN], "a plan needs one capture, not 2"),
        (["plan", RUN, "--share", "1"], "--share 1 cannot be reached"),
        (["plan", RUN, "--script", "/no/folder/plan.sh"], "cannot write it"),
        (["layers", PLAN, "--by", "kernel", "-o", "a.svg"], "nvprof-kit ncu layers REPORT -o roofline.png"),
    ],
)
def test_refusals_are_one_line(
    argv: list[object],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("ncu", *argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
