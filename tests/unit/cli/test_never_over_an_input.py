"""No verb writes its answer over what it was made of, by whatever name; the exit status is 2 and the file as it was."""

import csv
import io
import json
import lzma
import os
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.captures.kineto_file import event, write
from support.captures.nsys_file import NsysFile
from support.cli import run

import nvprof_kit

RULES = '[[rule]]\nmatch = "layers.*"\nlayer = "block"\n'
COUNTS = {"format": "nvprof_kit flops", "version": 3, "torch": "", "gpu": "", "rank": 0, "steps": 1, "operators": []}
KERNELS = '[[kernel]]\nname = "mine"\nclass = "gemm"\nmatch = "gemm"\n'


@pytest.fixture
def folder(file: NsysFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of each kind, in which the command line runs."""
    for number, zero in enumerate((0, 1000)):
        file.range_(f"step {number}", zero + 100, zero + 900, category="step", payload=number)
        file.range_("layers.0", zero + 110, zero + 200, category="forward")
        file.kernel(zero + 300, zero + 330, launched=(zero + 120, zero + 125))
    capture = file.write()
    (tmp_path / "packed.sqlite.xz").write_bytes(lzma.compress(capture.read_bytes(), preset=0))
    for name in ("run.json", "run.json.gz"):
        write(tmp_path / name, [event("cpu_op", "aten::mm", 1.0, 2.0)])
    (tmp_path / "rules.json").write_text(RULES)
    (tmp_path / "kernels.md").write_text(KERNELS)
    (tmp_path / "link.json").symlink_to("run.json")
    (tmp_path / "link.csv").symlink_to("run.sqlite")
    (tmp_path / "hard.csv").hardlink_to(capture)
    (tmp_path / "timer_rank0.log").write_text("")
    (tmp_path / "run.flops.json").write_text(json.dumps({**COUNTS, "ranges": [], "unknown": []}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "layers run.json -o run.json",
        "layers run.json -o ./run.json",
        "layers run.json -o link.json",
        "layers link.json -o run.json",
        "layers run.sqlite -o link.csv",
        "layers run.sqlite -o hard.csv",
        "layers run.sqlite run.json -o run.json",
        "layers run.sqlite --rules rules.json -o rules.json",
        "export run.json.gz -o run.json.gz",
        "export run.json -o run.json",
        "summary run.sqlite --view kernel --format csv -o run.sqlite",
        "summary run.sqlite --rules kernels.md -o kernels.md --view kernel",
        "breakdown run.sqlite --format md -o run.sqlite",
        "breakdown run.sqlite --rules kernels.md -o kernels.md",
        "advise run.sqlite --format json -o run.sqlite",
        "advise packed.sqlite.xz --format json -o packed.sqlite.xz",
        "metrics run.sqlite --format json -o run.sqlite",
        "flops run.sqlite --format json -o run.sqlite",
        "flops run.sqlite -o run.flops.json",
        "diff run.sqlite run.json -o run.json",
        "diff run.sqlite run.json -o run.sqlite --format csv",
        "ncu plan run.sqlite --format csv -o run.sqlite",
        "ncu plan run.sqlite --script run.sqlite",
        "ncu plan run.sqlite --script link.csv",
        "ncu layers run.json --format csv -o run.json",
        "ncu layers none.csv --capture run.sqlite --format csv -o run.sqlite",
        "ncu layers run.json --by kernel -o run.json",
        "memory run.json -o run.json",
        "timers timer_rank0.log --format csv -o timer_rank0.log",
        "timers . --format csv -o timer_rank0.log",
        "doctor run.sqlite --format json -o run.sqlite",
        "scrub run.sqlite -o run.sqlite",
    ],
)
def test_an_answer_is_never_written_over_an_input(folder, line, capsys):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert run(*line.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert "must not overwrite it" in said.err or "is the capture itself" in said.err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


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
def capture(file: NsysFile) -> Path:
    """One kernel in each layer."""
    for number, name in enumerate(LAYERS):
        at = 1000 * number
        file.range_(name, at, at + 900)
        file.kernel(at + 100_000, at + 100_100, launched=(at + 10, at + 20), name=f"k{name}")
    return file.write()


@pytest.mark.parametrize(
    "name", ["-rf", "--help", "a\nb", "\x1b[31mx", "$(id)'\"", "=1+1", "%d", "x?mode=rw#", "<b>", "u\udcff"]
)
def test_a_file_of_any_name(name, capture, capsys):
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


def test_layers_of_any_name(capture, tmp_path):
    for suffix in ("csv", "md", "json"):
        assert run("layers", capture, "-o", tmp_path / f"o.{suffix}") == 0
    assert run("report", capture, "-o", tmp_path / "o.html") == 0
    text = (tmp_path / "o.csv").read_text(encoding="utf-8")
    assert all(row["layer"][0] not in "=+-@" for row in csv.DictReader(io.StringIO(text)))
    page = (tmp_path / "o.html").read_text(encoding="utf-8")
    shown = nvprof_kit.open(capture).layers()._repr_html_()
    assert not {"\x1b", "\x9b", "\u202e"} & {*page, *shown, *(tmp_path / "o.json").read_text(encoding="utf-8")}
    assert "<script>alert(1)" not in page and "<img src=x" not in page
    lines = (tmp_path / "o.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2 + len(LAYERS)  # no name begins a row
    told = "\n".join(lines)
    for said in (r"\<img src=x", r"kernel\<float>", r"\[link](javascript", r"\`code\`", r"a\|b"):
        assert said in told


@pytest.mark.parametrize("verb", ["layers", "plot"])
def test_plots_show_any_name_as_it_is(verb, file, tmp_path, capsys):
    for number, name in enumerate((*LAYERS, "layers.$\\foo$", "$\\frac{$", "x$$y")):  # no formulas
        at = 1000 * number
        file.range_(name, at, at + 900)
        file.kernel(at + 100, at + 900, launched=(at + 10, at + 20), name=f"k{name}")
    file.range_("step 0", 0, 100_000, category="step", payload=0)
    for suffix in ("svg", "png"):
        target = tmp_path / f"o.{suffix}"
        assert run(verb, file.write() if suffix == "svg" else file.path, "-o", target) == 0
    assert not {"\x1b", "\x9b", "\u202e"} & {*capsys.readouterr().err}
    ElementTree.parse(tmp_path / "o.svg")  # XML has no control characters
