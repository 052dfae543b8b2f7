"""What `Throughput` costs a step in timer-only mode, and `LayerProfiler.step` while it is off; the limit is 5 µs.

python tests/bench/bench_throughput.py [STEPS]
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2])]

import torch  # noqa: E402

from nvprof_kit import LayerProfiler, Throughput  # noqa: E402

LIMIT_US = 5.0


def main(steps: int = 100_000) -> None:
    meter: Throughput[int] = Throughput(samples=8, tokens=4096)

    def timed() -> None:
        meter.begin_read()
        meter.end_read()
        meter.step()

    costs: dict[str, Callable[[], object]] = {
        "Throughput, reading and step": timed,
        "Throughput, step": meter.step,
        "LayerProfiler.step, off": LayerProfiler(torch.nn.Linear(2, 2), False).step,
    }
    bare = min(timeit.repeat("pass", number=steps, repeat=10))
    least = {
        name: (min(timeit.repeat(step, number=steps, repeat=10)) - bare) / steps * 1e6 for name, step in costs.items()
    }
    print("\n".join(f"{name:30} {cost:6.3f} µs a step" for name, cost in least.items()))
    sys.exit(f"over the limit of {LIMIT_US} µs" if max(least.values()) > LIMIT_US else 0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
