"""Each idle gap is charged to what the host did during it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.brute_force import idle as brute
from support.captures.kineto_file import Event, event, kernel, write
from support.captures.nsys_file import NsysFile, thread
from support.lane import examples

import nvprof_kit
from nvprof_kit import Breakdown

DATA = Path(__file__).parents[3] / "data"
MS = 1_000_000


@pytest.fixture
def file(tmp_path: Path) -> NsysFile:
    """A step with an idle gap of 10 ms in it: 2 ms to 12 ms, ended by a launch from 11.9 to 12 ms."""
    made = NsysFile(tmp_path / "run.sqlite")
    made.range_("step 1", 0, 20 * MS, category="step", payload=1)
    made.range_("layers.0", 0, 20 * MS)
    made.kernel(0, 2 * MS, launched=(0, 1), name="first")
    made.kernel(12 * MS, 20 * MS, launched=(12 * MS - 100_000, 12 * MS), name="second")
    return made


def analysed(file: NsysFile) -> Breakdown:
    return nvprof_kit.open(file.write()).breakdown()


def by_cause(result: nvprof_kit.Breakdown) -> dict[str, float]:
    """Idle time by cause in ms, only causes that there are."""
    sums = result.steps.filter(regex="^idle_.+_ns$").sum() / MS
    return {str(name)[5:-3]: ms for name, ms in sums.items() if ms}


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        ("cuLibraryLoadData", "loading"),
        ("cuModuleLoadDataEx", "loading"),
        ("cuLinkComplete", "loading"),
        ("nvrtcCompileProgram", "loading"),
        ("cublasCreate_v2", "loading"),
        ("cudaFuncGetAttributes_v3020", "loading"),  # of 4 ms: it loads what it asks about
        ("cudaMalloc_v3020", "allocation"),
        ("cudaFree_v3020", "allocation"),
        ("cudaHostAlloc_v3020", "allocation"),
        ("cudaEventSynchronize_v3020", "sync"),
        ("cudaMemcpy_v3020", "sync"),
        ("cuMemcpyDtoH_v2", "sync"),
        ("hipMemcpyWithStream", "sync"),
        ("hipDeviceSynchronize", "sync"),
        ("cudaMemcpyAsync_v3020", "copy"),  # of 4 ms, although the memory is not known to be pageable
        ("cudaEventRecord_v3020", "launch"),
    ],
)
def test_a_gap_in_a_call_belongs_to_the_call(file: NsysFile, call: str, cause: str) -> None:
    file.call("cudaStreamIsCapturing_v10000", 2 * MS, 5 * MS)
    file.call("cudaMemsetAsync_v3020", 5 * MS, 5 * MS + 1)  # loading begins behind it
    file.call(call, 5 * MS + 1, 9 * MS + 1)
    file.call("cudaMemsetAsync_v3020", 9 * MS + 1, 9 * MS + 2)
    found = analysed(file)
    assert by_cause(found)[cause] == pytest.approx(4 if cause != "launch" else 10, abs=1e-3)
    name = call.partition("_v3")[0]
    (row,) = found.idle[found.idle["call"] == name.removesuffix("_v2")].to_dict("records")
    assert (row["layer"], row["idle_ns"], row["longest_at_ns"]) == ("layers.0", 4 * MS, 5 * MS + 1)


@pytest.mark.parametrize(
    ("call", "cause"),
    [("hipMemcpyWithStream", "sync"), ("cudaMemcpy_v3020", "sync"), ("cudaStreamSynchronize_v3020", "queued")],
)
def test_a_copy_that_synchronizes_is_no_gap_of_the_device(tmp_path: Path, call: str, cause: str) -> None:
    """The next kernel was launched before the gap; the host waits in a call for the whole gap."""
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("step 1", 0, 20 * MS, category="step", payload=1)
    file.kernel(0, 2 * MS, launched=(0, 1), name="first")
    file.kernel(12 * MS, 20 * MS, launched=(1, 2), name="second")
    file.call(call, MS, 13 * MS)
    found = analysed(file)
    assert by_cause(found) == {cause: pytest.approx(10)}
    (row,) = found.idle.to_dict("records")
    assert row["call"] == (call.partition("_v3")[0] if cause == "sync" else "")


@pytest.mark.parametrize("call", ["cudaFuncGetAttributes_v3020", "cudaMemcpyAsync_v3020", "cuKernelSetAttribute"])
def test_a_call_that_returns_at_once_loads_nothing(file: NsysFile, call: str) -> None:
    file.call(call, 5 * MS, 5 * MS + 3_000)
    assert by_cause(analysed(file)) == {"launch": 10}


def test_loading_takes_the_time_since_the_work_before(file: NsysFile) -> None:
    """As cuDNN does for a new shape: a plan is made for milliseconds, then loaded in microseconds."""
    file.call("cudaMemsetAsync_v3020", 3 * MS, 3 * MS + 10_000)
    file.call("cudaStreamIsCapturing_v10000", 3 * MS + 20_000, 3 * MS + 21_000)
    file.call("cuLibraryLoadData", 9 * MS, 9 * MS + 40_000)
    file.call("cudaMemsetAsync_v3020", 10 * MS, 10 * MS + 10_000)
    # from the end of one memset to the begin of the other
    assert by_cause(analysed(file)) == {"loading": 6.99, "launch": 3.01}


def test_work_that_goes_on_another_thread_is_told_there(tmp_path: Path) -> None:
    """The main thread waits in backward() while autograd's loads; then the main thread launches."""
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("step 1", 0, 20 * MS, category="step", payload=1)
    file.range_("backward", 2 * MS, 11 * MS, category="phase")
    file.range_("layers.0 backward", 3 * MS, 10 * MS, category="backward", tid=8)
    file.call("cuModuleLoadData", 4 * MS, 9 * MS, tid=8)
    file.kernel(0, 2 * MS, launched=(0, 1))
    file.kernel(12 * MS, 20 * MS, launched=(12 * MS - 10, 12 * MS))
    result = analysed(file)
    # autograd's thread is told to 9, since its call comes next, or runs: in its layer, where loading reaches back to
    # the begin, since no work came before. The main thread was in the phase 2-3 and 9-11, then in nothing
    assert by_cause(result) == {"loading": 6, "launch": 3.00001, "unknown": 0.99999}
    assert set(result.idle[result.idle["cause"] == "loading"]["layer"]) == {"layers.0"}


