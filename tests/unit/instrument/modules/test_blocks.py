"""Blocks are found by structure in models of every family, and their kinds by class, list and the user's own rules."""

from collections.abc import Callable

import pytest
import torch
from support.model_zoo import make
from torch import nn

from nvprof_kit._instrument.modules.blocks import Submodule, block_kinds, find_blocks


class Holder(nn.Module):
    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


class Expert(Holder):
    def __init__(self) -> None:
        super().__init__(up=nn.Linear(8, 32), down=nn.Linear(32, 8))


class Block(Holder):
    def __init__(self, experts: int = 0) -> None:
        many = nn.ModuleList(Expert() for _ in range(experts))
        super().__init__(norm=nn.LayerNorm(8), linear=nn.Linear(8, 8), experts=many)


class Other(Block):
    pass


class Parts(Holder):
    """A block whose norms have no weights: an attention and a feed-forward part of plain projections."""

    def __init__(self) -> None:
        attention = Holder(qkv=nn.Linear(8, 24), out=nn.Linear(8, 8))
        super().__init__(norm=nn.LayerNorm(8, elementwise_affine=False), attention=attention, mlp=Expert())


def some(*modules: nn.Module) -> nn.ModuleList:
    return nn.ModuleList(modules)


def stage() -> nn.Module:
    return Holder(blocks=some(Block(), Block()), downsample=nn.Linear(8, 8))


def two_kinds(**left: int) -> nn.Module:
    """A model of spatial and temporal blocks, with so many of each."""
    model = make("two_kinds").model
    for name, count in left.items():
        setattr(model, name, getattr(model, name)[:count])
    return model


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


MODELS: list[tuple[str | Callable[[], nn.Module], str]] = [
    ("llama", "model.layers.0 model.layers.1 model.layers.2"),
    ("gpt2", "transformer.h.0 transformer.h.1 transformer.h.2"),
    ("bert", "bert.encoder.layer.0 bert.encoder.layer.1"),
    ("t5", "encoder.block.0 encoder.block.1 decoder.block.0 decoder.block.1"),
    ("mixtral", "model.layers.0 model.layers.1"),
    ("flux", "transformer_blocks.0 transformer_blocks.1 single_transformer_blocks.0 single_transformer_blocks.1"),
    ("torch_encoder", "layers.0 layers.1 layers.2"),
    ("two_kinds", "spatial.0 spatial.1 temporal.0 temporal.1"),
    # one block of a kind beside others
    (lambda: two_kinds(spatial=1, temporal=1), "spatial.0 temporal.0"),
    (lambda: two_kinds(spatial=1), "spatial.0 temporal.0 temporal.1"),
    # experts, stages and perceptrons are none
    (lambda: some(Block(experts=8), Block(experts=8)), "0 1"),
    (lambda: Holder(stages=some(stage(), stage())),
     "stages.0.blocks.0 stages.0.blocks.1 stages.1.blocks.0 stages.1.blocks.1"),
    (perceptron, ""),
    (lambda: Holder(heads=some(Expert(), Expert())), ""),
    # wherever they are held
    (lambda: Holder(first=Block(), second=Block(), head=nn.Linear(8, 2)), "first second"),
    (lambda: Holder(body=nn.Sequential(Block(), Block(), Block())), "body.0 body.1 body.2"),
    (lambda: Holder(grid=some(some(Block(), Block()), some(Block(), Block()))), "grid.0.0 grid.0.1 grid.1.0 grid.1.1"),
    (lambda: Holder(layers=some(Block(), Other(), Block())), "layers.0 layers.1 layers.2"),
    (lambda: Holder(module=Holder(layers=some(Block(), Block()))), "module.layers.0 module.layers.1"),
    (lambda: Holder(layers=some(torch.compile(Block()), torch.compile(Block()))), "layers.0 layers.1"),
    (lambda: Holder(model=Holder(layers=some(Parts(), Parts())), head=nn.Linear(8, 8)),
     "model.layers.0 model.layers.1"),
    # a model of one block
    *((lambda kind=kind: Holder(model=Holder(layers=some(kind())), head=nn.Linear(8, 8)), "model.layers.0")
      for kind in (Block, Parts)),
    (lambda: Holder(encoder=Holder(groups=some(Holder(layers=some(Block()))))), "encoder.groups.0.layers.0"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "blocks"), MODELS)
def test_blocks(model, blocks):
    made = make(model).model if isinstance(model, str) else model()
    assert [part.path for part in find_blocks(Submodule("", made))] == blocks.split()


VIDEO = ["spatial_blocks.0", "spatial_blocks.1", "temporal_blocks.0", "temporal_blocks.1"]


@pytest.mark.parametrize(
    ("temporal", "rules", "kinds"),
    [
        (Block, {}, [*["Block in spatial_blocks"] * 2, *["Block in temporal_blocks"] * 2]),
        # own rules come first, may name parts, and do not match the parts of what they match
        (Other, {"temporal*.1": "last", "Other": "temporal"}, ["Block", "Block", "temporal", "last"]),
        (Other, {"temporal_blocks.*": "temporal", "*.norm": "norm"}, ["Block", "Block", "temporal", "temporal"]),
    ],
)
def test_kinds(temporal, rules, kinds):
    model = Holder(spatial_blocks=some(Block(), Block()), temporal_blocks=some(temporal(), temporal()))
    parts = dict.fromkeys((f"{path}.norm" for path in VIDEO), "norm") if "*.norm" in rules else {}
    assert block_kinds(model, rules) == dict(zip(VIDEO, kinds, strict=True)) | parts
