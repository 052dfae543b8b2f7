"""Models to compile, and ways in which people compile them."""

from collections.abc import Callable, Iterable
from functools import cache

import torch
import torch._dynamo as dynamo
from torch import nn
from torch._dynamo.utils import counters

import nvprof_kit._instrument.session as session

LIMIT = 3
"""So often the compiler compiles one function anew in these tests, in place of eight times, before it gives up."""
BLOCKS = LIMIT + 2
"""More blocks than that: one compilation too many for each block would be seen."""


Compiles = tuple[int, int, dict[str, int]]
"""Graphs made, operators in them, and graph breaks."""


def compiles() -> Compiles:
    """What was compiled since the last look."""
    found = counters["stats"]["unique_graphs"], counters["stats"]["calls_captured"], dict(counters["graph_break"])
    counters.clear()
    return found


def train(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


@cache
def baseline(way: Callable[..., nn.Module], make: Callable[[], nn.Module], **options) -> Compiles:
    """What compiling a model takes that has no ranges."""
    assert session.backend is None
    compiled = way(make(), **options)
    train(compiled)
    train(compiled)
    found = compiles()
    assert found[0] > 0
    dynamo.reset()
    return found


class Stack(nn.Module):
    """Layers behind an embedding."""

    def __init__(self, embed: nn.Module, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.embed = embed
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def whole(net: nn.Module, **options) -> nn.Module:
    return torch.compile(net, **options)


def whole_in_place(net: nn.Module, **options) -> nn.Module:
    net.compile(**options)
    return net


def blocks_in_place(net: nn.Module, **options) -> nn.Module:
    for block in net.layers:
        block.compile(**options)
    return net


def blocks_wrapped(net: nn.Module, **options) -> nn.Module:
    for index, block in enumerate(net.layers):
        net.layers[index] = torch.compile(block, **options)
    return net


BY_BLOCK = (blocks_in_place, blocks_wrapped)
