"""Print what it costs that layers' ranges carry the memory: a reading of PyTorch's CUDA allocator, and a mark.

    python marks.py

Without a tool attached the mark itself costs next to nothing, so the reading is what is seen.
"""

from __future__ import annotations

import os
import statistics
import time

os.environ["NVPROF_KIT"] = "on"

import torch

import nvprof_kit._instrument.session as session
from nvprof_kit import layer_range
from nvprof_kit._instrument.ranges.backends import read_cuda

CALLS = 20_000


def seconds_per_call() -> float:
    best = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(CALLS):
            with layer_range("layers.0"):
                pass
        best.append((time.perf_counter() - began) / CALLS)
    return statistics.median(best)


def main() -> None:
    torch.ones(1, device="cuda")
    began = time.perf_counter()
    for _ in range(CALLS):
        read_cuda()
    reading = (time.perf_counter() - began) / CALLS
    bare = seconds_per_call()
    session.add_memory_marks()
    carrying = seconds_per_call()
    print(f"a reading {1e6 * reading:.2f} us; a range {1e6 * bare:.2f} us, with memory {1e6 * carrying:.2f} us")


if __name__ == "__main__":
    main()
