"""CUDA API calls, profiler overheads and system calls in an nsys export, and PyTorch operators in its NVTX events."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from nvprof_kit._trace.files.database import Database, Where, among
from nvprof_kit._trace.frames import MISSING_PAYLOAD, labels, make_frame
from nvprof_kit._trace.joins import distinct, launching_calls
from nvprof_kit._trace.nsys.nvtx import Nvtx
from nvprof_kit._trace.nsys.sources import NAMES, RUNTIME, Columns, process_of, read_columns, strings_of
from nvprof_kit._trace.schema import CALL_KINDS, LOADS_CODE, Trace

_LAUNCHING, _BUSY, _WAITS = (NAMES["patterns"][names] for names in ("launching", "busy", "waits"))
_TABLES = {"api": RUNTIME, "overhead": "PROFILER_OVERHEAD", "system": "OSRT_API"}
_COLUMNS = NAMES["calls"]
_IS_OPERATOR = re.compile("aten::.*|.*, (seq|op_id) = .*", re.IGNORECASE | re.DOTALL)
Fetched = dict[str, Columns]
"""Plain columns of calls by kind, as in the file, with names as ids."""


def fetch_launches(db: Database, timed: bool = False) -> Fetched:
    """The calls that launch, copy or set, in the file; thread-safe.

    Args:
        db: The file.
        timed: Whether to read when they ended.
    """
    columns = {name: column for name, column in _COLUMNS.items() if timed or name != "end_ns"}
    return {"api": read_columns(db, RUNTIME, columns, [Where("nameId", db.ids_like(*_LAUNCHING), or_null=True)])}


def fetch_calls(db: Database, busy: bool = False) -> Fetched:
    """The calls in the file; thread-safe.

    Args:
        db: The file.
        busy: Whether to read only CUDA calls that launch, wait, allocate or free, and overheads.
    """
    where = {"system": [Where("nameId", db.ids_like(*_WAITS), or_null=True)]}
    if busy:
        where["api"] = [Where("nameId", db.ids_like(*_LAUNCHING, *_BUSY), or_null=True)]
    fetched = {
        kind: read_columns(db, table, _COLUMNS, where.get(kind, ()))
        for kind, table in _TABLES.items()
        if not (busy and kind == "system")
    }
    fetched["overhead"]["correlation"] = np.full(len(fetched["overhead"]["tid"]), -1, dtype=np.int64)
    return fetched


def launches_of(db: Database, fetched: Fetched, timed: bool = False) -> Columns:
    """Columns of the schema's ``api``: the fetched calls with names of launches, copies and memsets."""
    return _as_api(fetched["api"], among(fetched["api"]["name"], [-1, *db.ids_like(*_LAUNCHING)]), timed)


def _as_api(calls: Columns, chosen: np.ndarray, timed: bool) -> Columns:
    rows: Any = slice(None) if chosen.all() else np.flatnonzero(chosen)
    columns = {name: calls[name][rows] for name in ("start_ns", "tid", "correlation")}
    durations = {"duration_ns": calls["end_ns"][rows] - columns["start_ns"]} if timed else {}
    return {**columns, "pid": process_of(columns["tid"]), **durations}


def with_missed_launches(db: Database, trace: Trace) -> Trace:
    """Add calls with other names that share a correlation id with an operation."""
    keys = ("pid", "correlation", "start_ns")
    is_missed = (trace.launching_calls < 0) & (trace.ops["correlation"].to_numpy() >= 0)
    if not is_missed.any() or RUNTIME not in db.tables:
        return trace
    calls = read_columns(db, RUNTIME, _COLUMNS, [Where("nameId", db.ids_like(*_LAUNCHING), excluded=True)])
    all_calls = _as_api(calls, np.ones(len(calls["tid"]), dtype=bool), timed="duration_ns" in trace.api)
    rows = launching_calls(all_calls, {name: trace.ops[name].to_numpy()[is_missed] for name in keys})
    rows = np.unique(rows[rows >= 0])
    api = {name: np.append(trace.api[name].to_numpy(), all_calls[name][rows]) for name in all_calls}
    return replace(trace, api=make_frame("api", api)) if len(rows) else trace


