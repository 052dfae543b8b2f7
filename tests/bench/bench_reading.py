"""How long each way of reading a large capture takes and how much memory, beside other programs: one table.

    python tests/bench/bench_reading.py [--copies 500] [--rounds 3] [--capture FILE.sqlite.xz] [--nsys PATH] [--docs]
    python tests/bench/bench_reading.py --report run.nsys-rep [--rounds 3] [--nsys PATH]

A committed capture is repeated along the time axis, as an SQLite file and as the folder that `nsys export
--type=parquetdir` writes. Whole processes run in turn, and the best of their rounds counts. The processor's seconds are
compared: what else the machine does changes those of the clock more. With --docs the table is written into
docs/performance.md. With --report a real report is read instead, exported in both ways; what exports on several
processors is compared by the clock. Exit 1 if a row exceeds its limit.
"""

from __future__ import annotations

import argparse
import compileall
import lzma
import os
import pickle
import platform
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(Path(__file__).parent)]
DATA = ROOT / "tests" / "data"
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- begin of the table -->", "<!-- end of the table -->"
TABLES = ("NVTX_EVENTS", *(f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("RUNTIME", "KERNEL", "MEMCPY", "MEMSET")))
READ = {
    "NVTX_EVENTS": ("start", "end", "eventType", "globalTid", "domainId", "category", "textId", "text", "int64Value"),
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("start", "globalTid", "correlationId", "nameId"),
    **{
        f"CUPTI_ACTIVITY_KIND_{kind}": ("start", "end", "deviceId", "correlationId", "globalPid", "graphNodeId", *more)
        for kind, more in (("KERNEL", ("demangledName",)), ("MEMCPY", ("copyKind",)), ("MEMSET", ()))
    },
}
"""The columns that `layers` needs."""
SCAN = f"""
import sys, adbc_driver_sqlite.dbapi as dbapi
for table, columns in {READ!r}.items():
    with dbapi.connect(sys.argv[1]) as connection, connection.cursor() as cursor:
        cursor.adbc_statement.set_options(**{{"adbc.sqlite.query.batch_rows": "131072"}})
        cursor.execute("SELECT " + ", ".join(f"[{{column}}]" for column in columns) + " FROM " + table)
        cursor.fetch_arrow_table()
"""
SCAN_FOLDER = f"""
import os, sys, pyarrow.parquet
for table, columns in {READ!r}.items():
    if os.path.exists(f"{{sys.argv[1]}}/{{table}}.parquet"):
        pyarrow.parquet.read_table(f"{{sys.argv[1]}}/{{table}}.parquet", columns=list(columns))
pyarrow.parquet.read_table(f"{{sys.argv[1]}}/StringIds.parquet")
"""


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        command: The command line.
        base: The row that it is compared with.
        limit: The most processor seconds that it may take, in units of those of `base`; 0 for none.
        by_clock: Whether seconds of the clock are compared instead, of what works on several processors.
    """

    command: list[str]
    base: str = ""
    limit: float = 0.0
    by_clock: bool = False


MEGABYTES = 600
"""The most memory that a verb may take, in units of 10^6 bytes; or a fifth more than the row beside it."""


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
    compileall.compile_dir(ROOT / "nvprof_kit", quiet=1)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def used(command: list[str], environment: dict[str, str]) -> tuple[float, float, float]:
    """Seconds by the clock, CPU seconds, and peak memory (10^6 bytes) of one run of a command."""
    began = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)}: failed with status {status}")
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6


LARGE, SMALL, FOLDER, SNAPSHOT = "large.sqlite", "small.sqlite", "large_pqtdir", "run.pickle"
PLAIN, COUNTED = "plain.sqlite", "counted.sqlite"
"""One capture, without and with counts beside it."""


def prepare(folder: Path, capture: Path, copies: int, events: int) -> dict[str, int]:
    """Write what is read; returns the rows of the large capture by table."""
    from support.captures.as_folder import as_folder
    from support.captures.snapshot_file import amplified

    counts = amplify(capture, folder / LARGE, copies)
    amplify(capture, folder / SMALL, max(copies // 10, 1))
    amplify(DATA / "limits" / "llama.sqlite.xz", folder / PLAIN, max(copies // 10, 1))
    (folder / COUNTED).symlink_to(PLAIN)
    shutil.copy(DATA / "limits" / "llama.flops.json", folder / "counted.flops.json")
    as_folder(folder / LARGE, folder / FOLDER)
    snapshot = pickle.loads(lzma.decompress((DATA / "snapshots" / "run-2.11.pickle.xz").read_bytes()))
    (folder / SNAPSHOT).write_bytes(pickle.dumps(amplified(snapshot, events)))
    return counts


def rows_of(files: Path, nsys: str | None) -> dict[str, Row]:
    """What is measured, by name."""
    large, small, folder, snapshot = (files / name for name in (LARGE, SMALL, FOLDER, SNAPSHOT))

    def verb(*words: str) -> list[str]:
        return [sys.executable, "-m", "nvprof_kit", *words]

    def python(program: str, path: Path) -> list[str]:
        return [sys.executable, "-c", program, str(path)]

    sqlite, tables, table = "`layers`, SQLite", "`layers`, folder", ("--format", "csv")
    of_sqlite, of_folder = (verb("layers", *table, str(path)) for path in (large, folder))
    rows = {
        sqlite: Row(of_sqlite),
        tables: Row(of_folder, sqlite, 1.0),
        "a bare scan of its columns, SQLite": Row(python(SCAN, large)),
        "`layers` of the file beside that": Row(of_sqlite, "a bare scan of its columns, SQLite", 2),
        "a bare read of its columns, Parquet": Row(python(SCAN_FOLDER, folder)),
        "`layers`, folder beside that": Row(of_folder, "a bare read of its columns, Parquet", 2),
        "`layers` of a tenth": Row(verb("layers", *table, str(small))),
        "`layers`, ten times the rows": Row(of_sqlite, "`layers` of a tenth", 11),
        "`layers` of a Llama": Row(verb("layers", *table, str(files / PLAIN))),
        "`layers` of it, with counts": Row(verb("layers", *table, str(files / COUNTED)), "`layers` of a Llama", 1.1),
        "`layers --by step`": Row(verb("layers", "--by", "step", *table, str(large)), sqlite, 3),
        "`summary`": Row(verb("summary", str(large)), sqlite, 3),
        "`breakdown`": Row(verb("breakdown", *table, str(large)), sqlite, 2.5),
        "`advise`": Row(verb("advise", str(large)), sqlite, 2.5),
        "`doctor`": Row(verb("doctor", str(large)), sqlite, 2),
        "`doctor`, folder": Row(verb("doctor", str(folder)), tables, 2),
        "`diff`": Row(verb("diff", *table, "--anyway", str(large), str(large)), sqlite, 2.5),
        "`report`": Row(verb("report", "-o", "report.html", str(large)), sqlite, 2.5),
        "`export`": Row(verb("export", "-o", "trace.json", str(large)), sqlite),
        "`ncu plan`": Row(verb("ncu", "plan", str(large)), sqlite, 3),
        "`plot`": Row(verb("plot", "-o", "plot.svg", str(large)), sqlite, 3),
        "`pickle.load` of a snapshot": Row(
            python("import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))", snapshot)
        ),
        "`memory` of the snapshot": Row(verb("memory", str(snapshot)), "`pickle.load` of a snapshot", 1.4),
    }
    if nsys:
        theirs = "`nsys stats -r nvtx_gpu_proj_sum`, SQLite"
        rows[theirs] = Row([nsys, "stats", "-q", "-r", "nvtx_gpu_proj_sum", *table, str(large)])
        rows["`layers`, folder beside nsys"] = Row(of_folder, theirs, 0.5)
        theirs = "`nsys stats -r cuda_gpu_kern_sum`, SQLite"
        rows[theirs] = Row([nsys, "stats", "-q", "-r", "cuda_gpu_kern_sum", *table, str(large)])
        kernels = verb("summary", "--view", "kernel", *table, str(large))
        rows["`summary --view kernel` beside nsys"] = Row(kernels, theirs, 1)
    return rows


def rows_of_report(report: Path, nsys: str) -> dict[str, Row]:
    """What is measured of a real report, by name: each of the first two rows exports it anew."""
    sqlite, folder = report.with_suffix(".sqlite"), report.with_name(f"{report.stem}_pqtdir")
    layers = [sys.executable, "-m", "nvprof_kit", "layers", "--format", "csv"]
    clean, ours = f"rm -rf {sqlite} {folder} && ", shlex.join(layers)
    by_sqlite, theirs = "`nsys export` to SQLite, then `layers`", "`nsys stats -r nvtx_gpu_proj_sum`, SQLite"
    return {
        by_sqlite: Row(["sh", "-c", f"{clean}{nsys} export --type sqlite -o {sqlite} {report} && {ours} {sqlite}"]),
        theirs: Row([nsys, "stats", "-q", "-r", "nvtx_gpu_proj_sum", "--format", "csv", str(sqlite)]),
        "`layers` of the .nsys-rep": Row(
            ["sh", "-c", f"{clean}NSYS={nsys} {ours} {report}"], by_sqlite, 0.6, by_clock=True
        ),
        "`layers`, folder beside nsys": Row([*layers, str(folder)], theirs, 0.1),
        "a bare read of its columns, Parquet": Row([sys.executable, "-c", SCAN_FOLDER, str(folder)]),
        "`layers`, folder beside that": Row([*layers, str(folder)], "a bare read of its columns, Parquet", 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--capture", type=Path, default=DATA / "hooks-train-2023.4.sqlite.xz")
    parser.add_argument("--events", type=int, default=1_000_000, help="events of the snapshot")
    parser.add_argument("--nsys", default=shutil.which("nsys"), help="which nsys; that on PATH by default")
    parser.add_argument("--docs", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--report", type=Path, help="a report to read instead")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.report:
            report = Path(shutil.copy(options.report, folder))
            title, rows = f"A report of {report.stat().st_size / 1e6:.0f} MB", rows_of_report(report, options.nsys)
        else:
            with ProcessPoolExecutor(1) as pool:  # the memory of a process counts what its parent had
                counts = pool.submit(prepare, folder, options.capture, options.copies, options.events).result()
            rows = rows_of(folder, options.nsys)
            title = f"{options.capture.name} x {options.copies}: " + ", ".join(
                f"{table.split('_')[-1]} {count:,}" for table, count in counts.items()
            )
        os.chdir(folder)  # for what the verbs write
        runs: dict[str, list[tuple[float, float, float]]] = {row: [] for row in rows}
        for _ in range(options.rounds):
            for row, (command, *_) in rows.items():
                runs[row].append(used(command, of_repository()))
    best = {row: [min(values) for values in zip(*measured, strict=True)] for row, measured in runs.items()}
    said = [
        f"{title}; best of {options.rounds}, {os.cpu_count()} processors, Python {platform.python_version()}.",
        "",
        "| | s | CPU s | MB | times | beside | limit |",
        "|---|---|---|---|---|---|---|",
    ]
    over = []
    for row, (seconds, cpu, megabytes) in best.items():
        _, base, limit, by_clock = rows[row]
        ratio = (seconds / best[base][0] if by_clock else cpu / best[base][1]) if base else 0.0
        cells = [row, f"{seconds:.2f}", f"{cpu:.2f}", f"{megabytes:.0f}"]
        cells += [f"{ratio:.2f}" if base else "", base, f"{limit:g}" if limit else ""]
        said.append(f"| {' | '.join(cells)} |")
        most = max(MEGABYTES, 1.2 * best[base][2] if base else 0)
        if (limit and ratio > limit) or ("nvprof_kit" in rows[row].command and megabytes > most):
            over.append(row)
    said += ["", f"Above the limit: {', '.join(over)}." if over else "None is above its limit."]
    print("\n".join(said))
    if options.docs:
        page = PAGE.read_text()
        before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
        PAGE.write_text("\n\n".join([before, "\n".join(said), after]))
    if over:
        raise SystemExit(f"over the limit: {', '.join(over)}")


if __name__ == "__main__":
    main()
