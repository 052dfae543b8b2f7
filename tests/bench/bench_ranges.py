"""What a range costs, against the least that it can cost.

Run as a script: it measures idle calls here, then runs itself under each nsys of NVPROF_KIT_NSYS (or the one on the
PATH) and measures there; ``--rounds 100`` measures less often, ``--parts calls modules`` only these. Times are
nanoseconds of the thread's CPU time per call, of interleaved runs. It fails if a median is over its limit: 1.5 times
the least for functions of tensors, 1.6 for modules. A function that does nothing may cost 1.5 times the pair that a
program writes by hand, and twice the least.

The least is a bare pair of NVTX's push and pop: the two functions of nvtx's extension in C, with their arguments bound
beforehand (around the same operator, where there is one), and for modules PyTorch's own price of empty hooks of the
same kinds. `Domain.push_range` and `Domain.pop_range`, as a program would write them, cost more.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from nvtx._lib import lib
from torch import nn

from nvprof_kit import annotate_model, layer_range, phase
from nvprof_kit._instrument.ranges import ranges, state
from nvprof_kit._instrument.ranges.backends import nvtx_domain

ROUNDS, CALLS, LAYERS = 405, 200, 20  # short rounds, so that few of them are interrupted
STEPS = 10
FUNCTION, MODULE, NOTHING = 1.5, 1.6, 2.0
"""Limits of the ratio of medians; a function that does nothing has its own over the least, see docs/development.md."""
ORDER = random.Random(0)
TEXT = "model.layers.3.self_attn"


class Cost(NamedTuple):
    """Nanoseconds per call."""

    median: float
    minimum: float

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]
        return Cost(self.median + other.median, self.minimum + other.minimum)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.median - other.median, self.minimum - other.minimum)


rounds = ROUNDS
over: list[str] = []


def costs(*functions: Callable[[], object], calls: int = CALLS) -> list[Cost]:
    """The cost of each function, interleaved in random order so that slow moments hit all alike."""
    times: list[list[float]] = [[] for _ in functions]
    order = list(zip(functions, times, strict=True))
    for _ in range(rounds):
        ORDER.shuffle(order)
        for function, seen in order:
            seen.append(timeit.timeit(function, timer=time.thread_time, number=calls) / calls * 1e9)
    return [Cost(statistics.median(seen), min(seen)) for seen in times]


def report(what: str, cost: Cost, least: Cost, ranges: int = 1, limit: float | None = FUNCTION) -> None:
    """Print a line; ``ranges`` is how many of each were measured at once."""
    if limit is not None and cost.median > limit * least.median:
        over.append(what)
    ratios = " ".join(f"{mine / other:5.2f}" for mine, other in zip(cost, least, strict=True))
    numbers = (
        f"{cost.median / ranges:7.0f} {least.median / ranges:7.0f}",
        f"{cost.minimum / ranges:7.0f} {least.minimum / ranges:7.0f}",
    )
    print(f"{what:<52} median {numbers[0]} ns, minimum {numbers[1]} ns, ratios {ratios}", flush=True)


def idle() -> None:
    class Block:
        def bare(self, x, mask=None):
            return x

        decorated = layer_range(bare)

    block = Block()
    bare, decorated = costs(lambda: block.bare(1), lambda: block.decorated(1), calls=2000)
    added = decorated - bare
    print(
        f"{'decorated call, no tool':<52} median +{added.median:.0f} ns over the bare call's {bare.median:.0f} ns",
        flush=True,
    )


def nothing() -> None:
    pass


DOMAIN = nvtx_domain()
ATTRIBUTES = DOMAIN.get_event_attributes(message=TEXT, category="forward", payload=3)


push = partial(lib.push_range, ATTRIBUTES, DOMAIN.handle)
pop = partial(lib.pop_range, DOMAIN.handle)


def pair() -> None:
    push()
    pop()


def by_hand() -> None:
    DOMAIN.push_range(ATTRIBUTES)
    DOMAIN.pop_range()


def blocks() -> None:
    scope, stretch = layer_range(TEXT), phase("generate")

    def kept() -> None:
        with scope:
            pass

    def anew() -> None:
        with layer_range(TEXT):
            pass

    def phase_kept() -> None:
        with stretch:
            pass

    def phase_anew() -> None:
        with phase("generate"):
            pass

    empty, least, domain, *ranged = costs(nothing, pair, by_hand, kept, anew, phase_kept, phase_anew)
    report("Domain.push_range and Domain.pop_range by hand", domain - empty, least - empty, limit=None)
    names = ("layer_range that is kept", "layer_range(name) anew", "phase that is kept", "phase(name) anew")
    for name, cost in zip(names, ranged, strict=True):
        report(f"with {name}", cost - empty, least - empty, limit=None)


def calls() -> None:
    def bare(x: object) -> object:
        return x

    def neg(x: torch.Tensor) -> torch.Tensor:
        return x.neg()

    def paired(x: torch.Tensor) -> torch.Tensor:
        push()
        y = x.neg()
        pop()
        return y

    def marked(x: torch.Tensor) -> torch.Tensor:
        y = paired(x)
        y.grad_fn.register_prehook(lambda _grads: None)  # type: ignore[union-attr]
        return y

    class Block:
        def bare(self, x: object, mask: object = None) -> object:
            return x

        decorated = layer_range(bare)

    block, x = Block(), torch.ones(1, requires_grad=True)
    decorated, ranged = layer_range(TEXT)(bare), layer_range(TEXT)(neg)
    empty, least, domain, plain, function, method_plain, method = costs(
        nothing,
        pair,
        by_hand,
        lambda: bare(1),
        lambda: decorated(1),
        lambda: block.bare(1),
        lambda: block.decorated(1),
    )
    for name, cost in (("function", function - plain), ("method", method - method_plain)):
        report(f"decorated {name}", cost, least - empty, limit=NOTHING)
        report(f"decorated {name}, over the pair by hand", cost, domain - empty)
    with torch.no_grad():
        plain, least, cost = costs(lambda: neg(x), lambda: paired(x), lambda: ranged(x))
        report("decorated function of a tensor, no gradients", cost - plain, least - plain)
    plain, least, cost = costs(lambda: neg(x), lambda: marked(x), lambda: ranged(x))
    report("decorated function of a tensor, with gradients", cost - plain, least - plain)


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


def modules() -> None:
    bare, hooked, marked, annotated = Echo(), HookedEcho(), MarkedEcho(), Echo()
    annotate_model(annotated)
    x = torch.ones(1, requires_grad=True)
    grad = torch.ones(1)

    def forward(model: nn.Module) -> Callable[[], object]:
        return lambda: model(x)

    def training(model: nn.Module) -> Callable[[], object]:
        return lambda: torch.autograd.grad(model(x), x, grad)

    with torch.no_grad():
        empty, least, plain, hooks, ranged = costs(nothing, pair, *map(forward, (bare, hooked, annotated)))
    report("module, forward, no gradients", ranged - plain, least - empty + hooks - plain, limit=MODULE)
    empty, least, plain, hooks, ranged = costs(nothing, pair, *map(forward, (bare, marked, annotated)))
    report("module, forward, with gradients", ranged - plain, least - empty + hooks - plain, limit=MODULE)
    many = nn.Sequential(*(Echo() for _ in range(LAYERS)))
    many_marked = nn.Sequential(*(MarkedEcho() for _ in range(LAYERS)))
    many_annotated = nn.Sequential(*(Echo() for _ in range(LAYERS)))
    annotate_model(many_annotated, depth=1)
    pairs = [pair] * 2 * LAYERS
    empty, least, plain, hooks, ranged = costs(
        lambda: [nothing() for _ in pairs],
        lambda: [one() for one in pairs],
        *map(training, (many, many_marked, many_annotated)),
        calls=5,
    )
    added, floor = ranged - plain, least - empty + hooks - plain
    report("module, forward and backward, each of 20 layers", added, floor, LAYERS, MODULE)


def least_hooks(module: nn.Module) -> list[Any]:
    """Hooks that push and pop a range around a module's forward and at the node of its output, and do nothing else."""

    def before(_module: object, _args: object, _kwargs: object) -> None:
        push()

    def after(_module: object, _args: object, outputs: Any) -> None:
        pop()
        output = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(lambda _grads: pair())

    return [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_hook(after, always_call=True),
    ]


