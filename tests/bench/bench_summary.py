"""What the kernel view of `nvprof-kit summary` costs beside nsys's own summary of kernels, on a large capture.

    python tests/bench/bench_summary.py --nsys PATH [--copies 500] [--rounds 5] [--capture FILE.sqlite.xz]

The capture of `bench_reading.py`, repeated likewise; whole processes in turn; the best of the processor's seconds
of each, and its highest memory. Both run once before, so that Python's bytecode is there as in an installed package.
The two tables must agree in calls and in total, shortest and longest time of each kernel name. Exit 1 if they differ,
or if ours takes more of the processor or of memory.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_reading import DATA, amplify, of_repository, used

OURS = [sys.executable, "-m", "nvprof_kit", "summary", "--view", "kernel", "--format", "csv"]
OUR_COLUMNS = ("name", "calls", "gpu_total_ns", "gpu_min_ns", "gpu_max_ns")
THEIRS = ["stats", "-q", "-r", "cuda_gpu_kern_sum", "--format", "csv"]
THEIR_COLUMNS = ("Name", "Instances", "Total Time (ns)", "Min (ns)", "Max (ns)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--capture", type=Path, default=DATA / "hooks-train-2023.4.sqlite.xz")
    parser.add_argument("--nsys", default=shutil.which("nsys"), help="which nsys; that on PATH by default")
    options = parser.parse_args()
    if not options.nsys:
        raise SystemExit("no nsys on PATH; name one with --nsys")
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "large.sqlite"
        rows = amplify(options.capture, large, options.copies)
        print(f"{options.capture.name} x {options.copies}: {rows['CUPTI_ACTIVITY_KIND_KERNEL']:,} kernels", flush=True)
        commands = {
            "nvprof-kit summary": [*OURS, str(large)],
            "nsys stats": [options.nsys, *THEIRS, str(large)],
        }
        environment = compiled(Path(folder) / "bytecode")
        tables = [
            table_of(command, environment, columns)
            for command, columns in zip(commands.values(), (OUR_COLUMNS, THEIR_COLUMNS), strict=True)
        ]
        if tables[0] != tables[1]:
            raise SystemExit("the tables of kernels differ")
        print(f"the same {len(tables[0])} names, with the same calls, total, minimum and maximum")
        runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in commands}
        for number in range(options.rounds):
            for name in [*commands][:: 1 if number % 2 else -1]:
                runs[name].append(used(commands[name], environment))
    ours, theirs = (shown(name, seen) for name, seen in runs.items())
    over = [what for what, mine, other in zip(("processor", "memory"), ours, theirs, strict=True) if mine >= other]
    if over:
        raise SystemExit(f"not less than nsys: {', '.join(over)}")


def compiled(folder: Path) -> dict[str, str]:
    """The environment of the repository in which Python keeps the bytecode, in this folder."""
    environment = {**of_repository(), "PYTHONPYCACHEPREFIX": str(folder)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def table_of(command: list[str], environment: dict[str, str], columns: tuple[str, ...]) -> list[tuple[str, ...]]:
    """These columns of a command's csv, sorted."""
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    header = f"{columns[0]}," if columns is OUR_COLUMNS else "Time (%)"
    lines = output[output.index(header) :]
    return sorted(tuple(row[column] for column in columns) for row in csv.DictReader(io.StringIO(lines)))


def shown(name: str, runs: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Print a command's runs; returns its best seconds of the processor and its highest memory in MB."""
    _, processor, memory = zip(*runs, strict=True)
    median, megabytes = statistics.median(processor), max(memory) * 1.024 * 1.024
    print(f"{name:20} {min(processor):6.2f} s of processor (median {median:.2f}), {megabytes:5.0f} MB", flush=True)
    return min(processor), megabytes


if __name__ == "__main__":
    main()
