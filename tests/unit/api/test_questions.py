"""Ten natural questions of docs/how-to/ask-in-python.md, asked as the page asks them."""

import re
from pathlib import Path
from typing import Any

import pytest
from support.data import ROOT, unpacked

import nvprof_kit

DATA = ROOT / "tests" / "data"
PAGE = (ROOT / "docs" / "how-to" / "ask-in-python.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("captures")
    for name in ("run", "after"):
        unpacked("slow-2024.2.sqlite.xz", place / f"{name}.sqlite")
    return place


def test_the_questions_of_the_page(folder, monkeypatch):
    monkeypatch.chdir(folder)
    found: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    for block in blocks:
        exec(compile(block, "ask-in-python.md", "exec"), found)
    assert len(blocks) == 12 and PAGE.count("?**") == 10
    capture, third = found["capture"], found["third"]
    assert [len(one.rows) for one in found["same"]] == [len(third.rows)] * 2
    assert third.rows["gpu_self_ns"].sum() == found["same"][1].rows["gpu_self_ns"].sum()
    assert found["table"].column_names == list(capture.layers().to_frame())
    assert Path("layers.csv").read_text().startswith("step,")
    assert set(capture.sql("show tables;")["name"]) == set(capture.tables)
    assert found["slower"] == []  # it is the same capture twice


def test_an_answer_is_a_sequence_of_rows(folder):
    layers = nvprof_kit.open(folder / "run.sqlite").layers()
    rows = list(layers)
    assert len(layers) == len(rows) == len(layers.rows) and bool(layers)
    assert [row["gpu_self_ns"] for row in rows] == layers.rows["gpu_self_ns"].tolist()
    one = layers["layers.2.up"]
    assert {row["layer"] for row in one} == {"layers.2.up"} and 0 < len(one) < len(layers)
    assert len(layers.selected(where="layers.2.*")) > len(one)
    with pytest.raises(KeyError, match="no row is of this layer"):
        layers["layers.99"]
    with pytest.raises(KeyError, match="no row is of this layer"):
        nvprof_kit.open(folder / "run.sqlite").kernels()["layers.2.up"]


def test_polars_has_the_memory_of_arrow(folder):
    polars = pytest.importorskip("polars")
    layers = nvprof_kit.open(folder / "run.sqlite").layers()
    frame = layers.to_polars()
    assert isinstance(frame, polars.DataFrame) and frame["gpu_self_ns"].to_list() == [r["gpu_self_ns"] for r in layers]


@pytest.mark.parametrize("steps", ["three", range(3, 9, 2), range(0)])
def test_steps_that_are_no_range(folder, steps):
    with pytest.raises(nvprof_kit.UsageError, match="steps"):
        nvprof_kit.open(folder / "run.sqlite").layers(steps=steps)


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        *((question, r"no such view here; available: .*kernel|steps") for question in ("breakdown", "diff", "summary")),
        *((question, "this answer has a single table; leave its name out") for question in ("layers", "advise")),
    ],
)
def test_a_table_that_is_not_there_is_named_with_those_that_are(folder, question, sentence):
    capture = nvprof_kit.open(folder / "run.sqlite")
    result = capture.diff(capture) if question == "diff" else getattr(capture, question)()
    with pytest.raises(nvprof_kit.UsageError, match=f"nosuch: {sentence}"):
        result.to_frame("nosuch")
