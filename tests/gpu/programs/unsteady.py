"""Training loops whose steps are unlike, or seem so, to be captured on a GPU: two rules of advise are judged on them.

    python unsteady.py garbage|garbage-hidden|lengths|lengths-even

- ``garbage``: while the GPU works the host makes trees whose nodes know their parents, as a parser does, and drops
  those of the step before. Only Python's garbage collection frees them, and it walks over a large index each time.
  That takes longer than the GPU has work.
- ``garbage-hidden``: the same, and the index is frozen (``gc.freeze()``), the trees are half as large and the batches
  many times as large: there are more collections, and so short that the GPU has work meanwhile.
- ``lengths``: batches are as long as their longest text, and three of ten are several times as long as the others.
- ``lengths-even``: batches differ by a few per cent, and the model is evaluated between steps, without waiting.
"""

from __future__ import annotations

import gc
import sys
import time

import torch
from torch import nn
from variants import collected

import nvprof_kit

WIDTH, LAYERS, STEPS, WARM_UP = 2048, 6, 10, 4
INDEX, TREE = 1_000_000, 40_000
UNHIDDEN, HIDDEN = 0.4, 10.0  # GPU time of a step over that of a tree and a collection, which take longer in the loop
LONG = (2048, 2304, 1920, 7168, 2048, 2176, 6144, 1984, 2112, 8192)
EVEN = (4096, 4224, 4032, 3968, 4160, 4096, 4064, 4192, 4128, 4000)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


class Trainer:
    """The model, its optimizer, and a batch of which a part is taken."""

    def __init__(self, tokens: int) -> None:
        torch.manual_seed(0)
        self.model = Model().to("cuda", torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.batch = torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
        nvprof_kit.annotate_model(self.model)
        nvprof_kit.annotate_optimizer(self.optimizer)

    def step(self, tokens: int) -> torch.Tensor:
        with nvprof_kit.phase("forward"):
            loss = self.model(self.batch[:tokens])
        with nvprof_kit.phase("backward"):
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def seconds(self, tokens: int) -> float:
        """What a step of so many tokens takes the GPU."""
        self.step(tokens)
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.step(tokens)
        torch.cuda.synchronize()
        return time.perf_counter() - began


def tree(nodes: int) -> dict[str, object]:
    """Nodes that know their parents: a cycle each."""
    root: dict[str, object] = {"parent": None, "children": []}
    made = [root]
    for number in range(1, nodes):
        parent = made[number // 8]
        node: dict[str, object] = {"parent": parent, "children": []}
        parent["children"].append(node)  # type: ignore[attr-defined]
        made.append(node)
    return root


def garbage(hidden: bool) -> None:
    index = [[number] for number in range(INDEX)]
    gc.collect()
    if hidden:
        gc.freeze()
    nodes = TREE // 2 if hidden else TREE
    kept = tree(nodes)
    began = time.perf_counter()
    kept = tree(nodes)
    gc.collect()
    host = time.perf_counter() - began  # what the GPU's work hides, or does not
    unit = 8192
    most = 24
    trainer = Trainer(most * unit)
    wanted = (HIDDEN if hidden else UNHIDDEN) * host
    tokens = min(most, max(1, round(wanted / trainer.seconds(unit)))) * unit
    gpu = trainer.seconds(tokens)
    print(f"a tree and a collection: {1e3 * host:.1f} ms; {tokens} tokens: {1e3 * gpu:.1f} ms of GPU")
    count = gc.get_stats()[2]["collections"]

    def step() -> None:
        nonlocal kept
        loss = trainer.step(tokens)
        kept = tree(nodes)
        assert loss.item() >= 0 and kept

    for _ in range(WARM_UP):
        step()
    with collected():
        for number in range(STEPS):
            began = time.perf_counter()
            before = gc.get_stats()[2]["collections"]
            with nvprof_kit.step(number):
                step()
            many = gc.get_stats()[2]["collections"] - before
            print(f"step {number}: {1e3 * (time.perf_counter() - began):.1f} ms, {many} full collections")
    print(f"{gc.get_stats()[2]['collections'] - count} full collections of {len(index)} objects and more")


def lengths(of_steps: tuple[int, ...], evaluates: bool) -> None:
    unit = 8
    trainer = Trainer(unit * max(of_steps))
    for tokens in (max(of_steps), *of_steps, *of_steps):  # nothing is new in the window: no shape, no memory
        trainer.step(unit * tokens)
    with collected():
        for number, tokens in enumerate(of_steps):
            with nvprof_kit.step(number):
                trainer.step(unit * tokens)
            if evaluates and number % 3 == 2:
                with nvprof_kit.phase("evaluation"), torch.no_grad():
                    for _ in range(3):
                        trainer.model(trainer.batch[: unit * 4096])


def main() -> None:
    kind = sys.argv[1]
    if kind.startswith("garbage"):
        garbage(hidden=kind == "garbage-hidden")
    else:
        lengths(EVEN if kind == "lengths-even" else LONG, kind == "lengths-even")
    print("done")


if __name__ == "__main__":
    main()
