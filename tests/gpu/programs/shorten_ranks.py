"""Shorten a capture of take_ranks.sh to its first steps, so that many of them fit into a repository.

python shorten_ranks.py IN.sqlite OUT.sqlite STEPS      what began, or was launched, after those steps is left out
python shorten_ranks.py IN.json OUT.json STEPS          the same; and operators other than collectives, and arrows
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from pathlib import Path
from typing import Any

PAIRED = ("KERNEL", "MEMCPY", "MEMSET", "SYNCHRONIZATION", "CUDA_EVENT")


def shorten_nsys(source: Path, target: Path, steps: int) -> None:
    shutil.copyfile(source, target)
    db = sqlite3.connect(target)
    starts = db.execute(
        "SELECT e.start FROM NVTX_EVENTS e JOIN StringIds s ON s.id = e.textId "
        "WHERE e.eventType = 59 AND s.value LIKE 'step %' ORDER BY e.start"
    ).fetchall()
    (cut,) = starts[steps]
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    for table in tables & {"NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME", "PROFILER_OVERHEAD"}:
        what = "eventType IN (34, 59, 60) AND " if table == "NVTX_EVENTS" else ""
        db.execute(f"DELETE FROM {table} WHERE {what}start >= ?", (cut,))
    for table in tables & {f"CUPTI_ACTIVITY_KIND_{name}" for name in PAIRED}:
        db.execute(
            f"DELETE FROM {table} WHERE correlationId NOT IN (SELECT correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME)"
        )
    db.commit()
    db.execute("VACUUM")
    db.close()


def shorten_kineto(source: Path, target: Path, steps: int) -> None:
    trace = json.loads(source.read_text())
    events: list[dict[str, Any]] = trace["traceEvents"]
    starts = sorted(event["ts"] for event in events if str(event.get("name")).startswith("nvprof_kit:step:"))
    launches = {
        event["args"].get("correlation")
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and event["ts"] < starts[steps]
    }

    def kept(event: dict[str, Any]) -> bool:
        kind, name = event.get("cat"), str(event.get("name"))
        if kind in ("kernel", "gpu_memcpy", "gpu_memset", "cuda_sync"):
            return event["args"].get("correlation") in launches
        if kind in ("ac2g", "fwdbwd", "async_cpu_to_gpu", "gpu_user_annotation"):
            return False
        if kind == "cpu_op" and not name.startswith(("nvprof_kit:", "record_param_comms")):
            return False
        return event.get("ph") == "M" or event["ts"] < starts[steps]

    trace["traceEvents"] = [event for event in events if kept(event)]
    trace["traceName"] = target.name
    target.write_text(json.dumps(trace, separators=(",", ":")))


if __name__ == "__main__":
    shorten = shorten_nsys if sys.argv[1].endswith(".sqlite") else shorten_kineto
    shorten(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
