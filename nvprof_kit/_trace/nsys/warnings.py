"""Warnings about missing or distorted data in an nsys capture, each with what to do."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from nvprof_kit._trace.files.sqlite import Database, integer_list
from nvprof_kit._trace.nsys.sources import check_rows
from nvprof_kit._trace.schema import OP_KINDS
from nvprof_kit.issues import Issue

_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_PID_MASK = ~0xFFFFFF
_KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
_WARNING, _ERROR = 2, 3
_OVERHEAD_SHARE = 0.01
_LOST_SHARE = 0.001

GUESS = re.compile(r"\bmight\b|\bmay\b|does the process use|is not supported by this build", re.IGNORECASE)
"""nsys messages about possibly missing data. nsys 2024.2 writes some of them into every partial capture and under every
newer driver; `lost_launches` checks whether data is actually missing.
"""


def capture_warnings(db: Database, ops: dict[str, Any], launches: int) -> tuple[Issue, ...]:
    """All warnings that follow from the export's tables.

    Args:
        db: The export.
        ops: Columns of the schema's ``ops``.
        launches: What `count_launches` found.
    """
    alone = (ops["kind"] == OP_KINDS.index("kernel")) & (ops["graph_node"] < 0)
    missing = max(launches - int(np.count_nonzero(alone)), 0)
    return (*_whole_graphs(db, ops), *_overhead(db, ops), *_lost(launches, missing), *_diagnostics(db, missing))


def launch_names(db: Database) -> list[int]:
    """Ids of the names of calls that launch a kernel; none if launches cannot be compared with kernels.

    During CUDA graph capture, a launch call only adds a node: in a process that captured graphs, no launches are
    counted.
    """
    if not db.has(_RUNTIME, "nameId") or not db.has(_KERNEL):
        return []
    names = dict(
        db.rows(
            "SELECT id, value FROM StringIds WHERE typeof(id) = 'integer' AND (value LIKE '%LaunchKernel%' "
            "OR value LIKE '%LaunchCooperativeKernel%' OR value LIKE '%StreamBeginCapture%')"
        )
    )
    return [] if any("BeginCapture" in str(name) for name in names.values()) else list(names)


def count_launches(db: Database, names: list[int]) -> int:
    """Number of calls with these names. Thread-safe."""
    if not names:
        return 0
    table = db.columns(f"SELECT count(*) AS n FROM {_RUNTIME} WHERE nameId IN ({integer_list(names)})")
    return int(table["n"][0])


def lost_launches(db: Database) -> tuple[int, int]:
    """Number of calls that launched a kernel, and the number of those kernels that are not in the capture."""
    launches = count_launches(db, launch_names(db))
    if not launches:
        return 0, 0
    graphs = "WHERE graphNodeId IS NULL OR graphNodeId = 0" if db.has(_KERNEL, "graphNodeId") else ""
    kernels = int(db.rows(f"SELECT count(*) FROM {_KERNEL} {graphs}")[0][0])
    return launches, max(launches - kernels, 0)


def _lost(launches: int, missing: int) -> list[Issue]:
    if missing <= _LOST_SHARE * launches:
        return []
    text = (
        f"{missing:,} of {launches:,} kernel launches have no kernel in the capture: GPU times are too small; end the "
        "window after torch.cuda.synchronize(), capture fewer steps, or use an nsys as new as the driver"
    )
    return [Issue("lost-kernels", "error", missing / launches, text)]


def handed_over_warnings(count: int) -> tuple[Issue, ...]:
    """Ranges that end on a different thread: their work on other threads is unknown."""
    text = (
        f"{count} ranges ended on another thread than they began on, and hold what the thread launched on which they "
        "began; range the work of the other thread there"
    )
    return (Issue("handed-over", "warning", 1.0, text),) if count else ()


def _whole_graphs(db: Database, ops: dict[str, Any]) -> list[Issue]:
    """CUDA graph replays without node tracing: their kernels are indistinguishable or missing."""
    if not db.has(_RUNTIME, "nameId", "correlationId", "globalTid"):
        return []
    names = [
        row[0]
        for row in db.rows(
            "SELECT id FROM StringIds WHERE typeof(id) = 'integer' "
            "AND (value LIKE 'cudaGraphLaunch%' OR value LIKE 'cuGraphLaunch%')"
        )
    ]
    launches = (
        db.rows(
            f"SELECT correlationId, globalTid FROM {_RUNTIME} WHERE nameId IN ({integer_list(names)}) "
            "AND typeof(globalTid) = 'integer'"
        )
        if names
        else []
    )
    if not launches:
        return []
    correlation, tid = (np.array(column, dtype=np.int64) for column in zip(*launches, strict=True))
    pid, node = tid & _PID_MASK, ops["graph_node"] >= 0
    unseen = 0
    for process in np.unique(pid).tolist():
        seen = ops["correlation"][node & (ops["pid"] == process)]
        unseen += int(np.count_nonzero(~np.isin(correlation[pid == process], seen)))
    if not unseen:
        return []
    text = (
        f"{unseen} of {len(launches)} CUDA-graph replays were traced as a whole, so their kernels belong to no layer; "
        "record with --cuda-graph-trace=node"
    )
    return [Issue("whole-graphs", "warning", unseen / len(launches), text)]


def _overhead(db: Database, ops: dict[str, Any]) -> list[Issue]:
    """Profiler overhead during operations."""
    if not db.has("PROFILER_OVERHEAD", "start", "end"):
        return []
    check_rows(db, ("PROFILER_OVERHEAD",))  # the comparisons below would leave out what is no number
    first, last = int(ops["start_ns"].min()), int(ops["end_ns"].max())
    backwards, overhead_ns = db.rows(
        f'SELECT count(*) FILTER (WHERE "end" < start), coalesce(sum("end" - start), 0) FROM PROFILER_OVERHEAD '
        f'WHERE start >= {first} AND "end" <= {last}'
    )[0]
    if backwards:
        raise db.refuse(f"{backwards} rows of PROFILER_OVERHEAD end before they begin")
    if overhead_ns <= _OVERHEAD_SHARE * (last - first):
        return []
    text = (
        f"the profiler itself took {overhead_ns / 1e6:.1f} ms of the {(last - first) / 1e6:.1f} ms window; CPU times "
        "and gaps are too long, GPU times are not touched: record more steps, or skip the first"
    )
    return [Issue("overhead", "warning", overhead_ns / max(last - first, 1), text)]


def _diagnostics(db: Database, missing: int) -> list[Issue]:
    """Warnings and errors written by nsys (2024.2 and newer); possible losses only if data is actually missing."""
    if not db.has("DIAGNOSTIC_EVENT", "severity", "text"):
        return []
    messages = db.rows(
        f"SELECT text, count(*) FROM DIAGNOSTIC_EVENT WHERE severity IN ({_WARNING}, {_ERROR}) "
        "AND text IS NOT NULL GROUP BY text ORDER BY max(severity) DESC, text"
    )
    return [
        Issue(
            "nsys-message",
            "warning",
            1.0,
            f"nsys warns: {' '.join(str(text).split())}" + (f" ({count} times)" if count > 1 else ""),
        )
        for text, count in messages
        if missing or not GUESS.search(str(text))
    ]
