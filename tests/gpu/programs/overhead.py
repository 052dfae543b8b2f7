"""What annotation costs a training step: rounds of a plain stretch, one annotated as by default, and one without norms.

    python overhead.py [--layers 48] [--width 2048] [--batch 4] [--clock cpu]

Prints the median of the ratios of the step times in a round, their quartiles, and as a control those of each round's
plain stretch and the next round's; run it alone, under nsys, or under the embedded recorder. Each stretch begins with a
step that is not timed, in which the ranges get their names; every other round runs the stretches in reverse. With
--clock cpu the processor's time is compared: the clearer one where the CPU limits the step and others use it too; with
--device cpu --width 128 --sequence 8 --batch 1, hardly anything but the time that Python and PyTorch take for a call.
"""

import argparse
import statistics
import time
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from train import llama

import nvprof_kit

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def seconds_per_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, steps: int, clock: str = "wall"
) -> float:
    began, synchronize = 0.0, torch.get_device_module(tokens.device).synchronize
    for number in range(-1, steps):
        if number <= 0:
            synchronize()
            began = CLOCKS[clock]()
        with nvprof_kit.step(number):
            model(input_ids=tokens, labels=tokens)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
    synchronize()
    return (CLOCKS[clock]() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sequence", type=int, default=1024)
    options = parser.parse_args()
    with torch.device(options.device):
        model = llama(options.layers, options.width, num_attention_heads=options.width // 128).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(0, 32000, (options.batch, options.sequence), device=options.device)
    seconds_per_step(model, optimizer, tokens, 3)
    kinds: dict[str, dict[str, Any] | None] = {"plain": None, "annotated": {}, "without norms": {"select": not_norm}}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    modules = dict.fromkeys(kinds, 0)
    for round_ in range(options.pairs):
        for kind in list(kinds)[:: -1 if round_ % 2 else 1]:
            with ExitStack() as stack:
                if (arguments := kinds[kind]) is not None:
                    annotation = stack.enter_context(nvprof_kit.annotate_model(model, **arguments))
                    modules[kind] = len(annotation.paths)
                seconds[kind].append(seconds_per_step(model, optimizer, tokens, options.steps, options.clock))
    plain = seconds["plain"]
    program = f"{options.layers} layers of {options.width}, batch {options.batch}"
    print(f"{program}: plain {statistics.median(plain) * 1e3:.1f} ms")
    for kind in list(kinds)[1:]:
        shown(f"{kind}, {modules[kind]} modules, {statistics.median(seconds[kind]) * 1e3:.1f} ms", seconds[kind], plain)
    shown("control", plain[1:], plain[:-1])


def not_norm(path: str, module: nn.Module) -> bool:
    """Blocks, their parts except norms, and what is outside them."""
    return not path.startswith("model.layers.") or (path.count(".") <= 3 and "norm" not in path)


def shown(text: str, seconds: list[float], base: list[float]) -> None:
    ratios = [with_it / without for with_it, without in zip(seconds, base, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    print(f"{text}: median ratio of {len(ratios)} rounds {median:.4f} ({low:.4f} to {high:.4f})", flush=True)


if __name__ == "__main__":
    main()
