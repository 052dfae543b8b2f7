"""Steps, phases, marks, dataloaders and optimizers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import nvprof_kit._instrument.session as session
from nvprof_kit import MemoryProfiler, annotate_dataloader, annotate_model, annotate_optimizer, mark, phase, step
from nvprof_kit.errors import UsageError
from nvprof_kit.names import Category


def test_step_phase_mark(sink):
    @step()
    def train() -> str:
        with phase("forward"):
            mark("here")
        return "done"

    @phase("generate")
    def generate():
        yield 1

    with step(12):
        assert list(generate()) == [1]
    assert train() == "done"
    with step():
        pass
    payloads = [range_.payload for range_ in sink.ranges if range_.category is Category.STEP]
    assert payloads[0] == 12 and payloads[2] == payloads[1] + 1
    steps = [f"step {number}" for number in payloads]
    assert sink.lines == [steps[0], *["  generate"] * 2, steps[1], "  forward", "mark here", steps[2]]
    assert {(range_.category, range_.payload) for range_ in sink.ranges[1:3]} == {(Category.PHASE, None)}


def test_dataloader(sink):
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


def test_optimizer(sink):
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
    model, both = torch.nn.Linear(1, 1), [optimizer, torch.optim.SGD([weight], lr=0.1)]
    with pytest.raises(UsageError, match="one optimizer, not a list of them; call it for each"):
        annotate_optimizer(both)
    with annotate_model(model, optimizer=both, steps=False):
        both[1].step()
    assert sink.lines == ["optimizer"] * 2


class Wrapper:
    """As ``DeepSpeedZeroOptimizer`` of deepspeed 0.19, ``DeepSpeedEngine`` around it, and ``MegatronOptimizer`` of
    megatron-core 0.16: no optimizer of PyTorch's; it steps the one that it holds.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


class ChainedOptimizer:
    """As megatron-core's: the optimizer of several is an assertion that fails."""

    def __init__(self, chained_optimizers: list[Any]) -> None:
        self.chained_optimizers = chained_optimizers

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        raise AssertionError("ChainedOptimizer has more than one optimizer")

    def step(self) -> None:
        for optimizer in self.chained_optimizers:
            optimizer.step()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters())


def real_chained(model: nn.Sequential) -> Any:
    """Megatron's own classes, which want a GPU for a number that is always 1."""
    megatron = pytest.importorskip("megatron.core.optimizer.optimizer")
    from megatron.core.optimizer import OptimizerConfig

    config = OptimizerConfig(optimizer="adam", lr=0.1, clip_grad=0.0)
    with pytest.MonkeyPatch.context() as patch:
        tensor = torch.tensor
        patch.setattr(torch, "tensor", lambda data, device=None, dtype=None: tensor(data, dtype=dtype))
        parts = [megatron.FP32Optimizer(adam(part), config, lambda *_args: None) for part in model]
    chain = megatron.ChainedOptimizer(parts)
    chain.step = chain.step_with_ready_grads  # without the norms, for which every rank is asked
    return chain


def real_accelerated(model: nn.Sequential) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare(adam(model))


WRAPPERS: dict[str, tuple[Callable[[nn.Sequential], Any], int]] = {
    "wrapper": (lambda model: Wrapper(adam(model)), 1),
    "engine": (lambda model: Wrapper(Wrapper(adam(model))), 1),
    "chained": (lambda model: ChainedOptimizer([Wrapper(adam(part)) for part in model]), 2),
    "megatron-core": (real_chained, 2),
    "accelerate": (real_accelerated, 1),
}
"""How a wrapper is made, and how many optimizers it has."""


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_steps_of_a_wrapped_optimizer_are_ranged_and_told(name, sink, tmp_path):
    make, count = WRAPPERS[name]
    model = net()
    optimizer = make(model)
    options = dict(folder=tmp_path, pages=False)
    with annotate_optimizer(optimizer), MemoryProfiler(model, optimizer, **options) as profiling:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert sink.lines.count("optimizer") == 2 * count
    last = profiling.points[-1]
    assert last.name == "step 1 optimizer"
    # AdamW keeps two values and the step's number, of 4 bytes each, for 12 weights in 4 tensors
    assert (last.sum_of("params"), last.sum_of("grads"), last.sum_of("os_state")) == (48, 48, 2 * 48 + 4 * 4)
    sink.lines.clear()
    optimizer.step()
    assert sink.lines == []


def test_the_components_of_a_pipeline(sink):
    """As one of Diffusers has them; `examples/flux_pipeline.py` has a real one."""
    pipeline = type("Pipeline", (), {"components": {"unet": net(), "scheduler": object()}})()
    with annotate_model(pipeline):
        pipeline.components["unet"](torch.ones(1, 2))
    assert sink.lines == ["unet", "  unet.0", "  unet.1"]


@pytest.mark.parametrize("wrong", [[nn.Linear(2, 2)], "model", object()])
def test_what_is_no_model_is_an_error_that_says_so(wrong):
    with pytest.raises(UsageError, match=r"annotate_model takes a torch\.nn\.Module, or a pipeline"):
        annotate_model(wrong)
