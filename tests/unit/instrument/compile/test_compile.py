"""torch.compile: what is compiled is ranged from outside, and is compiled exactly as without annotation."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo as dynamo
from compiled_models import BLOCKS, BY_BLOCK, Stack, baseline, blocks_in_place, compiles, train, whole, whole_in_place
from torch import nn

import nvprof_kit._instrument.session as session
from nvprof_kit import annotate_model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x)).relu()


class Net(Stack):
    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__(nn.Linear(4, 4), (Block() for _ in range(blocks)))


def by_forward(net: nn.Module, **options) -> nn.Module:
    net.forward = torch.compile(net.forward, **options)
    return net


WAYS: list[Callable[..., nn.Module]] = [whole, whole_in_place, by_forward, *BY_BLOCK]


def expected(way: Callable[..., nn.Module]) -> list[str]:
    if way in BY_BLOCK:
        layers = [f"layers.{index}" for index in range(BLOCKS)]
        forward = ["Net", "  embed", *(f"  {layer}" for layer in layers)]
        backward = ["Net backward", *(f"  {layer} backward" for layer in reversed(layers)), "  embed backward"]
        return forward + backward
    return ["Net", "Net backward"]


@pytest.mark.parametrize(
    ("annotated", "fullgraph"), [("before", False), ("before", True), ("after", False), ("idle", True)]
)
@pytest.mark.parametrize("way", WAYS)
def test_ranged_from_outside_and_compiled_as_if_bare(way, annotated, fullgraph, sink):
    options = {"backend": "aot_eager", "fullgraph": fullgraph}
    session.deactivate()
    bare = baseline(way, Net, **options)
    if annotated != "idle":
        session.activate(sink)
    net = Net()
    if annotated != "after":
        handle = annotate_model(net)
    compiled = way(net, **options)
    if annotated == "after":
        handle = annotate_model(net)
    train(compiled)
    train(compiled)
    assert compiles() == bare
    session.activate(sink)
    sink.lines.clear()
    train(compiled)
    assert sink.lines == expected(way)
    assert "layers.0.norm" in handle.inside_compiled
    assert ("layers.0" in handle.inside_compiled) == (way not in BY_BLOCK)
    session.deactivate()
    train(compiled)
    handle.remove()
    train(compiled)
    assert compiles() == (0, 0, {}), "annotating, waking, silencing and removing compile nothing anew"


@pytest.mark.xfail(torch.__version__ < "2.5", reason="compiles each module anew", strict=True)
def test_a_model_whose_code_is_compiled_already(sink):
    """The compiler does not trace then, so nobody would notice that the model's call is another."""
    for _ in range(2):
        net = Net(1)
        annotate_model(net)
        net.compile(backend="eager")
        sink.lines.clear()
        train(net)
    assert compiles()[0] == 1
    assert sink.lines == ["Net", "Net backward"]


def test_where_the_graph_breaks_the_layers_are_ranged(sink):
    class Breaking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dynamo.graph_break()
            return super().forward(x)

    def make() -> nn.Module:
        net = Net(3)
        net.layers[1] = Breaking()
        return torch.compile(net, backend="aot_eager")

    session.deactivate()
    train(make())
    breaks = compiles()[-1]
    dynamo.reset()
    session.activate(sink)
    compiled = make()
    annotate_model(compiled)
    train(compiled)
    assert compiles()[-1] == breaks
    sink.lines.clear()
    train(compiled)
    assert sink.lines[:5] == ["Net", "  embed", "  layers.0", "  layers.1", "  layers.2"]
    assert "  layers.1 backward" in sink.lines
    assert compiles() == (0, 0, {})


class Decorated(nn.Sequential):
    @torch.enable_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("kind", [nn.Sequential, Decorated])
def test_in_place_where_pytorch_has_the_outermost_code(kind, around, sink):
    if around and hasattr(dynamo.config, "wrap_top_frame"):  # the hooks are compiled too, as by PyTorch 2.15
        context = dynamo.config.patch(wrap_top_frame=True)
    else:
        context = nullcontext()
    net = nn.Sequential(kind(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    with context:
        net[0].compile(backend="aot_eager")
        compiled = net[0]._compiled_call_impl
        handle = annotate_model(net, select=["0"])
        train(net)
        assert compiles()[0] <= 1  # PyTorch 2.4 compiles none of its own classes
        for _ in range(2):
            sink.lines.clear()
            train(net)
            assert sink.lines == ["0", "0 backward"]
        session.deactivate()
        assert net[0]._compiled_call_impl is compiled
        train(net)
        session.activate(sink)
        train(net)
        assert compiles() == (0, 0, {})
        with pytest.raises(Exception, match=r"shape|size|mat"):
            net(torch.ones(2, 3))
        assert sink.open_count() == 0
        assert copy.deepcopy(net)[0]._compiled_call_impl is None
        handle.remove()
        sink.lines.clear()
        train(net)
    assert (net[0]._compiled_call_impl, sink.lines) == (compiled, [])


def test_what_is_lost_is_warned_of_once(sink):
    net = Net(2)
    handle = annotate_model(net)
    compiled = torch.compile(net, backend="aot_eager")
    with pytest.warns(UserWarning, match="2 layers into one, so their kernels belong to Net"):
        train(compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle.disable()
        handle.enable()
    blocks = blocks_in_place(Net(2), backend="aot_eager")
    by_block = annotate_model(blocks)
    assert by_block.inside_compiled == ("layers.0.norm", "layers.0.linear", "layers.1.norm", "layers.1.linear")
