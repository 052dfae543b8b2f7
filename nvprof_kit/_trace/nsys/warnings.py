"""Warnings about missing or distorted data in an nsys capture, each with what to do."""

from __future__ import annotations

import re

import numpy as np

from nvprof_kit._trace.files.database import Database, Where, among
from nvprof_kit._trace.nsys.sources import Columns, check_rows, process_of, read_columns
from nvprof_kit._trace.schema import OP_KINDS, Losses
from nvprof_kit.issues import Issue

_WARNING, _ERROR = 2, 3
_OVERHEAD_SHARE = 0.01
_LOST_SHARE = 0.001
_GRAPH_LAUNCHES = ("cudaGraphLaunch%", "cuGraphLaunch%")

GUESS = re.compile(r"\bmight\b|\bmay\b|does the process use|is not supported by this build", re.IGNORECASE)
"""nsys messages about possibly missing data. nsys 2024.2 writes some of them into every partial capture and under every
newer driver; `losses_of` tells whether data is actually missing.
"""


def losses_of(db: Database, calls: Columns, ops: Columns) -> Losses:
    """What nsys lost or took. While a program captures a CUDA graph, a launch call only adds a node: launches are then
    not compared with kernels.

    Args:
        db: The export.
        calls: Its CUDA calls, all that launch something among them, with names as ids.
        ops: Columns of the schema's ``ops``.
    """
    launch_names = db.ids_like("%LaunchKernel%", "%LaunchCooperativeKernel%", "%StreamBeginCapture%")
    is_compared = len(ops["kind"]) and not any("BeginCapture" in name for name in launch_names.values())
    launches = int(np.count_nonzero(among(calls["name"], launch_names))) if is_compared else 0
    kernels = int(np.count_nonzero((ops["kind"] == OP_KINDS.index("kernel")) & (ops["graph_node"] < 0)))
    replayed, whole_graphs = np.flatnonzero(among(calls["name"], db.ids_like(*_GRAPH_LAUNCHES))), 0
    pids, correlations = process_of(calls["tid"][replayed]), calls["correlation"][replayed]
    for process in np.unique(pids).tolist():
        by_node = ops["correlation"][(ops["graph_node"] >= 0) & (ops["pid"] == process)]
        whole_graphs += int((~np.isin(correlations[pids == process], by_node)).sum())
    return Losses(launches, max(launches - kernels, 0), len(replayed), whole_graphs, _overhead(db, ops))


def capture_warnings(db: Database, ops: Columns, losses: Losses) -> list[Issue]:
    """All warnings that follow from the export's tables.

    Args:
        db: The export.
        ops: Columns of the schema's ``ops``.
        losses: The result of `losses_of`.
    """
    issues = []
    launches, missing, count, unseen, overhead_ns = losses
    if unseen:
        issues.append(Issue.of("whole-graphs:nsys", unseen / count, count=unseen, replays=count))
    window = max(int(ops["end_ns"].max()) - int(ops["start_ns"].min()), 1) if len(ops["start_ns"]) else 1
    if overhead_ns > _OVERHEAD_SHARE * window:
        issues.append(Issue.of("overhead", overhead_ns / window, overhead_ms=overhead_ns / 1e6, window_ms=window / 1e6))
    if missing > _LOST_SHARE * launches:
        issues.append(Issue.of("lost-kernels", missing / launches, lost=missing, launches=launches))
    for text, (_, processes) in nsys_messages(db).items():
        # nsys warns of possible losses too, which count only if data is actually missing
        if missing or not GUESS.search(text):
            message = " ".join(text.split()) + (f" ({len(processes)} times)" if len(processes) > 1 else "")
            issues.append(Issue.of("nsys-message", message=message))
    return issues


def _overhead(db: Database, ops: Columns) -> int:
    """Profiler overhead during operations in ns."""
    check_rows(db, "PROFILER_OVERHEAD")  # the comparisons below would leave out what is no number
    overhead = read_columns(db, "PROFILER_OVERHEAD", {"start": "start", "end": "end"})
    if not len(overhead["start"]) or not len(ops["start_ns"]):
        return 0
    is_inside = (overhead["start"] >= ops["start_ns"].min()) & (overhead["end"] <= ops["end_ns"].max())
    lengths = (overhead["end"] - overhead["start"])[is_inside]
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
