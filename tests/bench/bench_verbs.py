"""How long the other reading verbs take on a large capture, beside `nvprof-kit layers`.

    python tests/bench/bench_verbs.py [--copies 500] [--rounds 3] [--capture FILE.sqlite.xz]

The capture of `bench_layers.py`, repeated in the same way; whole processes, medians. The processor's seconds mind less
than the clock's what else the machine does.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
from pathlib import Path

from bench_layers import DATA, amplify, of_repository, timed

VERBS = {
    "layers": ["layers", "--format", "csv"],
    "summary": ["summary", "--view", "kernel", "--format", "csv"],
    "summary, all views": ["summary"],
    "breakdown": ["breakdown", "--format", "csv"],
    "breakdown, all views": ["breakdown"],
    "advise": ["advise", "--format", "csv"],
    "export, pftrace": ["export", "--format", "pftrace"],
    "export, json": ["export", "--format", "json"],
    "export, pprof": ["export", "--format", "pprof"],
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
        seen = {name: [measured(command) for command in [words] * options.rounds] for name, words in commands.items()}
    first = [statistics.median(values) for values in zip(*seen["layers"], strict=True)]
    for name, runs in seen.items():
        wall, processor, memory = (statistics.median(values) for values in zip(*runs, strict=True))
        print(
            f"{name:20} {wall:6.2f} s {wall / first[0]:5.2f} times layers, {processor:6.2f} s of processor "
            f"{processor / first[1]:5.2f} times, {memory:5.0f} MB"
        )


def measured(command: list[str]) -> tuple[float, float, float]:
    """Seconds by the clock, seconds of processor, and megabytes of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds, megabytes = timed(command, of_repository())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, megabytes


if __name__ == "__main__":
    main()
