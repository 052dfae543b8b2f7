"""The data half of the plots, and that the drawn halves hold it: a timeline's bands, bars of steps, boxes of a tree."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from support.captures.layers_result import MS, layers_result
from support.captures.nsys_file import NsysFile

from nvprof_kit._analysis.attribution.attribution import attribute
from nvprof_kit._analysis.breakdown.breakdown import OPTIONAL as BREAKDOWN
from nvprof_kit._analysis.breakdown.breakdown import breakdown
from nvprof_kit._analysis.timeline import OPTIONAL, Timeline, timeline
from nvprof_kit._report.plots.plots import PHASE_COLOURS, encode
from nvprof_kit._report.plots.queue import queue_areas, queue_figure
from nvprof_kit._report.plots.steps import steps_bars, steps_figure
from nvprof_kit._report.plots.timeline import IDLE, last_words, timeline_bands, timeline_figure
from nvprof_kit._report.plots.tree import tree_boxes, tree_figure
from nvprof_kit._result.formats import PICTURES
from nvprof_kit._trace.open import open_capture

LENGTHS = pd.DataFrame({"step": [0, 1], "wall_ns": [30 * MS, 22 * MS]})


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


def test_bars_of_steps() -> None:
    assert steps_bars(layers_result(), LENGTHS).to_dict("list") == {
        "step": [0, 1],
        "length": [30 * MS, 22 * MS],
        "forward": [6 * MS, 9 * MS],  # 1 + 3 + 2 and 2 + 5 + 2
        "backward": [10 * MS, 7 * MS],
        "recompute": [0, 0],
        "other": [4 * MS, 3 * MS],  # the optimizer; its 1 ms outside steps is in no bar
    }
    (axes,) = steps_figure(layers_result(), LENGTHS).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "GPU time, ms")
    assert max(bar.get_y() + bar.get_height() for bar in axes.patches) == 20


def test_a_hundred_steps_can_be_drawn() -> None:
    lengths = pd.DataFrame({"step": range(100), "wall_ns": MS})
    (axes,) = steps_figure(layers_result(), lengths).axes
    axes.figure.canvas.draw()
    assert len(axes.get_xticks()) <= 25


def test_boxes_of_a_tree() -> None:
    boxes = tree_boxes(layers_result().tree)
    assert [(box.label, box.left // MS, box.width // MS, box.level) for box in boxes] == [
        ("model", 0, 30, 0),
        ("layers.0", 0, 16, 1),
        ("attn", 0, 12, 2),
        ("layers.1", 16, 10, 1),
        ("lm_head", 26, 4, 1),
        ("(none) forward", 30, 2, 0),
        ("(none) optimizer", 32, 8, 0),
    ]
    assert [box.label for box in tree_boxes(layers_result().tree, 1)] == ["model", "(none) forward", "(none) optimizer"]
    (axes,) = tree_figure(layers_result()).axes
    assert axes.get_xlabel() == "GPU time, ms per step" and axes.get_xlim() == (0, 20)


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


def test_the_queue_as_areas_by_stream() -> None:
    rows = [(1, stream, start, start + 10, float(depth), 2) for stream, *depths in [(7, 1, 0), (9, 2, 3)]
            for start, depth in zip((0, 10), depths, strict=True)]  # fmt: skip
    names = ["step", "stream", "start_ns", "end_ns", "queue_mean", "queue_max"]
    areas = queue_areas(pd.DataFrame(rows, columns=names))
    assert areas.to_dict("list") == {"stream 9": [2, 3], "stream 7": [1, 0]}
    many = pd.DataFrame([(1, stream, 0, 10, float(stream), 9) for stream in range(9)], columns=names)
    assert queue_areas(many).iloc[0].to_dict() == {
        **{f"stream {stream}": float(stream) for stream in (8, 7, 6, 5, 4, 3)}, "3 other streams": 3.0
    }  # fmt: skip


@pytest.mark.filterwarnings("error")
def test_the_queue_of_a_step_in_which_nothing_runs(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    for number in range(3):
        file.range_(f"step {number}", 100 * number, 100 * number + 50, category="step", payload=number)
    file.kernel(10, 20, launched=(1, 2))
    figure = queue_figure(breakdown(open_capture(file.write(), optional=BREAKDOWN)))
    encode(figure, "png")
    assert figure.axes[0].get_legend() is None


def test_the_drawn_queue_shows_idle_gaps(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("step 4", 0, 1000, category="step", payload=4)
    file.kernel(300, 400, launched=(30, 31))
    file.kernel(600, 1000, launched=(60, 61), stream=9)
    figure = queue_figure(breakdown(open_capture(file.write(), optional=BREAKDOWN)))
    axes, strip = figure.axes
    assert figure.get_suptitle() == "Queue of launched operations, step 4 on Test GPU"
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"stream 7", "stream 9"}
    (gaps,) = strip.collections
    found = [edge for path in gaps.get_paths() for edge in (path.vertices[0, 0], path.vertices[2, 0])]
    assert found == pytest.approx([0, 0.0003, 0.0004, 0.0006])
