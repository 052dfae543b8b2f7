"""What annotation costs, against its limits.

Run as a script. Without a tool: a decorated call costs at most 60 ns more than a bare one, and modules have no hooks;
a step of `Throughput`, or of a `LayerProfiler` that is off, costs at most 5 µs.
Under each nsys of NVPROF_KIT_NSYS (or the one on the PATH): the CPU time of a range, beside a pair of push and pop as a
program writes it. On a machine with a GPU, also: a training step annotated over the same step unannotated, the
median of alternating steps of `tests/gpu/programs/overhead.py` under nsys; at most 1.005 where the GPU limits the step
and 1.05 where the CPU does. ``--parts idle cost ratio`` measures only these. It fails over a limit.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from nvprof_kit import LayerProfiler, Throughput, annotate_model, layer_range, phase
from nvprof_kit._instrument.session import nvtx_domain

IDLE_NS, STEP_NS = 60, 5_000
RATIOS = {8: 1.005, 2: 1.05}
"""Limits of the ratio by batch size: with 8 sequences the GPU limits the step, with 2 the CPU."""
ROUNDS, CALLS = 101, 200
OVERHEAD = Path(__file__).parents[1] / "gpu" / "programs" / "overhead.py"


def costs(*functions: Callable[[], object], calls: int = CALLS) -> list[float]:
    """Median nanoseconds of CPU time per call of each function, interleaved so that slow moments hit all alike."""
    times: list[list[float]] = [[] for _ in functions]
    order = list(zip(functions, times, strict=True))
    shuffle = random.Random(0).shuffle
    for _ in range(ROUNDS):
        shuffle(order)
        for function, seen in order:
            seen.append(timeit.timeit(function, timer=time.thread_time, number=calls) / calls * 1e9)
    return [statistics.median(seen) for seen in times]


class Echo(nn.Module):
    """One autograd node and nothing else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.neg()


def idle() -> bool:
    class Block:
        def bare(self, x, mask=None):
            return x

        decorated = layer_range(bare)

    block, model = Block(), nn.Sequential(Echo(), Echo())
    annotate_model(model)
    bare, decorated = costs(lambda: block.bare(1), lambda: block.decorated(1), calls=2000)
    changed = sum("_compiled_call_impl" in vars(module) for module in model.modules())
    print(f"no tool: decorated call {decorated - bare:+.0f} ns over {bare:.0f} ns (limit {IDLE_NS}), {changed} changed")
    meter: Throughput[int] = Throughput(samples=8, tokens=4096)

    def reading() -> None:
        meter.begin_read()
        meter.end_read()
        meter.step()

    steps = (reading, meter.step, LayerProfiler(nn.Linear(2, 2), False).step)
    empty, *taken = costs(lambda: None, *steps, calls=2000)
    for name, nanoseconds in zip(
        ("Throughput, reading and step", "Throughput, step", "LayerProfiler.step, off"), taken, strict=True
    ):
        print(f"{name}: {nanoseconds - empty:.0f} ns (limit {STEP_NS})")
    return decorated - bare <= IDLE_NS and changed == 0 and max(taken) - empty <= STEP_NS


def cost() -> None:
    """Prints the cost of a range under the attached tool."""
    domain = nvtx_domain()
    attributes = domain.get_event_attributes(message="layers.3.self_attn", category="forward", payload=3)

    def by_hand() -> None:
        domain.push_range(attributes)
        domain.pop_range()

    scope, stretch = layer_range("layers.3.self_attn"), phase("generate")

    def with_scope() -> None:
        with scope:
            pass

    def with_phase() -> None:
        with stretch:
            pass

    bare, x = Echo().forward, torch.ones(1, requires_grad=True)
    decorated = layer_range("layers.3.mlp")(bare)
    plain, annotated = (nn.Sequential(*(Echo() for _ in range(20))) for _ in range(2))
    annotate_model(annotated, depth=1)

    def train(model: nn.Module) -> Callable[[], object]:
        return lambda: torch.autograd.grad(model(x), x)

    empty, hand, scoped, phased = costs(lambda: None, by_hand, with_scope, with_phase)
    rows = {"push_range, pop_range by hand": hand - empty, "with layer_range": scoped - empty, "with phase": phased}
    without, with_range = costs(lambda: bare(x), lambda: decorated(x))
    rows["decorated function of a tensor, with gradients"] = with_range - without
    without, with_range = costs(train(plain), train(annotated), calls=10)
    rows["module, forward and backward"] = (with_range - without) / 21
    for name, nanoseconds in rows.items():
        print(f"{name:<48} {nanoseconds:7.0f} ns", flush=True)


def ratio(nsys: str) -> bool:
    """Runs the training step under nsys and checks the ratios; True without a GPU."""
    if not torch.cuda.is_available():
        print("no GPU: the ratios are not measured")
        return True
    within = True
    for batch, limit in RATIOS.items():
        printed = under(nsys, "cuda,nvtx,osrt", str(OVERHEAD), "--batch", str(batch))
        found = re.search(r"annotated, .*median ratio ([\d.]+)", printed)
        print(f"batch {batch}, limit {limit}: {printed.strip()}", flush=True)
        within = within and found is not None and float(found[1]) <= limit
    return within


def under(nsys: str, trace: str, *program: str) -> str:
    """What a program prints under nsys."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["-t", trace, "-s", "none", "--cpuctxsw=none", "-o", f"{folder}/report"]
        command = [nsys, "profile", *options, sys.executable, *program]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return "\n".join(line for line in done.stdout.splitlines() if " ns" in line or "ratio" in line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("idle", "cost", "ratio"), default=["idle", "cost", "ratio"])
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.here:
        cost()
        return 0
    within = idle() if "idle" in options.parts else True
    named = os.environ.get("NVPROF_KIT_NSYS", shutil.which("nsys") or "")
    for nsys in filter(None, named.split(os.pathsep)):
        print(subprocess.run([nsys, "--version"], capture_output=True, text=True, check=True).stdout.strip())
        if "cost" in options.parts:
            print(under(nsys, "nvtx,osrt", __file__, "--here"), flush=True)
        if "ratio" in options.parts:
            within = ratio(nsys) and within
    return not within


if __name__ == "__main__":
    sys.exit(main())
