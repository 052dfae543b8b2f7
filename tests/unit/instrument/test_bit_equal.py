"""Annotation changes nothing: outputs, gradients, what autograd saves, what stays alive."""

import gc
import weakref
from functools import cache

import pytest
import torch
from support.model_zoo import ZOO, Subject, gradients, make

from nvprof_kit import annotate_model


def two_steps(subject: Subject) -> tuple[list[torch.Tensor], int]:
    """Losses and gradients of two steps, and how many tensors autograd saved."""
    saved = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += 1
        return tensor

    torch.manual_seed(1)
    results = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for _ in range(2):
            loss = subject.loss(subject.model)
            loss.backward()
            results += [
                loss.detach(),
                *(grad.clone() for grad in gradients(subject.model).values() if grad is not None),
            ]
    return results, saved


@cache
def plain(name: str) -> tuple[list[torch.Tensor], int]:
    """What the model without annotation gives."""
    return two_steps(make(name))


@pytest.mark.parametrize("depth", [None, "leaf"])
@pytest.mark.parametrize("name", ZOO)
def test_bit_equal(name, depth, sink):
    expected, saved = plain(name)
    subject = make(name)
    with annotate_model(subject.model, depth=depth):
        results, saved_now = two_steps(subject)
    assert saved_now == saved
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result, wanted)
    backward = [line for line in sink.lines if line.endswith(" backward")]
    assert len(backward) > len(expected) ** 0.5
    assert max(len(line) - len(line.lstrip()) for line in sink.lines) < 40


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "checkpoint_reentrant", "checkpoint_non_reentrant", "in_place"])
def test_nothing_stays_alive_and_nothing_grows(name, sink):
    subject = make(name)

    def objects() -> list[object]:
        sink.lines.clear(), sink.ranges.clear()
        gc.collect()
        return gc.get_objects()

    with annotate_model(subject.model, depth="leaf"):
        subject.loss(subject.model).backward()
        before = objects()
        tensors = sum(isinstance(item, torch.Tensor) for item in before)
        count = len(before)
        del before
        for _ in range(3):
            loss = subject.loss(subject.model)
            loss.backward()
            reference = weakref.ref(loss)
            del loss
            assert reference() is None
        after = objects()
    assert sum(isinstance(item, torch.Tensor) for item in after) <= tensors
    assert len(after) - count < 50


def test_a_dropped_graph_is_freed_at_once(sink):
    """Without the garbage collector: hooks and frames make no cycles with the graph."""
    subject = make("torch_encoder")
    with annotate_model(subject.model):
        gc.disable()
        try:
            held = torch.ones(2, 8, 32, requires_grad=True)
            hidden = subject.model(held)
            reference = weakref.ref(held)
            del hidden, held
            assert reference() is None
        finally:
            gc.enable()
