"""Tables of an nsys export that are read on request: memory allocations, GPU metrics samples in both of their formats,
and CPU scheduling of threads.
"""

from __future__ import annotations

import json
import re

import numpy as np

from nvprof_kit._trace.files.database import Database
from nvprof_kit._trace.frames import MISSING_PAYLOAD, labels
from nvprof_kit._trace.joins import launching_calls
from nvprof_kit._trace.nsys.sources import NAMES, RUNTIME, Columns, check_rows, process_of, read_columns

_EVENTS = "CUDA_GPU_MEMORY_USAGE_EVENTS"
_KINDS = ("pageable", "pinned", "device", "array", "managed", "static", "managed static", "unknown")
"""Names by ENUM_CUDA_MEM_KIND."""


def read_allocations(db: Database) -> Columns:
    """Columns of the schema's ``allocations``; empty if nsys traced none."""
    read = read_columns(db, _EVENTS, NAMES["allocations"])
    is_known = (read["kind"] >= 0) & (read["kind"] < len(_KINDS))
    if not is_known.all():
        unknown = read["kind"][~is_known]
        db.warn("rows:memory-kind", table=_EVENTS, kind=unknown[0], count=len(unknown))
    calls = read_columns(db, RUNTIME, {"start_ns": "start", "tid": "globalTid", "correlation": "correlationId"})
    calls["pid"] = process_of(calls["tid"])
    call = launching_calls(calls, read | {"start_ns": read["time_ns"]})
    read.pop("correlation")
    return {
        **read,
        "tid": np.append(calls["tid"], -1)[call],
        "call_ns": np.append(calls["start_ns"], -1)[call],
        "bytes": np.where(read["freed"] == 0, read["bytes"], -read["bytes"]),
        "kind": labels(np.where(is_known, read["kind"], _KINDS.index("unknown")), _KINDS),
    }


_GPU = 0xFF  # the low byte of a type id is the GPU number (nsys user guide)
_UNIT = re.compile(r"\s*\[[^\]]*\]$")
_AVERAGE_OF_WARPS = re.compile(r"\[Avg[^\]]*\]$")
_SAMPLED = '"SM Active'


def read_samples(db: Database) -> Columns:
    """Columns of the schema's ``samples``; empty if the capture has none."""
    read = _metrics(db) if "GPU_METRICS" in db.tables else _generic_events(db)
    devices = {}
    if db.has("TARGET_INFO_GPU", "id", "cuDevice"):
        rows = db.rows("TARGET_INFO_GPU", ("id", "cuDevice"))
        devices = {gpu: ordinal for gpu, ordinal in rows if ordinal is not None}
    gpus, gpu_of_row = np.unique(read["device"] & _GPU, return_inverse=True)
    read["device"] = np.array([devices.get(gpu, gpu) for gpu in gpus.tolist()], dtype=np.int64)[gpu_of_row]
    return read


def _metrics(db: Database) -> Columns:
    """From GPU_METRICS, written by nsys 2023 and newer; metric ids are only valid within one file."""
    names: dict[tuple[int, int], str] = {}
    if "TARGET_INFO_GPU_METRICS" in db.tables:
        check_rows(db, "TARGET_INFO_GPU_METRICS")
        rows = db.rows("TARGET_INFO_GPU_METRICS", ("typeId", "metricId", "metricName"))
        names = {(type_, metric): str(name) for type_, metric, name in rows if not _AVERAGE_OF_WARPS.search(str(name))}
    columns = {"time": "timestamp", "type": "typeId", "metric": "metricId", "value": "value"}
    read = read_columns(db, "GPU_METRICS", columns, missing=MISSING_PAYLOAD)
    types, type_index = np.unique(read["type"], return_inverse=True)
    metrics, metric_index = np.unique(read["metric"], return_inverse=True)
    name_of_pair = [names.get((type_, metric), "") for type_ in types.tolist() for metric in metrics.tolist()]
    pair = type_index * len(metrics) + metric_index
    keep = (read["time"] != MISSING_PAYLOAD) & np.array([bool(name) for name in name_of_pair], dtype=bool)[pair]
    return {
        "time_ns": read["time"][keep],
        "device": read["type"][keep],
        "metric": labels(pair[keep], [_UNIT.sub("", name) for name in name_of_pair]),
        "value": read["value"][keep].astype(np.float64),
    }


def _generic_events(db: Database) -> Columns:
    """From GENERIC_EVENTS.data, written by nsys 2022 and older: one object per sample, with numbers as strings."""
    samples: list[tuple[int, int, str, float]] = []
    if db.has("GENERIC_EVENTS", "data", "typeId"):
        timestamp = "timestamp" if db.has("GENERIC_EVENTS", "timestamp") else "rawTimestamp"
        for time, raw_time, type_, data in db.rows("GENERIC_EVENTS", (timestamp, "rawTimestamp", "typeId", "data")):
            if _SAMPLED not in str(data):
                continue
            when = raw_time if time is None else time
            if not (isinstance(when, int) and isinstance(type_, int)):
                raise db.refuse(f"GENERIC_EVENTS.rawTimestamp is {when!r} and typeId {type_!r} where a sample is")
            try:
                values = json.loads(data)
            except (ValueError, RecursionError):
                values = None
            if not isinstance(values, dict):
                raise db.refuse("GENERIC_EVENTS.data is not a JSON object where a sample is")
            samples += [
                (when, type_, _UNIT.sub("", name), float(value))
                for name, value in values.items()
                if not _AVERAGE_OF_WARPS.search(name) and str(value).lstrip("-").replace(".", "", 1).isdigit()
            ]
    times, types, metrics, numbers = zip(*samples, strict=True) if samples else ((), (), (), ())
    names, index = np.unique(np.array(metrics, dtype=object), return_inverse=True)
    return {
        "time_ns": np.array(times, dtype=np.int64),
        "device": np.array(types, dtype=np.int64),
        "metric": labels(index, names.tolist()),
        "value": np.array(numbers, dtype=np.float64),
    }


def read_scheduled(db: Database) -> Columns:
    """Columns of the schema's ``scheduled``; empty if nsys did not trace context switches.

    A thread already on a CPU when tracing begins runs from the first switch in the capture; a thread still on a CPU at
    the end runs until the last switch.
    """
    read = read_columns(db, "SCHED_EVENTS", {"start": "start", "is_scheduled": "isSchedIn", "tid": "globalTid"})
    read = {name: values[read["tid"] != -1] for name, values in read.items()}
    order = np.lexsort((read["start"], read["tid"]))  # the sort is stable: at equal times the file's order holds
    time, tid, is_scheduled = (read[name][order] for name in ("start", "tid", "is_scheduled"))
    first, last = int(time.min(initial=0)), int(time.max(initial=0))
    same = np.append(tid[1:] == tid[:-1], False)
    ends = np.where(same, np.append(time[1:], last), last)
    begun = is_scheduled == 1
    came_off = ~begun & ~np.concatenate(([False], same[:-1]))
    tid = np.concatenate([tid[begun], tid[came_off]])
    return {
        "start_ns": np.concatenate([time[begun], np.full(int(came_off.sum()), first)]),
        "end_ns": np.concatenate([ends[begun], time[came_off]]),
        "pid": process_of(tid),
        "tid": tid,
    }
