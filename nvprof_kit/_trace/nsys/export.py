"""Export an ``.nsys-rep`` to SQLite once with the installed nsys, and keep the export next to the report."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sqlite3
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from nvprof_kit._trace.files.sqlite import SqliteFile
from nvprof_kit.errors import CaptureError, ToolError

_TRACED = ("CUPTI_", "CUDNN_", "CUBLAS_", "OSRT_", "MPI_", "OPENMP", "NCCL")
_SAMPLED = frozenset({"GPU_METRICS", "COMPOSITE_EVENTS", "SCHED_EVENTS", "GENERIC_EVENTS"})


def exported(report: Path, *, beside: Path) -> Path:
    """The SQLite export next to a report; created again if it is missing or older than the report.

    Args:
        report: The decompressed ``.nsys-rep``.
        beside: The path given by the user; the export is stored next to it as ``NAME.sqlite``.

    Raises:
        ToolError: nsys is not installed, or is older than the report.
        CaptureError: nsys cannot read the report, or the folder cannot be written to.
    """
    target = beside.with_name(beside.name.removesuffix(".xz")).with_suffix(".sqlite")
    if target.exists():
        _check_is_its_export(target, report.name, beside)
        if target.stat().st_mtime >= beside.stat().st_mtime:
            return target
    nsys = shutil.which("nsys")
    if nsys is None:
        raise ToolError(
            f"{beside}: reading a report needs nsys, and there is none on PATH; "
            f"run `nsys export --type sqlite {beside.name}` where nsys is installed and give the .sqlite"
        )
    try:
        with tempfile.TemporaryDirectory(prefix=".nvprof-kit-", dir=target.parent) as folder:
            new_file = Path(folder) / target.name
            _export(nsys, report, new_file, beside)
            os.replace(new_file, target)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise CaptureError(
            f"{beside}: its export is kept beside it, and {target.parent} is not writable; "
            f"run `nsys export --type sqlite --output FOLDER/{target.name} {beside}` and give that file"
        ) from None
    return target


def _check_is_its_export(target: Path, report: str, named: Path) -> None:
    """Reject an existing file at the export's path that belongs to another report.

    Raises:
        CaptureError: The file was exported from a report with another name.
    """
    try:
        with closing(SqliteFile(target)) as db:
            meta = next(
                (table for table in ("META_DATA_EXPORT", "EXPORT_META_DATA") if db.has(table, "name", "value")), None
            )
            entries = db.rows(meta, ("name", "value")) if meta else []
            made_from = [str(value) for name, value in entries if name == "EXPORT_PARAM_INPUT_FILE"]
    except CaptureError:
        return  # not an export: create it again
    if made_from and made_from[0] not in ("", report, "(scrubbed)"):
        raise CaptureError(
            f"{named}: {target.name} beside it is the export of {made_from[0]}, not of this report; "
            "move it away, or name it if it is what you want to read"
        )


def _export(nsys: str, report: Path, new_file: Path, named: Path) -> None:
    process = subprocess.run(
        [nsys, "export", "--type", "sqlite", "--output", str(new_file), str(report)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        check=False,
    )
    if process.returncode == 0 and new_file.exists():
        return
    written_by, installed = _report_version(report), _version(nsys)
    if written_by > installed:
        raise ToolError(
            f"{named}: the report was written by nsys {_dotted(written_by)}, newer than the "
            f"{_dotted(installed)} on PATH; "
            "export it to SQLite with the nsys that recorded it, or put a newer nsys on PATH"
        )
    message = next((line for line in reversed(process.stdout.split("\n")) if "error" in line.lower()), "").strip()
    raise CaptureError(
        f"{named}: nsys could not export the report ({message[-200:] or 'it gave no reason'}); record or copy it again"
    )


def _report_version(report: Path) -> tuple[int, ...]:
    """The nsys version in a report's first line; empty if absent (2022.4 and older)."""
    with report.open("rb") as file:
        match = re.match(rb"[^\n]*?Report (\d+)@(\d+)@(\d+)", file.read(128))
    return tuple(int(digits) for digits in match.groups()) if match else ()


def _version(nsys: str) -> tuple[int, ...]:
    process = subprocess.run([nsys, "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"(\d+)\.(\d+)\.(\d+)", process.stdout)
    return tuple(int(digits) for digits in match.groups()) if match else ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version)) or "of unknown version"


def is_empty(path: Path) -> bool:
    """Whether an export of nsys has none of what nsys can trace; False for a file that cannot be read."""
    try:
        uri = f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as database:
            rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            tables = {str(name) for (name,) in rows}
            traced = {name for name in tables if name.startswith(_TRACED)} | (tables & _SAMPLED)
            traced = {name for name in traced if not name.startswith("CUPTI_ACTIVITY_KIND_OVERHEAD")}
            queries = [f'SELECT 1 FROM "{name}" LIMIT 1' for name in traced]
            if "NVTX_EVENTS" in tables:
                queries.append("SELECT 1 FROM NVTX_EVENTS WHERE eventType IN (34, 59, 60, 70, 71) LIMIT 1")
            return "StringIds" in tables and not any(database.execute(query).fetchone() for query in queries)
    except sqlite3.Error:
        return False
