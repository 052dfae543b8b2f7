"""Names of files and layers that a terminal, a spreadsheet, Markdown or a page could take for something else."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.captures.nsys_file import NsysFile
from support.cli import run

import nvprof_kit

LAYERS = (
    "=cmd|'/c calc'!A1",
    "@SUM(1)",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\x1b[31mred",
    "\x9b31m",
    "a\nb",
    "a\u202eb",
    "[link](javascript:alert(1))",
    "`code`",
    "a|b",
    "kernel<float>",
)


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """One kernel in each layer."""
    file = NsysFile(tmp_path / "run.sqlite")
    for number, name in enumerate(LAYERS):
        at = 1000 * number
        file.range_(name, at, at + 900)
        file.kernel(at + 100_000, at + 100_100, launched=(at + 10, at + 20), name=f"k{name}")
    return file.write()


@pytest.mark.parametrize(
    "name", ["-rf", "--help", "a\nb", "\x1b[31mx", "$(id)'\"", "=1+1", "%d", "x?mode=rw#", "<b>", "u\udcff"]
)
def test_a_file_of_any_name(name: str, capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = capture.with_name(f"{name}.sqlite")
    try:
        shutil.copy(capture, file)
    except OSError:
        pytest.skip("this file system has no such names")
    out = capture.parent / "out"
    assert run("layers", file) == 0
    said = capsys.readouterr()
    assert not {"\x1b", "\x9b", "\u202e"} & {*said.out, *said.err}
    assert "run · nsys" in said.out.replace(said.out.splitlines()[0].partition(" · nsys")[0], "run", 1).splitlines()[0]
    for suffix in ("json", "html", "json.gz", "csv", "md", "parquet"):
        verb = {"html": "report", "json.gz": "export"}.get(suffix, "layers")
        assert run(verb, file, "-o", f"{out}.{suffix}") == 0, suffix
    json.loads(Path(f"{out}.json").read_text(encoding="utf-8"))
    if name == "<b>":
        assert f"{os.sep}<b>.sqlite" not in Path(f"{out}.html").read_text(encoding="utf-8")


def test_layers_of_any_name(capture: Path, tmp_path: Path) -> None:
    for suffix in ("csv", "md"):
        assert run("layers", capture, "-o", tmp_path / f"o.{suffix}") == 0
    assert run("report", capture, "-o", tmp_path / "o.html") == 0
    text = (tmp_path / "o.csv").read_text(encoding="utf-8")
    assert all(row["layer"][0] not in "=+-@" for row in csv.DictReader(io.StringIO(text)))
    page = (tmp_path / "o.html").read_text(encoding="utf-8")
    shown = nvprof_kit.open(capture).layers()._repr_html_()
    assert not {"\x1b", "\x9b", "\u202e"} & {*page, *shown}
    assert "<script>alert(1)" not in page and "<img src=x" not in page
    lines = (tmp_path / "o.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2 + len(LAYERS)  # no name begins a row
    told = "\n".join(lines)
    for said in (r"\<img src=x", r"kernel\<float>", r"\[link](javascript", r"\`code\`", r"a\|b"):
        assert said in told


@pytest.mark.parametrize("view", ["layers", "timeline"])
def test_plots_show_any_name_as_it_is(view: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    for number, name in enumerate((*LAYERS, "layers.$\\foo$", "$\\frac{$", "x$$y")):  # no formulas
        at = 1000 * number
        file.range_(name, at, at + 900)
        file.kernel(at + 100, at + 900, launched=(at + 10, at + 20), name=f"k{name}")
    file.range_("step 0", 0, 100_000, category="step", payload=0)
    for suffix in ("svg", "png"):
        target = tmp_path / f"o.{suffix}"
        assert run("plot", file.write() if suffix == "svg" else file.path, "--view", view, "-o", target) == 0
    assert not {"\x1b", "\x9b", "\u202e"} & {*capsys.readouterr().err}
    ElementTree.parse(tmp_path / "o.svg")  # XML has no control characters


def test_json_has_no_control_characters(capture: Path, tmp_path: Path) -> None:
    assert run("layers", capture, "-o", tmp_path / "o.json") == 0
    text = (tmp_path / "o.json").read_bytes()
    assert not any(one.encode() in text for one in ("\x1b[31m", "\x9b31m", "\u202e"))
