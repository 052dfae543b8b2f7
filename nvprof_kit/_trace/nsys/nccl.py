"""Collectives in an nsys export, from NCCL's NVTX domain and its payloads, or from operations on the GPU.

NCCL attaches a payload with a schema to each call (``src/include/nvtx_payload_schemas.h`` of NCCL): the communicator
and the message size. An export has the payloads as bytes in ``NVTX_EVENTS.binaryData`` and their layout in
``NVTX_PAYLOAD_SCHEMA_ENTRIES`` (nsys 2026.4's exporter reference; nsys 2024.2 and older write neither). A blob starts
with four 8-byte integers: domain, schema, payload size and blob size; the payload follows.

nsys 2025.6 and later trace NCCL 2.28 and later (``--trace=nccl``), and nsys recipes merge the events of each operation
into one row: text, start, end, commHash, commRank, count, dataType, operationClass and operationId (Nsight Systems'
analysis guide, "Recipe Composite Tables"). The id is equal on all ranks, and for a send and its receive. This reader
follows that description; no real export was available to test it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._trace.files.database import Database, Int64Array, Where
from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.nsys.sources import check_rows
from nvprof_kit._trace.nsys.tables import nvtx_domains

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
    kernels = ("start", "end", "correlationId", "globalPid", "shortName")
    if db.has(_TABLE, *_NEEDED) and db.has(_KERNELS, *kernels):
        return _read_operations(db)
    rows = _calls(db)
    if not rows:
        nothing = np.empty(0, dtype=np.int64)
        return _columns(_Calls(nothing, nothing, nothing, nothing, (), ()), np.empty((0, 3), dtype=np.int64))
    *numbers, names, blobs = zip(*rows, strict=True)
    start, end, tid, domain = (np.array(column, dtype=np.int64) for column in numbers)
    calls = _Calls(start, end, tid, domain, [str(name) for name in names], blobs)
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
    pairs = nvtx_domains(db).by_name.get(_DOMAIN, frozenset())
    columns = ["start", "end", "globalTid", "domainId", "textId", "text"]
    if db.has("NVTX_EVENTS", "binaryData") and _has_layouts(db):
        columns.append("binaryData")
    rows = db.rows("NVTX_EVENTS", columns, [Where("eventType", (59,)), Where("domainId", {id_ for _, id_ in pairs})])
    if not all(isinstance(number, int) for row in rows for number in (row[0], row[2])):
        check_rows(db, ("NVTX_EVENTS",))
        rows = [row for row in rows if isinstance(row[2], int)]
    texts = db.texts_of_ids({row[4] for row in rows if row[4] is not None})
    calls = [
        (start, end, tid, domain, texts.get(text_id, text), *(blob or [None]))
        for start, end, tid, domain, text_id, text, *blob in rows
        if end is not None and ((tid & _PID_MASK), domain) in pairs
    ]
    return sorted(calls, key=lambda call: call[0])


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
    entries = db.rows("NVTX_PAYLOAD_SCHEMA_ENTRIES", ("schemaId", "name", "offset"), [Where("domainId", domains)])
    for schema, name, offset in entries:
        if name in fields:
            field, width = fields[name]
            layouts.setdefault(schema, {})[field] = (offset or 0, width)
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
    ids, id_of_row = np.unique(payloads[:, 1], return_inverse=True)
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
        "communicator": labels(
            id_of_row.ravel(), ["" if id_ == -1 else f"{id_ & (1 << 64) - 1:#x}" for id_ in ids.tolist()]
        ),
        "description": labels(np.zeros(len(pid), dtype=np.int64), [""]),
        "sequence": np.full(len(pid), -1, dtype=np.int64),
        "peers": labels(np.zeros(len(pid), dtype=np.int64), [""]),
    }


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


# ---------------------------------------------------------------- operations on the GPU

_TABLE = "NCCL_GPU_OPERATIONS"
_OPTIONAL = ("commHash", "count", "dataType")
_NEEDED = ("text", "start", "end", "operationId")
_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_BYTES = {
    "int8": 1, "char": 1, "uint8": 1, "float8e4m3": 1, "float8e5m2": 1, "float16": 2, "half": 2, "bfloat16": 2,
    "int32": 4, "int": 4, "uint32": 4, "float32": 4, "float": 4, "int64": 8, "uint64": 8, "float64": 8, "double": 8,
}  # fmt: skip
"""Bytes of NCCL data types, without the prefix ``nccl``."""

_POSITIVE = (1 << 63) - 1
_BACK = 4
"""Maximum number of concurrent kernels of one kind on a device."""

_PER_RANK = ("allgather", "reducescatter", "alltoall", "gather", "scatter")
"""Operations with a count that is one rank's part of the larger buffer."""


