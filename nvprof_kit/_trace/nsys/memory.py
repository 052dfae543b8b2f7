"""Memory data in an nsys export: the NVTX marks of layer ranges, and CUDA allocations."""

from __future__ import annotations

from typing import Any

import numpy as np

from nvprof_kit._trace.files.database import Database, Int64Array
from nvprof_kit._trace.frames import distinct_rows, labels
from nvprof_kit._trace.nsys.sources import read_columns
from nvprof_kit._trace.nsys.tables import RUNTIME, Domains, process_of, read_nvtx

Columns = dict[str, Any]

_EVENTS = "CUDA_GPU_MEMORY_USAGE_EVENTS"
_MARK = 34
_KINDS = ("pageable", "pinned", "device", "array", "managed", "static", "managed static", "unknown")
"""Names by ENUM_CUDA_MEM_KIND."""


def read_marks(db: Database, domains: Domains, domain: str) -> Columns:
    """Columns of the schema's ``marks`` for one domain, or several separated by commas."""
    read = read_nvtx(db, domains, domain, (_MARK,))
    names = {"time_ns": "start"} | {name: name for name in ("pid", "tid", "category", "text", "payload")}
    return {name: read[source] for name, source in names.items()}


def read_allocations(db: Database) -> Columns:
    """Columns of the schema's ``allocations``; empty if nsys traced none."""
    if _EVENTS not in db.tables:
        empty: Columns = {name: np.empty(0, dtype=np.int64) for name in ("time_ns", "pid", "tid", "call_ns", "device")}
        return {**empty, "bytes": np.empty(0, dtype=np.int64), "kind": labels(np.empty(0, dtype=np.int64), ())}
    read = read_columns(
        db,
        _EVENTS,
        {
            "time": "start",
            "bytes": "bytes",
            "freed": "memoryOperationType",
            "pid": "globalPid",
            "device": "deviceId",
            "kind": "memKind",
            "correlation": "correlationId",
        },
    )
    if (strange := (read["kind"] < 0) | (read["kind"] >= len(_KINDS))).any():
        db.warn(f"{_EVENTS}.memKind is {read['kind'][strange][0]} in {int(strange.sum())} rows: memory of unknown kind")
    tid, call = _calls(db, read["pid"], read["correlation"])
    return {
        "time_ns": read["time"],
        "pid": read["pid"],
        "tid": tid,
        "call_ns": call,
        "device": read["device"],
        "bytes": np.where(read["freed"] == 0, read["bytes"], -read["bytes"]),
        "kind": labels(np.where((read["kind"] < 0) | (read["kind"] >= len(_KINDS)), 7, read["kind"]), _KINDS),
    }


def _calls(db: Database, pid: Int64Array, correlation: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Thread and start of each event's call, joined by process and correlation id; -1 if there is none."""
    none = np.full(len(pid), -1, dtype=np.int64)
    if RUNTIME not in db.tables:
        return none, none
    calls = db.columns(RUNTIME, {"start": "start", "tid": "globalTid", "correlation": "correlationId"})
    is_joined = (calls["correlation"] != -1) & np.isin(calls["correlation"], correlation)
    calls = {name: values[is_joined] for name, values in calls.items()}
    if not len(calls["start"]):
        return none, none
    call_keys = (process_of(calls["tid"]), calls["correlation"])
    _, code = distinct_rows(*(np.concatenate(both) for both in zip(call_keys, (pid, correlation), strict=True)))
    of_known, of_asked = np.split(code, [len(calls["start"])])
    order = np.argsort(of_known, kind="stable")
    position = np.minimum(np.searchsorted(of_known[order], of_asked), len(order) - 1)
    rows = order[position]
    matched = of_known[rows] == of_asked
    return np.where(matched, calls["tid"][rows], -1), np.where(matched, calls["start"][rows], -1)
