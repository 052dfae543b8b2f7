"""No verb writes its answer over what it was made of, by whatever name; the exit status is 2 and the file as it was."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile

from nvprof_kit._cli import main

RULES = '[[rule]]\nmatch = "layers.*"\nlayer = "block"\n'
KERNELS = '[[rule]]\nname = "mine"\nclass = "gemm"\nmatch = "gemm"\n'


def kineto() -> bytes:
    """A PyTorch trace of one operator on the CPU."""
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0, "args": {}}
    return json.dumps({"schemaVersion": 1, "traceEvents": [event]}).encode()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of each kind, in which the command line runs."""
    file = NsysFile(tmp_path / "run.sqlite")
    for number, zero in enumerate((0, 1000)):
        file.range_(f"step {number}", zero + 100, zero + 900, category="step", payload=number)
        file.range_("layers.0", zero + 110, zero + 200, category="forward")
        file.kernel(zero + 300, zero + 330, launched=(zero + 120, zero + 125))
    capture = file.write()
    (tmp_path / "packed.sqlite.xz").write_bytes(lzma.compress(capture.read_bytes(), preset=0))
    (tmp_path / "run.json").write_bytes(kineto())
    (tmp_path / "run.json.gz").write_bytes(gzip.compress(kineto()))
    (tmp_path / "rules.json").write_text(RULES)
    (tmp_path / "kernels.md").write_text(KERNELS)
    (tmp_path / "link.json").symlink_to("run.json")
    (tmp_path / "link.csv").symlink_to("run.sqlite")
    (tmp_path / "hard.csv").hardlink_to(capture)
    (tmp_path / "timer_rank0.log").write_text("")
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
        "summary run.sqlite --kernel-rules kernels.md -o kernels.md --view kernel",
        "breakdown run.sqlite --format md -o run.sqlite",
        "breakdown run.sqlite --kernel-rules kernels.md -o kernels.md",
        "advise run.sqlite --format json -o run.sqlite",
        "advise packed.sqlite.xz --format json -o packed.sqlite.xz",
        "metrics run.sqlite --format json -o run.sqlite",
        "flops run.sqlite --format json -o run.sqlite",
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
        "scrub run.sqlite -o run.sqlite --force",
    ],
)
def test_an_answer_is_never_written_over_an_input(folder: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(SystemExit) as end:
        main(line.split())
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == ""
    assert len(said.err.splitlines()) == 1 and ("must not overwrite it" in said.err or line.startswith("scrub"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_counts_are_an_input(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = folder / "run.flops.json"
    counts.write_text("{}")
    with pytest.raises(SystemExit) as end:
        main(["flops", "run.sqlite", "-o", str(counts)])
    assert end.value.code == 2 and counts.read_text() == "{}"
