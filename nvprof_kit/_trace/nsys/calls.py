"""CUDA API calls and profiler overheads in an nsys export, and the host memory kind of its copies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nvprof_kit._trace.files.database import Database, Int64Array, Where
from nvprof_kit._trace.frames import MISSING_PAYLOAD, distinct, labels, spared
from nvprof_kit._trace.nsys.sources import read_columns, strings_of
from nvprof_kit._trace.nsys.tables import launches_among, read_launches
from nvprof_kit._trace.schema import CALL_KINDS, LOADS_CODE

_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_TABLES: Mapping[str, tuple[str, str | tuple[()]]] = {
    "api": (_RUNTIME, "correlationId"),
    "overhead": ("PROFILER_OVERHEAD", ()),
    "system": ("OSRT_API", ()),
}
_WAITS = (
    *("recv%", "read%", "pread%", "poll", "ppoll", "select", "pselect", "epoll_wait%", "%sleep", "fsync", "fdatasync"),
    *("send%", "write%", "pwrite%", "sem_%wait", "waitpid", "wait4", "accept%", "connect", "open%", "flock"),
)
"""Calls of the operating system in which a thread waits for a file, another process or time. Not those that wait for
another thread of its own: that thread says why.
"""
_BUSY = (
    *("%Launch%", "%Memcpy%", "%Memset%", "%GraphUpload%", "%MemPrefetch%", "%Synchronize%", "%Malloc%", "%MemAlloc%"),
    *("%MemFree%", "%HostAlloc%", "%HostRegister%", "%MemMap%", "%MemCreate%", "cudaFree%"),
)
_OPERATORS = ("aten::%", "%, seq = %", "%, op_id = %")
_IS_OPERATOR = re.compile("aten::.*|.*, (seq|op_id) = .*", re.IGNORECASE | re.DOTALL)
_PID_MASK = ~0xFFFFFF
_HOST_MEMORY = {0: "pageable", 1: "pinned", 4: "managed"}  # ENUM_CUDA_MEM_KIND; other values are device memory


_SPARE = {"start_ns": 0, "end_ns": 0, "tid": -1}
"""Values for "no call", after the last row."""

Fetched = dict[str, dict[str, Any]]
"""Plain columns of calls by kind, as in the file."""


def busy_calls(db: Database) -> tuple[Where, ...]:
    """The condition for CUDA calls that launch, wait, allocate or free."""
    return (Where("nameId", db.ids_like(*_BUSY), or_invalid=True),)


def fetch_calls(db: Database, where: Sequence[Where] = ()) -> Fetched:
    """The calls in the file; thread-safe.

    Args:
        db: The file.
        where: Conditions for the CUDA calls.
    """
    columns = {}
    for kind, (table, correlation) in _TABLES.items():
        conditions = {"api": where, "system": (Where("nameId", db.ids_like(*_WAITS)),)}.get(kind, ())
        if table in db.tables and not (kind == "system" and where):
            sources = {"start_ns": "start", "end_ns": "end", "tid": "globalTid", "correlation": correlation}
            columns[kind] = read_columns(db, table, {**sources, "name": "nameId"}, where=conditions)
    return columns


def launches_of(db: Database, fetched: Fetched, timed: bool) -> dict[str, Any]:
    """Columns of the schema's ``api``, from calls that are already read; see `tables.read_launches`."""
    return launches_among(db, fetched["api"], timed) if "api" in fetched else read_launches(db, timed)


def count_among(fetched: Fetched, names: list[int]) -> int:
    """Number of CUDA calls with these names."""
    return int(np.isin(fetched["api"]["name"], names).sum()) if names and "api" in fetched else 0


