"""A real Nsight Systems that a test runs by itself, not through the product."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from nvprof_kit.names import DOMAIN

ROOT = Path(__file__).parents[2]


def run_nsys(
    nsys: str, verb: str, *argv: str | Path, cwd: Path | None = None, attempts: int = 3, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a verb of nsys to its end, with this tree on Python's path.

    nsys fails by itself in a few of some thousand runs, so it runs again where it does; `profile` and `export` then
    overwrite what the first run left.

    Raises:
        AssertionError: nsys failed each time. Holds the end of what the last run printed.
    """
    command = [nsys, verb, *(["--force-overwrite=true"] if verb in ("profile", "export") else []), *map(str, argv)]
    paths = [os.environ.get("PYTHONPATH", ""), environ.pop("PYTHONPATH", ""), str(ROOT)]
    environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    for _ in range(attempts):
        ended = subprocess.run(
            command,
            cwd=cwd,
            env=os.environ | environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=300,
        )
        if ended.returncode == 0:
            return ended
    raise AssertionError(f"{command} ended with {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")


class Recorded(NamedTuple):
    """A row of nsys's NVTX_EVENTS that is ours."""

    text: str
    category: str
    payload: int | None
    kind: int
    registered: bool
    start: int
    end: int | None
    thread: int


def profile(nsys: str, folder: Path, program: str, **environ: str) -> Path:
    """Run a program under nsys; returns the report as SQLite."""
    script = folder / "program.py"
    script.write_text(program)
    report = folder / "report"
    options = ["-t", "nvtx,osrt", "-s", "none", "--cpuctxsw=none", "-o", report]
    run_nsys(nsys, "profile", *options, sys.executable, script, **environ)
    run_nsys(nsys, "export", "-t", "sqlite", "-o", f"{report}.sqlite", f"{report}.nsys-rep")
    return folder / "report.sqlite"


def read(path: Path) -> list[Recorded]:
    """The ranges and marks of our domain in order of their begin; those of Python's garbage collections come when they
    will, and are left out.
    """
    with sqlite3.connect(path) as connection:
        rows = connection.execute(
            """
            SELECT coalesce(texts.value, events.text), categories.text, events.int64Value, events.eventType,
                   events.textId IS NOT NULL, events.start, events.end, events.globalTid
            FROM NVTX_EVENTS AS events
            LEFT JOIN NVTX_EVENTS AS categories
                ON categories.eventType = 33 AND categories.domainId = events.domainId
                AND categories.category = events.category
            LEFT JOIN StringIds AS texts ON texts.id = events.textId
            WHERE events.eventType IN (34, 59, 60)
                AND events.domainId IN (SELECT domainId FROM NVTX_EVENTS WHERE eventType = 75 AND text = ?)
            ORDER BY events.start, events.end DESC
            """,
            (DOMAIN,),
        ).fetchall()
    return [Recorded(*row) for row in rows if row[0] != "gc"]
