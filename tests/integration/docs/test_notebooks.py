"""The notebooks of the documentation: they hold the outputs of a whole run, and run again with the same ones."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).parents[3]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
MEASURED = {"train-and-read"}
"""Notebooks that measure this machine: their figures differ from run to run."""

READ = [pytest.param(path, marks=[pytest.mark.full] if path.stem in MEASURED else []) for path in NOTEBOOKS]


def code(path: Path) -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def texts(cells: list[Any]) -> list[str]:
    """What the cells say, but pictures."""
    outputs = [output for cell in cells for output in cell.outputs]
    said = [output.get("text") or output.get("data", {}).get("text/html", "") for output in outputs]
    return [re.sub(r'src="data:[^"]*"|<style[^>]*>.*?</style>', "", text, flags=re.DOTALL) for text in said]


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["read-a-capture", "train-and-read", "two-ranks"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_those_of_one_whole_run(path: Path) -> None:
    cells = code(path)
    nbformat.validate(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert [output.output_type for output in cell.outputs if output.output_type == "error"] == []
        assert len(cell.outputs) <= 1, f"shown twice: {cell.source}"
    assert sum("text/html" in output.get("data", {}) for cell in cells for output in cell.outputs) >= 4
    said = "".join(texts(cells))
    assert re.findall(r"(?<![\w.])/(?:home|root|tmp|work)/\S+", said) == []
    assert path.stat().st_size < 300_000


@pytest.mark.slow
@pytest.mark.parametrize("path", READ, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    place = tmp_path / "docs" / "notebooks"
    place.mkdir(parents=True)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(place)}})
    client.execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if path.stem not in MEASURED:
        assert texts(cells) == texts(code(path)), "stale: run `make notebooks`"
    for cell in cells:
        assert len(cell.outputs) <= 1, f"shown twice: {cell.source}"


@pytest.mark.full
def test_every_cell_of_a_notebook_may_be_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell twice in a row, as one does who tries things: nothing fails, and no layer is ranged twice."""
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
    notebook = nbformat.read(ROOT / "docs" / "notebooks" / "train-and-read.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    check = nbformat.v4.new_code_cell("print(capture.layers().to_frame().query('layer == \"head\"')['calls'].tolist())")
    notebook.cells = [nbformat.v4.new_code_cell(cell.source) for cell in cells for _ in range(2)] + [check]
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert notebook.cells[-1].outputs[0].text == "[3, 3]\n"  # three steps, forward and backward
