"""What annotation costs a training step: ten interleaved pairs of annotated and plain stretches in one run.

    python overhead.py [--layers 48] [--width 2048] [--batch 4]

Prints the median ratio of the step times; run it alone, under nsys, or under the embedded recorder. Each stretch begins
with a step that is not timed, in which the ranges get their names; every other pair runs the annotated stretch first.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

import nvprof_kit


def seconds_per_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, steps: int) -> float:
    began = 0.0
    for number in range(-1, steps):
        if number <= 0:
            torch.cuda.synchronize()
            began = time.perf_counter()
        with nvprof_kit.step(number):
            model(input_ids=tokens, labels=tokens)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=options.width,
        intermediate_size=options.width * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 128,
        num_key_value_heads=options.width // 128,
        use_cache=False,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(0, 32000, (options.batch, 1024), device="cuda")
    seconds_per_step(model, optimizer, tokens, 3)
    plain, annotated, modules = [], [], 0
    for stretch in range(2 * options.pairs):
        if stretch % 4 in (0, 3):
            plain.append(seconds_per_step(model, optimizer, tokens, options.steps))
            continue
        with nvprof_kit.annotate_model(model) as annotation:
            annotated.append(seconds_per_step(model, optimizer, tokens, options.steps))
            modules = len(annotation.paths)
    ratios = [with_it / without for with_it, without in zip(annotated, plain, strict=True)]
    print(
        f"{options.layers} layers of {options.width}, batch {options.batch}, {modules} modules ranged: plain "
        f"{statistics.median(plain) * 1e3:.1f} ms, "
        f"annotated {statistics.median(annotated) * 1e3:.1f} ms, median ratio of {options.pairs} pairs "
        f"{statistics.median(ratios):.4f} "
        f"({min(ratios):.4f} to {max(ratios):.4f})"
    )


if __name__ == "__main__":
    main()
