"""How long it takes to find which range holds which, where ranges nest and where each crosses the next.

    python tests/bench/bench_nesting.py [--ranges 1000000]

The limit is 50 µs a range: the time must grow with their number, not with its square.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

LIMIT_US = 50.0


def main() -> None:
    from nvprof_kit._analysis.attribution.nesting import nest

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranges", type=int, default=1_000_000)
    count = parser.parse_args().ranges
    start = np.arange(count) * 100
    thread = np.zeros(count, dtype=np.int64)
    worst = 0.0
    for name, length in {"one after the other": 50, "each crosses the next": 150}.items():
        began = time.perf_counter()
        nest(start, start + length, thread)
        taken = (time.perf_counter() - began) / count * 1e6
        worst = max(worst, taken)
        print(f"{name:24} {taken:6.3f} µs a range")
    sys.exit(f"over the limit of {LIMIT_US} µs" if worst > LIMIT_US else 0)


if __name__ == "__main__":
    main()