def llama() -> None:
    """A whole model, whose work between the ranges leaves nothing of them in the caches."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=12,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    torch.set_num_threads(1)  # others would wait for work in a busy loop
    model, tokens = LlamaForCausalLM(config), torch.zeros(1, 4, dtype=torch.long)

    def step() -> None:
        model(input_ids=tokens, labels=tokens)[0].backward()
        model.zero_grad()

    def plain() -> float:
        step()  # in which ranges get their names
        begin = time.process_time()  # the threads of autograd included
        for _ in range(STEPS):
            step()
        return (time.process_time() - begin) / STEPS * 1e9

    def least() -> float:
        hooks = [hook for module in ranged for hook in least_hooks(module)]
        cost = plain()
        for hook in hooks:
            hook.remove()
        return cost

    def annotated() -> float:
        with annotate_model(model):
            return plain()

    with annotate_model(model) as annotation:
        ranged = [model if path == "LlamaForCausalLM" else model.get_submodule(path) for path in annotation.paths]
    kinds: list[Callable[[], float]] = [plain, least, annotated]
    seen: dict[str, list[float]] = {kind.__name__: [] for kind in kinds}
    for _ in range(rounds // 7):
        ORDER.shuffle(kinds)
        for kind in kinds:
            seen[kind.__name__].append(kind())
    bare, floor, cost = seen.values()
    added = [
        Cost(statistics.median(map(float.__sub__, times, bare)), min(times) - min(bare)) for times in (cost, floor)
    ]
    report(f"module of a Llama, each of {len(ranged)}, a training step", *added, len(ranged), MODULE)


PARTS: dict[str, Callable[[], None]] = {"blocks": blocks, "calls": calls, "modules": modules, "llama": llama}


def under(nsys: str, parts: list[str]) -> bool:
    """Measure under an nsys; returns whether all is within the limits."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["-t", "nvtx,osrt", "-s", "none", "--cpuctxsw=none", "-o", f"{folder}/report"]
        command = [nsys, "profile", *options, sys.executable, __file__, "--rounds", str(rounds), "--parts", *parts]
        lines = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            for line in running.stdout or ():
                if " ns" in line or line.startswith(OVER):
                    lines.append(line)
                    print(line, end="", flush=True)
    return bool(lines) and not any(line.startswith(OVER) for line in lines)


OVER = "over the limit: "


def main() -> int:
    global rounds  # noqa: PLW0603
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    rounds = options.rounds
    if state.backend is not None:
        for part in options.parts:
            PARTS[part]()
        print("".join(f"{OVER}{what}\n" for what in over), flush=True)
        return 0
    print(f"ranges by {'the extension in C' if ranges.compiled else 'Python'}")
    idle()
    named = os.environ.get("NVPROF_KIT_NSYS", shutil.which("nsys") or "")
    within = True
    for nsys in filter(None, named.split(os.pathsep)):
        version = subprocess.run([nsys, "--version"], capture_output=True, text=True, check=True).stdout
        print(f"\n{version.strip()}")
        within = under(nsys, options.parts) and within
    return not within


if __name__ == "__main__":
    sys.exit(main())
