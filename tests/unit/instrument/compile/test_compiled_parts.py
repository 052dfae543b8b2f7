"""Ranges inside what torch.compile compiled: written between its kernels, which stay what they are."""

import re
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch._dynamo as dynamo
import torch._inductor.codegen.wrapper
from compiled_models import Stack, blocks_in_place, whole, whole_in_place
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

import nvprof_kit._instrument.session as session
from nvprof_kit import annotate_model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Net(Stack):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__(nn.Linear(16, 16), (Block() for _ in range(blocks)))


if not hasattr(torch._inductor.codegen.wrapper, "SubgraphPythonWrapperCodegen"):
    pytest.skip("inductor of this PyTorch is built in another way", allow_module_level=True)


def train(model: nn.Module, scale: float = 1.0) -> torch.Tensor:
    torch.manual_seed(1)
    loss = model(scale * torch.randn(8, 16)).square().mean()
    loss.backward()
    return loss


def second_step(sink, way: Callable[..., nn.Module], net: nn.Module, **options) -> list[str]:
    """The ranges of a step of the compiled model, which the step before compiled."""
    annotate_model(net, compiled_parts=True)
    compiled = way(net, **options)
    for _ in range(2):
        sink.lines.clear()
        train(compiled)
    return sink.lines


@pytest.mark.parametrize("way", [whole, whole_in_place])
def test_the_layers_of_a_model_compiled_as_a_whole(way, sink):
    """The sum with the first block and the norm of the second are one kernel, which is of neither block."""
    lines = second_step(sink, way, Net())
    blocks = ["  layers.0", "    layers.0.norm", "    layers.0.mlp", "  layers.1", "    layers.1.mlp"]
    assert lines[:7] == ["Net", "  embed", *blocks]
    backward = [line for line in lines if line.endswith(" backward")]
    assert backward[:3] == ["Net backward", "  layers.1 backward", "    layers.1.mlp backward"]
    assert {"  layers.0 backward", "    layers.0.mlp backward", "  embed backward"} <= set(backward)


def test_the_parts_of_compiled_blocks_which_share_their_code(sink):
    lines = second_step(sink, blocks_in_place, Net(3), fullgraph=True)
    for index in range(3):
        begin = lines.index(f"  layers.{index}")
        assert lines[begin + 1 : begin + 3] == [f"    layers.{index}.norm", f"    layers.{index}.mlp"]
        begin = lines.index(f"  layers.{index} backward")
        assert lines[begin + 1] == f"    layers.{index}.mlp backward"
        assert f"    layers.{index}.norm backward" in lines


@pytest.mark.parametrize("checkpointed", [True, False])
def test_recompute_inside_one_compiled_graph(checkpointed, sink):
    """What the backward graph computes of the forward once more is a checkpoint's recompute; nothing, without one."""
    net = Net()
    for layer in net.layers if checkpointed else ():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    lines = second_step(sink, whole, net)
    again = {line.strip() for line in lines if line.endswith("recompute")}
    parts = {f"layers.{index}{part} recompute" for index in range(2) for part in ("", ".mlp")}
    assert again >= parts if checkpointed else not again


def test_results_and_compilations_are_those_of_the_bare_model(sink):
    def losses(annotate: bool) -> tuple[list[float], int, dict[str, int]]:
        dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        net = Net()
        if annotate:
            annotate_model(net, compiled_parts=True)
        compiled = whole(net)
        found = [train(compiled).item(), train(compiled, 2.0).item()]
        found += [float(parameter.grad.sum()) for parameter in net.parameters()]
        return found, counters["stats"]["unique_graphs"], dict(counters["graph_break"])

    ranged = losses(True)
    session.deactivate()
    assert ranged == losses(False)


def kernels(code: str) -> Counter[str]:
    """The launches in generated code, without what tells the ranges."""
    lines = [line.strip() for line in code.splitlines() if "nvprof_kit" not in line]
    return Counter(line for line in lines if line and not line.startswith("#"))


@pytest.mark.slow
def test_the_code_is_what_it_is_without_ranges(sink):
    def codes(parts: bool) -> list[str]:
        dynamo.reset()
        torch.manual_seed(0)
        net = Net()
        with annotate_model(net, compiled_parts=parts) as annotation:
            _, found = run_and_get_code(lambda: train(whole(net)))
            assert annotation.paths
        return found

    with torch.compiler.config.patch(force_disable_caches=True):
        ranged, bare = codes(True), [re.sub(".*nvprof_kit.*\n", "", code) for code in codes(False)]
    assert len(ranged) == len(bare) == 2
    assert all("nvprof_kit_enter('layers.1.mlp" in code for code in ranged)
    assert [kernels(code) for code in ranged] == [kernels(code) for code in bare]
