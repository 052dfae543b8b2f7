"""How long the reading verbs take on a large capture, and how much memory, beside `nvprof-kit layers`.

    python tests/bench/bench_verbs.py [--copies 500] [--rounds 2] [--capture FILE.sqlite.xz] [--only VERB]

The capture of `bench_layers.py`, repeated in the same way; whole processes, each verb beside `layers` in turn; the best
of its runs. The processor's seconds mind less than the clock's what else the machine does. Exit 1 if a verb exceeds
`LIMIT` or `MEGABYTES`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from bench_layers import DATA, amplify, of_repository, used

LIMIT = 3.0
"""Times the processor's seconds of `layers` that a verb may take."""

MEGABYTES = 700
"""The most memory that a verb may take, in units of 10⁶ bytes."""

VERBS = {
    "layers": ["layers", "--format", "csv"],
    "layers, by step": ["layers", "--by", "step", "--format", "csv"],
    "layers, parquet": ["layers", "-o", "layers.parquet"],
    "layers, classes": ["layers", "--columns", "class", "--format", "json"],
    "summary, kernel": ["summary", "--view", "kernel", "--format", "csv"],
    "summary, all views": ["summary"],
    "breakdown": ["breakdown", "--format", "csv"],
    "breakdown, all views": ["breakdown"],
    "advise": ["advise"],
    "ncu plan": ["ncu", "plan"],
    "report": ["report", "-o", "report.html"],
    "report, findings": ["report", "--findings", "-o", "findings.html"],
    "export, json": ["export", "-o", "trace.json"],
    "plot": ["plot", "-o", "plot.svg"],
    "doctor": ["doctor"],
    "diff": ["diff", "--format", "csv", "--anyway"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--capture", type=Path, default=DATA / "hooks-train-2023.4.sqlite.xz")
    parser.add_argument("--only", action="append", choices=[*VERBS], default=[])
    options = parser.parse_args()
    over = []
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "large.sqlite"
        rows = amplify(options.capture, large, options.copies)
        print(f"{options.capture.name} x {options.copies}: {sum(rows.values()):,} rows", flush=True)
        os.chdir(folder)  # for what the verbs write
        commands = {name: command(words, large) for name, words in VERBS.items()}
        for name in options.only or VERBS:
            layers, runs = [], []  # in alternation, as many of both: the speed of a machine varies
            for _ in range(options.rounds):
                layers.append(measured(commands["layers"]))
                runs.append(measured(commands[name]))
            wall, processor, memory = (min(values) for values in zip(*runs, strict=True))
            times = processor / min(one for _, one, _ in layers)
            figures = f"{wall:6.2f} s, {processor:6.2f} s of processor, {times:5.2f} times layers, {memory:5.0f} MB"
            print(f"{name:20} {figures}", flush=True)
            if times > LIMIT or memory > MEGABYTES:
                over.append(name)
    if over:
        raise SystemExit(f"over {LIMIT:g} times layers or {MEGABYTES} MB: {', '.join(over)}")


def command(words: list[str], capture: Path) -> list[str]:
    """The command line of a verb; `diff` compares the capture with itself."""
    return [sys.executable, "-m", "nvprof_kit", *words, *[str(capture)] * (2 if words[0] == "diff" else 1)]


def measured(command: list[str]) -> tuple[float, float, float]:
    """Seconds by the clock, seconds of processor, and megabytes of a command."""
    seconds, processor, memory = used(command, of_repository())
    return seconds, processor, memory * 1.024 * 1.024  # of 10⁶ bytes


if __name__ == "__main__":
    main()
