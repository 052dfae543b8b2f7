"""What a range costs, against the least that it can cost.

Run as a script: it measures idle calls here, then runs itself under each nsys of NVPROF_KIT_NSYS (or the one on the
PATH) and measures there. Times are nanoseconds per call, medians of interleaved runs. The least is a bare pair of
`Domain.push_range` and `Domain.pop_range` and, for modules, PyTorch's own price of empty hooks of the same kinds.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable

import torch
from torch import nn

from nvprof_kit import annotate_model, layer_range
from nvprof_kit.instrument import state
from nvprof_kit.instrument.backends import nvtx_domain

ROUNDS, CALLS, LAYERS = 41, 2000, 20
TEXT = "model.layers.3.self_attn"


def medians(*functions: Callable[[], object], calls: int = CALLS) -> list[float]:
    """Nanoseconds per call of each function, interleaved so that a slow moment hits all alike."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(ROUNDS):
        for function, seen in zip(functions, times, strict=True):
            seen.append(timeit.timeit(function, number=calls) / calls * 1e9)
    return [statistics.median(seen) for seen in times]


def report(what: str, cost: float, least: float) -> None:
    print(f"{what:<58} {cost:8.0f} ns   least {least:6.0f} ns   ratio {cost / least:5.2f}", flush=True)


def idle() -> None:
    class Block:
        def bare(self, x, mask=None):
            return x

        decorated = layer_range(bare)

    block = Block()
    bare, decorated = medians(lambda: block.bare(1), lambda: block.decorated(1), calls=20_000)
    print(f"{'decorated call, no tool':<58} +{decorated - bare:7.0f} ns over the bare call's {bare:.0f} ns", flush=True)


def scopes() -> float:
    """Measure scopes; returns the cost of a bare pair."""
    domain = nvtx_domain()
    attributes = domain.get_event_attributes(message=TEXT, category="forward", payload=3)
    scope = layer_range(TEXT)

    def nothing() -> None:
        pass

    def pair() -> None:
        domain.push_range(attributes)
        domain.pop_range()

    def kept() -> None:
        with scope:
            pass

    def inline() -> None:
        with layer_range(TEXT):
            pass

    def bare(x: int) -> int:
        return x

    decorated = layer_range(TEXT)(bare)
    empty, least, held, made, plain, ranged = medians(
        nothing, pair, kept, inline, lambda: bare(1), lambda: decorated(1)
    )
    least -= empty
    report("with a layer_range that is kept", held - empty, least)
    report("with layer_range(name), made anew", made - empty, least)
    report("decorated call", ranged - plain, least)
    return least


class Echo(nn.Module):
    """One autograd node and nothing else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.neg()


class HookedEcho(Echo):
    """With empty hooks of the kinds that annotation needs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda _module, _args, _kwargs: None, prepend=True, with_kwargs=True)
        self.register_forward_hook(lambda _module, _args, _output: None, always_call=True)


class MarkedEcho(HookedEcho):
    """With an empty hook before its node too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.neg()
        y.grad_fn.register_prehook(lambda _grads: None)
        return y


def modules(pair: float) -> None:
    bare, hooked, marked, annotated = Echo(), HookedEcho(), MarkedEcho(), Echo()
    annotate_model(annotated)
    x = torch.ones(1, requires_grad=True)
    grad = torch.ones(1)

    def step(model: nn.Module) -> Callable[[], object]:
        return lambda: torch.autograd.grad(model(x), x, grad)

    with torch.no_grad():
        plain, empty, ranged = medians(lambda: bare(x), lambda: hooked(x), lambda: annotated(x))
    report("module, forward, no gradients", ranged - plain, pair + empty - plain)
    plain, empty, ranged = medians(lambda: bare(x), lambda: marked(x), lambda: annotated(x))
    report("module, forward, with gradients", ranged - plain, pair + empty - plain)
    many = nn.Sequential(*(Echo() for _ in range(LAYERS)))
    many_marked = nn.Sequential(*(MarkedEcho() for _ in range(LAYERS)))
    many_annotated = nn.Sequential(*(Echo() for _ in range(LAYERS)))
    annotate_model(many_annotated, depth=1)
    plain, empty, ranged = (
        time / LAYERS for time in medians(*map(step, (many, many_marked, many_annotated)), calls=50)
    )
    report("module, forward and backward, each of 20 layers", ranged - plain, 2 * pair + empty - plain)


def under(nsys: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = ["-t", "nvtx,osrt", "-s", "none", "--cpuctxsw=none", "-o", f"{folder}/report"]
        command = [nsys, "profile", *options, sys.executable, __file__]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    print("".join(line for line in done.stdout.splitlines(keepends=True) if " ns " in line) or done.stderr, flush=True)


def main() -> None:
    if state.backend is not None:
        modules(scopes())
        return
    idle()
    named = os.environ.get("NVPROF_KIT_NSYS", shutil.which("nsys") or "")
    for nsys in filter(None, named.split(os.pathsep)):
        version = subprocess.run([nsys, "--version"], capture_output=True, text=True, check=True).stdout
        print(f"\n{version.strip()}")
        under(nsys)


if __name__ == "__main__":
    main()
