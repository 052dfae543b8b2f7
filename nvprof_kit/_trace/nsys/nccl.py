"""NCCL calls in an nsys export, from NCCL's NVTX domain and its payloads.

NCCL attaches a payload with a schema to each call (``src/include/nvtx_payload_schemas.h`` of NCCL): the communicator
and the message size. An export has the payloads as bytes in ``NVTX_EVENTS.binaryData`` and their layout in
``NVTX_PAYLOAD_SCHEMA_ENTRIES`` (nsys 2026.4's exporter reference; nsys 2024.2 and older write neither). A blob starts
with four 8-byte integers: domain, schema, payload size and blob size; the payload follows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._trace.files.sqlite import Database, Int64Array, integer_list
from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.nsys.nccl_operations import has_operations, read_operations
from nvprof_kit._trace.nsys.sources import check_rows, strings_of

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
    if not rows:
        nothing = np.empty(0, dtype=np.int64)
        return _columns(_Calls(nothing, nothing, nothing, nothing, (), ()), np.empty((0, 3), dtype=np.int64))
    *numbers, names, blobs = zip(*rows, strict=True)
    columns = [np.array(column) for column in numbers]
    if any(column.dtype != np.int64 for column in columns):
        check_rows(db, ("NVTX_EVENTS",))
        columns = [column.astype(np.int64) for column in columns]
    start, end, tid, domain = columns
    calls = _Calls(start, end, tid, domain, _texts(db, names), blobs)
    return _columns(calls, _payloads(db, calls))


class _Calls(NamedTuple):
    """Start, end, thread, domain id, name and payload of all NCCL calls."""

    start: Int64Array
    end: Int64Array
    tid: Int64Array
    domain: Int64Array
    names: Sequence[str]
    blobs: Sequence[Any]


def _calls(db: Database) -> list[tuple[Any, ...]]:
    """The rows of all NCCL calls, each with the id of its name, or the name if it has no id: the same text a hundred
    thousand times would take longer to read than all else.
    """
    if not db.has("NVTX_EVENTS", "domainId", "textId", "text"):
        return []
    payload = "n.binaryData" if db.has("NVTX_EVENTS", "binaryData") and _has_layouts(db) else "NULL"
    named = "coalesce((SELECT {1} FROM StringIds WHERE id = {0}.textId AND value IS NOT NULL), {0}.text)"
    return db.rows(
        f'SELECT n.start, n."end", n.globalTid, n.domainId, {named.format("n", "id")}, {payload} FROM NVTX_EVENTS AS n '
        f"JOIN NVTX_EVENTS AS d ON d.eventType = 75 AND {named.format('d', 'value')} = '{_DOMAIN}' "
        f"AND d.domainId = n.domainId AND (d.globalTid & {_PID_MASK}) = (n.globalTid & {_PID_MASK}) "
        'WHERE n.eventType = 59 AND n."end" IS NOT NULL ORDER BY n.start'
    )


def _texts(db: Database, names: Sequence[Any]) -> list[str]:
    """The texts of names, of which some are ids."""
    distinct = set(names)
    texts = strings_of(db, np.array([name for name in distinct if isinstance(name, int)], dtype=np.int64))
    text = {name: texts.get(name, "") if isinstance(name, int) else str(name) for name in distinct}
    return [text[name] for name in names]


def _has_layouts(db: Database) -> bool:
    return db.has("NVTX_PAYLOAD_SCHEMA_ENTRIES", "domainId", "schemaId", "name", "offset")


def _payloads(db: Database, calls: _Calls) -> Int64Array:
    """Size, communicator and ranks from each call's payload; -1 if absent; shape ``(n, 3)``."""
    values = np.full((len(calls.start), 3), -1, dtype=np.int64)
    layouts = _layouts(db, np.unique(calls.domain).tolist())
    if not layouts:
        return values
    blobs = [blob if isinstance(blob, bytes) else b"" for blob in calls.blobs]
    length = np.array([len(blob) for blob in blobs], dtype=np.int64)
    for size in np.unique(length[length >= _HEADER]).tolist():
        rows = np.flatnonzero(length == size)
        block = np.frombuffer(b"".join(blobs[row] for row in rows.tolist()), dtype=np.uint8).reshape(len(rows), size)
        schema = _number(block, 8, 8)
        for id_ in np.unique(schema).tolist():
            chosen = schema == id_
            for field, (offset, width) in layouts.get(id_, {}).items():
                if _HEADER + offset + width <= size:
                    values[rows[chosen], field] = _number(block[chosen], _HEADER + offset, width)
    return values


