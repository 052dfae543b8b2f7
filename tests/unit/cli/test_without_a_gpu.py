"""A capture of nsys in which nothing ran on a GPU: `layers` tells the CPU's times, all else what is missing."""

import sqlite3
from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile
from support.cli import run

import nvprof_kit


def capture(path: Path, *, calls: bool = False) -> Path:
    """Two steps of 100 ns, a layer of 40 and 50 in them; with CUDA calls, or without the tables of CUDA."""
    file = NsysFile(path)
    for step in range(2):
        begin = 1000 * step
        file.range_(f"step {step}", begin, begin + 100, category="step")
        file.range_("layers.0", begin + 10, begin + 50 + 10 * step)
    file.call("cudaGetDevice", 5, 6)
    made = file.write()
    with sqlite3.connect(made) as db:
        for table in ("KERNEL", "MEMCPY", "MEMSET", *([] if calls else ["RUNTIME"])):
            db.execute(f"DROP TABLE IF EXISTS CUPTI_ACTIVITY_KIND_{table}")
    return made


@pytest.mark.parametrize("calls", [False, True])
def test_layers_gives_the_cpus_times(calls, tmp_path):
    opened = nvprof_kit.open(capture(tmp_path / "run.sqlite", calls=calls))
    result = opened.layers()
    rows = result.to_frame().set_index("layer")
    assert rows.loc["layers.0", ["calls", "gpu_ops", "gpu_self_ns", "cpu_ns"]].tolist() == [2, 0, 0, 90]
    assert sum("no kernel" in one or "no GPU operations" in one for one in result.warnings) == 1
    assert len(opened.tables["ranges"]) == 4 and opened.tables["ops"].empty


@pytest.mark.parametrize(
    "verb", ["breakdown", "summary", "advise", "export", "report", "metrics", "flops", "diff", "ncu plan"]
)
def test_every_other_verb_says_what_is_missing_in_one_line(verb, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = str(capture(tmp_path / "run.sqlite"))
    more = [path] if verb == "diff" else ["-o", "out.json.gz"] if verb == "export" else []
    assert run(*verb.split(), path, *more) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith(f"nvprof-kit: {path}: ") or path in line
    assert "GPU" in line or "FLOPs" in line
