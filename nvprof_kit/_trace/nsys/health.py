"""Diagnostics of an nsys export: its tables, nsys's own messages, and the profiled processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nvprof_kit._trace.files.database import Database, Int64Array, Where
from nvprof_kit._trace.frames import MISSING_PAYLOAD, distinct, distinct_rows, few
from nvprof_kit._trace.nsys.scrub import environment_names, home_folders
from nvprof_kit._trace.nsys.sources import ALWAYS, check_columns, check_enums, check_rows, warn_of_descriptions
from nvprof_kit._trace.nsys.tables import nvtx_domains, process_of
from nvprof_kit._trace.nsys.warnings import lost_launches, nsys_messages
from nvprof_kit._trace.open import nsys_export

_OPS = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
_COUNTED = (*_OPS, "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "GPU_METRICS", "CUDA_GPU_MEMORY_USAGE_EVENTS")
_PID_SHIFT, _PID_MASK = 24, 0xFFFFFF
_RANGES = Where("eventType", (59, 60))


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
        without_payloads: Whether ranges have payloads that the export left out, as nsys 2026.2 does unless told.
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
    without_payloads: bool = False


def read_health(path: Path) -> CaptureHealth:
    """Read the facts about an nsys capture, ``.sqlite`` or ``.nsys-rep``, compressed or not.

    Raises:
        CaptureError: The file cannot be read, or is not an nsys capture.
        ToolError: An ``.nsys-rep`` needs nsys, which is not installed or is older than the report.
    """
    with nsys_export(path) as db:
        check_columns(db, ALWAYS)
        check_rows(db, ALWAYS)
        check_enums(db)
        warn_of_descriptions(db, environment=True)
        open_ranges = 0
        ranges: Counter[str] = Counter()
        names: dict[tuple[int, int], str] = {}
        if "NVTX_EVENTS" in db.tables:
            sources = {"id": "textId", "text": "text", "end": "end"}
            read = db.columns("NVTX_EVENTS", sources, where=[_RANGES], missing=MISSING_PAYLOAD, texts=("text",))
            open_ranges = int(np.count_nonzero(read["end"] == MISSING_PAYLOAD))
            if nameless := int(np.count_nonzero((read["id"] == MISSING_PAYLOAD) & (read["text"] == ""))):
                db.warn(f"NVTX_EVENTS.text and textId give no text to {nameless} of {len(read['id'])} ranges")
        if db.has("NVTX_EVENTS", "eventType", "domainId", "globalTid", "text", "textId"):
            names = {pair: name for name, pairs in nvtx_domains(db).by_name.items() for pair in pairs}
            read = db.columns("NVTX_EVENTS", {"tid": "globalTid", "domain": "domainId"}, where=[_RANGES], missing=0)
            (pids, numbers), index = distinct_rows(process_of(read["tid"]), read["domain"])
            counts = np.bincount(index, minlength=len(pids))
            for pid, number, count in zip(pids.tolist(), numbers.tolist(), counts.tolist(), strict=True):
                ranges[names.get((pid, number), f"domain {number}") if number else ""] += count
        columns = {"start": "start", "end": "end", "pid": "globalPid"}
        ops = [db.columns(table, columns) for table in _OPS if db.has(table, "start", "end")]
        ops = [read for read in ops if len(read["start"])]
        window, overhead = _window(db, ops)
        launches, lost_count = lost_launches(db)
        return CaptureHealth(
            path=str(path),
            schema=_export_fact(db, "EXPORT_SCHEMA_VERSION"),
            rows={table: db.count(table) for table in _COUNTED},
            complaints=_complaints(db),
            launches=launches,
            lost=lost_count,
            domains=dict(ranges),
            registered=tuple(sorted({*names.values()})),
            open_ranges=open_ranges,
            processes=_processes(db, ops),
            window_ns=window,
            overhead_ns=overhead,
            whole_graphs=_whole_graphs(db),
            environment=tuple(environment_names(db)),
            homes=tuple(home_folders(db)),
            incomplete=tuple(db.warnings),
            without_payloads=db.count("NVTX_PAYLOAD_SCHEMAS") > 0
            and _export_fact(db, "EXPORT_PARAM_INCLUDE_BLOBS") == "false",
        )


def _export_fact(db: Database, fact: str) -> str:
    """What nsys wrote about the export; '' if nothing."""
    for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
        if db.has(table, "name", "value"):
            values = [value for name, value in db.rows(table, ("name", "value")) if name == fact]
            if values:
                return str(values[0])
    return ""


def _complaints(db: Database) -> tuple[tuple[str, int, bool], ...]:
    return tuple(
        (" ".join(text.split()) + _of_process(text, processes), len(processes), severity == 3)
        for text, (severity, processes) in nsys_messages(db).items()
    )


def _of_process(text: str, processes: list[int | None]) -> str:
    pids = [(process >> _PID_SHIFT) & _PID_MASK for process in processes if process is not None]
    if "the process" not in text or not pids:
        return ""
    return f" (process {min(pids)}{f' and {len(processes) - 1} more' if len(processes) > 1 else ''})"


def _processes(db: Database, ops: Sequence[Mapping[str, Int64Array]]) -> dict[int, int]:
    """Number of operations of each process that called CUDA or opened an NVTX range."""
    counts: dict[int, int] = {}
    for table, where in (("CUPTI_ACTIVITY_KIND_RUNTIME", []), ("NVTX_EVENTS", [_RANGES])):
        if db.has(table, "globalTid"):
            tid = db.columns(table, {"tid": "globalTid"}, where=where, missing=0)["tid"]
            counts |= dict.fromkeys((few(tid >> _PID_SHIFT) & _PID_MASK).tolist(), 0)
    for read in ops:
        pids, index = distinct(read["pid"][read["pid"] != -1] >> _PID_SHIFT & _PID_MASK)
        for process, count in zip(pids.tolist(), np.bincount(index).tolist(), strict=True):
            counts[process] = counts.get(process, 0) + count
    return counts


def _window(db: Database, ops: Sequence[Mapping[str, Int64Array]]) -> tuple[int, int]:
    """Time from the first to the last GPU operation, and the profiler overhead in it."""
    if not ops:
        return 0, 0
    first, last = min(int(read["start"].min()) for read in ops), max(int(read["end"].max()) for read in ops)
    overhead_ns = 0
    if db.has("PROFILER_OVERHEAD", "start", "end"):
        read = db.columns("PROFILER_OVERHEAD", {"start": "start", "end": "end"})
        overhead_ns = int(np.maximum(np.minimum(read["end"], last) - np.maximum(read["start"], first), 0).sum())
    return last - first, overhead_ns


def _whole_graphs(db: Database) -> int:
    table = "CUPTI_ACTIVITY_KIND_RUNTIME"
    names = db.ids_like("cudaGraphLaunch%", "cuGraphLaunch%") if db.has(table, "nameId") else {}
    launches = db.count(table, [Where("nameId", names)]) if names else 0
    for ops in _OPS if launches else ():
        if db.has(ops, "graphNodeId"):
            rows, faults = db.faults(ops, {"graphNodeId": ""})
            if faults["graphNodeId"][0] < rows:
                return 0
    return launches
