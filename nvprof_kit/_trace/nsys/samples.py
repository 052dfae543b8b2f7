"""GPU metrics samples in an nsys export, in both formats: a separate table, and JSON in the generic events."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from nvprof_kit._trace.files.checks import without_doubles
from nvprof_kit._trace.files.database import Database
from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.nsys.sources import check_rows, read_columns

Columns = dict[str, Any]

_GPU = 0xFF  # the low byte of a type id is the GPU number (nsys user guide)
_UNIT = re.compile(r"\s*\[[^\]]*\]$")
_AVERAGE_OF_WARPS = re.compile(r"\[Avg[^\]]*\]$")
_KNOWN = "SM Active"
_NO_TIME = int(np.iinfo(np.int64).min)


def read_samples(db: Database) -> Columns:
    """Columns of the schema's ``samples``; empty if the capture has none."""
    read = _table(db) if "GPU_METRICS" in db.tables else _events(db)
    devices = _ordinals(db)
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
            for name, value in _sample(db, when, type_, data).items():
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


def _sample(db: Database, when: Any, type_: Any, data: str) -> dict[str, Any]:
    """The values of one sample by name."""
    if not (isinstance(when, int) and isinstance(type_, int)):
        raise db.refuse(f"GENERIC_EVENTS.rawTimestamp is {when!r} and typeId {type_!r} where a sample is")
    try:
        parsed = json.loads(data, object_pairs_hook=without_doubles)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise db.refuse("GENERIC_EVENTS.data is not a JSON object where a sample is")
    return parsed


def _ordinals(db: Database) -> dict[int, int]:
    """CUDA ordinals by GPU number."""
    if not db.has("TARGET_INFO_GPU", "id", "cuDevice"):
        return {}
    return {gpu: ordinal for gpu, ordinal in db.rows("TARGET_INFO_GPU", ("id", "cuDevice")) if ordinal is not None}