def test_time_off_the_cpu(file: NsysFile) -> None:
    for start, put_on in ((0, 1), (4 * MS, 0), (9 * MS, 1), (19 * MS, 0)):
        file.rows["SCHED_EVENTS"].append({"start": start, "cpu": 0, "isSchedIn": put_on, "globalTid": thread()})
    # 4-9 ms the thread was on no CPU, and in a layer, but in no call
    assert by_cause(analysed(file)) == {"off_cpu": 5, "launch": 5}


def kineto(path: Path, *more: Event) -> nvprof_kit.Breakdown:
    """Kernels 0-100 and 10,000-10,100 of a PyTorch trace, and between them what is said."""
    kernels = [*kernel("kernel 0", 0, 100, -10, 0), *kernel("kernel 1", 10_000, 100, 9_990, 1)]
    return nvprof_kit.open(write(path, [*kernels, *more])).breakdown()


def operator(name: str, start: int, length: int) -> Event:
    return event("cpu_op", name, start, length)


def frame(name: str, start: int, end: int) -> Event:
    return event("python_function", name, start, end - start)


def test_garbage_collection_in_a_pytorch_trace(tmp_path: Path) -> None:
    collection = frame("Python GC", 2_000, 5_000)
    result = kineto(tmp_path / "trace.json", operator("aten::mm", 1_000, 9_001), collection)
    # 100-1,000 nothing is open; 1,000-9,990 aten::mm, but for the collection; the launch
    assert by_cause(result) == {"gc": 3, "launch": 6, "unknown": 0.9}
    assert result.idle.set_index("cause").loc["gc", "operator"] == "Python GC"


@pytest.mark.parametrize(
    ("frames", "causes", "names"),
    [
        # the function that took the time, not the loop around it nor what it calls
        (
            [
                frame("train.py(1): <module>", -1_000, 20_000),
                frame("train.py(9): main", -900, 19_000),
                frame("train.py(5): preprocess", 1_000, 8_000),
                frame("json/decoder.py(343): raw_decode", 2_000, 4_000),
                frame("<built-in function sleep>", 5_000, 7_000),
            ],
            {"python": 9.89, "launch": 0.01},
            {"train.py(5): preprocess": 7, "train.py(9): main": 2.89},
        ),
        (
            [frame("torch/utils/data/dataloader.py(700): __next__", 1_000, 9_000)],
            {"dataloader": 8, "unknown": 1.89, "launch": 0.01},
            {"torch/utils/data/dataloader.py(700): __next__": 8},
        ),
        # too short to name, and nothing but built-in functions
        ([frame("train.py(5): tick", 1_000, 1_050)], {"unknown": 9.89, "launch": 0.01}, {}),
        ([frame("<built-in function sleep>", 1_000, 9_000)], {"unknown": 9.89, "launch": 0.01}, {}),
    ],
)
def test_python_functions_over_a_gap_are_named(
    tmp_path: Path, frames: list[Event], causes: dict[str, float], names: dict[str, float]
) -> None:
    result = kineto(tmp_path / "trace.json", *frames)
    assert by_cause(result) == causes
    named = result.idle[result.idle["operator"] != ""]
    assert (named.groupby("operator", observed=True)["idle_ns"].sum() / MS).to_dict() == names


