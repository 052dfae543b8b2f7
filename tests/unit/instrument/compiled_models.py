"""Models to compile, and ways in which people compile them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


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


def blocks_in_place(net: nn.Module, **options) -> nn.Module:
    for block in net.layers:
        block.compile(**options)
    return net


def blocks_wrapped(net: nn.Module, **options) -> nn.Module:
    for index, block in enumerate(net.layers):
        net.layers[index] = torch.compile(block, **options)
    return net
