"""CUDA API calls and profiler overheads in an nsys export, and the host memory kind of its copies."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from nvprof_kit._trace.files.checks import check_spans
from nvprof_kit._trace.files.sqlite import Database, Int64Array, integer_list
from nvprof_kit._trace.frames import distinct, labels, spared
from nvprof_kit._trace.nsys.sources import check_rows, strings_of
from nvprof_kit._trace.nsys.tables import launches_among, read_launches
from nvprof_kit._trace.schema import CALL_KINDS, LOADS_CODE

_TABLES = {
    "api": ("CUPTI_ACTIVITY_KIND_RUNTIME", "correlationId"),
    "overhead": ("PROFILER_OVERHEAD", "-1"),
}
_BUSY = (
    *("%Launch%", "%Memcpy%", "%Memset%", "%GraphUpload%", "%MemPrefetch%", "%Synchronize%", "%Malloc%", "%MemAlloc%"),
    *("%MemFree%", "%HostAlloc%", "%HostRegister%", "%MemMap%", "%MemCreate%", "cudaFree%"),
)
_PID_MASK = ~0xFFFFFF
_HOST_MEMORY = {0: "pageable", 1: "pinned", 4: "managed"}  # ENUM_CUDA_MEM_KIND; other values are device memory


_SPARE = {"start_ns": 0, "end_ns": 0, "tid": -1}
"""Values for "no call", after the last row."""

Fetched = dict[str, dict[str, Any]]
"""Plain columns of calls by kind, as in the file."""


def busy_calls(db: Database) -> str:
    """An SQL condition for CUDA calls that launch, wait, allocate or free."""
    likes = " OR ".join(f"value LIKE '{pattern}'" for pattern in _BUSY)
    ids = [id_ for (id_,) in db.rows(f"SELECT id FROM StringIds WHERE typeof(id) = 'integer' AND ({likes})")]
    return f"nameId IN ({integer_list(ids)}) OR nameId IS NULL OR nameId >= ''"


def fetch_calls(db: Database, only: str = "") -> Fetched:
    """The calls in the file; thread-safe.

    Args:
        db: The file.
        only: An SQL condition for the CUDA calls; '' for all.
    """
    columns = {}
    for kind, (table, correlation) in _TABLES.items():
        if table in db.tables:
            where = f" WHERE {only}" if only and kind == "api" else ""
            columns[kind] = db.columns(
                f'SELECT start AS start_ns, "end" AS end_ns, globalTid AS tid, {correlation} AS correlation, '
                f"nameId AS name FROM {table}{where}",
                required=("start_ns", "end_ns", "tid", "correlation", "name"),
                diagnose=partial(check_rows, db, (table,)),
            )
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
    columns = {"name": labels(np.concatenate([np.empty(0, dtype=np.int32), *_shifted(parts)]), names)}
    columns |= {
        name: np.concatenate([column_part.pop(name) for column_part in parts] or [np.empty(0, dtype=np.int64)])
        for name in ("correlation", "kind")
    }
    columns |= {name: spared([column_part.pop(name) for column_part in parts], spare) for name, spare in _SPARE.items()}
    return {**columns, "pid": columns["tid"] & _PID_MASK}


def read_loads(db: Database) -> dict[str, Any]:
    """Columns of the schema's ``loads``."""
    empty = np.empty(0, dtype=np.int64)
    if not db.has("CUPTI_ACTIVITY_KIND_RUNTIME", "start", "end", "nameId"):
        return {"start_ns": empty, "end_ns": empty}
    named = db.rows("SELECT id, value FROM StringIds WHERE value LIKE 'cu%Load%' OR value LIKE 'cuLink%'")
    ids = integer_list(np.array([id_ for id_, text in named if LOADS_CODE.match(str(text))], dtype=np.int64))
    sql = f'SELECT start AS start_ns, "end" AS end_ns FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE nameId IN ({ids})'
    read = db.columns(
        sql, required=("start_ns", "end_ns"), diagnose=lambda: check_rows(db, ("CUPTI_ACTIVITY_KIND_RUNTIME",))
    )
    check_spans(db.named, "rows of CUPTI_ACTIVITY_KIND_RUNTIME", read["start_ns"], read["end_ns"])
    return read


def _shifted(parts: list[dict[str, Any]]) -> list[Int64Array]:
    """Shift the name codes of each part to index the concatenated names of all parts."""
    before = np.cumsum([0, *(len(column_part["texts"]) for column_part in parts)])
    return [
        column_part.pop("code").astype(np.int32) + np.int32(first)
        for column_part, first in zip(parts, before, strict=False)
    ]


def _named(db: Database, kind: str, read: dict[str, Any]) -> dict[str, Any]:
    check_spans(db.named, f"rows of {_TABLES[kind][0]}", read["start_ns"], read["end_ns"])
    distinct_ids, code = distinct(read.pop("name"))
    strings = strings_of(db, distinct_ids)
    texts = [_plain(strings.get(id_) or "(unnamed call)") for id_ in distinct_ids.tolist()]
    return {**read, "kind": np.full(len(code), CALL_KINDS.index(kind), dtype=np.int8), "code": code, "texts": texts}


def _operators(db: Database) -> list[dict[str, Any]]:
    """Ranges that PyTorch emitted for its operators: ``aten::addmm, seq = 12``."""
    if "NVTX_EVENTS" not in db.tables:
        return []
    label = "coalesce((SELECT value FROM StringIds WHERE id = textId), text)"
    rows = db.rows(
        f'SELECT start, "end", globalTid, {label} FROM NVTX_EVENTS WHERE eventType = 59 AND "end" IS NOT NULL AND '
        "(text LIKE 'aten::%' OR text LIKE '%, seq = %' OR text LIKE '%, op_id = %' OR textId IN "
        "(SELECT id FROM StringIds WHERE value LIKE 'aten::%' OR value LIKE '%, seq = %' OR value LIKE '%, op_id = %'))"
    )
    if not rows:
        return []
    start, end, tid, texts = zip(*rows, strict=True)
    names, code = np.unique([text.partition(",")[0] for text in texts], return_inverse=True)
    starts, ends = np.array(start, dtype=np.int64), np.array(end, dtype=np.int64)
    check_spans(db.named, "ranges of NVTX_EVENTS", starts, ends)
    return [{
        "start_ns": starts, "end_ns": ends,
        "tid": np.array(tid, dtype=np.int64), "correlation": np.full(len(rows), -1, dtype=np.int64),
        "kind": np.full(len(rows), CALL_KINDS.index("operator"), dtype=np.int8), "code": code, "texts": names.tolist(),
    }]  # fmt: skip


def _plain(name: str) -> str:
    stem, mark, version = name.rpartition("_v")
    return stem if mark and version.isdecimal() else name


def host_memory_item(db: Database, table: str) -> str:
    """A SELECT item: the host memory kind of a copy as a code for `host_memory_names`; -1 if none."""
    if not table.endswith("MEMCPY"):
        return "-1 AS host_memory"
    codes = integer_list(_HOST_MEMORY)
    return (
        "CASE WHEN srcKind >= '' THEN srcKind WHEN dstKind >= '' THEN dstKind "  # no numbers: the reader names them
        f"WHEN srcKind IN ({codes}) THEN srcKind WHEN dstKind IN ({codes}) THEN dstKind ELSE -1 END AS host_memory"
    )


def host_memory_names(codes: Int64Array) -> Any:
    """The column ``host_memory`` from its codes."""
    distinct_kinds, place_of_row = np.unique(codes, return_inverse=True)
    return labels(place_of_row, [_HOST_MEMORY.get(kind, "") for kind in distinct_kinds.tolist()])
