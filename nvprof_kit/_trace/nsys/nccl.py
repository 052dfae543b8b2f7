"""NCCL calls in an nsys export, from NCCL's NVTX domain and its payloads.

NCCL attaches a payload with a schema to each call (``src/include/nvtx_payload_schemas.h`` of NCCL): the communicator
and the message size. An export has the payloads as bytes in ``NVTX_EVENTS.binaryData`` and their layout in
``NVTX_PAYLOAD_SCHEMA_ENTRIES`` (nsys 2026.4's exporter reference; nsys 2024.2 and older write neither). A blob starts
with four 8-byte integers: domain, schema, payload size and blob size; the payload follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._trace.files.sqlite import Database, Int64Array, integer_list
from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.nsys.nccl_operations import has_operations, read_operations
from nvprof_kit._trace.nsys.sources import check_rows

Columns = dict[str, Any]

_DOMAIN = "NCCL"
_PID_MASK = ~0xFFFFFF
_HEADER = 32
_SIZE, _COMMUNICATOR, _RANKS = "Message size [bytes]", "NCCL communicator ID", "No. of ranks"
_OF_ALL_RANKS = ("AllGather", "ReduceScatter", "AlltoAll", "Gather", "Scatter")
"""Calls with a message size that is one rank's part of the larger buffer."""


def read_collectives(db: Database) -> Columns:
    """Columns of the schema's ``collectives``: GPU operations if the export has them, else calls; without payloads,
    only names and times of the calls.
    """
    if has_operations(db):
        return read_operations(db)
    rows = _calls(db)
    if any(not isinstance(number, int) for row in rows for number in row[:4]):
        check_rows(db, ("NVTX_EVENTS",))
    if not rows:
        return _columns([], np.empty((0, 3), dtype=np.int64))
    payloads = _payloads(db, rows)
    return _columns(rows, payloads)


def _calls(db: Database) -> list[tuple[Any, ...]]:
    """Start, end, thread, domain id, name and payload of all NCCL calls."""
    if not db.has("NVTX_EVENTS", "domainId", "textId", "text"):
        return []
    payload = "n.binaryData" if db.has("NVTX_EVENTS", "binaryData") and _has_layouts(db) else "NULL"
    label = "coalesce((SELECT value FROM StringIds WHERE id = {0}.textId), {0}.text)"
    return db.rows(
        f'SELECT n.start, n."end", n.globalTid, n.domainId, {label.format("n")}, {payload} FROM NVTX_EVENTS AS n '
        f"JOIN NVTX_EVENTS AS d ON d.eventType = 75 AND {label.format('d')} = '{_DOMAIN}' AND d.domainId = n.domainId "
        f"AND (d.globalTid & {_PID_MASK}) = (n.globalTid & {_PID_MASK}) "
        'WHERE n.eventType = 59 AND n."end" IS NOT NULL ORDER BY n.start'
    )


def _has_layouts(db: Database) -> bool:
    return db.has("NVTX_PAYLOAD_SCHEMA_ENTRIES", "domainId", "schemaId", "name", "offset")


def _payloads(db: Database, rows: list[tuple[Any, ...]]) -> Int64Array:
    """Size, communicator and ranks from each call's payload; -1 if absent; shape ``(n, 3)``."""
    values = np.full((len(rows), 3), -1, dtype=np.int64)
    layouts = _layouts(db, {row[3] for row in rows})
    blobs = [row[5] if isinstance(row[5], bytes) else b"" for row in rows]
    length = np.array([len(blob) for blob in blobs], dtype=np.int64)
    for size in np.unique(length[length >= _HEADER]).tolist():
        mine = np.flatnonzero(length == size)
        block = np.frombuffer(b"".join(blobs[one] for one in mine.tolist()), dtype=np.uint8).reshape(len(mine), size)
        schema = _number(block, 8, 8)
        for id_ in np.unique(schema).tolist():
            chosen = schema == id_
            for place, (offset, width) in layouts.get(id_, {}).items():
                if _HEADER + offset + width <= size:
                    values[mine[chosen], place] = _number(block[chosen], _HEADER + offset, width)
    return values


def _layouts(db: Database, domains: set[int]) -> Mapping[int, Mapping[int, tuple[int, int]]]:
    """By schema: offset and width in bytes of size, communicator and ranks."""
    if not _has_layouts(db):
        return {}
    wanted = {_SIZE: (0, 8), _COMMUNICATOR: (1, 8), _RANKS: (2, 4)}
    found: dict[int, dict[int, tuple[int, int]]] = {}
    for schema, name, offset in db.rows(
        'SELECT schemaId, name, coalesce("offset", 0) FROM NVTX_PAYLOAD_SCHEMA_ENTRIES '
        f"WHERE domainId IN ({integer_list(domains)})"
    ):
        if name in wanted:
            place, width = wanted[name]
            found.setdefault(schema, {})[place] = (offset, width)
    return found


def _number(block: npt.NDArray[np.uint8], offset: int, width: int) -> Int64Array:
    """The little-endian integer of each row; an overflow is negative, which is fine for ids and means unknown for sizes
    and ranks.
    """
    kind = "<i4" if width == 4 else "<i8"
    return np.ascontiguousarray(block[:, offset : offset + width]).view(kind).ravel().astype(np.int64)


def _columns(rows: list[tuple[Any, ...]], payloads: Int64Array) -> Columns:
    start, end, tid = (np.array([row[place] for row in rows], dtype=np.int64) for place in range(3))
    pid = tid & _PID_MASK
    names, which = np.unique(np.array([str(row[4]) for row in rows], dtype=object), return_inverse=True)
    per_rank = np.isin(np.array([str(name).removeprefix("nccl") for name in names]), _OF_ALL_RANKS)[which]
    ranks = _ranks(pid, payloads)
    size = np.where(per_rank, np.where((ranks > 0) & (payloads[:, 0] >= 0), payloads[:, 0] * ranks, -1), payloads[:, 0])
    return {
        "start_ns": start,
        "end_ns": end,
        "pid": pid,
        "tid": tid,
        "correlation": np.full(len(rows), -1, dtype=np.int64),
        "call": labels(which.astype(np.int64), [str(name) for name in names]),
        "bytes": size,
        "ranks": ranks,
        "communicator": _communicators(payloads[:, 1]),
        "description": labels(np.zeros(len(rows), dtype=np.int64), [""]),
        "sequence": np.full(len(rows), -1, dtype=np.int64),
        "peers": labels(np.zeros(len(rows), dtype=np.int64), [""]),
    }


def _communicators(id_: Int64Array) -> Any:
    """Communicator ids as text; '' for -1."""
    distinct, which = np.unique(id_, return_inverse=True)
    return labels(
        which.ravel().astype(np.int64), ["" if one == -1 else f"{one & (1 << 64) - 1:#x}" for one in distinct.tolist()]
    )


def _ranks(pid: Int64Array, payloads: Int64Array) -> Int64Array:
    """Number of ranks of each call's communicator, from the call that created it; -1 if that call is not in the
    capture.
    """
    makes = payloads[:, 2] > 0
    made = dict(zip(zip(pid[makes], payloads[makes, 1], strict=True), payloads[makes, 2].tolist(), strict=True))
    keys, which = np.unique(np.stack([pid, payloads[:, 1]], axis=1), axis=0, return_inverse=True)
    of_key = np.array([made.get(tuple(key), -1) for key in keys.tolist()], dtype=np.int64)
    return of_key[which.ravel()] if len(keys) else np.empty(0, dtype=np.int64)
