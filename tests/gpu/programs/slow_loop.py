"""A training loop with everything in it that `nvprof-kit advise` looks for, to be captured on a GPU.

python slow_loop.py [--operators]      (--operators: under emit_nvtx, for the operator view of `nvprof-kit summary`)

Pageable copies, a data loader that is late, .item() in the middle of the step, matrix products in fp32, an unfused
optimizer, memory given back in every step, one layer four times as wide as its equals.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext

import torch
from torch import nn

import nvprof_kit

WIDTH = 1024


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8 * WIDTH if place == 3 else 2 * WIDTH) for place in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    model = Model(6).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    nvprof_kit.annotate_model(model)
    nvprof_kit.annotate_optimizer(optimizer)
    for number in range(8):
        if number == 3:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
        watched = torch.autograd.profiler.emit_nvtx() if options.operators and number >= 3 else nullcontext()
        with nvprof_kit.step(number), watched:
            with nvprof_kit.phase("data"):
                time.sleep(0.004)  # a loader that is late
                batch = torch.randn(16, 256, WIDTH).cuda()  # pageable, blocking
            with nvprof_kit.phase("forward"):
                loss = model(batch)
            assert loss.item() == loss.item()  # the host waits
            with nvprof_kit.phase("backward"):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
    print("done")


if __name__ == "__main__":
    main()
