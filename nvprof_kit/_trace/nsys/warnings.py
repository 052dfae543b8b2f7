"""Warnings about missing or distorted data in an nsys capture, each with what to do."""

from __future__ import annotations

import re

import numpy as np

from nvprof_kit._trace.files.database import Database, Where
from nvprof_kit._trace.nsys.sources import KERNEL, RUNTIME, Columns, check_rows, process_of, read_columns
from nvprof_kit._trace.schema import OP_KINDS
from nvprof_kit.issues import Issue, Severity

_WARNING, _ERROR = 2, 3
_OVERHEAD_SHARE = 0.01
_LOST_SHARE = 0.001
_GRAPH_LAUNCHES = ("cudaGraphLaunch%", "cuGraphLaunch%")

GUESS = re.compile(r"\bmight\b|\bmay\b|does the process use|is not supported by this build", re.IGNORECASE)
"""nsys messages about possibly missing data. nsys 2024.2 writes some of them into every partial capture and under every
newer driver; `lost_launches` checks whether data is actually missing.
"""


def capture_warnings(db: Database, ops: Columns, launches: int) -> list[Issue]:
    """All warnings that follow from the export's tables.

    Args:
        db: The export.
        ops: Columns of the schema's ``ops``.
        launches: Number of calls that launched a kernel, of those that `launch_names` names.
    """
    issues = []

    def warn(code: str, share: float, text: str, severity: Severity = "warning") -> None:
        issues.append(Issue(code, severity, share, text))

    replays, unseen = graph_launches(db), 0
    for process in np.unique(replays["pid"]).tolist():
        by_node = ops["correlation"][(ops["graph_node"] >= 0) & (ops["pid"] == process)]
        unseen += int((~np.isin(replays["correlation"][replays["pid"] == process], by_node)).sum())
    if unseen:
        count = len(replays["pid"])
        warn("whole-graphs", unseen / count,
             f"{unseen} of {count} CUDA-graph replays were traced as a whole, so their kernels belong to no layer; "
             "record with --cuda-graph-trace=node")  # fmt: skip
    window = max(int(ops["end_ns"].max()) - int(ops["start_ns"].min()), 1) if len(ops["start_ns"]) else 1
    if (overhead_ns := _overhead(db, ops)) > _OVERHEAD_SHARE * window:
        warn("overhead", overhead_ns / window,
             f"the profiler itself took {overhead_ns / 1e6:.1f} ms of the {window / 1e6:.1f} ms window; CPU times and "
             "gaps are too long, GPU times are not touched: record more steps, or skip the first")  # fmt: skip
    alone = (ops["kind"] == OP_KINDS.index("kernel")) & (ops["graph_node"] < 0)
    missing = max(launches - int(np.count_nonzero(alone)), 0)
    if missing > _LOST_SHARE * launches:
        warn("lost-kernels", missing / launches,
             f"{missing:,} of {launches:,} kernel launches have no kernel in the capture: GPU times are too small; end "
             "the window after torch.cuda.synchronize(), capture fewer steps, or use an nsys as new as the driver",
             "error")  # fmt: skip
    for text, (_, processes) in nsys_messages(db).items():
        # nsys warns of possible losses too, which count only if data is actually missing
        if missing or not GUESS.search(text):
            times = f" ({len(processes)} times)" if len(processes) > 1 else ""
            warn("nsys-message", 1.0, f"nsys warns: {' '.join(text.split())}{times}")
    return issues


def launch_names(db: Database) -> list[int]:
    """Ids of the names of calls that launch a kernel; none if launches cannot be compared with kernels.

    During CUDA graph capture, a launch call only adds a node: in a process that captured graphs, no launches are
    counted.
    """
    if not db.has(RUNTIME, "nameId") or not db.has(KERNEL):
        return []
    names = db.ids_like("%LaunchKernel%", "%LaunchCooperativeKernel%", "%StreamBeginCapture%")
    return [] if any("BeginCapture" in name for name in names.values()) else list(names)


def lost_launches(db: Database) -> tuple[int, int]:
    """Number of calls that launched a kernel, and the number of those kernels that are not in the capture."""
    names = launch_names(db)
    launches = db.count(RUNTIME, [Where("nameId", names)]) if names else 0
    if not launches:
        return 0, 0
    is_alone = [Where("graphNodeId", (0,), or_null=True)] if db.has(KERNEL, "graphNodeId") else []
    return launches, max(launches - db.count(KERNEL, is_alone), 0)


def graph_launches(db: Database) -> Columns:
    """Process and correlation id of the CUDA graph launches."""
    names = db.ids_like(*_GRAPH_LAUNCHES)
    if not names:
        return dict.fromkeys(("pid", "correlation"), np.empty(0, dtype=np.int64))
    columns = {"pid": "globalTid", "correlation": "correlationId"}
    read = read_columns(db, RUNTIME, columns, [Where("nameId", names)])
    return {**read, "pid": process_of(read["pid"])}


def _overhead(db: Database, ops: Columns) -> int:
    """Profiler overhead during operations in ns."""
    check_rows(db, "PROFILER_OVERHEAD")  # the comparisons below would leave out what is no number
    read = read_columns(db, "PROFILER_OVERHEAD", {"start": "start", "end": "end"})
    if not len(read["start"]) or not len(ops["start_ns"]):
        return 0
    is_inside = (read["start"] >= ops["start_ns"].min()) & (read["end"] <= ops["end_ns"].max())
    lengths = (read["end"] - read["start"])[is_inside]
    if backwards := int(np.count_nonzero(lengths < 0)):
        raise db.refuse(f"{backwards} rows of PROFILER_OVERHEAD end before they begin")
    return int(lengths.sum())


def nsys_messages(db: Database) -> dict[str, tuple[int, list[int | None]]]:
    """Warnings and errors of nsys, most severe first: the severity, and the process of each time it was given."""
    if not db.has("DIAGNOSTIC_EVENT", "severity", "text"):
        return {}
    columns = [name for name in ("severity", "text", "globalPid") if db.has("DIAGNOSTIC_EVENT", name)]
    messages: dict[str, tuple[int, list[int | None]]] = {}
    for severity, text, *process in db.rows("DIAGNOSTIC_EVENT", columns, [Where("severity", (_WARNING, _ERROR))]):
        if text is not None:
            worst, processes = messages.get(str(text), (severity, []))
            processes.append(process[0] if process and isinstance(process[0], int) else None)
            messages[str(text)] = max(worst, severity), processes
    return dict(sorted(messages.items(), key=lambda message: (-message[1][0], message[0])))
