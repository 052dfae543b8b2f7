"""`nvprof-kit memory` against a bare `pickle.load` of the same file: time and memory, in interleaved processes.

    python tests/bench/bench_memory.py [--events 1000000] [--pairs 3] [--made-up | SNAPSHOT]

The limit is 1.5 times the bare load's time. Without a SNAPSHOT it is a real one of an H200 (tests/data/snapshots) whose
history is repeated up to so many events, or with --made-up one that is made up: a deeper model with longer stacks.
"""

from __future__ import annotations

import argparse
import lzma
import pickle
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

REAL = ROOT / "tests" / "data" / "snapshots" / "run-2.11.pickle.xz"
BARE = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"
MEASURE = """
import resource, subprocess, sys, time
began = time.perf_counter()
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)
"""


def measured(command: list[str]) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak memory in bytes of a command."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *command], capture_output=True, text=True, check=True, cwd=ROOT
    )
    wall, cpu, memory = map(float, done.stdout.split())
    return wall, cpu, memory


def made(path: Path, events: int, *, made_up: bool) -> None:
    """A snapshot of so many events."""
    from support.captures.snapshot_file import amplified, training

    if made_up:
        training(events).write(path)
        return
    real = pickle.loads(lzma.decompress(REAL.read_bytes()))
    path.write_bytes(pickle.dumps(amplified(real, events)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("snapshot", nargs="?", type=Path)
    parser.add_argument("--made-up", action="store_true")
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.snapshot
        if path is None:
            path = Path(folder) / "run.pickle"
            made(path, options.events, made_up=options.made_up)
        verb = [sys.executable, "-m", "nvprof_kit", "memory", str(path)]
        pairs = [(measured([sys.executable, "-c", BARE, str(path)]), measured(verb)) for _ in range(options.pairs)]
        size = path.stat().st_size
    names = ("wall s", "CPU s", "peak MiB")
    scales = (1, 1, 1 << 20)
    print(f"snapshot of {size / 2**20:.0f} MiB, {options.pairs} interleaved pairs, medians")
    for number, (name, scale) in enumerate(zip(names, scales, strict=True)):
        bare = statistics.median(pair[0][number] for pair in pairs) / scale
        ours = statistics.median(pair[1][number] for pair in pairs) / scale
        ratio = statistics.median(pair[1][number] / pair[0][number] for pair in pairs)
        print(f"{name:>9}: bare pickle.load {bare:8.2f}, nvprof-kit memory {ours:8.2f}, ratio {ratio:.2f}")
    if statistics.median(pair[1][0] / pair[0][0] for pair in pairs) > 1.5:
        sys.exit("over the limit of 1.5 times")


if __name__ == "__main__":
    main()
