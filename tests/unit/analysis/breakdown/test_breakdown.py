"""Where the time of a step goes: tiny captures with their arithmetic, real ones against brute force and golden data."""

from math import isnan
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.brute_force import breakdown as brute
from support.captures.kineto_file import Event, event, kernel, write
from support.captures.nsys_file import START_END, NsysFile
from support.data import DATA, unpacked
from support.lane import examples

import nvprof_kit
from nvprof_kit import Breakdown

PARTS = ["compute_ns", "exposed_comm_ns", "exposed_copy_ns", "idle_ns"]


def analysed(file: NsysFile) -> Breakdown:
    return nvprof_kit.open(file.write()).breakdown()


def test_the_queue_of_a_step_shorter_than_its_slices(file):
    file.kernel(30, 37, launched=(5, 10))
    file.range_("layers.0", 0, 20)
    queue, text = (result := analysed(file)).queue, str(result)
    assert text.count("the whole capture") == 3 and "outside" not in text  # its row, and titles
    assert len(queue) == 7 and queue["step"].isna().all()
    assert queue["queue_mean"].tolist() == [0] * 7


@pytest.mark.parametrize(
    ("gpu", "host", "peer"),
    [
        ("NVIDIA H200", "PCIe 5 x16", 450.0),
        ("NVIDIA H100 PCIe", "PCIe 5 x16", 300.0),
        ("NVIDIA H800", "PCIe 5 x16", 200.0),
        ("NVIDIA GH200 480GB", "NVLink-C2C", 450.0),
        ("NVIDIA B200", "PCIe 5 x16", 900.0),
        ("NVIDIA A100-SXM4-80GB", "PCIe 4 x16", 300.0),
        ("Tesla V100-SXM2-16GB", "PCIe 3 x16", 150.0),
        ("NVIDIA L4", "PCIe 4 x16", None),
        ("GPU of unknown name", "", None),
    ],
)
def test_copies_against_the_link_of_the_gpu(file, gpu, host, peer):
    file.range_("data", 0, 400, category="data")
    file.kernel(100, 200, launched=(10, 12), table="MEMCPY", memory=(1, 2), size=3150)
    file.kernel(200, 300, launched=(14, 16), table="MEMCPY", memory=(2, 1), size=3150, copy_kind=2)
    file.kernel(300, 350, launched=(20, 22), table="MEMCPY", memory=(2, 2), size=1600, copy_kind=8)
    file.kernel(350, 360, launched=(24, 26), table="MEMCPY", memory=(2, 2), size=2250, copy_kind=10)
    file.gpu = gpu
    copies = analysed(file).copies.set_index("copy")
    assert copies.loc["memcpy HtoD", ["gb_per_s", "link"]].tolist() == [31.5, host]
    assert copies.loc["memcpy DtoH", "link"] == host
    if host == "PCIe 5 x16":
        assert copies.loc["memcpy HtoD", "of_link"] == pytest.approx(31.5 / 63.015)
    # 225 GB/s to a peer; a copy inside the GPU goes over no link
    assert copies.loc["memcpy PtoP", "link"] == ("NVLink" if peer else "")
    assert not peer or copies.loc["memcpy PtoP", "of_link"] == 225 / peer
    assert copies.loc["memcpy DtoD", "link"] == "" and isnan(copies.loc["memcpy DtoD", "of_link"])


def test_a_step_that_another_range_crosses_is_one_step(file):
    file.range_("step 1", 100, 300, category="step", payload=1)
    file.range_("cross", 50, 200, category="user", style=START_END)  # ends while step 1 is open
    file.range_("step 2", 300, 400, category="step", payload=2)
    for start in (150, 250, 350):
        file.kernel(start + 10, start + 20, launched=(start, start + 5))
    result = analysed(file)
    assert result.steps[["step", "wall_ns"]].to_numpy().tolist() == [[1, 200], [2, 100]]


MOMENT = st.integers(0, 400)


