"""Export an ``.nsys-rep`` once with the installed nsys, and keep the export next to the report."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Condition, current_thread, main_thread
from typing import Any

from nvprof_kit._trace.files.database import Database, Where
from nvprof_kit._trace.files.kinds import PARQUET_FOLDER, has_tables
from nvprof_kit._trace.files.packed import free_memory
from nvprof_kit._trace.nsys.sources import export_facts
from nvprof_kit.errors import CaptureError, ToolError

_TRACED = ("CUPTI_", "CUDNN_", "CUBLAS_", "OSRT_", "MPI_", "OPENMP", "NCCL")
_SAMPLED = frozenset({"GPU_METRICS", "COMPOSITE_EVENTS", "SCHED_EVENTS", "GENERIC_EVENTS"})
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_REPLACED = (errno.ENOTEMPTY, errno.EEXIST)
_MESSAGE_BYTES = 4096
_EXPORT_BYTES = 16
"""Memory of an export to Parquet in units of the report's size; nsys 2024.2 takes up to 11, its two parts together as
much, and less to SQLite.
"""
_PARTS = ("CUPTI_ACTIVITY_KIND_K.*", "[^C].*,C[^U].*,CU[^P].*,CUPTI_ACTIVITY_KIND_[^K].*")
"""Patterns of tables, which match each table once: nsys writes on one processor, and half of its work are kernels.
Another part would have to read the report once more.
"""
_ENDINGS = {"parquetdir": PARQUET_FOLDER, "sqlite": ".sqlite"}
"""How the names of exports end, by kind; a folder comes first."""

_memory, _exports = Condition(), list[int]()
"""What the running exports of this process need."""


def open_export(path: Path, named: Path | None = None) -> Database:
    """The tables of an export, an SQLite file or a folder.

    Args:
        path: The file or folder.
        named: The path to show in messages, if different.

    Raises:
        CaptureError: It is damaged or only a part.
    """
    if not path.is_dir():
        from nvprof_kit._trace.files.sqlite import SqliteFile

        return SqliteFile(path, named)
    from nvprof_kit._trace.files.parquet import TableFolder

    db = TableFolder(path, named)
    if "StringIds" in db.tables and not {"META_DATA_EXPORT", "EXPORT_META_DATA"} & {*db.tables}:
        raise CaptureError.of("part-of-export", path=db.named)
    return db


def exported(report: Path, *, beside: Path) -> Path:
    """The export of a report: a folder of Parquet files where the installed nsys can write one, which takes half the
    time, else an SQLite file. It is made again if it is missing or older than the report.

    Args:
        report: The decompressed ``.nsys-rep``.
        beside: The path given by the user; the export is stored next to it as ``NAME_pqtdir`` or ``NAME.sqlite``, or in
            the user's cache if that folder is read-only.

    Raises:
        ToolError: nsys is not installed, or is older than the report.
        CaptureError: nsys cannot read the report, or nothing can be written.
    """
    stem = beside.with_name(beside.name.removesuffix(".xz")).with_suffix("")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "nvprof_kit"
    bases = (stem, cache / f"{hashlib.sha1(os.fsencode(beside.resolve())).hexdigest()[:16]}-{stem.name}")
    for target in (base.with_name(base.name + ending) for base in bases for ending in _ENDINGS.values()):
        if target.exists() and _is_export_of(target, report.name, beside) and _age(target) >= _age(beside):
            return target
    nsys = shutil.which(os.environ.get("NSYS") or "nsys")
    if nsys is None:
        raise ToolError.of("no-nsys", beside=beside, name=beside.name)
    kind, options_of_parts = export_options(nsys)
    for base in bases:
        target = base.with_name(base.name + _ENDINGS[kind])
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with _memory_for(report), _partial(target) as new:
                command = [nsys, "export", "--type", kind, "--output", str(new)]
                _run([[*command, *options, str(report)] for options in options_of_parts], report, beside)
                if not new.exists():
                    raise CaptureError(f"{beside}: nsys wrote no export of it; record or copy it again")
                if target.is_dir():
                    os.rename(target, new.with_name("replaced"))
                os.replace(new, target)
            return target
        except OSError as error:
            if error.errno in _REPLACED:  # by another process, with the same
                return target
            if error.errno not in _READ_ONLY:
                raise
    facts = {"folder": stem.parent, "cache": cache, "kind": kind, "name": stem.name + _ENDINGS[kind]}
    raise CaptureError.of("export-not-writable", beside=beside, **facts) from None


def export_options(nsys: str) -> tuple[str, list[list[str]]]:
    """What an nsys exports a report to, and the options of the commands that do, each for a part of the tables."""
    command = [nsys, "export", "--help"]
    help_text = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False).stdout
    kind = "parquetdir" if "parquetdir" in help_text else "sqlite"
    # from 2026.2 on, what NCCL says of its collectives is left out unless asked for
    options = ["--include-blobs=true"] if "--include-blobs" in help_text else []
    can_append = kind == "parquetdir" and "--tables" in help_text and "--append" in help_text
    # other threads export the other reports of a job, and parts take a quarter more processor time
    if not can_append or current_thread() is not main_thread() or (os.cpu_count() or 1) == 1:
        return kind, [options]
    return kind, [[*options, f"--tables={pattern}", "--append"] for pattern in _PARTS]


@contextmanager
def _memory_for(report: Path) -> Iterator[None]:
    """Wait until there is memory for an export beside those of other threads; one runs in any case."""
    need = _EXPORT_BYTES * report.stat().st_size
    with _memory:
        _memory.wait_for(lambda: not _exports or need + sum(_exports) < free_memory())
        _exports.append(need)
    try:
        yield
    finally:
        with _memory:
            _exports.remove(need)
            _memory.notify_all()


def _age(path: Path) -> float:
    """When a file, or the tables of a folder, were written."""
    files = [*path.iterdir()] if path.is_dir() else [path]
    return min((file.stat().st_mtime for file in files), default=0.0)


def _is_export_of(target: Path, report: str, named: Path) -> bool:
    """Whether what is at the export's path is a readable export.

    Raises:
        CaptureError: It was exported from a report with another name, or is a folder of something else.
    """
    if target.is_dir() and not has_tables(target) and any(target.iterdir()):
        raise CaptureError(f"{named}: {target.name} beside it is a folder of something else; move it away")
    try:
        with open_export(target) as db:
            facts = export_facts(db)
            is_whole = all(db.tables[table] is not None for table in db.tables)  # opens each file of a folder
    except CaptureError:
        return False
    if target.is_dir() and not (facts and is_whole):
        return False
    origin = facts.get("EXPORT_PARAM_INPUT_FILE", "")
    if origin not in ("", report, "(scrubbed)"):
        raise CaptureError.of("other-export", path=named, export=target.name, origin=origin)
    return True


@contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """A path in a temporary folder next to the target, which is removed afterwards, also when the process is ended."""

    def end(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    is_main = current_thread() is main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with tempfile.TemporaryDirectory(prefix=".nvprof-kit-", dir=target.parent) as folder:
        if is_main:
            signal.signal(signal.SIGTERM, end)
        try:
            yield Path(folder) / target.name
        finally:
            if is_main:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run(commands: Sequence[list[str]], report: Path, named: Path) -> None:
    """Run the commands that export a report, beside each other; the progress of the first is shown where stderr is a
    terminal.
    """
    shows_progress, output = sys.stderr is not None and sys.stderr.isatty(), b""
    with ExitStack() as stack:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        processes = [stack.enter_context(subprocess.Popen(command, **pipes)) for command in commands]
        try:
            if current_thread() is main_thread():  # what reads the export is imported meanwhile
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # an import may swallow SystemExit
                try:
                    import pandas  # noqa: F401
                    import pyarrow.parquet  # noqa: F401
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for process in processes:
                assert process.stdout is not None
                while chunk := os.read(process.stdout.fileno(), _MESSAGE_BYTES):
                    output = (output + chunk)[-_MESSAGE_BYTES:]
                    if shows_progress and process is processes[0]:
                        sys.stderr.write(chunk.decode("utf-8", "replace"))
                        sys.stderr.flush()
                if process.wait():
                    break
            else:
                return
        finally:
            for started in processes:
                started.kill()
    with report.open("rb") as file:  # 2022.4 and older write no version into the first line
        written_by = _version(rb"[^\n]*?Report (\d+)@(\d+)@(\d+)", file.read(128))
    printed = subprocess.run([commands[0][0], "--version"], capture_output=True, check=False).stdout
    installed = _version(rb".*?(\d+)\.(\d+)\.(\d+)", printed)
    if written_by > installed:
        newer, older = (".".join(map(str, version)) or "of unknown version" for version in (written_by, installed))
        raise ToolError.of("newer-nsys", path=named, newer=newer, older=older)
    lines = output.decode("utf-8", "replace").splitlines()
    message = next((line for line in reversed(lines) if "error" in line.lower()), "").strip()
    reason = "it was killed, as where memory ends" if process.returncode == -signal.SIGKILL else "it gave no reason"
    raise CaptureError.of("export-failed", path=named, reason=message[-200:] or reason)


def _version(pattern: bytes, text: bytes) -> tuple[int, ...]:
    match = re.match(pattern, text, re.DOTALL)
    return tuple(map(int, match.groups())) if match else ()


def is_empty(path: Path) -> bool:
    """Whether an export of nsys has none of what nsys can trace; False for one that cannot be read."""
    try:
        with open_export(path) as db:
            traced = {table for table in db.tables if table.startswith(_TRACED)} | (_SAMPLED & {*db.tables})
            traced = {table for table in traced if not table.startswith("CUPTI_ACTIVITY_KIND_OVERHEAD")}
            events = [Where("eventType", (34, 59, 60, 70, 71))]
            has_ranges = db.has("NVTX_EVENTS", "eventType") and db.rows("NVTX_EVENTS", ("eventType",), events, limit=1)
            has_events = any(db.rows(table, sorted(db.tables[table])[:1], limit=1) for table in traced)
            return "StringIds" in db.tables and not has_ranges and not has_events
    except CaptureError:
        return False
