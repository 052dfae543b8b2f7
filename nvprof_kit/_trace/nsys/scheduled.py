"""CPU scheduling of threads in an nsys export: paired context switches."""

from __future__ import annotations

from typing import Any

import numpy as np

from nvprof_kit._trace.files.database import Database
from nvprof_kit._trace.nsys.sources import read_columns
from nvprof_kit._trace.nsys.tables import process_of

_TABLE = "SCHED_EVENTS"


def read_scheduled(db: Database) -> dict[str, Any]:
    """Columns of the schema's ``scheduled``; empty if nsys did not trace context switches.

    A thread already on a CPU when tracing begins runs from the first switch in the capture; a thread still on a CPU at
    the end runs until the last switch.
    """
    if _TABLE not in db.tables:
        return {name: np.empty(0, dtype=np.int64) for name in ("start_ns", "end_ns", "pid", "tid")}
    read = read_columns(db, _TABLE, {"start": "start", "put_on": "isSchedIn", "tid": "globalTid"})
    read = {name: values[read["tid"] != -1] for name, values in read.items()}
    order = np.lexsort((read["start"], read["tid"]))  # the sort is stable: at equal times the file's order holds
    time, tid, put_on = (read[name][order] for name in ("start", "tid", "put_on"))
    first, last = int(time.min(initial=0)), int(time.max(initial=0))
    same = np.append(tid[1:] == tid[:-1], False)
    ends = np.where(same, np.append(time[1:], last), last)
    begun = put_on == 1
    came_off = ~begun & ~np.concatenate(([False], same[:-1]))
    return {
        "start_ns": np.concatenate([time[begun], np.full(int(came_off.sum()), first)]),
        "end_ns": np.concatenate([ends[begun], time[came_off]]),
        "pid": process_of(np.concatenate([tid[begun], tid[came_off]])),
        "tid": np.concatenate([tid[begun], tid[came_off]]),
    }
