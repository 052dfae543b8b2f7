"""torch.compile and decorated functions: ranges come and go without compiling anew, and compiled blocks have theirs."""

from collections.abc import Callable

import pytest
import torch
import torch._dynamo as dynamo
from compiled_models import BLOCKS, BY_BLOCK, LIMIT, Stack, baseline, blocks_in_place, compiles, train, whole
from torch import nn

import nvprof_kit._instrument.session as session
from nvprof_kit import layer_range


def bare(target: Callable | type) -> Callable | type:
    return target


def method(cls: type) -> type:
    cls.forward = layer_range("block")(cls.forward)
    return cls


def by_arguments(cls: type) -> type:
    cls.forward = layer_range(name=lambda module, x: "block")(cls.forward)
    return cls


def named_class(cls: type) -> type:
    return layer_range(cls, name="block")


def below_another_decorator(cls: type) -> type:
    """What is compiled is the other's wrapper, with what it decorates inside."""
    cls.forward = torch.enable_grad()(layer_range("block")(cls.forward))
    return cls


DECORATIONS = [method, by_arguments, named_class, below_another_decorator]


def make_net(decorated: Callable[[type], type]) -> nn.Module:
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    if decorated is not bare:
        double = layer_range("double")(double)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return double(self.linear(x)).relu()

    block = decorated(Block)

    return Stack(nn.Identity(), (block() for _ in range(BLOCKS)))


def make_bare() -> nn.Module:
    return make_net(bare)


def by_forward(net: nn.Module, **options) -> nn.Module:
    for block in net.layers:
        block.forward = torch.compile(block.forward, **options)
    return net


WAYS = [whole, *BY_BLOCK, by_forward]

STARTS_ABOVE_SKIPPED = hasattr(dynamo.eval_frame.OptimizedModule, "_should_wrap_module_call_impl")
"""Whether `Module.compile` compiles from the call on where PyTorch's own files have the outermost part of ``forward``.

Since PyTorch 2.15, as `torch.compile` always has. Before, that part ran in Python, and what it called was compiled.
"""


EACH_FORWARD_ANEW = not getattr(dynamo.config, "inline_inbuilt_nn_modules", True)
"""Whether the compiler compiles a method anew for each module, decorated or not: PyTorch 2.4 does.

With the limit below the number of blocks, it would give up on what is not decorated.
"""


@pytest.fixture
def limit(request: pytest.FixtureRequest) -> int:
    way = request.node.callspec.params.get("way") if hasattr(request.node, "callspec") else None
    return BLOCKS if way is by_forward and EACH_FORWARD_ANEW else LIMIT


@pytest.mark.parametrize(("first", "fullgraph"), [("asleep", True), ("awake", False)])
@pytest.mark.parametrize("decorated", DECORATIONS)
@pytest.mark.parametrize("way", WAYS)
def test_compiled_once_and_ranged_from_outside(way, decorated, fullgraph, first, sink):
    options = {"backend": "aot_eager", "fullgraph": fullgraph}
    session.deactivate()
    expected = baseline(way, make_bare, **options)
    if first == "awake":
        session.activate(sink)
    compiled = way(make_net(decorated), **options)
    for _ in range(2):
        train(compiled)
    assert compiles() == expected
    session.activate(sink)
    sink.lines.clear()
    train(compiled)
    below = decorated is below_another_decorator and (way is not blocks_in_place or STARTS_ABOVE_SKIPPED)
    inside = way is whole or below
    assert sink.lines == ([] if inside else ["block"] * BLOCKS + ["block backward"] * BLOCKS)
    session.deactivate()
    train(compiled)
    session.activate(sink)
    train(compiled)
    assert compiles() == (0, 0, {}), "waking, silencing and waking again compile nothing anew"


def test_a_compiled_function_is_ranged(sink):
    @torch.compile(backend="aot_eager", fullgraph=True)
    @layer_range("double")
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        sink.lines.clear()
        double(x).sum().backward()
    assert sink.lines == ["double", "double backward"]
    assert compiles() == (1, 1, {})
