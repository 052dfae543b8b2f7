"""How long `nvprof-kit layers` takes on a large capture, as ratios within one run.

    python tests/bench/bench_layers.py [--copies 500] [--rounds 5] [--capture FILE.sqlite.xz] [--nsys PATH]

A committed H200 capture is repeated along the time axis. Then, alternating, whole processes are timed: our verb,
NVIDIA's own projection of the same question (if there is an nsys), and a bare scan that only reads the columns that our
verb needs. The best of several rounds is compared, by the clock and by CPU time: `layers` reads with several threads,
so its CPU time is the same on any machine, and the clock shows less on idle cores.
"""

from __future__ import annotations

import argparse
import compileall
import lzma
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

DATA = Path(__file__).parents[1] / "data"
TABLES = ("NVTX_EVENTS", *(f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("RUNTIME", "KERNEL", "MEMCPY", "MEMSET")))
SCAN = """
import sys, adbc_driver_sqlite.dbapi as dbapi
op = 'start, "end", deviceId, correlationId, globalPid, graphNodeId'
for columns, table in (
    ("start, globalTid, correlationId, nameId", "RUNTIME"), (f"{op}, demangledName", "KERNEL"),
    (f"{op}, copyKind", "MEMCPY"), (op, "MEMSET"),
):
    with dbapi.connect(sys.argv[1]) as connection, connection.cursor() as cursor:
        cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": "131072"})
        cursor.execute(f"SELECT {columns} FROM CUPTI_ACTIVITY_KIND_{table}")
        cursor.fetch_arrow_table()
"""


def amplify(packed: Path, target: Path, copies: int) -> dict[str, int]:
    """Write the capture `copies` times, one behind the other, every copy with correlation ids of its own; returns
    rows by table.
    """
    target.write_bytes(lzma.decompress(packed.read_bytes()))
    with sqlite3.connect(target) as db:
        db.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF")
        have = [
            table for table in TABLES if db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        ]
        low = min(db.execute(f"SELECT min(start) FROM {table} WHERE start >= 0").fetchone()[0] for table in have)
        high = max(db.execute(f'SELECT max("end") FROM {table}').fetchone()[0] for table in have)
        ids = db.execute("SELECT max(correlationId) FROM CUPTI_ACTIVITY_KIND_RUNTIME").fetchone()[0] + 1
        for table in have:
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            shift = {"start": high - low + 1000, "end": high - low + 1000, "correlationId": ids}
            shifted = ", ".join(
                f'"{name}" + copy * {shift[name]}' if name in shift else f'"{name}"' for name in columns
            )
            ranges = "WHERE eventType IN (59, 60)" if table == "NVTX_EVENTS" else ""
            db.execute(
                f"INSERT INTO {table} WITH RECURSIVE counter(copy) AS (SELECT 1 UNION ALL SELECT copy + 1 FROM "
                f"counter WHERE copy < {copies - 1}) "
                f"SELECT {shifted} FROM counter, (SELECT * FROM {table} {ranges}) WHERE {copies} > 1"
            )
        return {table: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in have}


@cache
def of_repository() -> dict[str, str]:
    """The environment, with the package of this repository first, compiled as pip compiles what it installs."""
    repository = Path(__file__).parents[2]
    compileall.compile_dir(repository / "nvprof_kit", quiet=1)
    paths = [str(repository), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def used(command: list[str], environment: dict[str, str]) -> tuple[float, float, float]:
    """Seconds by the clock, CPU seconds, and peak memory (MB) of one run of a command."""
    began = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)}: failed with status {status}")
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def timed(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Seconds and peak memory (MB) of one run of a command."""
    seconds, _, megabytes = used(command, environment)
    return seconds, megabytes


def measure(commands: dict[str, list[str]], rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds and highest memory of each command, run in turn."""
    environment = of_repository()
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            seen[name].append(timed(command, environment))
    return {name: (statistics.median(s for s, _ in runs), max(mb for _, mb in runs)) for name, runs in seen.items()}


LIMITS = {"nsys stats": 0.25, "bare scan": 1.2, "layers, a tenth": 11.0}
"""The most that `layers` may take, in units of each other command."""

MEGABYTES = 700
"""The most memory that `layers` may take."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--capture", type=Path, default=DATA / "hooks-train-2023.4.sqlite.xz")
    parser.add_argument("--nsys", default=shutil.which("nsys"), help="which nsys; that on PATH by default")
    options = parser.parse_args()
    environment = of_repository()
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder) / "large.sqlite", Path(folder) / "small.sqlite"
        rows = amplify(options.capture, large, options.copies)
        amplify(options.capture, small, max(options.copies // 10, 1))
        print(
            f"{options.capture.name} x {options.copies}: "
            + ", ".join(f"{table.split('_')[-1]} {count:,}" for table, count in rows.items())
        )
        ours = [sys.executable, "-m", "nvprof_kit", "layers", "--format", "csv"]
        commands = {
            "layers": [*ours, str(large)],
            "layers, a tenth": [*ours, str(small)],
            "bare scan": [sys.executable, "-c", SCAN, str(large)],
        }
        if options.nsys:
            projection = ["-r", "nvtx_gpu_proj_sum", "--format", "csv"]
            commands["nsys stats"] = [options.nsys, "stats", "-q", *projection, str(large)]
        runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in commands}
        for _ in range(options.rounds):
            for name, command in commands.items():
                runs[name].append(used(command, environment))
    sys.exit(judged(runs))


def judged(runs: dict[str, list[tuple[float, float, float]]]) -> str | None:
    """Print the best run of each command and its ratio; returns which limits are exceeded, None for none."""
    best = {name: [min(values) for values in zip(*seen, strict=True)] for name, seen in runs.items()}
    memory = max(megabytes for _, _, megabytes in runs["layers"])
    print(f"{'':18}{'seconds':>9}{'layers /':>10}{'limit':>7}{'CPU s':>8}{'layers /':>10}{'MB':>6}")
    over = [f"{memory:.0f} MB, over {MEGABYTES}"] if memory > MEGABYTES else []
    for name, (seconds, cpu, megabytes) in best.items():
        ratio, limit = best["layers"][0] / seconds, LIMITS.get(name)
        shown = f"{limit:7}" if limit else " " * 7
        print(f"{name:18}{seconds:9.2f}{ratio:10.2f}{shown}{cpu:8.2f}{best['layers'][1] / cpu:10.2f}{megabytes:6.0f}")
        if limit and ratio > limit:
            over.append(f"{ratio:.2f} times {name}, over {limit}")
    return f"layers took {'; '.join(over)}" if over else None


if __name__ == "__main__":
    main()
