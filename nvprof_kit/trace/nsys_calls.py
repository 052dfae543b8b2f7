"""CUDA API calls and the profiler's own interruptions of an nsys export, and what memory its copies touch."""

from __future__ import annotations

from typing import Any

import numpy as np

from nvprof_kit.trace.frames import labels
from nvprof_kit.trace.schema import CALL_KINDS
from nvprof_kit.trace.sqlite import Database, Int64Array, integer_list

_TABLES = {
    "api": ("CUPTI_ACTIVITY_KIND_RUNTIME", "correlationId"),
    "overhead": ("PROFILER_OVERHEAD", "-1"),
}
_PID_MASK = ~0xFFFFFF
_HOST_MEMORY = {0: "pageable", 1: "pinned", 4: "managed"}  # ENUM_CUDA_MEM_KIND; the others are on a device


def read_calls(db: Database) -> dict[str, Any]:
    """Columns of the schema's ``calls``: every CUDA runtime and driver call, and every overhead of the profiler."""
    selects = [
        f'SELECT start AS start_ns, "end" AS end_ns, globalTid AS tid, {correlation} AS correlation, '
        f"{CALL_KINDS.index(kind)} AS kind, nameId AS name FROM {table}"
        for kind, (table, correlation) in _TABLES.items()
        if db.has(table, "start", "end", "globalTid", "nameId")
    ]
    if not selects:
        return {name: np.empty(0, dtype=np.int64) for name in ("start_ns", "end_ns", "tid", "pid", "correlation")} | {
            "kind": np.empty(0, dtype=np.int8),
            "name": np.empty(0, dtype=object),
        }
    read = db.columns(" UNION ALL ".join(selects))
    return {
        **{name: read[name] for name in ("start_ns", "end_ns", "tid", "correlation")},
        "pid": read["tid"] & _PID_MASK,
        "kind": read["kind"].astype(np.int8),
        "name": _call_names(db, read["name"]),
    }


def _call_names(db: Database, ids: Int64Array) -> Any:
    """Names without the ABI version behind them: ``cudaLaunchKernel_v7000`` is ``cudaLaunchKernel``."""
    known, which = np.unique(ids, return_inverse=True)
    strings = dict(db.rows(f"SELECT id, value FROM StringIds WHERE id IN ({integer_list(known)})"))
    return labels(which, [_plain(str(strings.get(one, ""))) for one in known.tolist()])


def _plain(name: str) -> str:
    head, mark, version = name.rpartition("_v")
    return head if mark and version.isdecimal() else name


def host_memory_item(db: Database, table: str) -> str:
    """One item of a SELECT: the host's end of a copy as a code of `host_memory_names`, -1 where it has none."""
    if not db.has(table, "srcKind", "dstKind"):
        return "-1 AS host_memory"
    codes = integer_list(_HOST_MEMORY)
    return (
        f"CASE WHEN srcKind IN ({codes}) THEN srcKind WHEN dstKind IN ({codes}) THEN dstKind ELSE -1 END AS host_memory"
    )


def host_memory_names(codes: Int64Array) -> Any:
    """The column ``host_memory`` from its codes."""
    known, which = np.unique(codes, return_inverse=True)
    return labels(which, [_HOST_MEMORY.get(one, "") for one in known.tolist()])
