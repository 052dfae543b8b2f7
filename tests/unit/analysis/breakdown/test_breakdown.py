"""Where the time of a step goes: tiny captures with their arithmetic, real ones against brute force and golden data."""

from __future__ import annotations

import lzma
import sqlite3
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.brute_force import breakdown as brute
from support.captures.nsys_file import START_END, NsysFile
from support.golden import Golden
from support.lane import examples

import nvprof_kit
from nvprof_kit import Breakdown

DATA = Path(__file__).parents[3] / "data"
PARTS = ["compute_ns", "exposed_comm_ns", "exposed_copy_ns", "idle_ns"]


@pytest.fixture
def file(tmp_path: Path) -> NsysFile:
    return NsysFile(tmp_path / "run.sqlite")


def analysed(file: NsysFile) -> Breakdown:
    return nvprof_kit.open(file.write()).breakdown()


def idle_of(result: Breakdown) -> dict[str, int]:
    """Idle time by cause, only causes that there are."""
    sums = result.steps.filter(regex="^idle_.+_ns$").sum()
    return {str(name)[5:-3]: int(ns) for name, ns in sums.items() if ns}


def gap(file: NsysFile, call: tuple[int, int], start: int = 300) -> NsysFile:
    """A step with a kernel 100-200 and one from 300 on, launched by a call: idle 0-100 (launch) and 200-300."""
    file.range_("step 1", 0, 400, category="step", payload=1)
    file.kernel(0, 200, launched=(0, 1), name="first")
    file.kernel(start, 400, launched=call, name="second")
    return file


def test_idle_before_a_late_launch_is_the_hosts(file: NsysFile) -> None:
    gap(file, (280, 290)).range_("layers.4", 150, 295)
    result = analysed(file)
    # of 200-300 the launching thread was in layers.4 to 280 and in the launch to 290; then it had launched
    assert idle_of(result) == {"launch": 90, "queued": 10}
    assert result.idle.to_numpy().tolist() == [
        ["launch", "layers.4", "forward", "", "", 1, 80, 80, 200],
        ["launch", "layers.4", "forward", "", "cudaLaunchKernel", 1, 10, 10, 280],
        ["queued", "layers.4", "forward", "", "", 1, 10, 10, 290],
    ]


def test_idle_before_a_devices_first_replay_is_not_between_replays(file: NsysFile) -> None:
    file.range_("step 1", 0, 500, category="step", payload=1)
    file.call("cudaGraphLaunch_v10000", 10, 20, correlation=1)
    file.call("cudaGraphLaunch_v10000", 390, 395, correlation=2)
    file.kernel(20, 500, correlation=1, node=1 << 32, device=0)  # the device before in the table, all the step long
    file.kernel(400, 500, correlation=2, node=2 << 32, device=1)
    # the first device waits 20 for its launch, which takes 10; the second 400, in both launches for 15, and 5 after the
    # second; it had no replay before
    assert idle_of(analysed(file)) == {"launch": 10 + 15, "unknown": 10 + 380, "queued": 5}


def test_a_short_wait_makes_the_host_late_by_no_more_than_it_took(file: NsysFile) -> None:
    gap(file, (280, 290)).call("cudaStreamSynchronize_v3020", 190, 210)
    # 200-210 it waits; without the wait of 20 it had launched 20 earlier; the other 50 it had needed all the same
    assert idle_of(analysed(file)) == {"sync": 10, "after_sync": 20, "launch": 10, "unknown": 50, "queued": 10}


def test_idle_between_two_graph_replays(file: NsysFile) -> None:
    file.range_("step 1", 0, 400, category="step", payload=1)
    for launch, begin in ((0, 10), (30, 200)):
        call = file.call("cudaGraphLaunch_v10000", launch, launch + 5)
        for number in (1, 2):
            file.kernel(begin + 40 * number, begin + 40 * number + 30, correlation=call, node=number)
    # 0-50 before the first (its launch ends at 5, then it is the device's), 80-90 and 270-280 inside replays, 120-240
    # between them, 310-400 behind the last operation
    assert idle_of(analysed(file)) == {"launch": 5, "queued": 45 + 20, "graph": 120, "other": 90}


