"""What annotation costs a training step: rounds of a plain stretch, one annotated as by default, and one without norms.

    python overhead.py [--layers 48] [--width 2048] [--batch 4] [--output overhead.txt]

Prints the median of the ratios of the step times in a round, their quartiles, and as a control those of each round's
plain stretch and the next round's; run it alone, under nsys, or under the embedded recorder. Each stretch begins with a
step that is not timed, in which the ranges get their names; every other round runs the stretches in reverse. The time
of the clock is compared, and that of the processor: the clearer one where the CPU limits the step and others use it
too; with --device cpu --width 128 --sequence 8 --batch 1, hardly anything but what Python and PyTorch take for a call.
"""

import argparse
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from train import llama

import nvprof_kit

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def times_of(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, steps: int) -> dict[str, float]:
    began, synchronize = [0.0, 0.0], torch.get_device_module(tokens.device).synchronize
    for number in range(-1, steps):
        if number <= 0:
            synchronize()
            began = [clock() for clock in CLOCKS.values()]
        with nvprof_kit.step(number):
            model(input_ids=tokens, labels=tokens)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
    synchronize()
    return {name: (clock() - start) / steps for start, (name, clock) in zip(began, CLOCKS.items(), strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--output", type=Path, metavar="FILE", help="what is printed, also there")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sequence", type=int, default=1024)
    options = parser.parse_args()
    with torch.device(options.device):
        model = llama(options.layers, options.width, num_attention_heads=options.width // 128).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(0, 32000, (options.batch, options.sequence), device=options.device)
    times_of(model, optimizer, tokens, 3)
    kinds: dict[str, dict[str, Any] | None] = {"plain": None, "annotated": {}, "without norms": {"select": not_norm}}
    seconds: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    modules = dict.fromkeys(kinds, 0)
    for round_ in range(options.pairs):
        for kind in list(kinds)[:: -1 if round_ % 2 else 1]:
            with ExitStack() as stack:
                if (arguments := kinds[kind]) is not None:
                    annotation = stack.enter_context(nvprof_kit.annotate_model(model, **arguments))
                    modules[kind] = len(annotation.paths)
                seconds[kind].append(times_of(model, optimizer, tokens, options.steps))
    lines = [f"{options.layers} layers of {options.width}, batch {options.batch}"]
    for clock in CLOCKS:
        times = {kind: [stretch[clock] for stretch in seconds[kind]] for kind in kinds}
        for kind in kinds:
            what = f"{clock}: {kind}, {modules[kind]} modules, {statistics.median(times[kind]) * 1e3:.1f} ms"
            lines.append(ratios(what, times[kind], times["plain"]))
        lines.append(ratios(f"{clock}: control", times["plain"][1:], times["plain"][:-1]))
    print("\n".join(lines))
    if options.output:
        options.output.write_text("\n".join([*lines, ""]))


def not_norm(path: str, module: nn.Module) -> bool:
    """Blocks, their parts except norms, and what is outside them."""
    return not path.startswith("model.layers.") or (path.count(".") <= 3 and "norm" not in path)


def ratios(text: str, seconds: list[float], base: list[float]) -> str:
    low, median, high = statistics.quantiles(map(float.__truediv__, seconds, base), n=4)
    return f"{text}: median ratio of {len(seconds)} rounds {median:.4f} ({low:.4f} to {high:.4f})"


if __name__ == "__main__":
    main()