def _read_operations(db: Database) -> dict[str, Any]:
    """Columns of the schema's ``collectives``: operations with their kernels, without operations that have none."""
    check_rows(db, (_TABLE, _KERNELS))
    present = [name for name in _OPTIONAL if db.has(_TABLE, name)]
    rows = []
    for start, end, text, id_, *values in db.rows(_TABLE, ("start", "end", "text", "operationId", *present)):
        value_of = dict(zip(present, values, strict=True))
        rows.append((start, end, text, id_, *(value_of.get(name) for name in _OPTIONAL)))
    rows.sort(key=lambda row: row[0])
    kernel_names = db.ids_like("%nccl%")
    columns = ("start", "end", "correlationId", "globalPid", "shortName")
    named = sorted(db.rows(_KERNELS, columns, [Where("shortName", kernel_names)]))
    kernels = [(*row[:4], kernel_names[row[4]]) for row in named]
    owner = _owners(rows, kernels)
    pairs = [(row, kernels[position]) for row, position in zip(rows, owner, strict=True) if position >= 0]
    names = [f"nccl{str(row[2]).removeprefix('nccl')}" for row, _ in pairs]
    code_of_name = {name: position for position, name in enumerate(dict.fromkeys(names))}
    hashes = ["" if row[4] is None else f"{int(row[4]) & (1 << 64) - 1:#x}" for row, _ in pairs]
    comms = {name: position for position, name in enumerate(dict.fromkeys(hashes))}
    pid = np.array([kernel[3] for _, kernel in pairs], dtype=np.int64)
    none = np.zeros(len(pairs), dtype=np.int64)
    return {
        "start_ns": np.array([row[0] for row, _ in pairs], dtype=np.int64),
        "end_ns": np.array([row[1] for row, _ in pairs], dtype=np.int64),
        "pid": pid,
        "tid": pid,
        "correlation": np.array([kernel[2] for _, kernel in pairs], dtype=np.int64),
        "call": labels(np.array([code_of_name[name] for name in names], dtype=np.int64), list(code_of_name) or [""]),
        "bytes": np.array([_bytes(row[2], row[5], row[6]) for row, _ in pairs], dtype=np.int64),
        "ranks": none - 1,
        "communicator": labels(np.array([comms[name] for name in hashes], dtype=np.int64), list(comms) or [""]),
        "description": labels(none, [""]),
        "sequence": none - 1,
        "peers": labels(none, [""]),
        "operation": np.array([int(row[3]) & _POSITIVE for row, _ in pairs], dtype=np.int64),
    }


def _owners(rows: list[tuple[Any, ...]], kernels: list[tuple[Any, ...]]) -> list[int]:
    """The kernel of each operation: the one of its kind with the most overlap; -1 if there is none."""
    of_kind: dict[str, Int64Array] = {}
    for kind in {_kind(row[2]) for row in rows}:
        of_kind[kind] = np.array([i for i, kernel in enumerate(kernels) if kind in _plain(kernel[4])], dtype=np.int64)
    start = np.array([kernel[0] for kernel in kernels], dtype=np.int64)
    end = np.array([kernel[1] for kernel in kernels], dtype=np.int64)
    owner = []
    for since, until, text, *_ in rows:
        candidates = of_kind[_kind(text)]
        until_row = int(np.searchsorted(start[candidates], (since + until) // 2, side="right"))
        near = candidates[max(until_row - _BACK, 0) : until_row]
        together = np.minimum(end[near], until) - np.maximum(start[near], since)
        owner.append(int(near[together.argmax()]) if len(near) and together.max() > 0 else -1)
    return owner


def _plain(name: object) -> str:
    return str(name).lower().replace("_", "")


def _kind(text: object) -> str:
    """The kind of an operation, as in its kernel's name."""
    kind = _plain(text).removeprefix("nccl")
    return "sendrecv" if kind in ("send", "recv", "alltoall", "gather", "scatter") else kind


def _bytes(text: object, count: object, data_type: object) -> int:
    """Bytes of the operation's larger buffer; -1 if unknown."""
    size = _BYTES.get(_plain(data_type).removeprefix("nccl"), 0)
    has_bytes = isinstance(count, int) and size and _plain(text).removeprefix("nccl") not in _PER_RANK
    return count * size if has_bytes and isinstance(count, int) and 0 <= count < 1 << 46 else -1
