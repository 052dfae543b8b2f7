"""What the kernel view of `nvprof-kit summary` costs beside nsys's own summary of kernels, on a large capture.

    python tests/bench/bench_summary.py --nsys PATH [--copies 500] [--rounds 3] [--capture FILE.sqlite.xz]

The capture of `bench_layers.py`, repeated in the same way; whole processes in turn, medians of the processor's seconds,
highest memory.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from bench_layers import DATA, amplify
from bench_verbs import measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--nsys", default=shutil.which("nsys"), help="which nsys; that on PATH by default"
    )
    parser.add_argument("--copies", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--capture", type=Path, default=DATA / "hooks-train-2023.4.sqlite.xz")
    options = parser.parse_args()
    if not options.nsys:
        raise SystemExit("no nsys on PATH; name one with --nsys")
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "large.sqlite"
        rows = amplify(options.capture, large, options.copies)
        print(f"{options.capture.name} x {options.copies}: {rows['CUPTI_ACTIVITY_KIND_KERNEL']:,} kernels")
        ours = [sys.executable, "-m", "nvprof_kit", "summary", "--view", "kernel", "--format", "csv", str(large)]
        theirs = [options.nsys, "stats", "-q", "-r", "cuda_gpu_kern_sum", "--format", "csv", str(large)]
        seen = [(measured(ours), measured(theirs)) for _ in range(options.rounds)]
    for name, runs in zip(("nvprof-kit summary", "nsys stats"), zip(*seen, strict=True), strict=True):
        _, processor, memory = zip(*runs, strict=True)
        print(f"{name:20} {statistics.median(processor):6.2f} s of processor, {max(memory):5.0f} MB")


if __name__ == "__main__":
    main()
