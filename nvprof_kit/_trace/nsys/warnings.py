"""Warnings about missing or distorted data in an nsys capture, each with what to do."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from nvprof_kit._trace.files.database import Database, Where
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
        launches: Number of calls that launched a kernel, of those that `launch_names` names.
    """
    alone = (ops["kind"] == OP_KINDS.index("kernel")) & (ops["graph_node"] < 0)
    missing = max(launches - int(np.count_nonzero(alone)), 0)
    messages = []  # nsys warns of possible losses too, which count only if data is actually missing
    for text, (_, processes) in nsys_messages(db).items():
        if missing or not GUESS.search(text):
            times = f" ({len(processes)} times)" if len(processes) > 1 else ""
            messages.append(Issue("nsys-message", "warning", 1.0, f"nsys warns: {' '.join(text.split())}{times}"))
    return (*_whole_graphs(db, ops), *_overhead(db, ops), *_lost(launches, missing), *messages)


def launch_names(db: Database) -> list[int]:
    """Ids of the names of calls that launch a kernel; none if launches cannot be compared with kernels.

    During CUDA graph capture, a launch call only adds a node: in a process that captured graphs, no launches are
    counted.
    """
    if not db.has(_RUNTIME, "nameId") or not db.has(_KERNEL):
        return []
    names = db.ids_like("%LaunchKernel%", "%LaunchCooperativeKernel%", "%StreamBeginCapture%")
    return [] if any("BeginCapture" in name for name in names.values()) else list(names)


def lost_launches(db: Database) -> tuple[int, int]:
    """Number of calls that launched a kernel, and the number of those kernels that are not in the capture."""
    names = launch_names(db)
    launches = db.count(_RUNTIME, [Where("nameId", names)]) if names else 0
    if not launches:
        return 0, 0
    is_alone = [Where("graphNodeId", (0,), or_invalid=True)] if db.has(_KERNEL, "graphNodeId") else []
    return launches, max(launches - db.count(_KERNEL, is_alone), 0)


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
    names = db.ids_like("cudaGraphLaunch%", "cuGraphLaunch%")
    rows = db.rows(_RUNTIME, ("correlationId", "globalTid"), [Where("nameId", names)]) if names else []
    launches = [row for row in rows if isinstance(row[1], int)]
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
    read = db.columns("PROFILER_OVERHEAD", {"start": "start", "end": "end"})
    lengths = (read["end"] - read["start"])[(read["start"] >= first) & (read["end"] <= last)]
    backwards, overhead_ns = int(np.count_nonzero(lengths < 0)), int(lengths.sum())
    if backwards:
        raise db.refuse(f"{backwards} rows of PROFILER_OVERHEAD end before they begin")
    if overhead_ns <= _OVERHEAD_SHARE * (last - first):
        return []
    text = (
        f"the profiler itself took {overhead_ns / 1e6:.1f} ms of the {(last - first) / 1e6:.1f} ms window; CPU times "
        "and gaps are too long, GPU times are not touched: record more steps, or skip the first"
    )
    return [Issue("overhead", "warning", overhead_ns / max(last - first, 1), text)]


def nsys_messages(db: Database) -> dict[str, tuple[int, list[int | None]]]:
    """Warnings and errors of nsys, most severe first: the severity, and the process of each time it was given."""
    if not db.has("DIAGNOSTIC_EVENT", "severity", "text"):
        return {}
    columns = [name for name in ("severity", "text", "globalPid") if db.has("DIAGNOSTIC_EVENT", name)]
    messages: dict[str, tuple[int, list[int | None]]] = {}
    for severity, text, *process in db.rows("DIAGNOSTIC_EVENT", columns, [Where("severity", (_WARNING, _ERROR))]):
        if text is not None:
            worst, processes = messages.get(str(text), (severity, []))
            processes.append(process[0] if process else None)
            messages[str(text)] = max(worst, severity), processes
    return dict(sorted(messages.items(), key=lambda message: (-message[1][0], message[0])))
