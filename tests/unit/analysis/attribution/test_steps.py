"""What a step is: instances of steps, whatever their numbers, in every table."""

from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile
from support.data import DATA

import nvprof_kit


@pytest.mark.parametrize(("range_end", "before", "wall_ns"), [(400, False, 150), (900, False, 1000), (400, True, 860)])
def test_the_first_step_of_a_pipelined_engine_starts_on_the_gpu(file, range_end, before, wall_ns):
    """Its range had ended before the GPU came to it, so the GPU was busy with work from before the capture."""
    file.range_("execute_context_0(0)_generation_16(16)", 0, range_end, category="step")
    if before:  # and where the capture has that work, the step starts when it ends
        file.kernel(130, 140)
    file.kernel(850, 900, launched=(200, 210))
    file.kernel(950, 1000, launched=(220, 230))
    assert nvprof_kit.open(file.write()).steps["wall_ns"].tolist() == [wall_ns]


def steps_of(tmp_path: Path, lengths: tuple[int, ...], loading: dict[int, int] | None = None) -> nvprof_kit.Capture:
    """Steps of these lengths, each with 10 ns of a layer on the GPU, and loading, below 0 counting, so long in some."""
    file, begin = NsysFile(tmp_path / "run.sqlite"), 0
    for number, length in enumerate(lengths):
        file.range_(f"step {number}", begin, begin + length, category="step", payload=number)
        file.range_("a", begin + 1, begin + 10)
        file.kernel(begin + 20, begin + 30, launched=(begin + 2, begin + 3))
        if (ns := (loading or {}).get(number, 0)) < 0:
            file.range_("count_flops", begin + 40, begin + 40 - ns, category="user")
        elif ns:
            file.call("cuLibraryLoadData", begin + 40, begin + 40 + ns)
        begin += length
    return nvprof_kit.open(file.write())


@pytest.mark.parametrize(
    ("lengths", "loading", "shown"),
    [
        ((1000, 100, 100, 100), {}, [1, 2, 3]),  # the first is ten times the median of the others
        ((110, 100, 100, 100), {}, [0, 1, 2, 3]),
        ((1000, 100), {}, [0, 1]),  # of two steps none is known to be the odd one
        ((100, 100, 400, 100), {2: 300}, [0, 1, 3]),  # a library is loaded in the third
        ((100, 100, 400, 100), {2: -300}, [0, 1, 3]),  # its operations are counted
        ((100, 100, 400, 100), {}, [0, 1, 2, 3]),  # a slow step alone is no warm-up
        ((100, 100, 100, 100), {2: 3}, [0, 1, 2, 3]),  # 3 of 100 ns: below the threshold
        ((100, 100), {0: 50, 1: 50}, [0, 1]),  # nothing else to show
    ],
)
def test_which_steps_are_warm_up(tmp_path, lengths, loading, shown):
    choice = steps_of(tmp_path, lengths, loading).layers().steps
    assert choice.shown.nonzero()[0].tolist() == shown
    assert len(choice.left_out) == len(lengths) - len(shown)


def test_the_table_and_its_rows_leave_warm_up_out_unless_the_whole_capture_is_asked_for(tmp_path):
    capture = steps_of(tmp_path, (1000, 100, 100, 100))
    result = capture.layers()
    assert result.rows["gpu_self_ns"].sum() == result.summary.total_ns == 30
    assert result.rows["steps"].tolist() == [3]
    assert result.tree["total_ns"].tolist() == [30]
    assert (result.summary.steps, result.summary.all_steps, result.summary.left_out_ns) == (3, 4, 10)
    assert result.summary.capture_ns == 40
    whole = capture.layers(steps="all")
    assert whole.rows["gpu_self_ns"].sum() == whole.tree["total_ns"].sum() == whole.summary.total_ns == 40
    assert whole.rows["steps"].tolist() == [4] and whole.summary.left_out_ns == 0


@pytest.mark.parametrize(("text", "kept"), [("1:3", [1, 2]), ("2:", [2, 3]), (":2", [0, 1]), ("3", [3]), ("+3:", [3])])
def test_steps_that_are_asked_for(tmp_path, text, kept):
    capture = steps_of(tmp_path, (1000, 100, 100, 100))
    assert capture.layers(by="step", steps=text).rows["step"].tolist() == kept
    result = capture.layers(steps=text)
    assert (
        result.rows["gpu_self_ns"].sum() == result.summary.total_ns == result.tree["total_ns"].sum() == 10 * len(kept)
    )
    assert capture.breakdown(steps=text).steps["step"].tolist() == kept
    table = capture.summary(steps=text).views
    assert table["kernel"]["calls"].tolist() == [len(kept)]
    assert table["user"].set_index("range")["calls"]["a"] == len(kept)
    assert capture.advise(steps=text).steps == len(kept)


def test_the_first_collective_of_a_window_is_named():
    first = nvprof_kit.open(DATA / "ddp.rank0-2024.2.sqlite.xz")
    took = "the first collective of the window took 40"
    assert [issue for issue in first.breakdown(steps="0:").warnings if took in issue]
    assert not [issue for issue in first.breakdown().warnings if "profilers began" in issue]  # it is in no figure
    assert [issue for issue in first.summary(steps="all").warnings if took in issue]
    steady = nvprof_kit.open(DATA / "fsdp.rank0-2024.2.sqlite.xz").breakdown().warnings
    assert not [issue for issue in steady if "profilers began" in issue]


def test_a_prefill_is_no_warm_up(file):
    for number, (begin, end) in enumerate(((0, 900), (900, 1000), (1000, 1100))):
        file.range_(f"step {number}", begin, end, category="step", payload=number)
        file.range_("decode" if number else "prefill", begin + 1, end - 1, category="phase")
        file.kernel(begin + 20, begin + 30, launched=(begin + 2, begin + 3))
    assert nvprof_kit.open(file.write()).layers().steps.shown.all()
