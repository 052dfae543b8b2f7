"""NCCL operations on the GPU from nsys recipes: the table ``NCCL_GPU_OPERATIONS``.

nsys 2025.6 and later trace NCCL 2.28 and later (``--trace=nccl``), and nsys recipes merge the events of each operation
into one row: text, start, end, commHash, commRank, count, dataType, operationClass and operationId (Nsight Systems'
analysis guide, "Recipe Composite Tables"). The id is equal on all ranks, and for a send and its receive. This reader
follows that description; no real export was available to test it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nvprof_kit._trace.files.sqlite import Database, Int64Array
from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.nsys.sources import check_rows

TABLE = "NCCL_GPU_OPERATIONS"
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


def has_operations(db: Database) -> bool:
    """Whether the export has the table, and NCCL kernels to match its rows with."""
    return db.has(TABLE, *_NEEDED) and db.has(_KERNELS, "start", "end", "correlationId", "globalPid", "shortName")


def read_operations(db: Database) -> dict[str, Any]:
    """Columns of the schema's ``collectives``: operations with their kernels, without operations that have none."""
    check_rows(db, (TABLE, _KERNELS))
    column = {name: name if db.has(TABLE, name) else "NULL" for name in ("commHash", "count", "dataType")}
    rows = db.rows(
        f'SELECT start, "end", text, operationId, {column["commHash"]}, {column["count"]}, {column["dataType"]} '
        f"FROM {TABLE} ORDER BY start"
    )
    kernels = db.rows(
        f'SELECT k.start, k."end", k.correlationId, k.globalPid, s.value FROM {_KERNELS} AS k '
        "JOIN StringIds AS s ON s.id = k.shortName WHERE s.value LIKE '%nccl%' ORDER BY k.start"
    )
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
