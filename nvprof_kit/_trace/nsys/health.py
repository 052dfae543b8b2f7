"""Diagnostics of an nsys export: its tables, nsys's own messages, and the profiled processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nvprof_kit._trace.frames import MISSING_PAYLOAD
from nvprof_kit._trace.joins import distinct_rows, few
from nvprof_kit._trace.nsys.nvtx import read_nvtx
from nvprof_kit._trace.nsys.ops import OP_TABLES, check_ops
from nvprof_kit._trace.nsys.scrub import environment_names, home_folders
from nvprof_kit._trace.nsys.sources import RUNTIME, export_facts, read_columns, warn_of_descriptions
from nvprof_kit._trace.nsys.warnings import nsys_messages
from nvprof_kit._trace.open import nsys_export
from nvprof_kit._trace.schema import Losses, Trace

_COUNTED = (*OP_TABLES, RUNTIME, "NVTX_EVENTS", "GPU_METRICS", "CUDA_GPU_MEMORY_USAGE_EVENTS")


@dataclass(frozen=True)
class CaptureHealth:
    """Facts about one export; times in ns.

    Attributes:
        path: The file.
        rows: Number of rows of each relevant table; 0 if absent.
        complaints: nsys's warnings and errors with their counts, most severe first; errors are marked. Messages about a
            process include the process.
        losses: What nsys lost or took.
        domains: Number of ranges in each NVTX domain; the default domain is ``''``.
        registered: Names of all registered NVTX domains, with or without ranges.
        open_ranges: Number of ranges without an end.
        processes: Number of kernels and copies by process id, for each process that called CUDA or opened a range.
        window_ns: Time from the first to the last GPU operation; 0 without operations.
        environment: Names of the environment variables in the file.
        homes: Home folders mentioned in the file.
        incomplete: Columns that are missing, or lack values.
        without_payloads: Whether ranges have payloads that the export left out, as nsys 2026.2 does unless told.
    """

    path: str
    rows: Mapping[str, int]
    complaints: tuple[tuple[str, int, bool], ...] = ()
    losses: Losses = field(default_factory=Losses)
    domains: Mapping[str, int] | None = None
    registered: tuple[str, ...] = ()
    open_ranges: int = 0
    processes: Mapping[int, int] | None = None
    window_ns: int = 0
    environment: tuple[str, ...] = ()
    homes: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = ()
    without_payloads: bool = False


def read_health(path: Path, trace: Trace) -> CaptureHealth:
    """Read the facts about an nsys capture, ``.sqlite`` or ``.nsys-rep``, compressed or not.

    Args:
        path: The capture.
        trace: Its tables.

    Raises:
        CaptureError: The file cannot be read, or is not an nsys capture.
        ToolError: An ``.nsys-rep`` needs nsys, which is not installed or is older than the report.
    """
    with nsys_export(path) as db:
        check_ops(db)
        warn_of_descriptions(db, environment=True)
        nvtx = read_nvtx(db)
        events = {name: nvtx.events[name] for name in ("kind", "end", "domain", "pid")}
        events = {name: values[np.isin(events["kind"], (59, 60))] for name, values in events.items()}
        (pids, ids), index = distinct_rows(events["pid"], events["domain"])
        ranges: Counter[str] = Counter()
        for pid, id_, count in zip(pids.tolist(), ids.tolist(), np.bincount(index).tolist(), strict=True):
            ranges[nvtx.domains.get((pid, id_), f"domain {id_}") if id_ else ""] += count
        callers = read_columns(db, RUNTIME, {"tid": "globalTid"})["tid"]
        start, end, key = (trace.ops[name].to_numpy() for name in ("start_ns", "end_ns", "pid"))
        process = key[key != -1] >> 24 & 0xFFFFFF
        processes = dict.fromkeys(np.unique(np.append(few(callers), few(events["pid"])) >> 24 & 0xFFFFFF).tolist(), 0)
        processes |= {pid: int(np.count_nonzero(process == pid)) for pid in few(process).tolist()}
        facts = export_facts(db)
        incomplete = [issue for issue in trace.info.warnings if issue.code == "rows"]
        return CaptureHealth(
            path=str(path),
            rows={table: db.count(table) for table in _COUNTED},
            complaints=tuple(
                (" ".join(text.split()) + _of_process(text, keys), len(keys), severity == 3)
                for text, (severity, keys) in nsys_messages(db).items()
            ),
            losses=trace.info.losses,
            domains=dict(ranges),
            registered=tuple(nvtx.domain_names),
            open_ranges=int((events["end"] == MISSING_PAYLOAD).sum()),
            processes=processes,
            window_ns=int(end.max() - start.min()) if len(start) else 0,
            environment=tuple(environment_names(db)),
            homes=tuple(home_folders(db)),
            incomplete=tuple(dict.fromkeys([*incomplete, *db.warnings])),
            without_payloads=db.count("NVTX_PAYLOAD_SCHEMAS") > 0
            and facts.get("EXPORT_PARAM_INCLUDE_BLOBS") == "false",
        )


def _of_process(text: str, keys: list[int | None]) -> str:
    pids = [key >> 24 & 0xFFFFFF for key in keys if key is not None]
    if "the process" not in text or not pids:
        return ""
    return f" (process {min(pids)}{f' and {len(keys) - 1} more' if len(keys) > 1 else ''})"
