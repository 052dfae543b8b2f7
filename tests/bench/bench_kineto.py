"""A PyTorch trace of some gigabytes: time and peak memory of opening it.

    python tests/bench/bench_kineto.py [--gigabytes 4]

A real one (tests/data/kineto) is repeated, each time later and with other correlation ids, until it is as large; it is
deleted afterwards. The limit is three times the memory of the columns that are kept, beside what Python and pandas take
themselves.
"""

from __future__ import annotations

import argparse
import lzma
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
REAL = ROOT / "tests" / "data" / "kineto" / "ddp.rank0.json.xz"
LIMIT = 3

OPEN = """
import resource, sys, time
import pandas, pyarrow
from nvprof_kit._trace.open import open_capture
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before, began = peak(), time.process_time()
trace = open_capture(sys.argv[1], optional=("name", "stream", "bytes", "calls"))
tables = (trace.ranges, trace.api, trace.ops, trace.calls, trace.operators)
kept = sum(int(one.memory_usage(deep=False).sum()) for one in tables if one is not None) >> 20
print(time.process_time() - began, before, peak(), kept, len(trace.ops), len(trace.calls))
"""


def grown(path: Path, gigabytes: float) -> None:
    """Write a trace of that size."""
    text = lzma.decompress(REAL.read_bytes())
    begin = text.index(b"[", text.index(b'"traceEvents"')) + 1
    body, end = text[begin : text.rindex(b"]")].rstrip(), text[text.rindex(b"]") :]
    times = [float(one) for one in re.findall(rb'"ts": ?([0-9.]+)', body)]
    length, number = max(times) - min(times) + 1e5, 0
    moving = re.compile(rb'("ts": ?|"correlation": ?)([0-9.]+)')

    def moved(found: re.Match[bytes]) -> bytes:
        key, value = found.groups()
        later = f"{float(value) + number * length:.3f}" if b"ts" in key else f"{int(value) + number * 1_000_000}"
        return key + later.encode()

    with path.open("wb") as file:
        file.write(text[:begin])
        while file.tell() < gigabytes * 1e9:
            file.write((b"," if number else b"") + (moving.sub(moved, body) if number else body))
            number += 1
        file.write(end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        grown(path, options.gigabytes)
        print(f"trace of {path.stat().st_size / 1e9:.2f} GB")
        done = subprocess.run(
            [sys.executable, "-c", OPEN, path], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT
        )
        seconds, before, peak, kept, operations, calls = map(float, done.stdout.split())
        print(f"open_capture: {seconds:.1f} s CPU, peak {peak:.0f} MiB, {peak - before:.0f} more than before; columns "
              f"of {operations:,.0f} operations and {calls:,.0f} calls take {kept:.0f} MiB")  # fmt: skip
    # what Python needs for a window of the file comes on top, and counts where the file is small
    if peak - before > LIMIT * kept + 128:
        sys.exit(f"over the limit of {LIMIT} times the columns")


if __name__ == "__main__":
    main()
