"""Blocks are found by structure in models of every family."""

from __future__ import annotations

import pytest
import torch
from model_zoo import make
from torch import nn

from nvprof_kit._instrument.modules.blocks import Submodule, children, find_blocks


def blocks_of(model: nn.Module) -> list[str]:
    return [part.path for part in find_blocks(Submodule("", model))]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", ["model.layers.0", "model.layers.1", "model.layers.2"]),
        ("gpt2", ["transformer.h.0", "transformer.h.1", "transformer.h.2"]),
        ("bert", ["bert.encoder.layer.0", "bert.encoder.layer.1"]),
        ("t5", ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]),
        ("mixtral", ["model.layers.0", "model.layers.1"]),
        (
            "flux",
            [
                "transformer_blocks.0",
                "transformer_blocks.1",
                "single_transformer_blocks.0",
                "single_transformer_blocks.1",
            ],
        ),
        ("torch_encoder", ["layers.0", "layers.1", "layers.2"]),
        ("conv_attention", ["blocks.0", "blocks.1"]),
        ("two_kinds", ["spatial.0", "spatial.1", "temporal.0", "temporal.1"]),
    ],
)
def test_blocks_of_the_zoo(name: str, expected: list[str]) -> None:
    assert blocks_of(make(name).model) == expected


def test_vit_blocks_whatever_they_are_called() -> None:
    assert len(blocks_of(make("vit").model)) == 2


def test_a_flux_of_one_block_of_each_kind() -> None:
    model = make("two_kinds").model
    del model.spatial[1], model.temporal[1]
    assert blocks_of(model) == ["spatial.0", "temporal.0"]
    model = make("two_kinds").model
    del model.spatial[1]
    assert blocks_of(model) == ["spatial.0", "temporal.0", "temporal.1"]


class Block(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.downsample = nn.Linear(8, 8)


class Holder(nn.Module):
    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


def test_experts_are_no_blocks() -> None:
    assert blocks_of(nn.ModuleList(Block(experts=8) for _ in range(2))) == ["0", "1"]


def test_stages_are_no_blocks() -> None:
    model = Holder(stages=nn.ModuleList(Stage() for _ in range(2)))
    assert blocks_of(model) == [f"stages.{stage}.blocks.{block}" for stage in (0, 1) for block in (0, 1)]


def test_blocks_side_by_side_as_attributes() -> None:
    assert blocks_of(Holder(first=Block(), second=Block(), head=nn.Linear(8, 2))) == ["first", "second"]


def test_blocks_in_a_sequential_and_lists_of_lists() -> None:
    assert blocks_of(Holder(body=nn.Sequential(*(Block() for _ in range(3))))) == ["body.0", "body.1", "body.2"]
    nested = Holder(grid=nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2)))
    assert blocks_of(nested) == ["grid.0.0", "grid.0.1", "grid.1.0", "grid.1.1"]


def test_an_odd_one_among_repeated_blocks_is_a_block() -> None:
    class Attention(Block):
        pass

    model = Holder(layers=nn.ModuleList([Block(), Attention(), Block()]))
    assert blocks_of(model) == ["layers.0", "layers.1", "layers.2"]


def test_a_plain_multilayer_perceptron_has_no_blocks() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    assert blocks_of(model) == []


def test_wrappers_are_looked_through() -> None:
    inner = Holder(layers=nn.ModuleList(Block() for _ in range(2)))
    wrapped = Holder(module=inner)
    assert blocks_of(wrapped) == ["module.layers.0", "module.layers.1"]
    assert [part.path for part in children(Submodule("", wrapped))] == ["module.layers.0", "module.layers.1"]
    compiled = Holder(layers=nn.ModuleList(torch.compile(Block()) for _ in range(2)))
    assert blocks_of(compiled) == ["layers.0", "layers.1"]


class Parts(nn.Module):
    """A block whose norms have no weights: an attention and a feed-forward part of plain projections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, elementwise_affine=False)
        self.attention = Holder(qkv=nn.Linear(8, 24), out=nn.Linear(8, 8))
        self.mlp = Expert()


def test_blocks_whose_norms_have_no_weights() -> None:
    model = Holder(model=Holder(layers=nn.ModuleList(Parts() for _ in range(2))), head=nn.Linear(8, 8))
    assert blocks_of(model) == ["model.layers.0", "model.layers.1"]


def test_perceptrons_in_a_list_are_no_blocks() -> None:
    assert blocks_of(Holder(heads=nn.ModuleList(Expert() for _ in range(2)))) == []


@pytest.mark.parametrize("make_block", [Block, Parts])
def test_a_model_of_one_block(make_block: type[nn.Module]) -> None:
    model = Holder(model=Holder(layers=nn.ModuleList([make_block()])), head=nn.Linear(8, 8))
    assert blocks_of(model) == ["model.layers.0"]
    shared = Holder(encoder=Holder(groups=nn.ModuleList([Holder(layers=nn.ModuleList([make_block()]))])))
    assert blocks_of(shared) == ["encoder.groups.0.layers.0"]
