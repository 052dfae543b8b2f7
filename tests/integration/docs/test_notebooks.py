"""The notebooks of the documentation: they are kept without outputs, and run."""

import re
import sys
from typing import Any

import pytest
from support.data import ROOT

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("mkdocs")

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
sys.path.insert(0, str(ROOT / "docs"))
import hooks  # noqa: E402  # of the site itself


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def said(output: Any) -> str:
    """What a cell says, but pictures."""
    text = output.get("text") or output.get("data", {}).get("text/html", "")
    return re.sub(r'src="data:[^"]*"|<style[^>]*>.*?</style>', "", text, flags=re.DOTALL)


def test_there_are_three_without_outputs():
    assert [path.stem for path in NOTEBOOKS] == ["read-a-capture", "train-and-read", "two-ranks"]
    for path in NOTEBOOKS:
        nbformat.validate(notebook := nbformat.read(path, as_version=4))
        assert [cell for cell in code(notebook) if cell.outputs or cell.execution_count] == [], path.stem


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path):
    cells = code(hooks.run(nbformat.read(path, as_version=4)))
    for cell in cells:
        assert len(cell.outputs) <= 1, f"shown twice: {cell.source}"
    outputs = [output for cell in cells for output in cell.outputs]
    assert sum("text/html" in output.get("data", {}) for output in outputs) >= 4
    assert re.findall(r"(?<![\w.])/(?:home|root|work)/\S+", "".join(map(said, outputs))) == []


@pytest.mark.full
def test_every_cell_of_a_notebook_may_be_run_again():
    """Each cell twice in a row, as one does who tries things: nothing fails, and no layer is ranged twice."""
    notebook = nbformat.read(ROOT / "docs" / "notebooks" / "train-and-read.ipynb", as_version=4)
    check = nbformat.v4.new_code_cell("print(capture.layers().to_frame().query('layer == \"head\"')['calls'].tolist())")
    twice = [nbformat.v4.new_code_cell(cell.source) for cell in code(notebook) for _ in range(2)]
    notebook.cells = [*twice, check]
    hooks.run(notebook)
    assert notebook.cells[-1].outputs[0].text == "[3, 3]\n"  # three steps, forward and backward
