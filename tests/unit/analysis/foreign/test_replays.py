"""Kernels of graph replays in a PyTorch trace, named by the trace of the graph's capture."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.captures.kineto_file import event, write
from support.data import DATA

import nvprof_kit

BLOCK = ("rms_norm", "gemm_qkv", "flash_fwd", "gemm_out", "memset", "gemm_up")
"""What a block launches: in its attention until the first matrix product after it, then in its MLP."""


class Trace:
    """A PyTorch trace with one thread, written event by event."""

    def __init__(self, *, names: bool = True) -> None:
        self.events: list[dict[str, Any]] = []
        self._now, self._ids, self._names = count(0, 10), count(1), names

    def event(self, category: str, name: str, start: float, length: float, **args: Any) -> None:
        pid = 0 if category in ("kernel", "gpu_memset") else 9
        self.events.append(event(category, name, start, length, pid=pid, **args))

    def inside(self, category: str, name: str, *parts: Any) -> None:
        start = next(self._now)
        for part in parts:
            part()
        self.event(category, name, start, next(self._now) - start)

    def call(self, name: str, kernel: str = "") -> int:
        correlation = next(self._ids)
        args = {"kernel": kernel} if kernel and self._names else {}
        self.event("cuda_runtime", name, next(self._now), 2, correlation=correlation, **args)
        return correlation

    def create(self, kernel: str) -> None:
        """Launch a kernel inside an operator while a graph is captured."""
        launch = ("hipMemsetAsync", "") if kernel == "memset" else ("hipLaunchKernel", kernel)
        operator = "aten::mm" if "gemm" in kernel else f"vllm::{kernel}"
        self.inside("cpu_op", operator, lambda: self.call(*launch))

    def replay(self, *kernels: str) -> None:
        correlation, device = self.call("hipGraphLaunch"), {"device": 0, "stream": 7}
        for kernel in kernels:
            category, name = ("gpu_memset", "Memset (Device)") if kernel == "memset" else ("kernel", kernel)
            bytes_set = {"bytes": 4} if kernel == "memset" else {}
            self.event(category, name, next(self._now), 1, correlation=correlation, **device, **bytes_set)

    def write(self, path: Path) -> Path:
        return write(path, self.events)


def captured(path: Path, *, graphs: bool = False, modules: bool = True, names: bool = True) -> Path:
    """The trace of a capture: one graph of all blocks, or one of each."""
    trace = Trace(names=names)

    def begin() -> None:
        trace.call("hipStreamBeginCapture")

    def part(name: str, *kernels: str) -> Any:
        run = [lambda kernel=kernel: trace.create(kernel) for kernel in kernels]
        return lambda: trace.inside("python_function", f"nn.Module: {name}", *run)

    def block(number: int) -> None:
        parts = part(f"Attention_{number}", *BLOCK[:4]), part(f"MLP_{number}", *BLOCK[4:])
        trace.inside("python_function", f"nn.Module: Block_{number}", *([begin] if graphs else []), *parts)

    def plain() -> None:
        for kernel in 4 * BLOCK:
            trace.create(kernel)

    numbered = [lambda number=number: block(number) for number in range(4)]
    if not graphs:
        begin()
    if modules:
        trace.inside("python_function", "nn.Module: Net_0", *numbered)
    else:
        trace.inside("cpu_op", "Torch-Compiled Region: 0/0", plain)
    return trace.write(path)


def layers(trace: Trace, capture: Path, folder: Path) -> tuple[dict[str, tuple[int, int]], tuple[str, ...]]:
    """Calls and operations of each layer that has some of its own, and the warnings."""
    table = nvprof_kit.open(trace.write(folder / "replay.json")).layers(with_=capture, fold=False)
    rows = table.rows[table.rows["gpu_ops"] > 0]
    return dict(zip(rows["layer"], zip(rows["calls"], rows["gpu_ops"], strict=True), strict=True)), table.warnings


@pytest.mark.parametrize("names", [True, False], ids=["ROCm", "CUDA"])
@pytest.mark.parametrize("graphs", [False, True], ids=["one graph", "a graph for each block"])
def test_modules_of_the_capture_name_every_kernel_of_its_replays(tmp_path, names, graphs):
    capture, trace = captured(tmp_path / "capture.json", graphs=graphs, names=names), Trace()
    for _ in range(2):
        for _ in range(4 if graphs else 1):
            trace.replay(*(1 if graphs else 4) * BLOCK)
    found, warnings = layers(trace, capture, tmp_path)
    parts = {"Attention": (2, 8), "MLP": (2, 4)}
    assert found == {f"Net.Block.{number}.{part}": sums for number in range(4) for part, sums in parts.items()}
    sentence = f"100.0% of the GPU time of {8 if graphs else 2} graph replays is named by the modules in capture.json"
    assert sentence in warnings


@pytest.mark.parametrize(
    ("kernels", "attention", "mlp", "share"),
    [
        pytest.param((*BLOCK[:3], "gemm_split_k", *BLOCK[4:]), 4, 2, "100.0%", id="a kernel chosen anew"),
        pytest.param(BLOCK[:1] + BLOCK[2:], 3, 2, "100.0%", id="a kernel less"),
        pytest.param(("copy", *BLOCK), 4, 2, "85.7%", id="a kernel that the capture does not have"),
    ],
)
def test_sequences_that_differ_are_aligned(tmp_path, kernels, attention, mlp, share):
    trace = Trace()
    trace.replay(*kernels, *3 * BLOCK)
    found, warnings = layers(trace, captured(tmp_path / "capture.json"), tmp_path)
    assert found["Net.Block.0.Attention"] == (1, attention)
    assert found["Net.Block.0.MLP"] == (1, mlp)
    assert found["Net.Block.3.Attention"] == (1, 4)
    named = sum(operations for layer, (_, operations) in found.items() if layer != "(none)")
    assert sum(f"{named / (len(kernels) + 18):.1%} of the GPU time" in warning for warning in warnings) == 1
    assert (share == "100.0%") == ("(none)" not in found)


def test_operators_of_a_compiled_model_name_the_parts_of_blocks_found_by_structure(tmp_path):
    trace = Trace()
    trace.replay(*4 * BLOCK)
    found, warnings = layers(trace, captured(tmp_path / "capture.json", modules=False), tmp_path)
    assert found["blocks.1.qkv.aten::mm"] == (1, 1)
    assert found["blocks.1.attention.vllm::flash_fwd"] == (1, 1)
    assert any("named by the operators in capture.json" in warning for warning in warnings)


@pytest.mark.parametrize(("name", "replays"), [("qwen3", 3), ("streams", 3), ("pieces", 2)])
def test_replays_on_cuda_have_the_layers_of_the_same_work_launched_eagerly(name, replays):
    """CUDA's calls do not tell what they launch, and several streams change the order of the kernels."""
    eager, replay, capture = (DATA / "replays" / f"{name}-{part}.json.xz" for part in ("eager", "replay", "capture"))
    truth = kernels(nvprof_kit.open(eager).layers(columns="class"))
    table = nvprof_kit.open(replay).layers(with_=capture, columns="class", steps="all")
    assert {layer: (ops // replays, classes) for layer, (ops, classes) in kernels(table).items()} == truth
    assert any(warning.startswith("100.0% of the GPU time") for warning in table.warnings)


def kernels(table: nvprof_kit.Result) -> dict[str, tuple[int, frozenset[str]]]:
    """The number of operations and the kernel classes of each part of a block."""
    rows = table.to_frame()
    rows = rows[rows["layer"].str.contains(r"\.\d") & (rows["gpu_ops"] > 0)]
    layers, classes = rows["layer"].str.extract(r"(\w+\.\d.*)")[0], rows.filter(like="class_")
    return {
        layer: (ops, frozenset(times[times > 0].index))
        for layer, ops, (_, times) in zip(layers, rows["gpu_ops"], classes.iterrows(), strict=True)
    }


@pytest.mark.parametrize(("lengths", "found"), [((1, 9), "blocks.2.attention"), ((9, 1), "Net.Encoder.2")])
def test_a_compiled_model_with_most_of_the_time_has_its_blocks_by_structure(tmp_path, lengths, found):
    """It is one module beside others, which are numbered."""
    trace = Trace()

    def launch(kernel: str, length: int) -> None:
        correlation = trace.call("cudaLaunchKernel")
        trace.event("kernel", kernel, 10_000 + 10 * correlation, length, correlation=correlation, device=0, stream=7)

    def module(name: str, kernels: tuple[str, ...], length: int) -> Any:
        run = [lambda kernel=kernel: launch(kernel, length) for kernel in kernels]
        return lambda: trace.inside("python_function", f"nn.Module: {name}", *run)

    encoders = (module(f"Encoder_{number}", ("conv",), lengths[0]) for number in range(4))
    model = module(
        "OptimizedModule_0", 4 * tuple(kernel for kernel in BLOCK if kernel != "memset"), lengths[1] // 9 or 1
    )
    trace.inside("python_function", "nn.Module: Net_0", *encoders, model)
    layers = set(nvprof_kit.open(trace.write(tmp_path / "a.json")).layers(fold=False).rows["layer"])
    assert found in layers
    assert not {"blocks.2.attention", "Net.Encoder.2"} - {found} & layers


def test_what_is_no_pair_is_refused_in_one_line(tmp_path):
    capture = captured(tmp_path / "capture.json")
    trace = Trace()
    trace.replay(*BLOCK)
    replay = trace.write(tmp_path / "replay.json")
    nsys = DATA / "eager-2024.2.sqlite.xz"
    for path, with_, sentence in (
        (replay, replay, "no capture of a CUDA graph in it"),
        (capture, capture, "no replay of a CUDA graph in it"),
        (nsys, capture, "not a PyTorch trace"),
        (replay, nsys, "not a PyTorch trace"),
        (replay, tmp_path / "none.json", "no such file"),
    ):
        with pytest.raises(nvprof_kit.CaptureError, match=sentence) as raised:
            nvprof_kit.open(path).layers(with_=with_)
        assert "\n" not in str(raised.value)