def test_lazy_loading_that_the_profiler_notes_is_its_operators(tmp_path: Path) -> None:
    lazy = event("overhead", "Lazy Function Loading", 8_000, 50, pid=-1, tid=0)
    result = kineto(tmp_path / "trace.json", operator("aten::mm", 1_000, 9_001), lazy)
    # the thread gave the device no work from the first launch on: all of the operator but the launch in it
    assert by_cause(result) == {"loading": 8.99, "unknown": 0.9, "launch": 0.01}
    assert result.idle.iloc[0][["cause", "operator"]].tolist() == ["loading", "aten::mm"]


@pytest.mark.parametrize(("others", "cause"), [(20, "loading"), (2_000, "launch")])
def test_an_operators_long_first_call_prepares_what_its_others_find(tmp_path: Path, others: int, cause: str) -> None:
    later = [operator("aten::mm", 20_000 + 5_000 * number, others) for number in range(3)]
    result = kineto(tmp_path / "trace.json", operator("aten::mm", 1_000, 8_000), *later)
    # 8 ms and then 20 µs each; or 2 ms each, which is its time. From 9 ms to the launch nothing is open
    assert by_cause(result)[cause] == pytest.approx(8, abs=0.02)


CALLS = ["cudaMalloc", "cudaDeviceSynchronize", "cudaEventRecord", "cudaFree"]
MOMENT = st.integers(0, 300)


@given(
    calls=st.lists(st.tuples(MOMENT, st.integers(1, 60), st.sampled_from(CALLS)), max_size=12),
    ranges=st.lists(st.tuples(MOMENT, st.integers(1, 150)), max_size=4),
    ends=st.tuples(st.integers(1, 100), st.integers(200, 310)),
)
@settings(
    max_examples=examples(40), phases=(Phase.generate,), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_gap_is_split_as_each_of_its_nanoseconds_is(
    tmp_path: Path, calls: list[tuple[int, int, str]], ranges: list[tuple[int, int]], ends: tuple[int, int]
) -> None:
    file = NsysFile(tmp_path / "any.sqlite")
    file.range_("layers.all", -10, 1000)
    nested = nesting(calls)
    for name, start, end in nested:
        file.call(name, start, end)
    layers = [brute.Open("layers.all", -10, 1000)]
    for number, (start, end) in enumerate(sorted({(a, a + n) for a, n in ranges})):
        if all(end <= one.start or start >= one.end or one.start <= start <= end <= one.end for one in layers):
            layers.append(brute.Open(f"layers.{number}", start, end))
            file.range_(f"layers.{number}", start, end)
    file.kernel(-5, ends[0], launched=(-9, -8))
    file.kernel(ends[1], 400, launched=(ends[1] - 1, ends[1]))
    found = analysed(file).idle
    launch = brute.Open("cudaLaunchKernel", ends[1] - 1, ends[1])
    called = found.groupby("call")["idle_ns"].sum().to_dict()
    assert called == dict(brute.spent([*nested, launch], *ends))
    assert found.groupby("layer")["idle_ns"].sum().to_dict() == dict(brute.spent(layers, *ends))


def nesting(calls: list[tuple[int, int, str]]) -> list[brute.Open]:
    """Those of some calls that nest in those before."""
    kept: list[brute.Open] = []
    for start, length, name in sorted(calls, key=lambda one: (one[0], -one[1])):
        end = start + length
        if all(end <= a or start >= b or (a <= start and end <= b and (a, b) != (start, end)) for _, a, b in kept):
            kept.append(brute.Open(name, start, end))
    return kept


def test_generation_that_plans_attention_for_each_length_says_so() -> None:
    """Each of eight tokens waits some 27 to 34 ms, or less, for cuDNN's plan of a new length."""
    result = nvprof_kit.open(DATA / "generate-2024.2.sqlite.xz").breakdown()
    loading = result.idle[result.idle["cause"] == "loading"]
    top = loading.iloc[0]
    assert (top["layer"], top["phase"]) == ("model.layers.0.self_attn", "forward")
    assert loading["idle_ns"].sum() > 0.75 * result.idle["idle_ns"].sum()
    assert result.idle["cause"].iloc[0] == "loading"


def test_gaps_in_several_blocks_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a gap has several parts: those of one cause and place are one, from the first of them."""

    def tables() -> list[pd.DataFrame]:
        result = nvprof_kit.open(DATA / "hooks-train-2023.4.sqlite.xz").breakdown()
        return [result.idle, result.gaps, result.waits]

    whole = tables()
    monkeypatch.setattr("nvprof_kit._analysis.breakdown.devices._GAPS", 7)
    for block, table in zip(tables(), whole, strict=True):
        pd.testing.assert_frame_equal(block, table)


def test_an_operator_that_outlasts_the_one_that_called_it_ends_with_it(tmp_path: Path) -> None:
    """Times of a PyTorch trace are rounded."""
    crossing = [operator("aten::linear", 1_000, 4_000), operator("aten::mm", 2_000, 3_001)]
    result = kineto(tmp_path / "trace.json", *crossing)
    assert (result.idle.groupby("operator")["idle_ns"].sum() / MS).to_dict() == {
        "": 5.9,
        "aten::linear": 1,
        "aten::mm": 3,
    }