@given(
    ops=st.lists(st.tuples(MOMENT, st.integers(1, 80), st.sampled_from("ccnm"), st.integers(0, 1)), min_size=1),
    calls=st.lists(st.tuples(MOMENT, st.integers(1, 50), st.sampled_from(["cudaMalloc", "cudaDeviceSynchronize"]))),
)
@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parts_always_add_up(tmp_path, ops, calls):
    file = NsysFile(tmp_path / "any.sqlite")
    file.range_("step 1", 20, 120, category="step", payload=1)
    file.range_("step 2", 150, 300, category="step", payload=2)
    file.range_("data", 130, 170, category="data")
    for start, length, sort, device in ops:
        more = {"n": {"name": "ncclDevKernel_AllGather_RING_LL"}, "m": {"table": "MEMSET"}}.get(sort, {"name": "gemm"})
        begin = max(start - 30, 0)
        file.kernel(start + 2, start + 2 + length, launched=(begin, begin + 2), device=device, stream=start, **more)
    for start, length, name in calls:
        file.call(name, start, start + length)
    result = analysed(file)
    steps = result.steps
    assert (steps[PARTS].sum(axis=1) == steps["wall_ns"]).all()
    for device, rows in steps.groupby("device"):
        ordered = rows.sort_values("start_ns")
        ends = ordered["start_ns"] + ordered["wall_ns"]
        assert (ordered["start_ns"].to_numpy()[1:] == ends.to_numpy()[:-1]).all()  # no gap, no overlap
        mine = sorted(
            (s + 2, s + 2 + n, {"n": "comm", "m": "copy"}.get(sort, "compute")) for s, n, sort, d in ops if d == device
        )
        for row in ordered.to_dict("records"):
            found = brute.states(mine, row["start_ns"], row["start_ns"] + row["wall_ns"])
            assert [row[part] for part in PARTS] == [found[one] for one in ("compute", "comm", "copy", "idle")]
    counted = steps[np.append(result.choice.shown, False)[result.instances]]
    loader = steps["idle_dataloader_ns"][result.instances < 0].sum()
    assert result.idle["idle_ns"].sum() == counted["idle_ns"].sum() + loader
    assert result.critical_path["share"].sum() == pytest.approx(1)


def test_warm_up_and_the_time_outside_steps_are_lines_of_their_own(file, tmp_path):
    """Four steps of 1000 ns with a gap of 100 in each, but the first has one of 5000; and one of 300 outside."""
    at = 0
    for number in range(4):
        gap = 5000 if number == 0 else 100
        file.range_(f"step {number}", at, at + 900 + gap, category="step", payload=number)
        file.kernel(at, at + 400, launched=(at, at))
        file.kernel(at + 400 + gap, at + 900 + gap, launched=(at + 390 + gap, at + 400 + gap))
        at += 900 + gap
    file.kernel(at + 300, at + 400, launched=(at + 290, at + 300))
    result = analysed(file)
    assert result.idle["idle_ns"].sum() == 300  # three steady steps
    assert result.launches["ops"].sum() == 6
    assert result.steps["idle_ns"].tolist() == [5000, 100, 100, 100, 300]
    shown = str(nvprof_kit.open(tmp_path / "run.sqlite").breakdown("steps"))
    excluded = "Warm-up: step 0 took"
    for line in ("3 steady steps", "warm-up, 1 more", "outside steps", excluded):
        assert line in shown


GOLDEN = {
    **dict.fromkeys(("eager-2023.4", "graph-2023.4", "graph-whole-2024.2"), ("steps", "idle", "communication")),
    "hooks-ddp-2024.2": ("steps", "idle", "communication", "critical-path"),
    "ddp.rank0-2024.2": ("steps", "idle", "communication", "copies", "critical-path"),
    "fsdp.rank0-2024.2": ("steps", "idle", "communication"),
    "generate-2024.2": ("idle", "queue", "launches"),
    "slow-cpu-2024.2": ("idle", "copies", "critical-path", "launches"),
    "foreign/kineto-stack": ("idle", "copies"),
    "kineto/fsdp.rank0": ("communication",),
    "ranks/kineto/pipeline-layer.rank0": ("communication",),
}
REAL = [*list(GOLDEN)[:6], "checkpoint-2023.4", "pipeline.rank1-2024.2"]


@pytest.mark.parametrize("capture", REAL)
def test_a_real_capture_against_brute_force(capture, tmp_path):
    plain = unpacked(f"{capture}.sqlite.xz", tmp_path / "plain.sqlite")
    steps = nvprof_kit.open(plain).breakdown().steps
    ops = brute.operations(plain)
    for row in steps.to_dict("records"):
        low, high = row["start_ns"], row["start_ns"] + row["wall_ns"]
        found = brute.states(ops, low, high)
        assert [row[part] for part in PARTS] == [found[one] for one in ("compute", "comm", "copy", "idle")]