def read_calls(db: Database, fetched: Fetched | None = None, *, operators: bool = True) -> dict[str, Any]:
    """Columns of the schema's ``calls``: CUDA calls, profiler overheads, and PyTorch operators, if ``emit_nvtx`` or
    ``nsys --pytorch`` wrote ranges for them.

    Args:
        db: The file.
        fetched: The result of `fetch_calls`, if already available; it is emptied.
        operators: Whether to read the operators.
    """
    fetched = fetch_calls(db) if fetched is None else fetched
    parts = [_named(db, kind, fetched.pop(kind)) for kind in list(fetched)] + (_operators(db) if operators else [])
    names = [text for column_part in parts for text in column_part["texts"]]
    # pop: the columns as they were read are free before the next is made
    before = np.cumsum([0, *(len(column_part["texts"]) for column_part in parts)]).astype(np.int32)
    codes = [
        column_part.pop("code").astype(np.int32) + offset for column_part, offset in zip(parts, before, strict=False)
    ]
    columns = {"name": labels(np.concatenate([np.empty(0, dtype=np.int32), *codes]), names)}
    columns |= {
        name: np.concatenate([column_part.pop(name) for column_part in parts] or [np.empty(0, dtype=np.int64)])
        for name in ("correlation", "kind")
    }
    columns |= {name: spared([column_part.pop(name) for column_part in parts], spare) for name, spare in _SPARE.items()}
    return {**columns, "pid": columns["tid"] & _PID_MASK}


def read_loads(db: Database) -> dict[str, Any]:
    """Columns of the schema's ``loads``."""
    empty = np.empty(0, dtype=np.int64)
    if not db.has(_RUNTIME, "start", "end", "nameId"):
        return {"start_ns": empty, "end_ns": empty}
    ids = [id_ for id_, text in db.ids_like("cu%Load%", "cuLink%").items() if LOADS_CODE.match(text)]
    return read_columns(db, _RUNTIME, {"start_ns": "start", "end_ns": "end"}, where=[Where("nameId", ids)])


def _named(db: Database, kind: str, read: dict[str, Any]) -> dict[str, Any]:
    if kind == "system":  # no figure is a sum of them
        has_end = read["end_ns"] >= read["start_ns"]
        read = {name: values[has_end] for name, values in read.items()}
    distinct_ids, code = distinct(read.pop("name"))
    strings = strings_of(db, distinct_ids)
    texts = [_plain(strings.get(id_) or "(unnamed call)") for id_ in distinct_ids.tolist()]
    return {**read, "kind": np.full(len(code), CALL_KINDS.index(kind), dtype=np.int8), "code": code, "texts": texts}


def _operators(db: Database) -> list[dict[str, Any]]:
    """Ranges that PyTorch emitted for its operators: ``aten::addmm, seq = 12``."""
    import pandas

    if "NVTX_EVENTS" not in db.tables:
        return []
    registered = db.ids_like(*_OPERATORS)
    read = read_columns(
        db,
        "NVTX_EVENTS",
        {"start": "start", "end": "end", "tid": "globalTid", "id": "textId", "text": "text"},
        where=[Where("eventType", (59,))],
        missing=MISSING_PAYLOAD,
        texts=("text",),
    )
    code, texts = pandas.factorize(read["text"])
    is_operator = np.array([_IS_OPERATOR.fullmatch(text) is not None for text in texts], dtype=bool)
    chosen = (is_operator[code] | np.isin(read["id"], [*registered])) & (read["end"] != MISSING_PAYLOAD)
    rows = np.flatnonzero(chosen)
    if not len(rows):
        return []
    ids = read["id"][rows].tolist()
    labels_of_rows = [registered.get(id_, text) for id_, text in zip(ids, read["text"][rows], strict=True)]
    names, code = np.unique([text.partition(",")[0] for text in labels_of_rows], return_inverse=True)
    return [{
        "start_ns": read["start"][rows], "end_ns": read["end"][rows],
        "tid": read["tid"][rows], "correlation": np.full(len(rows), -1, dtype=np.int64),
        "kind": np.full(len(rows), CALL_KINDS.index("operator"), dtype=np.int8), "code": code, "texts": names.tolist(),
    }]  # fmt: skip


def _plain(name: str) -> str:
    stem, mark, version = name.rpartition("_v")
    return stem if mark and version.isdecimal() else name


def host_memory(source: Int64Array, destination: Int64Array) -> Int64Array:
    """The host memory kinds of copies as codes for `host_memory_names`, from the kinds of both ends; -1 if none."""
    kinds = [*_HOST_MEMORY]
    return np.where(np.isin(source, kinds), source, np.where(np.isin(destination, kinds), destination, -1))


def host_memory_names(codes: Int64Array) -> Any:
    """The column ``host_memory`` from its codes."""
    distinct_kinds, place_of_row = np.unique(codes, return_inverse=True)
    return labels(place_of_row, [_HOST_MEMORY.get(kind, "") for kind in distinct_kinds.tolist()])
