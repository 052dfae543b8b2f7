"""Converts an nsys capture to a PyTorch trace, for tools that read only those."""

import sqlite3
from pathlib import Path

from support.captures import kineto_file
from support.captures.kineto_file import event

_TABLES = {"KERNEL": "kernel", "MEMCPY": "gpu_memcpy", "MEMSET": "gpu_memset"}
_COPIES = {
    1: "Memcpy HtoD (Pageable -> Device)",
    2: "Memcpy DtoH (Device -> Pinned)",
    8: "Memcpy DtoD (Device -> Device)",
}


def write(capture: Path, target: Path, rank: int = 0) -> None:
    """Write kernels, copies and CUDA calls of an nsys SQLite file of one process as a gzipped trace."""
    db = sqlite3.connect(f"file:{capture}?mode=ro", uri=True)
    names = dict(db.execute("SELECT id, value FROM StringIds"))
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    events = []
    for start, end, tid, correlation, name in db.execute(
        'SELECT start, "end", globalTid & 0xFFFFFF, correlationId, nameId FROM CUPTI_ACTIVITY_KIND_RUNTIME'
    ):
        times = start / 1000, (end - start) / 1000
        events.append(event("cuda_runtime", names[name].partition("_v")[0], *times, tid=tid, correlation=correlation))
    for table, category in _TABLES.items():
        if f"CUPTI_ACTIVITY_KIND_{table}" not in tables:
            continue
        label = {"KERNEL": "demangledName", "MEMCPY": "copyKind"}.get(table, "0")
        for start, end, device, stream, correlation, name in db.execute(
            f'SELECT start, "end", deviceId, streamId, correlationId, {label} FROM CUPTI_ACTIVITY_KIND_{table}'
        ):
            text = names[name] if table == "KERNEL" else _COPIES[name] if table == "MEMCPY" else "Memset (Device)"
            times, ids = (start / 1000, (end - start) / 1000), {"correlation": correlation, "device": device}
            events.append(event(category, text, *times, pid=device, tid=stream, stream=stream, **ids))
    kineto_file.write(target, events, schemaVersion=1, distributedInfo={"rank": rank})
