"""`make demo`, as a newcomer runs it, but for the installation."""

import csv
import re
import shutil
import sys
from pathlib import Path

import pytest
from support.cli import executable, execute
from support.data import ROOT


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A folder that looks to the Makefile like the environment it has installed."""
    binaries = tmp_path / "venv" / "bin"
    binaries.mkdir(parents=True)
    for name, command in {"python": "", "nvprof-kit": "-m nvprof_kit"}.items():
        paths = f"{ROOT}${{PYTHONPATH:+:$PYTHONPATH}}"
        executable(binaries / name, f'#!/bin/sh\nPYTHONPATH={paths} exec {sys.executable} {command} "$@"\n')
    return binaries.parent


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_demo(environment, tmp_path):
    folder = tmp_path / "out"
    stamp = environment / ".installed"
    command = ["make", "--no-print-directory", "demo", f"VENV={environment}", f"DEMO={folder}", "-o", stamp]
    done = execute(*command, cwd=ROOT, COLUMNS="120")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("step ") for line in lines) == 5

    header = next(line for line in lines if line.startswith("layer "))
    columns = ["layer", "calls", "forward", "backward", "total", "self share", "total share", "CPU"]
    assert re.split(r"\s{2,}", header.strip()) == columns
    labels = {re.split(r"\s{2,}", line.strip())[0] for line in lines[lines.index(header) + 2 :]}
    assert {"TinyTransformer", "layers.0", "layers.3", "attention", "mlp", "head", "(none) optimizer", "total"} <= set(
        labels
    )
    assert sum("no GPU" in line for line in lines) == 2  # the header, and the note that says what is counted
    assert lines[-1] == f"{folder}/ holds the trace (run.json.gz), the table (layers.csv) and the plot (layers.png)."

    assert sorted(path.name for path in folder.iterdir()) == ["layers.csv", "layers.png", "run.json.gz"]
    rows = list(csv.DictReader((folder / "layers.csv").open()))
    own = {(row["layer"], row["phase"]): int(row["gpu_self_ns"]) for row in rows}
    assert own["layers.0.mlp", "forward"] > 0
    assert own["layers.0.mlp", "backward"] > 0
    loop = sum(ns for (_, phase), ns in own.items() if phase in ("forward", "backward"))
    # elapsed time of CPU operators, idle cores give 0.98: what else runs here may stop the program in the loss
    assert sum(ns for (layer, phase), ns in own.items() if layer != "(none)") >= 0.8 * loop
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1)
