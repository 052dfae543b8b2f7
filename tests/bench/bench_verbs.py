"""How long the other reading verbs take on a large capture, beside `nvprof-kit layers`.

    python tests/bench/bench_verbs.py [--copies 500] [--rounds 3] [--capture FILE.sqlite.xz]

The capture of `bench_layers.py`, repeated in the same way; whole processes, in turn, medians.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench_layers import DATA, amplify, measure

VERBS = {
    "layers": ["layers", "--format", "csv"],
    "summary": ["summary", "--view", "kernel", "--format", "csv"],
    "summary, all views": ["summary"],
    "breakdown": ["breakdown", "--format", "csv"],
    "advise": ["advise", "--format", "csv"],
    "diff": ["diff", "--format", "csv", "--anyway"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--capture", type=Path, default=DATA / "hooks-train-2023.4.sqlite.xz")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "large.sqlite"
        rows = amplify(options.capture, large, options.copies)
        print(f"{options.capture.name} x {options.copies}: {sum(rows.values()):,} rows")
        ours = [sys.executable, "-m", "nvprof_kit"]
        commands = {
            name: [*ours, *words, *[str(large)] * (2 if name == "diff" else 1)] for name, words in VERBS.items()
        }
        seen = measure(commands, options.rounds)
    for name, (seconds, megabytes) in seen.items():
        print(f"{name:20} {seconds:6.2f} s  {seconds / seen['layers'][0]:5.2f} times layers  {megabytes:6.0f} MB")


if __name__ == "__main__":
    main()