@pytest.mark.parametrize("capture", GOLDEN)
def test_the_golden_tables(capture, golden):
    result = nvprof_kit.open(DATA / f"{capture}{'.json' if 'kineto' in capture else '.sqlite'}.xz").breakdown()
    for view in GOLDEN[capture]:
        found = result.table(view).to_csv(index=False, float_format="%.6g")
        golden(f"breakdown/{capture.replace('/', '-')}.{view}.csv", found)


MS = 1_000_000


@pytest.fixture
def with_gap(file: NsysFile) -> NsysFile:
    """A step with an idle gap of 10 ms in it: 2 ms to 12 ms, ended by a launch from 11.9 to 12 ms."""
    file.range_("step 1", 0, 20 * MS, category="step", payload=1)
    file.range_("layers.0", 0, 20 * MS)
    file.kernel(0, 2 * MS, launched=(0, 1), name="first")
    file.kernel(12 * MS, 20 * MS, launched=(12 * MS - 100_000, 12 * MS), name="second")
    return file


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
        ("cudaGraphInstantiateWithFlags", "loading"),
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
def test_a_gap_in_a_call_belongs_to_the_call(with_gap, call, cause):
    with_gap.call("cudaStreamIsCapturing_v10000", 2 * MS, 5 * MS)
    with_gap.call("cudaMemsetAsync_v3020", 5 * MS, 5 * MS + 1)  # loading begins behind it
    with_gap.call(call, 5 * MS + 1, 9 * MS + 1)
    with_gap.call("cudaMemsetAsync_v3020", 9 * MS + 1, 9 * MS + 2)
    found = analysed(with_gap)
    assert by_cause(found)[cause] == pytest.approx(4 if cause != "launch" else 10, abs=1e-3)
    name = call.partition("_v3")[0]
    (row,) = found.idle[found.idle["call"] == name.removesuffix("_v2")].to_dict("records")
    assert (row["layer"], row["idle_ns"], row["longest_at_ns"]) == ("layers.0", 4 * MS, 5 * MS + 1)


def test_a_graph_that_is_captured_is_loaded_from_the_begin_of_its_capture(with_gap):
    with_gap.call("cudaStreamBeginCapture_v10000", 3 * MS, 3 * MS + 1)
    with_gap.call("cudaLaunchKernel_v7000", 4 * MS, 4 * MS + 1)
    with_gap.call("cudaStreamEndCapture_v10000", 6 * MS, 7 * MS)
    assert by_cause(analysed(with_gap))["loading"] == pytest.approx(8.9)  # up to the next launch


def test_threads_that_load_need_not_launch(with_gap):
    for tid in (8, 9):
        with_gap.call("cuLibraryLoadData", 3 * MS, 5 * MS, tid=tid)
    assert by_cause(analysed(with_gap)) == {"launch": 10}


@pytest.mark.parametrize(
    ("call", "cause"),
    [("hipMemcpyWithStream", "sync"), ("cudaMemcpy_v3020", "sync"), ("cudaStreamSynchronize_v3020", "queued")],
)
def test_a_copy_that_synchronizes_is_no_gap_of_the_device(file, call, cause):
    """The next kernel was launched before the gap; the host waits in a call for the whole gap."""
    file.range_("step 1", 0, 20 * MS, category="step", payload=1)
    file.kernel(0, 2 * MS, launched=(0, 1), name="first")
    file.kernel(12 * MS, 20 * MS, launched=(1, 2), name="second")
    file.call(call, MS, 13 * MS)
    found = analysed(file)
    assert by_cause(found) == {cause: pytest.approx(10)}
    (row,) = found.idle.to_dict("records")
    assert row["call"] == (call.partition("_v3")[0] if cause == "sync" else "")


@pytest.mark.parametrize("call", ["cudaFuncGetAttributes_v3020", "cudaMemcpyAsync_v3020", "cuKernelSetAttribute"])
def test_a_call_that_returns_at_once_loads_nothing(with_gap, call):
    with_gap.call(call, 5 * MS, 5 * MS + 3_000)
    assert by_cause(analysed(with_gap)) == {"launch": 10}


def kineto(path: Path, *more: Event) -> nvprof_kit.Breakdown:
    """Kernels 0-100 and 10,000-10,100 of a PyTorch trace, and between them what is said."""
    kernels = [*kernel("kernel 0", 0, 100, -10, 0), *kernel("kernel 1", 10_000, 100, 9_990, 1)]
    return nvprof_kit.open(write(path, [*kernels, *more])).breakdown()


