"""Diagnostics of an nsys export: its tables, nsys's own messages, and the profiled processes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from nvprof_kit._trace.files.sqlite import Database
from nvprof_kit._trace.nsys.enums import check_enums
from nvprof_kit._trace.nsys.scrub import environment_names, home_folders
from nvprof_kit._trace.nsys.sources import ALWAYS, check_columns, check_rows, warn_of_descriptions
from nvprof_kit._trace.nsys.warnings import lost_launches
from nvprof_kit._trace.open import nsys_sqlite

_OPS = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
_COUNTED = (*_OPS, "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "GPU_METRICS", "CUDA_GPU_MEMORY_USAGE_EVENTS")
_PID_SHIFT, _PID_MASK = 24, 0xFFFFFF
_RANGES = "eventType IN (59, 60)"


@dataclass(frozen=True)
class CaptureHealth:
    """Facts about one export; times in ns.

    Attributes:
        path: The file.
        schema: Version of the export's schema; empty if unknown.
        rows: Number of rows of each relevant table; 0 if absent.
        complaints: nsys's warnings and errors with their counts, most severe first; errors are marked. Messages about a
            process include the process.
        launches: Number of calls that launched a kernel.
        lost: Number of these calls without a kernel in the capture.
        domains: Number of ranges in each NVTX domain; the default domain is ``''``.
        registered: Names of all registered NVTX domains, with or without ranges.
        open_ranges: Number of ranges without an end.
        processes: Number of kernels and copies by process id, for each process that called CUDA or opened a range.
        window_ns: Time from the first to the last GPU operation; 0 without operations.
        overhead_ns: Profiler overhead of nsys within the window.
        whole_graphs: Number of CUDA graph launches if no graph nodes were traced.
        environment: Names of the environment variables in the file.
        homes: Home folders mentioned in the file.
        incomplete: Columns that are missing, or lack values.
    """

    path: str
    schema: str
    rows: Mapping[str, int]
    complaints: tuple[tuple[str, int, bool], ...] = ()
    launches: int = 0
    lost: int = 0
    domains: Mapping[str, int] | None = None
    registered: tuple[str, ...] = ()
    open_ranges: int = 0
    processes: Mapping[int, int] | None = None
    window_ns: int = 0
    overhead_ns: int = 0
    whole_graphs: int = 0
    environment: tuple[str, ...] = ()
    homes: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = ()


def read_health(path: Path) -> CaptureHealth:
    """Read the facts about an nsys capture, ``.sqlite`` or ``.nsys-rep``, compressed or not.

    Raises:
        CaptureError: The file cannot be read, or is not an nsys capture.
        ToolError: An ``.nsys-rep`` needs nsys, which is not installed or is older than the report.
    """
    with nsys_sqlite(path) as plain, closing(Database(plain, path)) as db:
        check_columns(db, ALWAYS)
        check_rows(db, ALWAYS)
        check_enums(db)
        warn_of_descriptions(db, environment=True)
        _warn_of_nameless(db)
        domains, registered = _domains(db)
        window, overhead = _window(db)
        launches, lost_count = lost_launches(db)
        return CaptureHealth(
            path=str(path),
            schema=_schema(db),
            rows={table: _count(db, table) for table in _COUNTED},
            complaints=_complaints(db),
            launches=launches,
            lost=lost_count,
            domains=domains,
            registered=registered,
            open_ranges=_count(db, "NVTX_EVENTS", f'{_RANGES} AND "end" IS NULL'),
            processes=_processes(db),
            window_ns=window,
            overhead_ns=overhead,
            whole_graphs=_whole_graphs(db),
            environment=tuple(environment_names(db)),
            homes=tuple(home_folders(db)),
            incomplete=tuple(db.warnings),
        )


def _warn_of_nameless(db: Database) -> None:
    if "NVTX_EVENTS" in db.tables and (ranges := _count(db, "NVTX_EVENTS", _RANGES)):
        nameless = _count(db, "NVTX_EVENTS", f"{_RANGES} AND text IS NULL AND textId IS NULL")
        if nameless:
            db.warn(f"NVTX_EVENTS.text and textId give no text to {nameless} of {ranges} ranges")


def _count(db: Database, table: str, where: str = "1") -> int:
    return int(db.rows(f"SELECT count(*) FROM {table} WHERE {where}")[0][0]) if db.has(table) else 0


def _schema(db: Database) -> str:
    for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
        if db.has(table, "name", "value"):
            versions = db.rows(f"SELECT value FROM {table} WHERE name = 'EXPORT_SCHEMA_VERSION'")
            if versions:
                return str(versions[0][0])
    return ""


def _complaints(db: Database) -> tuple[tuple[str, int, bool], ...]:
    if not db.has("DIAGNOSTIC_EVENT", "severity", "text"):
        return ()
    pid = f"min((globalPid >> {_PID_SHIFT}) & {_PID_MASK})" if db.has("DIAGNOSTIC_EVENT", "globalPid") else "NULL"
    rows = db.rows(
        f"SELECT text, count(*), max(severity) = 3, {pid} FROM DIAGNOSTIC_EVENT WHERE severity IN (2, 3) "
        "AND text IS NOT NULL GROUP BY text ORDER BY max(severity) DESC, text"
    )
    return tuple(
        (" ".join(str(text).split()) + _of_process(str(text), count, process), int(count), bool(is_error))
        for text, count, is_error, process in rows
    )


def _of_process(text: str, count: int, process: int | None) -> str:
    if "the process" not in text or process is None:
        return ""
    return f" (process {process}{f' and {count - 1} more' if count > 1 else ''})"


def _domains(db: Database) -> tuple[dict[str, int], tuple[str, ...]]:
    """Number of ranges by domain name, and the names of all registered domains."""
    if not db.has("NVTX_EVENTS", "eventType", "domainId", "globalTid", "text", "textId"):
        return {}, ()
    registrations = db.rows(
        "SELECT event.globalTid >> 24, event.domainId, coalesce(event.text, string.value) FROM NVTX_EVENTS event "
        "LEFT JOIN StringIds string ON string.id = event.textId WHERE event.eventType = 75"
    )
    names = {(pid, number): str(name) for pid, number, name in registrations}
    range_counts = db.rows(f"SELECT globalTid >> 24, domainId, count(*) FROM NVTX_EVENTS WHERE {_RANGES} GROUP BY 1, 2")
    ranges: dict[str, int] = {}
    for pid, number, count in range_counts:
        name = names.get((pid, number), f"domain {number}") if number else ""
        ranges[name] = ranges.get(name, 0) + int(count)
    return ranges, tuple(sorted(set(names.values())))


def _processes(db: Database) -> dict[int, int]:
    """Number of operations of each process that called CUDA or opened an NVTX range."""
    counts: dict[int, int] = {}
    for table, where in (("CUPTI_ACTIVITY_KIND_RUNTIME", "1"), ("NVTX_EVENTS", _RANGES)):
        if db.has(table, "globalTid"):
            for (pid,) in db.rows(f"SELECT DISTINCT globalTid >> {_PID_SHIFT} FROM {table} WHERE {where}"):
                counts.setdefault(int(pid) & _PID_MASK, 0)
    for table in _OPS:
        if db.has(table, "globalPid"):
            for pid, count in db.rows(
                f"SELECT globalPid >> {_PID_SHIFT}, count(*) FROM {table} WHERE globalPid IS NOT NULL GROUP BY 1"
            ):
                counts[int(pid) & _PID_MASK] = counts.get(int(pid) & _PID_MASK, 0) + int(count)
    return counts


def _window(db: Database) -> tuple[int, int]:
    """Time from the first to the last GPU operation, and the profiler overhead in it."""
    ends = [
        db.rows(f'SELECT min(start), max("end") FROM {table}')[0] for table in _OPS if db.has(table, "start", "end")
    ]
    ends = [edge for edge in ends if edge[0] is not None]
    if not ends:
        return 0, 0
    first, last = min(start for start, _ in ends), max(end for _, end in ends)
    overhead_ns = 0
    if db.has("PROFILER_OVERHEAD", "start", "end"):
        overhead_ns = db.rows(
            f'SELECT coalesce(sum(min("end", {last}) - max(start, {first})), 0) FROM PROFILER_OVERHEAD '
            f'WHERE start < {last} AND "end" > {first}'
        )[0][0]
    return int(last - first), int(overhead_ns)


def _whole_graphs(db: Database) -> int:
    table = "CUPTI_ACTIVITY_KIND_RUNTIME"
    if not db.has(table, "nameId"):
        return 0
    if any(db.has(ops, "graphNodeId") and _count(db, ops, "graphNodeId IS NOT NULL") for ops in _OPS):
        return 0
    return _count(
        db,
        table,
        "nameId IN (SELECT id FROM StringIds WHERE value LIKE 'cudaGraphLaunch%' OR value LIKE 'cuGraphLaunch%')",
    )
