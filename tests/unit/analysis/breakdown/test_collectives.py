"""What collectives move and how fast: payloads of NCCL's calls in an nsys export, arguments in a PyTorch trace."""

from pathlib import Path
from typing import Any

import pytest
from support.captures.nsys_file import NsysFile
from support.data import DATA

import nvprof_kit

MOVED = ["ops", "bytes", "exposed_bytes", "ranks", "algorithm_gb_per_s", "bus_gb_per_s"]


@pytest.fixture
def file(tmp_path: Path) -> NsysFile:
    made = NsysFile(tmp_path / "run.sqlite", nsys="2026.4")
    made.range_("step 1", 0, 100_000, category="step", payload=1)
    return made


def analysed(path: Path) -> nvprof_kit.Breakdown:
    return nvprof_kit.open(path).breakdown()


def moved(result: nvprof_kit.Breakdown) -> dict[str, list[Any]]:
    rows = result.communication.astype(object).where(result.communication.notna(), None)
    return {row["collective"]: [row[name] for name in MOVED] for row in rows.to_dict("records")}


def nccl(kind: str) -> str:
    return f"ncclDevKernel_{kind}_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)"


@pytest.mark.parametrize(
    ("gpu", "link", "limits_ns"),
    [("NVIDIA L40S", "PCIe 4 x16", [28_000 / 31.508, 7_000 / 31.508]), ("GPU of unknown name", "", [None, None])],
)
def test_sizes_of_nccl_calls(file, gpu, link, limits_ns):
    file.nccl("ncclCommInitRank", 1, 2, "init", 77, 8, 0, 0)
    file.kernel(1_000, 2_000, launched=(100, 110))
    file.nccl("ncclAllReduce", 200, 230, "reduce", 77, 16_000, 0)
    file.kernel(1_500, 3_500, launched=(210, 220), name=nccl("AllReduce_Sum_bf16"), stream=9)
    file.nccl("ncclAllGather", 300, 330, "move", 77, 1_000)
    file.kernel(4_000, 5_000, launched=(310, 320), name=nccl("AllGather"), stream=9)
    file.kernel(6_000, 7_000, launched=(410, 420), name=nccl("ReduceScatter_Sum_bf16"))  # of unknown size
    file.gpu = gpu
    result = analysed(file.write())
    found = moved(result)
    # 16 kB in 2 µs, of which 1.5 µs beside nothing; eight ranks: 2·7/8 of it on the bus
    assert found["AllReduce"] == [1, 16_000, 12_000, 8, 8.0, 14.0]
    # each rank gives 1 kB and gets 8: that in 1 µs, 7/8 of it on the bus
    assert found["AllGather"] == [1, 8_000, 8_000, 8, 8.0, 7.0]
    rows = result.communication.set_index("collective")
    assert (rows["link"] == link).all()
    assert rows["wire_bytes"].dropna().to_dict() == {"AllReduce": 28_000, "AllGather": 7_000}
    took_ns = {"AllReduce": 2_000, "AllGather": 1_000}
    limits = {name: ns for name, ns in zip(took_ns, limits_ns, strict=True) if ns}
    assert rows["limit_ns"].dropna().to_dict() == {name: round(ns) for name, ns in limits.items()}
    shares = {name: pytest.approx(ns / took_ns[name]) for name, ns in limits.items()}
    assert rows["of_limit"].dropna().to_dict() == shares


def test_a_replay_of_a_graph_takes_no_call(file):
    file.nccl("ncclAllReduce", 300, 330, "reduce", 77, 700, 0)
    launch = file.call("cudaGraphLaunch_v10000", 400, 410)
    file.kernel(1_000, 2_000, correlation=launch, name=nccl("AllReduce_Sum_f32"), node=5)
    assert moved(analysed(file.write()))["AllReduce"][1] is None


def test_damaged_payloads_are_unknown(file):
    file.nccl("ncclAllReduce", 200, 230, "reduce", 77, 16_000, 0)
    for place, blob in enumerate((b"", b"\x00" * 31, b"\xff" * 40, None, "a text")):
        file.nccl("ncclAllReduce", 300 + 40 * place, 330 + 40 * place, "reduce", 77, 1, 0)
        file.rows["NVTX_EVENTS"][-1]["binaryData"] = blob
        begin = 1_000 * (place + 1)
        file.kernel(begin, begin + 9, launched=(310 + 40 * place, 315 + 40 * place), name=nccl("AllReduce_Sum_f32"))
    assert moved(analysed(file.write()))["AllReduce"][:2] == [5, None]


def test_exports_without_payloads_say_so(tmp_path):
    file = NsysFile(tmp_path / "old.sqlite", nsys="2024.2")
    file.range_("layers.0", 0, 50)
    file.range_("ncclAllReduce", 200, 230, category=None, domain="NCCL")
    file.kernel(1_000, 2_000, launched=(210, 220), name=nccl("AllReduce_Sum_f32"))
    result = analysed(file.write())
    assert moved(result)["AllReduce"] == [1, None, None, None, None, None]
    (warning,) = [one for one in result.warnings if "bytes of collectives" in one]
    assert "nvprof_kit.record" in warning


PARAMETERS = 116_925_440
"""Of the Llama of `tests/gpu/programs/parallel.py`: 2 x 32,768,000 of embedding and head, 4 layers of 12,847,104 and a
norm of 1024. Their gradients are bf16, two bytes each.
"""


@pytest.mark.parametrize(
    ("capture", "collective", "layer", "expected"),
    [
        ("ddp.rank0", "AllReduce", None, PARAMETERS),
        ("fsdp.rank0", "ReduceScatter", None, PARAMETERS),
        # gathered in the forward pass and again in the backward pass, what does not belong to a layer too
        ("fsdp.rank0", "AllGather", None, 2 * PARAMETERS),
        ("fsdp.rank0", "ReduceScatter", "model.layers.1", 12_847_104),
    ],
)
def test_a_real_run_moves_its_parameters(capture, collective, layer, expected):
    rows = analysed(DATA / "kineto" / f"{capture}.json.xz").communication
    rows = rows[(rows["collective"] == collective) & ((rows["layer"] == layer) | (layer is None))]
    assert rows["bytes"].sum() == 3 * 2 * expected  # three steps
    assert (rows["ranks"] == 2).all()
    assert (rows["exposed_bytes"] <= rows["bytes"]).all()
    # an NVLink of an H200 carries 450 GB/s in one direction, and two ranks move 2·1/2 or 1/2 of the size over it
    assert (rows["bus_gb_per_s"] < 450).all()
    assert (
        (rows["link"] == "NVLink").all() and (rows["limit_ns"] > 0).all() and (rows["limit_ns"] < rows["gpu_ns"]).all()
    )
    factor = 1.0 if collective == "AllReduce" else 0.5
    assert rows["bus_gb_per_s"].tolist() == pytest.approx((factor * rows["algorithm_gb_per_s"]).tolist())
