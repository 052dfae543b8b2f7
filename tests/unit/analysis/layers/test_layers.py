"""What the brute force of `test_layers_truth` does not know: names without categories, the model's order, warnings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.captures.nsys_file import SCHEMAS, START_END, NsysFile, thread

import nvprof_kit


@pytest.fixture(params=SCHEMAS)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> NsysFile:
    return NsysFile(tmp_path / "capture.sqlite", request.param)


def table(file: NsysFile) -> nvprof_kit.Layers:
    return nvprof_kit.open(file.write()).layers(steps="all")


def sums(result: nvprof_kit.Layers) -> dict[tuple[str, str], int]:
    rows = result.rows[result.rows["gpu_self_ns"] > 0]
    return dict(zip(zip(rows["layer"], rows["phase"], strict=True), rows["gpu_self_ns"], strict=True))


def test_the_phase_stands_in_the_category_or_else_in_the_text(file: NsysFile) -> None:
    file.range_("layers.0 backward", 0, 10, category="backward")
    file.range_("layers.1", 10, 20, category="backward")  # a capture whose text lacks the suffix
    file.range_("layers.2 backward", 20, 30, category=None)  # one without categories
    file.range_("optimizer", 30, 40, category=None)
    for n, start in enumerate((1, 11, 21, 31)):
        file.kernel(100 + n, 101 + n, launched=(start, start + 1))
    assert sums(table(file)) == {(f"layers.{n}", "backward"): 1 for n in range(3)} | {("(none)", "optimizer"): 1}


def test_the_models_order_even_where_the_window_begins_in_the_middle(file: NsysFile) -> None:
    names = ["model", "model.embed", "model.layers.9", "model.layers.10", "model.norm"]
    for start in (0, 1000):
        file.range_("model", start, start + 500)
        for n, name in enumerate(names[1:], 1):
            file.range_(name, start + n * 100, start + n * 100 + 50)
    events = file.rows["NVTX_EVENTS"]
    file.rows["NVTX_EVENTS"] = [row for row in events if not 0 <= int(str(row["start"])) < 250]  # first is layers.10
    file.kernel(5000, 5001, launched=(1001, 1002))
    tree = table(file).tree
    assert [name for name in tree["layer"] if name.startswith("model.layers")] == ["model.layers.9", "model.layers.10"]
    assert tree["layer"][0] == "model"
    assert tree["depth"].tolist()[:2] == [0, 1]


def built_outside(file: NsysFile) -> None:
    file.kernel(100, 110, correlation=file.call("cudaGraphLaunch_v10000", 60, 70), node=11)


def traced_whole(file: NsysFile) -> None:
    file.call("cudaGraphLaunch_v10000", 200, 210)  # its kernels are not in the capture


def without_launch(file: NsysFile) -> None:
    file.kernel(60, 1_500_060, correlation=5)


def run_on(file: NsysFile) -> None:
    for n in range(1, 10):
        file.range_(f"layers.{n}", n * 100, n * 100 + 50)


def run_on_and_launch(file: NsysFile) -> None:
    run_on(file)
    file.kernel(5001, 5002, launched=(930, 931))


def ends_elsewhere(file: NsysFile) -> None:
    file.range_("layers.1", 200, 300, style=START_END)
    file.rows["NVTX_EVENTS"][-1]["endGlobalTid"] = thread(9)
    file.kernel(500, 501, launched=(250, 251))
    file.kernel(510, 512, launched=(260, 261), tid=9)


def another_programs(file: NsysFile) -> None:
    file.range_("theirs", 0, 100, pid=2, domain="other", style=START_END)  # id 1 there, as ours is here
    file.rows["NVTX_EVENTS"][-1]["endGlobalTid"] = thread(9, 2)


@pytest.mark.parametrize(
    ("write", "more", "warning"),
    [
        (built_outside, {("layers.0", "forward"): 20}, "built outside the collected window"),
        (traced_whole, {}, "--cuda-graph-trace=node"),
        (
            without_launch,
            {("(none)", "other"): 1_500_000},
            "so 1.500 ms of their time have no layer",
        ),
        (run_on, {}, "9 of 10 ranges of layers begin after the last CUDA launch"),
        (run_on_and_launch, {("layers.9", "forward"): 1}, ""),
        (
            ends_elsewhere,
            {("layers.1", "forward"): 1, ("(none)", "other"): 2},
            "1 ranges ended on another thread than they began on",
        ),
        (another_programs, {}, ""),
    ],
)
def test_what_a_capture_lacks_is_said(
    write: Callable[[NsysFile], None], more: dict[tuple[str, str], int], warning: str, file: NsysFile
) -> None:
    file.range_("layers.0", 0, 100)
    file.kernel(50, 60, launched=(10, 11))
    write(file)
    result = table(file)
    assert sums(result) == {("layers.0", "forward"): 10, **more}
    assert sum(warning in one for one in result.warnings) == bool(warning)


def test_time_outside_steps_is_said(file: NsysFile) -> None:
    """A capture that began in a step lacks its range, and those of the layers that were open."""
    file.kernel(500, 501, launched=(10, 11))
    file.range_("layers.7", 100, 150)
    file.kernel(510, 512, launched=(110, 111))
    file.range_("step 4", 200, 400, category="step", payload=4)
    file.kernel(520, 524, launched=(260, 261))
    left_out = [warning for warning in nvprof_kit.open(file.write()).layers().warnings if "outside steps" in warning]
    assert left_out == ["42.9 % of the time is outside steps and left out; --steps all includes it"]


def test_correlation_ids_begin_anew_in_a_second_window_and_in_another_process(file: NsysFile) -> None:
    """Loading a module copies its constants: that it launches is not in the call's name, but in its id."""
    for number in (0, 1):
        file.range_(f"layers.{number}", 10_000 * number, 10_000 * number + 200)
        at = 10_000 * number + 110
        file.kernel(at + 900, at + 901 + number, launched=(at, at + 1), correlation=77)
    file.range_("layers.2", 0, 200, pid=2)
    file.call("cuModuleLoadData", 150, 151, pid=2, correlation=77)
    file.kernel(300, 330, pid=2, correlation=77, table="MEMCPY")
    assert sums(table(file)) == {(f"layers.{number}", "forward"): ns for number, ns in enumerate((1, 2, 30))}