def read_calls(db: Database, fetched: Fetched, nvtx: Nvtx | None) -> Columns:
    """Columns of the schema's ``calls``: CUDA calls, profiler overheads, calls of the operating system, and PyTorch
    operators, if ``emit_nvtx`` or ``nsys --pytorch`` wrote ranges for them.

    Args:
        db: The file.
        fetched: The result of `fetch_calls`; it is emptied.
        nvtx: The NVTX events with the operators; None for none.
    """
    if "system" in fetched:  # no figure is a sum of them
        has_end = fetched["system"]["end_ns"] >= fetched["system"]["start_ns"]
        fetched["system"] = {name: values[has_end] for name, values in fetched["system"].items()}
    calls_of_kind: list[Columns] = []
    names: list[str] = []
    for kind in [*fetched]:
        calls = fetched.pop(kind)
        ids, index = distinct(calls.pop("name"))
        strings = strings_of(db, ids)
        calls_of_kind.append({**calls, "name": index.astype(np.int32) + len(names), "kind": _kinds(kind, len(index))})
        names += [re.sub(r"_v\d+$", "", strings.get(id_) or "(unnamed call)") for id_ in ids.tolist()]
    if nvtx is not None:
        calls, operators = _operators(db, nvtx)
        calls_of_kind.append({**calls, "name": calls["name"] + len(names)})
        names += operators
    # pop: the columns as they were read are free before the next is made
    columns = {name: np.concatenate([calls.pop(name) for calls in calls_of_kind]) for name in [*calls_of_kind[0]]}
    return {**columns, "name": labels(columns["name"], names), "pid": process_of(columns["tid"])}


def _kinds(kind: str, count: int) -> np.ndarray:
    return np.full(count, CALL_KINDS.index(kind), dtype=np.int8)


def _operators(db: Database, nvtx: Nvtx) -> tuple[Columns, list[str]]:
    """Ranges that PyTorch emitted for its operators: ``aten::addmm, seq = 12``; and their names."""
    import pandas

    events = nvtx.events
    code, texts = pandas.factorize(np.where(events["text_id"] < 0, events["text"], ""))
    ids, index = np.unique(events["text_id"], return_inverse=True)
    labels_of = [db.strings.get(id_, "") for id_ in ids.tolist()]
    is_range = (events["kind"] == 59) & (events["end"] != MISSING_PAYLOAD)
    is_text, is_string = (
        np.array([_IS_OPERATOR.fullmatch(str(text)) is not None for text in candidates], dtype=bool)
        for candidates in (texts, labels_of)
    )
    rows = np.flatnonzero(is_range & (is_text[code] | is_string[index]))
    row_labels = [labels_of[index[row]] or texts[code[row]] for row in rows.tolist()]
    names, code = np.unique([text.partition(",")[0] for text in row_labels], return_inverse=True)
    columns = {"start_ns": events["start"], "end_ns": events["end"], "tid": events["tid"]}
    return {
        **{name: values[rows] for name, values in columns.items()},
        "correlation": np.full(len(rows), -1, dtype=np.int64),
        "kind": _kinds("operator", len(rows)),
        "name": code.astype(np.int32),
    }, names.tolist()


def read_loads(db: Database, calls: Columns | None = None) -> Columns:
    """Columns of the schema's ``loads``: of all CUDA calls in the file, which are read unless they are given."""
    ids: Collection[int] = [id_ for id_, text in db.ids_like("cu%Load%", "cuLink%").items() if LOADS_CODE.match(text)]
    if calls is not None:
        rows = np.flatnonzero(among(calls["name"], ids))
        return {name: calls[name][rows] for name in ("start_ns", "end_ns")}
    return read_columns(db, RUNTIME, {"start_ns": "start", "end_ns": "end"}, [Where("nameId", ids)])
