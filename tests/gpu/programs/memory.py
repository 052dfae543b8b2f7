"""Account for the memory of training steps of a Llama-shaped model: AdamW, bf16 autocast over fp32 weights.

    python memory.py FOLDER [--checkpoint] [--layers 8] [--width 2048]

Leaves FOLDER/rank0_dp0_tp0_pp0 and FOLDER/expected.json. Prints, for each time point, what the allocator holds and how
much of it is not accounted for; and whether losses and peak are those of the same steps without the profiler.
"""

import argparse
import json
from pathlib import Path

import torch
import train
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nvprof_kit import MemoryProfiler

KINDS = ("params", "grads", "os_state", "activation", "outputs", "inputs", "autocast", "workspace")


def model_of(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = train.llama(options.layers, options.width, num_attention_heads=options.width // 128)
    if options.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        tokens = torch.randint(0, 32000, (4, 1024), device="cuda")
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # also for what is run again in the backward pass
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens)[0]
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain(options: argparse.Namespace) -> tuple[list[float], int]:
    model = model_of(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.cuda.reset_peak_memory_stats()
    return steps(model, optimizer), torch.cuda.max_memory_allocated()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    losses, peak = plain(options)
    again, _ = plain(options)
    torch.cuda.empty_cache()
    model = model_of(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with MemoryProfiler(model, optimizer, options.folder) as profiler:
        profiled = steps(model, optimizer)
    worst = 0.0
    for point in profiler.points:
        counts = point.allocator
        share = point.sum_of("unexplained") / counts.allocated
        beside = (counts.allocated - point.total) / counts.allocated
        worst = max(worst, abs(share))
        kinds = {kind: point.sum_of(kind) >> 20 for kind in KINDS}
        print(
            f"{point.name:18} allocated {counts.allocated / 2**20:9.1f} MiB, "
            f"beside the five kinds {100 * beside:6.3f} %, unexplained {100 * share:7.4f} %  {kinds}"
        )
    found = {
        "same_losses": losses == profiled,
        "same_losses_without_profiler": losses == again,  # the attention's backward may add in any order
        "peak_plain": peak,
        "peak_profiled": max(point.allocator.peak for point in profiler.points),
        "worst_unexplained": worst,
        "boundaries": len(profiler.boundaries),
    }
    (options.folder / "expected.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