def operator(name: str, start: int, length: int) -> Event:
    return event("cpu_op", name, start, length)


def frame(name: str, start: int, end: int) -> Event:
    return event("python_function", name, start, end - start)


def test_garbage_collection_in_a_pytorch_trace(tmp_path):
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
def test_python_functions_over_a_gap_are_named(tmp_path, frames, causes, names):
    result = kineto(tmp_path / "trace.json", *frames)
    assert by_cause(result) == causes
    named = result.idle[result.idle["operator"] != ""]
    assert (named.groupby("operator", observed=True)["idle_ns"].sum() / MS).to_dict() == names


@pytest.mark.parametrize(("others", "cause"), [(20, "loading"), (2_000, "launch")])
def test_an_operators_long_first_call_prepares_what_its_others_find(tmp_path, others, cause):
    later = [operator("aten::mm", 20_000 + 5_000 * number, others) for number in range(3)]
    result = kineto(tmp_path / "trace.json", operator("aten::mm", 1_000, 8_000), *later)
    # 8 ms and then 20 µs each; or 2 ms each, which is its time. From 9 ms to the launch nothing is open
    assert by_cause(result)[cause] == pytest.approx(8, abs=0.02)


CALLS = ["cudaMalloc", "cudaDeviceSynchronize", "cudaEventRecord", "cudaFree"]
INSTANT = st.integers(0, 300)


@given(
    calls=st.lists(st.tuples(INSTANT, st.integers(1, 60), st.sampled_from(CALLS)), max_size=12),
    ranges=st.lists(st.tuples(INSTANT, st.integers(1, 150)), max_size=4),
    ends=st.tuples(st.integers(1, 100), st.integers(200, 310)),
)
@example(calls=[(293, 1, "cudaMalloc")], ranges=[], ends=(1, 294))  # begins and ends with the launch
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_gap_is_split_as_each_of_its_nanoseconds_is(tmp_path, calls, ranges, ends):
    with_gap = NsysFile(tmp_path / "any.sqlite")
    with_gap.range_("layers.all", -10, 1000)
    nested: list[brute.Open] = []  # those of the calls that nest in those before
    for start, length, name in sorted(calls, key=lambda call: (call[0], -call[1])):
        end = start + length
        if all(end <= a or start >= b or a <= start <= end <= b for _, a, b in nested):
            nested.append(brute.Open(name, start, end))
            with_gap.call(name, start, end)
    layers = [brute.Open("layers.all", -10, 1000)]
    for number, (start, end) in enumerate(sorted({(a, a + n) for a, n in ranges})):
        if all(end <= one.start or start >= one.end or one.start <= start <= end <= one.end for one in layers):
            layers.append(brute.Open(f"layers.{number}", start, end))
            with_gap.range_(f"layers.{number}", start, end)
    with_gap.kernel(-5, ends[0], launched=(-9, -8))
    with_gap.kernel(ends[1], 400, launched=(ends[1] - 1, ends[1]))
    found = analysed(with_gap).idle
    launch = brute.Open("cudaLaunchKernel", ends[1] - 1, ends[1])
    called = found.groupby("call")["idle_ns"].sum().to_dict()
    assert called == dict(brute.spent([*nested, launch], *ends))
    assert found.groupby("layer")["idle_ns"].sum().to_dict() == dict(brute.spent(layers, *ends))


def test_gaps_in_several_blocks_are_those_of_one(monkeypatch):
    """Also where a gap has several parts: those of one cause and place are one, from the first of them."""

    def tables() -> list[pd.DataFrame]:
        result = nvprof_kit.open(DATA / "hooks-train-2023.4.sqlite.xz").breakdown()
        return [result.idle, result.gaps, result.waits]

    whole = tables()
    monkeypatch.setattr("nvprof_kit._analysis.breakdown.devices._GAPS", 61)
    for block, table in zip(tables(), whole, strict=True):
        pd.testing.assert_frame_equal(block, table)


def test_an_operator_that_outlasts_the_one_that_called_it_ends_with_it(tmp_path):
    """Times of a PyTorch trace are rounded."""
    crossing = [operator("aten::linear", 1_000, 4_000), operator("aten::mm", 2_000, 3_001)]
    result = kineto(tmp_path / "trace.json", *crossing)
    idle_ms = result.idle.groupby("operator")["idle_ns"].sum() / MS
    assert idle_ms.to_dict() == {"": 5.9, "aten::linear": 1, "aten::mm": 3}
