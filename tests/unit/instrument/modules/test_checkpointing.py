"""Checkpoints inside a layer's own forward: what they run again is the layer's recompute."""

from functools import partial

import pytest
import torch
from support.model_zoo import make
from support.ranges.sink import Sink
from torch import nn
from torch.utils.checkpoint import checkpoint

import nvprof_kit._instrument.session as session
from nvprof_kit import annotate_model, phase


class Block(nn.Module):
    """Checkpoints all that it does, and what lies between its parts is its own."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def inside(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        if self.fails and torch._C._current_graph_task_id() != -1:
            raise RuntimeError("again")
        return (x + self.linear(self.norm(x) * scale)).tanh()

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inside, x, 2.0, use_reentrant=self.reentrant)


def train(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    x = torch.linspace(0, 1, 8).reshape(2, 4).requires_grad_()
    out = model(x).sum()
    with phase("pass"):
        out.backward()
    return [out.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]


def passed(sink: Sink) -> list[str]:
    """The lines of the backward pass, without those of backward ranges."""
    lines = sink.lines[sink.lines.index("pass") + 1 :]
    return [line.strip() for line in lines if not line.endswith(" backward")]


def depth_and_text(line: str) -> tuple[int, str]:
    return (len(line) - len(line.lstrip())) // 2, line.strip()


@pytest.mark.parametrize("reentrant", [True, False])
def test_it_is_recompute_of_the_layer_around_its_parts(reentrant, sink):
    torch.manual_seed(0)
    model = nn.Sequential(Block(reentrant), Block(reentrant))
    session.deactivate()
    expected = train(model)
    session.activate(sink)
    with annotate_model(model, depth=2):
        found = train(model)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert passed(sink) == [f"{index}{part} recompute" for index in (1, 0) for part in ("", ".norm", ".linear")]
    depths = {text: depth for depth, text in map(depth_and_text, sink.lines)}
    assert depths["1.norm recompute"] == depths["1.linear recompute"] == depths["1 recompute"] + 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_call_of_a_ranged_module_says_so_itself(reentrant, sink):
    model = nn.Sequential(nn.Linear(4, 4))
    model.forward = partial(checkpoint, model[0].__call__, use_reentrant=reentrant)
    with annotate_model(model, depth=1):
        train(model)
    assert passed(sink) == ["0 recompute"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_one_that_fails_leaves_nothing_open(reentrant, sink):
    model = nn.Sequential(Block(reentrant), Block(reentrant))
    with annotate_model(model, depth=2):
        model[0].fails = True
        with pytest.raises(RuntimeError, match="again"):
            train(model)
        assert sink.open_count() == 0
        model[0].fails = False
        sink.lines.clear()
        train(model)
    assert passed(sink)[0] == "1 recompute"


def test_of_the_blocks_of_transformers(sink):
    model, loss_of = make("llama")
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    with annotate_model(model):
        loss = loss_of(model)
        with phase("pass"):
            loss.backward()
    blocks = [line for line in passed(sink) if line.count(".") <= 2]
    assert blocks == [f"model.layers.{index} recompute" for index in (2, 1, 0)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_inside_a_checkpoint(reentrant, sink):
    class Twice(Block):
        def inside(self, x: torch.Tensor, scale: float) -> torch.Tensor:
            return checkpoint(super().inside, x.sin(), scale, use_reentrant=reentrant)

    model = nn.Sequential(Twice(reentrant))
    with annotate_model(model, depth=2):
        train(model)
    assert set(passed(sink)) == {"0 recompute", "0.norm recompute", "0.linear recompute"}
    again = [depth for depth, text in map(depth_and_text, sink.lines) if text == "0 recompute"]
    assert len(again) == 2, "once for the outer one, in which the inner one runs, and once for the inner one"
