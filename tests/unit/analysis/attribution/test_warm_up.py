"""Warm-up is told apart, steps can be chosen, and waiting is no work."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile

from nvprof_kit._analysis.advise.advise import OPTIONAL as ADVISE
from nvprof_kit._analysis.advise.advise import advise
from nvprof_kit._analysis.attribution.attribution import attribute
from nvprof_kit._analysis.attribution.steps import StepOptions
from nvprof_kit._analysis.attribution.warm_up import choose_steps
from nvprof_kit._analysis.breakdown.breakdown import breakdown
from nvprof_kit._analysis.layers.layers import LayersOptions, layers
from nvprof_kit._analysis.summary.summary import OPTIONAL as SUMMARY
from nvprof_kit._analysis.summary.summary import SummaryOptions, summary
from nvprof_kit._trace.open import open_capture
from nvprof_kit._trace.schema import Trace
from nvprof_kit.errors import UsageError

DATA = Path(__file__).parents[3] / "data"
ALL = tuple(dict.fromkeys((*ADVISE, *SUMMARY)))
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096>)"


def steps_of(tmp_path: Path, lengths: tuple[int, ...], loading: dict[int, int] | None = None) -> Trace:
    """Steps of these lengths, each with 10 ns of a layer on the GPU, and loading for so long in some of them."""
    file, begin = NsysFile(tmp_path / "run.sqlite"), 0
    for number, length in enumerate(lengths):
        file.range_(f"step {number}", begin, begin + length, category="step", payload=number)
        file.range_("a", begin + 1, begin + 10)
        file.kernel(begin + 20, begin + 30, launched=(begin + 2, begin + 3))
        if ns := (loading or {}).get(number):
            file.call("cuLibraryLoadData", begin + 40, begin + 40 + ns)
        begin += length
    return open_capture(file.write(), optional=ALL)


@pytest.mark.parametrize(
    ("lengths", "loading", "shown"),
    [
        ((1000, 100, 100, 100), {}, [1, 2, 3]),  # the first is ten times the median of the others
        ((110, 100, 100, 100), {}, [0, 1, 2, 3]),
        ((1000, 100), {}, [0, 1]),  # of two steps none is known to be the odd one
        ((100, 100, 400, 100), {2: 300}, [0, 1, 3]),  # a library is loaded in the third
        ((100, 100, 400, 100), {}, [0, 1, 2, 3]),  # a slow step alone is no warm-up
        ((100, 100, 100, 100), {2: 3}, [0, 1, 2, 3]),  # 3 of 100 ns: below the threshold
        ((100, 100), {0: 50, 1: 50}, [0, 1]),  # nothing else to show
    ],
)
def test_which_steps_are_warm_up(
    tmp_path: Path, lengths: tuple[int, ...], loading: dict[int, int], shown: list[int]
) -> None:
    trace = steps_of(tmp_path, lengths, loading)
    choice = choose_steps(trace, attribute(trace))
    assert choice.shown.nonzero()[0].tolist() == shown
    assert len(choice.left_out) == len(lengths) - len(shown)


def test_the_table_and_its_rows_leave_warm_up_out_unless_the_whole_capture_is_asked_for(tmp_path: Path) -> None:
    trace = steps_of(tmp_path, (1000, 100, 100, 100))
    result = layers(trace)
    assert result.rows["gpu_self_ns"].sum() == result.summary.total_ns == 30
    assert result.rows["steps"].tolist() == [3]
    assert result.tree["total_ns"].tolist() == [30]
    assert (result.summary.steps, result.summary.all_steps, result.summary.left_out_ns) == (3, 4, 10)
    assert result.summary.capture_ns == 40
    whole = layers(trace, LayersOptions(steps=StepOptions.parse("all")))
    assert whole.rows["gpu_self_ns"].sum() == whole.tree["total_ns"].sum() == whole.summary.total_ns == 40
    assert whole.rows["steps"].tolist() == [4] and whole.summary.left_out_ns == 0
    with pytest.raises(UsageError, match="--steps all takes the whole capture"):
        StepOptions.parse("all", 1)


@pytest.mark.parametrize(
    ("text", "skip", "kept"),
    [("1:3", 0, [1, 2]), ("2:", 0, [2, 3]), (":2", 0, [0, 1]), ("3", 0, [3]), (None, 3, [3]), ("0:3", 2, [2])],
)
def test_steps_that_are_asked_for(tmp_path: Path, text: str | None, skip: int, kept: list[int]) -> None:
    options = StepOptions.parse(text, skip)
    trace = steps_of(tmp_path, (1000, 100, 100, 100))
    by_step = layers(trace, LayersOptions(steps=options, by_step=True)).rows
    assert by_step["step"].tolist() == kept
    result = layers(trace, LayersOptions(steps=options))
    assert (
        result.rows["gpu_self_ns"].sum() == result.summary.total_ns == result.tree["total_ns"].sum() == 10 * len(kept)
    )
    assert breakdown(trace, options=options).steps["step"].tolist() == kept
    table = summary(trace, SummaryOptions(views=("kernel", "user"), steps=options)).views
    assert table["kernel"]["calls"].tolist() == [len(kept)]
    assert table["user"].set_index("range")["calls"]["a"] == len(kept)
    assert advise(trace, steps=options).steps == len(kept)


@pytest.mark.parametrize("text", ["x", ":", "1-3", "1:2:3"])
def test_what_is_no_range_of_steps(text: str) -> None:
    with pytest.raises(UsageError, match="needed 5:20"):
        StepOptions.parse(text)


def test_steps_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none of the requested steps is in it; it has 2 steps, 0 to 1"):
        layers(steps_of(tmp_path, (100, 100)), LayersOptions(steps=StepOptions.parse("7:9")))


def test_work_outside_steps_is_in_no_figure_per_step(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    for number in range(2):
        file.range_(f"step {number}", 100 * number, 100 * number + 100, category="step", payload=number)
        file.kernel(100 * number + 20, 100 * number + 30, launched=(100 * number + 2, 100 * number + 3))
    file.kernel(500, 900, launched=(450, 460))  # validation
    result = layers(open_capture(file.write()))
    assert (result.summary.total_ns, result.summary.outside_ns) == (20, 400)
    assert result.tree["total_ns"].sum() == result.rows["gpu_self_ns"].sum() == 20


def test_communication_and_copies_are_parts_of_the_own_time(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("a", 0, 100)
    file.kernel(200, 207, launched=(1, 2), name="nvjet_a")
    file.kernel(300, 350, launched=(3, 4), name=NCCL)
    file.kernel(400, 403, launched=(5, 6), table="MEMCPY")
    result = layers(open_capture(file.write(), optional=("name",)))
    assert result.rows[["gpu_self_ns", "compute_ns", "comm_ns", "copy_ns"]].values.tolist() == [[60, 7, 50, 3]]
    assert result.tree["comm_ns"].tolist() == [50]
    # of the 10 ns that are no waiting all is in a layer
    assert (result.summary.work_ns, result.summary.layer_ns, result.summary.comm_ns) == (10, 10, 50)


def test_waiting_does_not_make_less_of_the_time_in_layers(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("a", 0, 100)
    file.kernel(200, 300, launched=(1, 2), name="nvjet_a")
    file.kernel(300, 10_000, launched=(110, 111), name=NCCL)
    summary = layers(open_capture(file.write(), optional=("name",))).summary
    assert summary.layer_ns == summary.work_ns == 100


def test_without_names_communication_is_not_told() -> None:
    result = layers(open_capture(DATA / "ddp.rank0-2024.2.sqlite.xz"))
    assert "comm_ns" not in result.rows and result.summary.comm_ns is None


def test_the_first_collective_of_a_window_is_named() -> None:
    first = open_capture(DATA / "ddp.rank0-2024.2.sqlite.xz", optional=ALL)
    named = breakdown(first, options=StepOptions(first=0)).warnings
    assert [one for one in named if "the first collective of the window took 40" in one]
    assert not [one for one in breakdown(first).warnings if "profilers began" in one]  # it is in no figure
    whole = SummaryOptions(steps=StepOptions(everything=True))
    assert [issue for issue in summary(first, whole).warnings if "the first collective of the window took 40" in issue]
    assert not [issue for issue in summary(first).warnings if "began" in issue]
    steady = breakdown(open_capture(DATA / "fsdp.rank0-2024.2.sqlite.xz", optional=ALL)).warnings
    assert not [one for one in steady if "profilers began" in one]


def test_a_layer_that_only_waits_longer_is_not_unlike_its_equals(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    for number in range(6):
        begin = 10_000 * number
        file.range_(f"layers.{number}", begin, begin + 100)
        file.kernel(begin + 200, begin + 1200, launched=(begin + 1, begin + 2), name="nvjet_a")
        waited = 5000 if number == 3 else 500
        file.kernel(begin + 1200, begin + 1200 + waited, launched=(begin + 3, begin + 4), name=NCCL)
    found = advise(open_capture(file.write(), optional=ALL)).findings
    assert "outlier-layer" not in {one.rule for one in found}


def test_the_user_view_counts_what_autograd_launches(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("step 0", 0, 1000, category="step", payload=0)
    file.range_("backward", 100, 900, category="phase")
    file.range_("a backward", 200, 300, category="backward", tid=8)
    file.kernel(2000, 2500, launched=(210, 211), tid=8)
    file.kernel(2500, 2600, launched=(400, 401), tid=8)  # outside the layers
    file.kernel(2600, 2610, launched=(850, 851))  # on the main thread
    view = summary(open_capture(file.write(), optional=ALL), SummaryOptions(views=("user",))).views["user"]
    # the step and its backward have all of it, once each
    assert dict(zip(view["range"], view["gpu_total_ns"], strict=True)) == {"step 0": 610, "backward": 610, "a": 500}


def test_a_prefill_is_no_warm_up(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    for number, (begin, end) in enumerate(((0, 900), (900, 1000), (1000, 1100))):
        file.range_(f"step {number}", begin, end, category="step", payload=number)
        file.range_("decode" if number else "prefill", begin + 1, end - 1, category="phase")
        file.kernel(begin + 20, begin + 30, launched=(begin + 2, begin + 3))
    trace = open_capture(file.write(), optional=ALL)
    assert choose_steps(trace, attribute(trace)).shown.all()


def test_the_user_view_says_which_domains_it_leaves_out(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("a", 0, 100)
    file.range_("ncclAllReduce", 10, 20, category=None, domain="NCCL")
    file.kernel(200, 300, launched=(1, 2))
    result = summary(open_capture(file.write(), optional=ALL), SummaryOptions(views=("user",)))
    assert "not in it: NCCL (--domain NAME shows one)" in result.notes["user"]