def test_the_queue_of_a_step_shorter_than_its_slices(file: NsysFile) -> None:
    file.kernel(30, 37, launched=(5, 10))
    file.range_("layers.0", 0, 20)
    queue = analysed(file).queue
    assert len(queue) == 7 and queue["step"].isna().all()
    assert queue["queue_mean"].tolist() == [0] * 7


def test_copies_by_memory(file: NsysFile) -> None:
    file.range_("data", 0, 400, category="data")
    file.kernel(100, 200, launched=(10, 12), table="MEMCPY", memory=(0, 2), size=1600)
    file.kernel(300, 350, launched=(20, 22), table="MEMCPY", memory=(1, 2), size=1600)
    file.kernel(330, 380, launched=(24, 26), stream=9)
    copies = analysed(file).copies.set_index("memory")
    assert copies.loc["pageable", ["ops", "bytes", "gpu_ns", "exposed_ns", "gb_per_s", "blocking"]].tolist() == [
        1, 1600, 100, 100, 16.0, 1,
    ]  # fmt: skip
    assert copies.loc["pinned", ["gpu_ns", "exposed_ns", "gb_per_s", "blocking"]].tolist() == [50, 30, 32.0, 0]
    assert copies["link"].tolist() == ["", ""] and copies["of_link"].isna().all()  # nobody knows a "Test GPU"


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
def test_copies_against_the_link_of_the_gpu(file: NsysFile, gpu: str, host: str, peer: float | None) -> None:
    file.range_("data", 0, 400, category="data")
    file.kernel(100, 200, launched=(10, 12), table="MEMCPY", memory=(1, 2), size=3150)
    file.kernel(200, 300, launched=(14, 16), table="MEMCPY", memory=(2, 1), size=3150, copy_kind=2)
    file.kernel(300, 350, launched=(20, 22), table="MEMCPY", memory=(2, 2), size=1600, copy_kind=8)
    file.kernel(350, 360, launched=(24, 26), table="MEMCPY", memory=(2, 2), size=2250, copy_kind=10)
    path = file.write()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE TARGET_INFO_GPU SET name = ?", (gpu,))
    copies = nvprof_kit.open(path).breakdown().copies.set_index("copy")
    assert copies.loc["memcpy HtoD", ["gb_per_s", "link"]].tolist() == [31.5, host]
    assert copies.loc["memcpy DtoH", "link"] == host
    if host == "PCIe 5 x16":
        assert copies.loc["memcpy HtoD", "of_link"] == pytest.approx(31.5 / 63.015)
    # 225 GB/s to a peer; a copy inside the GPU goes over no link
    assert copies.loc["memcpy PtoP", "link"] == ("NVLink" if peer else "")
    assert not peer or copies.loc["memcpy PtoP", "of_link"] == 225 / peer
    assert copies.loc["memcpy DtoD", "link"] == "" and isnan(copies.loc["memcpy DtoD", "of_link"])


