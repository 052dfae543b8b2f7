"""Time the stages of a training loop on each rank, one of which is slow; and what a stage costs.

    python timers.py FOLDER                                            # one rank
    torchrun --nproc-per-node 2 timers.py FOLDER --slow 1              # ranks that share a GPU (gloo) or have their own

Leaves timer_rank*.log in FOLDER. Prints the cost of a stage, that of the GPU's time against a synchronised measurement,
and whether a stage ever waited for the GPU.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from nvprof_kit import global_timer
from nvprof_kit._instrument.meters.timers import GlobalTimer


def loop(model: nn.Module, batch: torch.Tensor, steps: int, extra: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(steps):
        with global_timer.stage("step"):
            with global_timer.stage("forward"):
                for _ in range(1 + extra):
                    loss = model(batch).square().mean()
            with global_timer.stage("backward"):
                loss.backward()
                for weight in model.parameters():
                    if dist.is_initialized():
                        dist.all_reduce(weight.grad)
            with global_timer.stage("optimizer"):
                optimizer.step()
                optimizer.zero_grad()


def cost_of_a_stage(folder: Path) -> float:
    """Microseconds."""
    timer, rounds = GlobalTimer(folder / "cost"), 20_000
    began = time.perf_counter()
    for _ in range(rounds):
        timer.start("a")
        timer.stop("a")
    return (time.perf_counter() - began) / rounds * 1e6


def never_waits(folder: Path) -> str:
    """A stage of 50 ms on the GPU is left by the CPU at once, and timed right."""
    timer = GlobalTimer(folder / "sleep")
    torch.cuda.synchronize()
    began = time.perf_counter()
    with timer.stage("sleep"):
        torch.cuda._sleep(100_000_000)
    left = (time.perf_counter() - began) * 1e3
    torch.cuda.synchronize()
    whole = (time.perf_counter() - began) * 1e3
    line = timer.dump().read_text().strip()
    return f"left after {left:.2f} ms of {whole:.1f} ms; {line}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slow", type=int, default=-1, help="rank whose forward takes longer")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    number = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        own = torch.cuda.device_count() > number
        dist.init_process_group("nccl" if own else "gloo")
        torch.cuda.set_device(number if own else 0)
    global_timer.folder = options.folder
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).to("cuda")
    batch = torch.randn(4096, 2048, device="cuda")
    loop(model, batch, options.steps, extra=4 if number == options.slow else 0)
    print(f"rank {number}: {global_timer.dump()}")
    if number == 0:
        print(never_waits(options.folder))
        print(f"a stage costs {cost_of_a_stage(options.folder):.1f} us with its CUDA events, line and flush")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
