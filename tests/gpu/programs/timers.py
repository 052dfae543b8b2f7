"""Whether a stage of `GlobalTimer` waits for the GPU, and what a stage costs.

python timers.py FOLDER
"""

import sys
import time
from pathlib import Path

import torch

from nvprof_kit._instrument.meters.timers import GlobalTimer


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
    return f"left after {left:.2f} ms of {whole:.1f} ms; {timer.dump().read_text().strip()}"


if __name__ == "__main__":
    torch.cuda.init()
    print(never_waits(Path(sys.argv[1])))
    print(f"a stage costs {cost_of_a_stage(Path(sys.argv[1])):.1f} us with its CUDA events, line and flush")
