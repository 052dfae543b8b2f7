"""One Llama-shaped model trained in the ways people train it, so that each way can be compared with the eager one.

python variants.py eager|checkpoint|checkpoint-inside|graph|compile-blocks|compile-model-parts|generate
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from train import VOCABULARY, llama

import nvprof_kit

LAYERS, STEPS, WARM_UP = 4, 3, 3


@contextmanager
def collected() -> Iterator[None]:
    """The window that nsys collects."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    yield
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = llama(LAYERS).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)
    return model, optimizer, torch.randint(0, VOCABULARY, (4, 513), device="cuda")


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    with nvprof_kit.phase("forward"):
        loss = model(input_ids=tokens[:, :-1], labels=tokens[:, 1:])[0]
    with nvprof_kit.phase("backward"):
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def run_steps(step: Callable[[], None]) -> None:
    for _ in range(WARM_UP):
        step()
    with collected():
        for number in range(STEPS):
            with nvprof_kit.step(number):
                step()


def eager(prepare: Callable[[nn.Module], nn.Module] = lambda model: model, *, parts: bool = False) -> None:
    model, optimizer, tokens = make()
    nvprof_kit.annotate_model(model, compiled_parts=parts)
    nvprof_kit.annotate_optimizer(optimizer)
    model = prepare(model)
    run_steps(lambda: train_step(model, optimizer, tokens))


def checkpointed(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    model.enable_input_require_grads()  # type: ignore[operator]
    return model.train()


def checkpointed_inside(model: nn.Module) -> nn.Module:
    """Each block checkpoints all that it does, as those of transformers 5 do, instead of being called again."""
    for block in model.model.layers:  # type: ignore[union-attr]
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    model.enable_input_require_grads()  # type: ignore[operator]
    return model.train()


def graph() -> None:
    model, optimizer, tokens = make()
    nvprof_kit.annotate_model(model)
    nvprof_kit.annotate_optimizer(optimizer)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            train_step(model, optimizer, tokens)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with collected():
        with nvprof_kit.phase("capture"), torch.cuda.graph(captured):
            train_step(model, optimizer, tokens)
        for number in range(STEPS):
            with nvprof_kit.step(number):
                captured.replay()


def compile_blocks(model: nn.Module) -> nn.Module:
    for block in model.model.layers:
        block.compile()
    return model


def generate() -> None:
    model, _, tokens = make()
    model.config.use_cache = True
    nvprof_kit.annotate_model(model)
    for _ in range(2):
        model.generate(tokens[:, :128], max_new_tokens=4, do_sample=False)
    with collected(), nvprof_kit.phase("generate"), nvprof_kit.generation(model):
        model.generate(tokens[:, :128], max_new_tokens=8, do_sample=False)


VARIANTS: dict[str, Callable[[], None]] = {
    "eager": eager,
    "checkpoint": lambda: eager(checkpointed),
    "checkpoint-inside": lambda: eager(checkpointed_inside),
    "graph": graph,
    "compile-blocks": lambda: eager(compile_blocks),
    "generate": generate,
    "compile-model-parts": lambda: eager(torch.compile, parts=True),
}

if __name__ == "__main__":
    VARIANTS[sys.argv[1]]()
