"""Diagnostics of an nsys export: its tables, nsys's own messages, and the profiled processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nvprof_kit._trace.files.database import Database, Int64Array
from nvprof_kit._trace.frames import MISSING_PAYLOAD
from nvprof_kit._trace.joins import distinct_rows, few
from nvprof_kit._trace.nsys.nvtx import read_nvtx
from nvprof_kit._trace.nsys.ops import OP_TABLES
from nvprof_kit._trace.nsys.scrub import environment_names, home_folders
from nvprof_kit._trace.nsys.sources import (
    GRAPH,
    RUNTIME,
    check_columns,
    check_enums,
    check_rows,
    columns_of,
    export_facts,
    read_columns,
    warn_of_descriptions,
)
from nvprof_kit._trace.nsys.warnings import graph_launches, lost_launches, nsys_messages
from nvprof_kit._trace.open import nsys_export

_OPS = [table for table in OP_TABLES if table != GRAPH]
_COUNTED = (*_OPS, RUNTIME, "NVTX_EVENTS", "GPU_METRICS", "CUDA_GPU_MEMORY_USAGE_EVENTS")


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
        lost_kernels: Number of these calls without a kernel in the capture.
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
    lost_kernels: int = 0
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
        check_columns(db)
        check_rows(db, "StringIds")
        check_enums(db)
        warn_of_descriptions(db, environment=True)
        nvtx = read_nvtx(db)
        events = {name: nvtx.events[name] for name in ("kind", "end", "text", "text_id", "domain", "pid")}
        events = {name: values[np.isin(events["kind"], (59, 60))] for name, values in events.items()}
        if nameless := int(((events["text_id"] == MISSING_PAYLOAD) & (events["text"] == "")).sum()):
            db.warn(f"NVTX_EVENTS.text and textId give no text to {nameless} of {len(events['kind'])} ranges")
        (pids, ids), index = distinct_rows(events["pid"], events["domain"])
        ranges: Counter[str] = Counter()
        for pid, id_, count in zip(pids.tolist(), ids.tolist(), np.bincount(index).tolist(), strict=True):
            ranges[nvtx.domains.get((pid, id_), f"domain {id_}") if id_ else ""] += count
        # all columns are read, so that faults in any of them are found
        tables = [_columns(db, table, "start", "end", "globalPid", "graphNodeId") for table in _OPS]
        start, end, keys, node = (np.concatenate(columns) for columns in zip(*tables, strict=True))
        (tids,) = _columns(db, RUNTIME, "globalTid")
        processes = dict.fromkeys(_pids(tids), 0)
        processes |= dict.fromkeys(_pids(events["pid"]), 0)
        for key in few(keys[keys != -1]).tolist():
            (pid,) = _pids(np.array([key]))
            processes[pid] = processes.get(pid, 0) + int((keys == key).sum())
        first, last = (int(start.min()), int(end.max())) if len(start) else (0, 0)
        overhead_start, overhead_end = _columns(db, "PROFILER_OVERHEAD", "start", "end")
        inside = np.minimum(overhead_end, last) - np.maximum(overhead_start, first)
        facts, (launches, lost_count) = export_facts(db), lost_launches(db)
        return CaptureHealth(
            path=str(path),
            schema=facts.get("EXPORT_SCHEMA_VERSION", ""),
            rows={table: db.count(table) for table in _COUNTED},
            complaints=tuple(
                (" ".join(text.split()) + _of_process(text, keys), len(keys), severity == 3)
                for text, (severity, keys) in nsys_messages(db).items()
            ),
            launches=launches,
            lost_kernels=lost_count,
            domains=dict(ranges),
            registered=tuple(nvtx.domain_names),
            open_ranges=int((events["end"] == MISSING_PAYLOAD).sum()),
            processes=processes,
            window_ns=last - first,
            overhead_ns=int(np.maximum(inside, 0).sum()),
            whole_graphs=0 if (node >= 0).any() else len(graph_launches(db)["pid"]),
            environment=tuple(environment_names(db)),
            homes=tuple(home_folders(db)),
            incomplete=tuple(db.warnings),
            without_payloads=db.count("NVTX_PAYLOAD_SCHEMAS") > 0
            and facts.get("EXPORT_PARAM_INCLUDE_BLOBS") == "false",
        )


def _columns(db: Database, table: str, *columns: str) -> list[Int64Array]:
    """Some columns of a table, all of which are read."""
    read = read_columns(db, table, {column: column for column in (*columns_of(table), *columns)})
    return [read[column] for column in columns]


def _pids(keys: Int64Array) -> list[int]:
    """The ids of the processes with these keys, globalTid or globalPid."""
    pids: list[int] = np.unique(few(keys) >> 24 & 0xFFFFFF).tolist()
    return pids


def _of_process(text: str, keys: list[int | None]) -> str:
    pids = [key >> 24 & 0xFFFFFF for key in keys if key is not None]
    if "the process" not in text or not pids:
        return ""
    return f" (process {min(pids)}{f' and {len(keys) - 1} more' if len(keys) > 1 else ''})"
