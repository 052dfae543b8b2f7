"""Steps, phases, marks, dataloaders and optimizers."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

import nvprof_kit._instrument.session as session
from nvprof_kit import annotate_dataloader, annotate_optimizer, mark, phase, step
from nvprof_kit.errors import UsageError
from nvprof_kit.names import Category


def test_step_phase_mark(sink) -> None:
    with step(12), phase("forward"):
        mark("here")
    assert sink.lines == ["step 12", "  forward", "mark here"]
    assert [(range_.category, range_.payload) for range_ in sink.ranges] == [
        (Category.STEP, 12),
        (Category.PHASE, None),
    ]


def test_steps_count_themselves(sink) -> None:
    @step()
    def train() -> str:
        return "done"

    assert train() == "done"
    with step():
        pass
    first, second = (range_.payload for range_ in sink.ranges)
    assert second == first + 1


def test_phase_decorates(sink) -> None:
    @phase("generate")
    def generate():
        yield 1
        yield 2

    assert list(generate()) == [1, 2]
    assert sink.lines == ["generate"] * 3


def test_dataloader(sink) -> None:
    loader = DataLoader(list(range(4)), batch_size=2)
    ranged = annotate_dataloader(loader)
    assert len(ranged) == 2
    assert ranged.dataset is loader.dataset
    for epoch in range(2):
        seen = []
        for batch in ranged:
            assert sink.open_count() == 0
            seen += batch.tolist()
        assert seen == [0, 1, 2, 3], epoch
    assert set(sink.lines) == {"data"}
    assert sink.ranges[0].category is Category.PHASE


def test_optimizer(sink) -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    handle = annotate_optimizer(optimizer)
    weight.sum().backward()
    optimizer.step()
    assert sink.lines == ["optimizer"]
    assert sink.ranges[0].category is Category.PHASE
    with pytest.raises(UsageError, match="SGD is already annotated"):
        annotate_optimizer(optimizer)
    session.deactivate()
    assert len(optimizer._optimizer_step_pre_hooks) == 0
    session.activate(sink)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    handle.remove()
    optimizer.step()
    assert sink.lines == ["optimizer"]
