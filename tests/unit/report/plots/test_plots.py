"""The pictures of a capture in time and of a roofline: what is drawn, and what is written on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile

import nvprof_kit

DATA = Path(__file__).parents[3] / "data"


def test_a_step_is_drawn_from_its_begin_to_its_end(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("step 1", 0, 100, category="step", payload=1)
    file.kernel(250, 1050, launched=(20, 21), stream=8)  # runs into step 2, which is open from 110 on
    file.range_("step 2", 110, 1000, category="step", payload=2)
    file.range_("a", 112, 140)
    file.range_("a.3", 125, 135)
    file.kernel(1000, 1100, launched=(120, 121))
    file.kernel(1200, 1400, launched=(130, 131))
    plot = nvprof_kit.open(file.write()).plot("timeline", step=2)
    assert plot.rows["layer"].tolist() == ["(none)", "a", "a.3"]
    figure = plot.figure()
    (axes,) = figure.axes
    assert figure.get_suptitle() == "Step 2 in time on Test GPU" and axes.get_xlabel() == "time, ms"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["forward", "idle"]
    assert {text.get_text() for text in axes.texts} == {"a", "a.3"}
    # 100 of the 350 ns from the end of step 1
    assert "GPU 0 idle, 28.6 %" in [label.get_text() for label in axes.get_yticklabels()]


def test_a_roofline_holds_every_ceiling_and_names_few_dots() -> None:
    (axes,) = nvprof_kit.open_ncu(DATA / "ncu" / "roofline-2025.3.csv.xz").layers().figure().axes
    assert sum(len(dots.get_offsets()) for dots in axes.collections) == 32  # a dot a kernel that computes and moves
    texts = [text.get_text().strip() for text in axes.texts]
    assert texts[:3] == ["FP32 65 T/s", "tensor bf16 to fp32 1,037 T/s", "DRAM 4.8 TB/s"]
    assert 0 < len(texts[3:]) <= 12
    assert [text.get_text() for text in axes.get_legend().get_texts()][-2:] == ["model.layers.0", "forward"]
    assert len({tuple(dots.get_facecolor()[0]) for dots in axes.collections}) == 5  # a colour a layer


@pytest.mark.parametrize("form", ["png", "svg", "pdf"])
def test_every_format(form: str, tmp_path: Path) -> None:
    plot = nvprof_kit.open(DATA / "llama-2023.4.sqlite.xz").plot("timeline")
    assert plot.save(tmp_path / f"a.{form}").read_bytes()[:5] in (b"\x89PNG\r", b"<?xml", b"%PDF-")