def _layouts(db: Database, domains: Collection[int]) -> Mapping[int, Mapping[int, tuple[int, int]]]:
    """By schema: offset and width in bytes of size, communicator and ranks."""
    if not _has_layouts(db):
        return {}
    fields = {_SIZE: (0, 8), _COMMUNICATOR: (1, 8), _RANKS: (2, 4)}
    layouts: dict[int, dict[int, tuple[int, int]]] = {}
    for schema, name, offset in db.rows(
        'SELECT schemaId, name, coalesce("offset", 0) FROM NVTX_PAYLOAD_SCHEMA_ENTRIES '
        f"WHERE domainId IN ({integer_list(domains)})"
    ):
        if name in fields:
            field, width = fields[name]
            layouts.setdefault(schema, {})[field] = (offset, width)
    return layouts


def _number(block: npt.NDArray[np.uint8], offset: int, width: int) -> Int64Array:
    """The little-endian integer of each row; an overflow is negative, which is fine for ids and means unknown for sizes
    and ranks.
    """
    kind = "<i4" if width == 4 else "<i8"
    return np.ascontiguousarray(block[:, offset : offset + width]).view(kind).ravel().astype(np.int64)


def _columns(calls: _Calls, payloads: Int64Array) -> Columns:
    pid = calls.tid & _PID_MASK
    names = sorted(set(calls.names))
    code_of_name = {name: code for code, name in enumerate(names)}
    code_of_call = np.array([code_of_name[name] for name in calls.names], dtype=np.int64)
    per_rank = np.isin(np.array([name.removeprefix("nccl") for name in names]), _OF_ALL_RANKS)[code_of_call]
    ranks = _ranks(pid, payloads)
    size = np.where(per_rank, np.where((ranks > 0) & (payloads[:, 0] >= 0), payloads[:, 0] * ranks, -1), payloads[:, 0])
    return {
        "start_ns": calls.start,
        "end_ns": calls.end,
        "pid": pid,
        "tid": calls.tid,
        "correlation": np.full(len(pid), -1, dtype=np.int64),
        "call": labels(code_of_call, names),
        "bytes": size,
        "ranks": ranks,
        "communicator": _communicators(payloads[:, 1]),
        "description": labels(np.zeros(len(pid), dtype=np.int64), [""]),
        "sequence": np.full(len(pid), -1, dtype=np.int64),
        "peers": labels(np.zeros(len(pid), dtype=np.int64), [""]),
    }


def _communicators(id_: Int64Array) -> Any:
    """Communicator ids as text; '' for -1."""
    distinct, id_of_row = np.unique(id_, return_inverse=True)
    return labels(
        id_of_row.ravel().astype(np.int64),
        ["" if id_value == -1 else f"{id_value & (1 << 64) - 1:#x}" for id_value in distinct.tolist()],
    )


def _ranks(pid: Int64Array, payloads: Int64Array) -> Int64Array:
    """Number of ranks of each call's communicator, from the call that created it; -1 if that call is not in the
    capture.
    """
    makes = payloads[:, 2] > 0
    if not makes.any():
        return np.full(len(pid), -1, dtype=np.int64)
    rank_of_key = dict(zip(zip(pid[makes], payloads[makes, 1], strict=True), payloads[makes, 2].tolist(), strict=True))
    keys, key_of_row = np.unique(np.stack([pid, payloads[:, 1]], axis=1), axis=0, return_inverse=True)
    of_key = np.array([rank_of_key.get(tuple(key), -1) for key in keys.tolist()], dtype=np.int64)
    return of_key[key_of_row.ravel()] if len(keys) else np.empty(0, dtype=np.int64)
