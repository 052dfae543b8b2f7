"""What `Throughput` costs a step in timer-only mode, and what `LayerProfiler.step` costs while it is off.

    python tests/bench/bench_throughput.py [--steps 100000]

The limit is 5 µs a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

LIMIT_US = 5.0


def microseconds(step: Callable[[], object], steps: int) -> tuple[float, float]:
    """Least and median cost of a step over ten stretches, less what the bare loop costs."""
    costs = []
    for _ in range(10):
        began = time.perf_counter()
        for _step in range(steps):
            pass
        bare = time.perf_counter() - began
        began = time.perf_counter()
        for _step in range(steps):
            step()
        costs.append((time.perf_counter() - began - bare) / steps * 1e6)
    return min(costs), statistics.median(costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    import torch

    from nvprof_kit import LayerProfiler, Throughput

    meter: Throughput[int] = Throughput(samples=8, tokens=4096)

    def timed() -> None:
        meter.begin_read()
        meter.end_read()
        meter.step()

    idle = LayerProfiler(torch.nn.Linear(2, 2), False)
    found = {
        "Throughput, reading and step": timed,
        "Throughput, step": meter.step,
        "LayerProfiler.step, off": idle.step,
    }
    worst = 0.0
    for name, step in found.items():
        least, median = microseconds(step, options.steps)
        worst = max(worst, least)
        print(f"{name:30} {least:6.3f} µs a step (median {median:.3f})")
    sys.exit(f"over the limit of {LIMIT_US} µs" if worst > LIMIT_US else 0)


if __name__ == "__main__":
    main()
