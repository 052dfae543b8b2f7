"""Backward passes of every kind: nested, aborted, repeated, partial, on no gradients at all."""

from collections import UserDict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.model_zoo import make
from torch import nn

from nvprof_kit import annotate_model, layer_range


class Lazy(UserDict[str, torch.Tensor]):
    """Arguments that cannot be searched."""

    def values(self):
        raise KeyError("not loaded")


def test_a_backward_or_a_call_that_fails_leaves_nothing_open(sink):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    annotate_model(model)
    hidden = model[0](torch.ones(1, 2))
    hidden.register_hook(lambda _grad: 1 / 0)
    for fails, error in (
        (lambda: model[1](hidden).sum().backward(), ZeroDivisionError),
        (lambda: model(Lazy()), KeyError),
    ):
        with pytest.raises(error):
            fails()
        sink.lines.clear()
        model(torch.ones(1, 2)).sum().backward()
        lines = [line.strip() for line in sink.lines if line.endswith(" backward")]
        assert lines == ["Sequential backward", "1 backward", "0 backward"]


def test_an_inner_backward_that_fails_is_survived(sink):
    inner = nn.Linear(2, 2)
    annotate_model(inner)

    class Reenter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                hidden = inner(torch.ones(1, 2))
                hidden.grad_fn.next_functions[0][0].register_prehook(lambda _grads: 1 / 0)
                loss = hidden.sum()
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            return grad

    outer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    annotate_model(outer)
    outer[1](Reenter.apply(outer[0](torch.ones(1, 2)))).sum().backward()
    lines = [line for line in sink.lines if line.endswith(("recompute", " backward"))]
    assert lines == ["1 backward", "Linear recompute", "Linear backward", "0 backward"]


@pytest.mark.parametrize("nodes_before", [0, 7, 40])
@pytest.mark.parametrize("name", ["checkpoint_reentrant", "checkpoint_non_reentrant"])
def test_recomputes_on_a_thread_that_counts_nodes_by_itself(name, nodes_before, sink):
    """Autograd's threads, one for each GPU, number what is run again there from their own zero on, so that these
    numbers say nothing about the nodes that were made where the forward ran.
    """

    def backward(loss: torch.Tensor) -> None:
        for _ in range(nodes_before):
            torch.ones(1, requires_grad=True).sin()
        loss.backward()

    model, loss_of = make(name)
    annotate_model(model)
    loss_of(model).backward()
    expected = list(sink.lines)
    sink.lines.clear()
    loss = loss_of(model)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(backward, loss).result()
    assert sink.lines == expected


def test_a_gradient_inside_a_forward(sink):
    weight = torch.ones(2, requires_grad=True)

    @layer_range("penalty")
    def penalty(x: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(inner(x).sum(), x, create_graph=True)
        return grad.square().sum()

    @layer_range("inner")
    def inner(x: torch.Tensor) -> torch.Tensor:
        return (x * weight).sin()

    penalty(torch.ones(2, requires_grad=True)).backward()
    assert sink.lines[:2] == ["penalty", "  inner"]
    assert "    inner backward" in sink.lines


def test_vmap_and_functional_gradients(sink):
    model = nn.Linear(2, 2)
    annotate_model(model)
    weights = dict(model.named_parameters())

    def loss(weights, x):
        return torch.func.functional_call(model, weights, (x,)).sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, torch.ones(3, 2))
    assert per_sample["weight"].shape == (3, 2, 2)