def test_a_step_that_another_range_crosses_is_one_step(file: NsysFile) -> None:
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
@settings(
    max_examples=examples(15),
    phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_parts_always_add_up(tmp_path: Path, ops: list[tuple[int, int, str, int]], calls: list) -> None:
    file = NsysFile(tmp_path / "any.sqlite")
    file.range_("step 1", 20, 120, category="step", payload=1)
    file.range_("step 2", 150, 300, category="step", payload=2)
    file.range_("data", 130, 170, category="data")
    for start, length, sort, device in ops:
        name, table = ("ncclDevKernel_AllGather_RING_LL", "KERNEL") if sort == "n" else ("gemm", "KERNEL")
        table = "MEMSET" if sort == "m" else table
        begin = max(start - 30, 0)
        file.kernel(
            start + 2,
            start + 2 + length,
            launched=(begin, begin + 2),
            name=name,
            table=table,
            device=device,
            stream=start,
        )
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


def test_warm_up_and_the_time_outside_steps_are_lines_of_their_own(tmp_path: Path) -> None:
    """Four steps of 1000 ns with a gap of 100 in each, but the first has one of 5000; and one of 300 outside."""
    file = NsysFile(tmp_path / "run.sqlite")
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


REAL = [
    "eager-2023.4",
    "graph-2023.4",
    "hooks-ddp-2024.2",
    "checkpoint-2023.4",
    "graph-whole-2024.2",
    "ddp.rank0-2024.2",
    "fsdp.rank0-2024.2",
    "pipeline.rank1-2024.2",
]
GOLDEN = [
    "eager-2023.4",
    "graph-2023.4",
    "graph-whole-2024.2",
    "hooks-ddp-2024.2",
    "ddp.rank0-2024.2",
    "fsdp.rank0-2024.2",
]


@pytest.mark.parametrize("capture", REAL)
def test_a_real_capture_against_brute_force(capture: str, tmp_path: Path) -> None:
    plain = tmp_path / "plain.sqlite"
    plain.write_bytes(lzma.decompress((DATA / f"{capture}.sqlite.xz").read_bytes()))
    steps = nvprof_kit.open(plain).breakdown().steps
    ops = brute.operations(plain)
    for row in steps.to_dict("records"):
        low, high = row["start_ns"], row["start_ns"] + row["wall_ns"]
        found = brute.states(ops, low, high)
        assert [row[part] for part in PARTS] == [found[one] for one in ("compute", "comm", "copy", "idle")]


@pytest.mark.parametrize("capture", GOLDEN)
def test_the_golden_tables(capture: str, golden: Golden) -> None:
    result = nvprof_kit.open(DATA / f"{capture}.sqlite.xz").breakdown()
    for view in ("steps", "idle", "communication"):
        found = result.table(view).to_csv(index=False, float_format="%.6g")
        golden(f"breakdown/{capture}.{view}.csv", found)


if TYPE_CHECKING:
    import pandas as pd


def path_of(file: NsysFile) -> pd.DataFrame:
    return nvprof_kit.open(file.write()).breakdown().critical_path


def test_the_path_goes_through_the_host_and_the_device(file: NsysFile) -> None:
    file.range_("step 1", 0, 400, category="step", payload=1)
    file.range_("layers.0", 0, 100)
    file.range_("layers.1", 100, 300)
    file.kernel(50, 150, launched=(40, 45))
    file.kernel(150, 200, launched=(60, 65))
    file.kernel(290, 400, launched=(270, 280))
    path = path_of(file).set_index("layer")
    # backwards: the kernel 290-400; 280-290 its launch's way to the device; the host from there to the step's begin,
    # since it never waited: layers.1 from 280 back to 100, where it began, and layers.0 before
    assert path.loc["layers.1", ["gpu_ns", "wait_ns", "host_ns"]].tolist() == [110, 10, 180]
    assert path.loc["layers.0", "host_ns"] == 100
    assert path["share"].sum() == pytest.approx(1)


def test_the_path_passes_an_operation_that_took_no_time(file: NsysFile) -> None:
    file.range_("step 1", 0, 400, category="step", payload=1)
    file.range_("layers.0", 0, 100)
    file.kernel(50, 200, launched=(10, 15))
    file.kernel(300, 300, launched=(20, 25), stream=9)
    file.kernel(300, 400, launched=(30, 35))
    row = path_of(file).iloc[0]
    # 100 and 150 on the device, 200-300 and 15-50 before them, 0-15 on the host
    assert row[["gpu_ns", "wait_ns", "host_ns"]].tolist() == [250, 135, 15]
