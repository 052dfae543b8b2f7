"""The data half of the plots, and that the drawn halves hold it: a timeline's bands."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile

from nvprof_kit._analysis.attribution.attribution import attribute
from nvprof_kit._analysis.timeline import OPTIONAL, Timeline, timeline
from nvprof_kit._report.plots.plots import PHASE_COLOURS, encode
from nvprof_kit._report.plots.timeline import IDLE, last_words, timeline_bands, timeline_figure
from nvprof_kit._result.formats import PICTURES
from nvprof_kit._trace.open import open_capture


@pytest.fixture
def shown(tmp_path: Path) -> Timeline:
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("a", 10, 700, category="forward")
    file.range_("a.3", 310, 600, category="forward")
    file.kernel(1000, 1300, launched=(30, 31))
    file.kernel(1300, 1700, launched=(320, 321))
    file.kernel(1800, 2000, launched=(720, 721))
    trace = open_capture(file.write(), optional=OPTIONAL)
    return timeline(trace, attribute(trace))


def test_bands_of_a_timeline(shown: Timeline) -> None:
    forward, other = PHASE_COLOURS["forward"], PHASE_COLOURS["other"]
    assert [(band.name, band.boxes.values.tolist()) for band in timeline_bands(shown)] == [
        ("GPU 0 idle, 10.0 %", [[1700, 1800, IDLE, ""]]),  # 100 of 1000 ns
        ("layers", [[1000, 1700, forward, "a"]]),
        ("", [[1300, 1700, forward, "a.3"]]),
        ("GPU 0 · stream 7", [[1000, 1300, forward, ""], [1300, 1700, forward, ""], [1800, 2000, other, ""]]),
    ]
    assert [band.name for band in timeline_bands(shown, depth=1)] == [
        "GPU 0 idle, 10.0 %",
        "layers",
        "GPU 0 · stream 7",
    ]


def test_a_title_names_every_gpu(shown: Timeline) -> None:
    figure = timeline_figure(shown, ("NVIDIA H100", "NVIDIA H100", "NVIDIA A100"))
    assert figure.get_suptitle() == "The capture in time on 2 x NVIDIA H100, NVIDIA A100"


def test_a_step_is_drawn_from_its_begin_to_its_end(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("step 1", 0, 100, category="step", payload=1)
    file.kernel(250, 1050, launched=(20, 21), stream=8)  # runs into step 2, which is open from 110 on
    file.range_("step 2", 110, 1000, category="step", payload=2)
    file.kernel(1000, 1100, launched=(120, 121))
    file.kernel(1200, 1400, launched=(130, 131))
    trace = open_capture(file.write(), optional=OPTIONAL)
    other = PHASE_COLOURS["other"]
    assert [
        (band.name, band.boxes.values.tolist()) for band in timeline_bands(timeline(trace, attribute(trace), 1))
    ] == [
        ("GPU 0 idle, 28.6 %", [[1100, 1200, IDLE, ""]]),  # of the 350 ns from the end of step 1
        ("GPU 0 · stream 7", [[1050, 1100, other, ""], [1200, 1400, other, ""]]),
    ]


def test_the_drawn_timeline_is_labelled(shown: Timeline) -> None:
    figure = timeline_figure(shown, ("NVIDIA H200",))
    (axes,) = figure.axes
    assert figure.get_suptitle() == "The capture in time on NVIDIA H200" and axes.get_xlabel() == "time, ms"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["forward", "other", "idle"]
    assert {text.get_text() for text in axes.texts} == {"a", "a.3"}


def test_last_words() -> None:
    assert [last_words(path) for path in ("model.layers.3", "model.layers.3.mlp", "lm_head", "3")] == [
        "layers.3",
        "mlp",
        "lm_head",
        "3",
    ]


@pytest.mark.parametrize("form", PICTURES)
def test_every_format(form: str, shown: Timeline) -> None:
    assert encode(timeline_figure(shown), form)[:5] in (b"\x89PNG\r", b"<?xml", b"%PDF-")
