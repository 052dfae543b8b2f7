"""Tables of an nsys export that are read on request: memory marks and allocations, GPU metrics samples in both of their
formats, and CPU scheduling of threads.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from nvprof_kit._trace.files.checks import without_doubles
from nvprof_kit._trace.files.database import Database, Int64Array
from nvprof_kit._trace.frames import distinct_rows, labels
from nvprof_kit._trace.nsys.sources import check_rows, read_columns
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


_GPU = 0xFF  # the low byte of a type id is the GPU number (nsys user guide)
_UNIT = re.compile(r"\s*\[[^\]]*\]$")
_AVERAGE_OF_WARPS = re.compile(r"\[Avg[^\]]*\]$")
_KNOWN = "SM Active"
_NO_TIME = int(np.iinfo(np.int64).min)


def read_samples(db: Database) -> Columns:
    """Columns of the schema's ``samples``; empty if the capture has none."""
    read = _table(db) if "GPU_METRICS" in db.tables else _events(db)
    devices = {}
    if db.has("TARGET_INFO_GPU", "id", "cuDevice"):
        rows = db.rows("TARGET_INFO_GPU", ("id", "cuDevice"))
        devices = {gpu: ordinal for gpu, ordinal in rows if ordinal is not None}
    gpus, gpu_of_row = np.unique(read["device"] & _GPU, return_inverse=True)
    read["device"] = np.array([devices.get(gpu, gpu) for gpu in gpus.tolist()], dtype=np.int64)[gpu_of_row]
    return read


def _table(db: Database) -> Columns:
    """From GPU_METRICS, written by nsys 2023 and newer; metric ids are only valid within one file."""
    named: dict[tuple[int, int], str] = {}
    if "TARGET_INFO_GPU_METRICS" in db.tables:
        check_rows(db, ("TARGET_INFO_GPU_METRICS",))
        rows = db.rows("TARGET_INFO_GPU_METRICS", ("typeId", "metricId", "metricName"))
        named = {(type_, metric): str(name) for type_, metric, name in rows if not _AVERAGE_OF_WARPS.search(str(name))}
    sources = {"time": "timestamp", "type": "typeId", "metric": "metricId", "value": "value"}
    read = read_columns(db, "GPU_METRICS", sources, missing=_NO_TIME)
    if (timeless := read["time"] == _NO_TIME).any():
        read = {name: values[~timeless] for name, values in read.items()}
    (types, type_at), (metrics, metric_at) = (
        np.unique(read[column_name], return_inverse=True) for column_name in ("type", "metric")
    )
    names = [named.get((type_, metric), "") for type_ in types.tolist() for metric in metrics.tolist()]
    index = type_at * len(metrics) + metric_at
    keep = np.array([bool(name) for name in names], dtype=bool)[index]
    return {
        "time_ns": read["time"][keep],
        "device": read["type"][keep],
        "metric": labels(index[keep], [_UNIT.sub("", name) for name in names]),
        "value": read["value"][keep].astype(np.float64),
    }


def _events(db: Database) -> Columns:
    """From GENERIC_EVENTS.data, written by nsys 2022 and older: one object per sample, with numbers as strings."""
    times, types, metrics, values = [], [], [], []
    if db.has("GENERIC_EVENTS", "data", "typeId"):
        timestamp = "timestamp" if db.has("GENERIC_EVENTS", "timestamp") else "rawTimestamp"
        for time, raw_time, type_, data in db.rows("GENERIC_EVENTS", (timestamp, "rawTimestamp", "typeId", "data")):
            if f'"{_KNOWN}' not in str(data):
                continue
            when = raw_time if time is None else time
            if not (isinstance(when, int) and isinstance(type_, int)):
                raise db.refuse(f"GENERIC_EVENTS.rawTimestamp is {when!r} and typeId {type_!r} where a sample is")
            try:
                sample = json.loads(data, object_pairs_hook=without_doubles)
            except (ValueError, RecursionError):
                sample = None
            if not isinstance(sample, dict):
                raise db.refuse("GENERIC_EVENTS.data is not a JSON object where a sample is")
            for name, value in sample.items():
                if _AVERAGE_OF_WARPS.search(name) or not str(value).lstrip("-").replace(".", "", 1).isdigit():
                    continue
                times.append(int(when))
                types.append(int(type_))
                metrics.append(_UNIT.sub("", name))
                values.append(float(value))
    names = sorted(set(metrics))
    code_of_name = {name: number for number, name in enumerate(names)}
    return {
        "time_ns": np.array(times, dtype=np.int64),
        "device": np.array(types, dtype=np.int64),
        "metric": labels(np.array([code_of_name[name] for name in metrics], dtype=np.int64), names),
        "value": np.array(values, dtype=np.float64),
    }


def read_scheduled(db: Database) -> dict[str, Any]:
    """Columns of the schema's ``scheduled``; empty if nsys did not trace context switches.

    A thread already on a CPU when tracing begins runs from the first switch in the capture; a thread still on a CPU at
    the end runs until the last switch.
    """
    if "SCHED_EVENTS" not in db.tables:
        return {name: np.empty(0, dtype=np.int64) for name in ("start_ns", "end_ns", "pid", "tid")}
    read = read_columns(db, "SCHED_EVENTS", {"start": "start", "is_scheduled": "isSchedIn", "tid": "globalTid"})
    read = {name: values[read["tid"] != -1] for name, values in read.items()}
    order = np.lexsort((read["start"], read["tid"]))  # the sort is stable: at equal times the file's order holds
    time, tid, is_scheduled = (read[name][order] for name in ("start", "tid", "is_scheduled"))
    first, last = int(time.min(initial=0)), int(time.max(initial=0))
    same = np.append(tid[1:] == tid[:-1], False)
    ends = np.where(same, np.append(time[1:], last), last)
    begun = is_scheduled == 1
    came_off = ~begun & ~np.concatenate(([False], same[:-1]))
    return {
        "start_ns": np.concatenate([time[begun], np.full(int(came_off.sum()), first)]),
        "end_ns": np.concatenate([ends[begun], time[came_off]]),
        "pid": process_of(np.concatenate([tid[begun], tid[came_off]])),
        "tid": np.concatenate([tid[begun], tid[came_off]]),
    }
