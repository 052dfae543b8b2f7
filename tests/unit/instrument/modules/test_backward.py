"""Backward passes of every kind: nested, aborted, repeated, partial, on no gradients at all."""

import random
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from model_zoo import make
from torch import nn

from nvprof_kit import annotate_model, layer_range, phase, step
from nvprof_kit._instrument import session


def lines_of(sink, what: str) -> list[str]:
    return [line.strip() for line in sink.lines if line.endswith(what)]


def test_backward_nests_in_reverse(sink):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    annotate_model(model, depth="leaf")
    with step(0), phase("backward"):
        model(torch.ones(1, 2)).sum().backward()
    assert sink.lines == [
        "step 0",
        "  backward",
        "    Sequential",
        "      0",
        "      1",
        "        1.0",
        "        1.1",
        "    Sequential backward",
        "      1 backward",
        "        1.1 backward",
        "        1.0 backward",
        "      0 backward",
    ]


class Scrambled(nn.Module):
    """A module of random operators before, between and after its nested modules: residuals, gates, several outputs and
    inputs, and inputs that it cuts off the graph. It notes its calls' first and last autograd node.
    """

    def __init__(self, rng: random.Random, depth: int, calls: list[tuple[int, int, nn.Module]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.inner = nn.ModuleList(Scrambled(rng, depth - 1, calls) for _ in range(rng.randint(1, 3) if depth else 0))
        kinds = ("scale", "sin", "residual", "gate", "use", "side", "view")
        self.sections = [rng.choices(kinds, k=rng.randint(0, 3)) for _ in range(len(self.inner) + 1)]
        self.passes, self.cuts = rng.choice([(), ("side",), ("gate", "side")]), rng.random() < 0.2
        self.returns_pair, self.calls = rng.random() < 0.4, calls

    def forward(self, x: torch.Tensor, **others: torch.Tensor) -> object:
        first = torch.autograd._get_sequence_nr()
        x = x.detach() * self.weight if self.cuts else sum(others.values(), x)
        values = {"residual": x, "gate": torch.ones(2), "side": x * 2}
        for operators, inner in zip(self.sections, [*self.inner, None], strict=True):
            for operator in operators:
                if operator in ("residual", "use"):
                    x = x + values["residual"] if operator == "residual" else x * values["gate"]
                else:
                    y = x * self.weight if operator == "scale" else x.view(-1) if operator == "view" else x.sin()
                    values, x = (values | {operator: y}, x) if operator in values else (values, y)
            if inner is not None:
                x = inner(x, **{name: values[name] for name in inner.passes})
                x, values["side"] = x if isinstance(x, tuple) else (x, values["side"])
        outputs = (x, values["side"]) if self.returns_pair else x
        self.calls.append((first, torch.autograd._get_sequence_nr(), self))
        return outputs


def nodes_of(node: torch.autograd.graph.Node | None, seen: set[object]) -> Iterator[torch.autograd.graph.Node]:
    if node is not None and node not in seen:
        seen.add(node)
        yield node
        for inner, _ in node.next_functions:
            yield from nodes_of(inner, seen)


@pytest.mark.parametrize("first_seed", range(0, 100, 25))
def test_each_node_runs_in_the_range_of_the_call_that_made_it(first_seed: int, sink) -> None:
    for seed in range(first_seed, first_seed + 25):
        calls: list[tuple[int, int, nn.Module]] = []
        model = Scrambled(random.Random(seed), 2, calls)
        paths = {module: path for path, module in model.named_modules()} | {model: "Scrambled"}
        ran: list[tuple[str, str | None]] = []

        def run(path: str, ran: list[tuple[str, str | None]] = ran) -> None:
            at = session.backend.thread.position.at
            ran.append((path, at and at.layer.path))

        with annotate_model(model, depth="leaf", steps=False):
            outputs = model(torch.ones(2, requires_grad=True) * 1)
            loss = sum(outputs).sum() if isinstance(outputs, tuple) else outputs.sum()
            for node in nodes_of(loss.grad_fn, set()):
                number = node._sequence_nr()
                makers = [(end - first, paths[module]) for first, end, module in calls if first <= number < end]
                for _, path in sorted(makers)[:1]:
                    node.register_prehook(lambda _grads, path=path: run(path))
            loss.backward()
        assert len(ran) > 1
        assert [made_by for made_by, _ in ran] == [ran_in for _, ran_in in ran]


def test_aborted_backward_leaves_nothing_open(sink):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    annotate_model(model)
    hidden = model[0](torch.ones(1, 2))
    hidden.register_hook(lambda _grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model[1](hidden).sum().backward()
    assert sink.open_count() == 0
    sink.lines.clear()
    model(torch.ones(1, 2)).sum().backward()
    assert lines_of(sink, " backward") == ["Sequential backward", "1 backward", "0 backward"]


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
    assert [line for line in sink.lines if line.endswith(("recompute", " backward"))] == [
        "1 backward",
        "Linear recompute",
        "Linear backward",
        "0 backward",
    ]


def on_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


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
    on_a_thread(lambda: backward(loss))
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
