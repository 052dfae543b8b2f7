"""Train a small Llama for a few steps with the ranges of others, none of nvprof_kit's; the capture begins after the
warm-up.

python foreign.py emit-nvtx|emit-nvtx-shapes|emit-nvtx-plain|torch-nvtx|plain-nvtx|ours [--layers 4] [--steps 2]
python foreign.py kineto|kineto-modules FILE.json [--checkpoint]

- emit-nvtx: `torch.autograd.profiler.emit_nvtx` beside forward hooks that push module paths with `torch.cuda.nvtx`
- emit-nvtx-shapes: the same with `record_shapes`; emit-nvtx-plain: without the hooks
- torch-nvtx: the hooks alone; plain-nvtx: the same with the `nvtx` package, in a domain ``train``
- kineto: `torch.profiler` with stacks, whose trace holds modules; kineto-modules: with `with_modules` alone
- ours: `nvprof_kit.annotate_model`, the truth to compare with
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from train import VOCABULARY, Size, llama

import nvprof_kit

Range = Callable[[str], AbstractContextManager[Any]]


def push_paths(model: nn.Module, push: Callable[[str], Any], pop: Callable[[], Any]) -> None:
    """Range every module's forward by its path, as one would by hand."""
    for path, module in model.named_modules():
        name = path or type(model).__name__
        module.register_forward_pre_hook(lambda *_, name=name: push(name) and None)
        module.register_forward_hook(lambda *_: pop() and None, always_call=True)


def ranges_of(mode: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Range:
    """Install the ranges of a mode; returns what ranges a stretch of the loop."""
    if mode == "ours":
        nvprof_kit.annotate_model(model, depth="leaf")
        nvprof_kit.annotate_optimizer(optimizer)
        return lambda text: nvprof_kit.step(int(text.split()[1])) if text.startswith("step") else nvprof_kit.phase(text)
    if mode == "plain-nvtx":
        import nvtx

        push_paths(model, lambda name: nvtx.push_range(name, domain="train"), lambda: nvtx.pop_range(domain="train"))
        return lambda text: nvtx.annotate(text, domain="train")
    if mode.startswith("kineto"):
        return torch.profiler.record_function
    if mode != "emit-nvtx-plain":
        push_paths(model, torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)
    return torch.cuda.nvtx.range


def watched(mode: str) -> AbstractContextManager[Any]:
    """What records the steps beside the ranges."""
    if mode.startswith("emit-nvtx"):
        return torch.autograd.profiler.emit_nvtx(record_shapes=mode.endswith("shapes"))
    if mode.startswith("kineto"):
        both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        return torch.profiler.profile(activities=both, with_stack=mode == "kineto", with_modules=True)
    return nullcontext()


def main() -> None:
    modes = ["emit-nvtx", "emit-nvtx-shapes", "emit-nvtx-plain", "torch-nvtx", "plain-nvtx", "ours"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=[*modes, "kineto", "kineto-modules"])
    parser.add_argument("file", nargs="?", help="where a Kineto trace goes")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations in the backward pass")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = llama(Size(options.layers)).to("cuda", torch.bfloat16)
    if options.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ranged = ranges_of(options.mode, model, optimizer)
    tokens = torch.randint(0, VOCABULARY, (4, 513), device="cuda")

    def run(number: int) -> torch.Tensor:
        with ranged(f"step {number}"):
            with ranged("data"):
                batch = tokens[torch.randperm(4, device="cuda")]
            with ranged("forward"):
                loss = model(input_ids=batch[:, :-1], labels=batch[:, 1:])[0]
            with ranged("backward"):
                loss.backward()
            with nullcontext() if options.mode == "ours" else ranged("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
        return loss

    for number in range(options.warm_up):
        run(number)
    torch.cuda.synchronize()
    if not options.mode.startswith("kineto"):
        torch.cuda.cudart().cudaProfilerStart()
    with watched(options.mode) as recorder:
        for number in range(options.warm_up, options.warm_up + options.steps):
            loss = run(number)
        torch.cuda.synchronize()
    if options.file:
        recorder.export_chrome_trace(options.file)
    else:
        torch.cuda.cudart().cudaProfilerStop()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
