"""Account for the memory of training steps of a Llama-shaped model: AdamW, bf16 autocast over fp32 weights.

    python memory.py FOLDER [--checkpoint] [--layers 8] [--width 2048] [--stacks]

Leaves FOLDER/rank0_dp0_tp0_pp0 and FOLDER/expected.json. Prints, for each time point, what the allocator holds and how
much of it is not accounted for; and whether losses and peak are those of the same steps without the profiler. With
--stacks it leaves FOLDER/unknown.json in place of all that: at each time point the blocks that lie in no known tensor,
by the C++ stack that asked for them, which judges what the profiler tells by their size.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nvprof_kit import MemoryProfiler
from nvprof_kit._instrument.memory import blocks as memory_blocks

KINDS = ("params", "grads", "os_state", "activation", "outputs", "inputs", "autocast", "workspace")


def model_of(layers: int, width: int, checkpoint: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 128,
        num_key_value_heads=width // 128,
        use_cache=False,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    """Losses of the steps; prints how long each took, which ends with reading the loss."""
    torch.manual_seed(1)
    losses = []
    ends = [time.perf_counter()]
    for _ in range(count):
        tokens = torch.randint(0, 32000, (4, 1024), device="cuda")
        with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            loss = model(input_ids=tokens, labels=tokens)[0]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # for what is run again
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        ends.append(time.perf_counter())
    print("steps took", ", ".join(f"{1e3 * (end - begin):.1f} ms" for begin, end in itertools.pairwise(ends)))
    return losses


def plain(options: argparse.Namespace) -> tuple[list[float], int]:
    model = model_of(options.layers, options.width, options.checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.cuda.reset_peak_memory_stats()
    return steps(model, optimizer, 3), torch.cuda.max_memory_allocated()


def with_stacks(options: argparse.Namespace) -> None:
    """The blocks that no known tensor lies in, by who asked for them."""
    torch.cuda.memory._record_memory_history(stacks="all")
    found: list[dict[str, Any]] = []
    unknown_of = memory_blocks.unknown_blocks

    def listed(blocks: Any, known: Any) -> Any:
        unknown = unknown_of(blocks, known)
        addresses = {block.address for block in unknown}
        counted: Counter[tuple[int, str]] = Counter()
        for segment in torch.cuda.memory._snapshot()["segments"]:
            for block in segment["blocks"]:
                if block["address"] in addresses:
                    names = [frame["name"][:100] for frame in block["frames"]]
                    own = [
                        name for name in names if name.startswith(("at::", "c10::", "torch::")) and "Cach" not in name
                    ]
                    counted[block["requested_size"], " < ".join(own[:12]) or " < ".join(names[:12])] += 1
        found.append({f"{count} of {size} bytes": stack for (size, stack), count in counted.most_common()})
        return unknown

    memory_blocks.unknown_blocks = listed  # type: ignore[assignment]
    model = model_of(options.layers, options.width, options.checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with MemoryProfiler(model, optimizer, options.folder / "stacks", pages=False) as profiler:
        steps(model, optimizer, 2)
    named = {
        point.name: {"rows": told(point), "stacks": one} for point, one in zip(profiler.points, found, strict=True)
    }
    (options.folder / "unknown.json").write_text(json.dumps(named, indent=1))
    print(json.dumps({name: one["rows"] for name, one in named.items()}, indent=1))


def told(point: Any) -> dict[str, int]:
    """Rows of what lies in no known tensor, with autocast's as one."""
    rows = {f"{row.kind} {row.path}": row.bytes for row in point.rows if row.kind in ("workspace", "unexplained")}
    return {**rows, "autocast": point.sum_of("autocast"), "rounding": point.sum_of("rounding")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--stacks", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.stacks:
        return with_stacks(options)
    torch.use_deterministic_algorithms(True, warn_only=True)
    losses, peak = plain(options)
    again, _ = plain(options)
    torch.cuda.empty_cache()
    model = model_of(options.layers, options.width, options.checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with MemoryProfiler(model, optimizer, options.folder) as profiler:
        profiled = steps(model, optimizer, 3)
    worst = 0.0
    print("largest allocations:", max(profiler.boundaries, key=lambda b: b.largest or 0))
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
        "losses": losses,
        "peak_plain": peak,
        "peak_profiled": max(point.allocator.peak for point in profiler.points),
        "worst_unexplained": worst,
        "boundaries": len(profiler.boundaries),
        "activation": max(point.sum_of("activation") for point in profiler.points),
    }
    (options.folder / "expected.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
