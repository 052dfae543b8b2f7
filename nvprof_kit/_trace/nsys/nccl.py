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

import bisect
import struct
from typing import Any

import numpy as np

from nvprof_kit._trace.files.database import Database, Where
from nvprof_kit._trace.nsys.nvtx import Nvtx
from nvprof_kit._trace.nsys.sources import KERNEL, NAMES, Columns, check_rows, process_of

_HEADER = 32
_FIELDS = {name: tuple(field) for name, field in NAMES["nccl_fields"].items()}
"""Fields of a payload by their names in NCCL: what they hold, and their format."""
_PER_RANK = ("allgather", "reducescatter", "alltoall", "gather", "scatter")
"""Calls and operations with a size that is one rank's part of the larger buffer."""
_OPERATIONS = "NCCL_GPU_OPERATIONS"
_BACK = 4
"""Maximum number of concurrent kernels of one kind on a device."""


def read_collectives(db: Database, nvtx: Nvtx) -> Columns:
    """Columns of the schema's ``collectives``: GPU operations if the export has them, else calls; without payloads,
    only names and times of the calls.
    """
    if db.has(_OPERATIONS, "text", "start", "end", "operationId") and db.has(KERNEL, "shortName"):
        rows = _operations(db)
        operations = {"operation": np.array([row["operation"] for row in rows], dtype=np.int64)}
    else:
        rows, operations = _calls(db, nvtx), {}
    numbers = ("start_ns", "end_ns", "pid", "tid", "correlation", "bytes", "ranks", "sequence")
    texts = ("call", "communicator", "description", "peers")
    return {
        **{name: np.array([row.get(name, -1) for row in rows], dtype=np.int64) for name in numbers},
        **{name: np.array([row.get(name, "") for row in rows], dtype=object) for name in texts},
        **operations,
    }


# ---------------------------------------------------------------- calls


def _calls(db: Database, nvtx: Nvtx) -> list[dict[str, Any]]:
    """The calls of NCCL, by time."""
    pairs = nvtx.pairs("NCCL")
    # the offset of what each field holds and its format in a payload, by schema
    layouts: dict[int, dict[tuple[str, str], int]] = {}
    if not pairs:
        return []
    columns = ["start", "end", "globalTid", "domainId", "textId", "text"]
    domain_ids = Where("domainId", {id_ for _, id_ in pairs})
    if db.has("NVTX_EVENTS", "binaryData") and db.has("NVTX_PAYLOAD_SCHEMA_ENTRIES", "domainId", "schemaId", "offset"):
        columns.append("binaryData")
        entries = db.rows("NVTX_PAYLOAD_SCHEMA_ENTRIES", ("schemaId", "name", "offset"), [domain_ids])
        for schema, field_name, offset in entries:
            if field_name in _FIELDS:
                layouts.setdefault(schema, {})[_FIELDS[field_name]] = _HEADER + (offset or 0)
    calls = []
    rows = db.rows("NVTX_EVENTS", columns, [Where("eventType", (59,)), domain_ids])
    for start, end, tid, domain, text_id, text, *blob in rows:
        if end is None or tid is None or (process_of(tid), domain) not in pairs:
            continue
        name = str(db.strings.get(text_id, text))
        call = {"start_ns": start, "end_ns": end, "pid": process_of(tid), "tid": tid, "call": name}
        if blob and isinstance(payload := blob[0], bytes):
            layout = layouts.get(struct.unpack_from("<q", payload, 8)[0], {}) if len(payload) >= _HEADER else {}
            # a number too large for a sign is negative: fine for ids, unknown for the rest
            values = {
                field: struct.unpack_from(code, payload, offset)[0]
                for (field, code), offset in layout.items()
                if 0 <= offset <= len(payload) - struct.calcsize(code)
            }
            call |= values | {"communicator": _hexadecimal(values.get("communicator"))}
        calls.append(call)
    calls.sort(key=lambda call: int(call["start_ns"]))
    # the number of ranks is in the payload of the call that makes the communicator
    ranks_of = {(call["pid"], call.get("communicator")): call["ranks"] for call in calls if call.get("ranks", -1) > 0}
    for call in calls:
        call["ranks"] = ranks_of.get((call["pid"], call.get("communicator")), -1)
        size = call.get("bytes", -1)
        if _kind(call["call"]) in _PER_RANK:
            call["bytes"] = size * call["ranks"] if call["ranks"] > 0 and size >= 0 else -1
    return calls


def _hexadecimal(number: int | None) -> str:
    return "" if number is None else f"{number & (1 << 64) - 1:#x}"


# ---------------------------------------------------------------- operations on the GPU


def _operations(db: Database) -> list[dict[str, Any]]:
    """Operations with their kernels by time, without operations that have none."""
    check_rows(db, _OPERATIONS, KERNEL)
    optional = [name for name in ("commHash", "count", "dataType") if db.has(_OPERATIONS, name)]
    kernel_names = {id_: _plain(text) for id_, text in db.ids_like("%nccl%").items()}
    columns = ("start", "end", "correlationId", "globalPid", "shortName")
    kernels = sorted(db.rows(KERNEL, columns, [Where("shortName", kernel_names)]))
    kernels_of: dict[str, list[tuple[Any, ...]]] = {}
    operations = []
    for start, end, text, id_, *values in sorted(
        db.rows(_OPERATIONS, ("start", "end", "text", "operationId", *optional)), key=lambda row: int(row[0])
    ):
        value_of, kind = dict(zip(optional, values, strict=True)), _kind(text)
        if kind not in kernels_of:
            name = "sendrecv" if kind in ("send", "recv", "alltoall", "gather", "scatter") else kind
            kernels_of[kind] = [kernel for kernel in kernels if name in kernel_names[kernel[4]]]
        # the one with the most overlap, of those that begin before the middle of the operation
        after = bisect.bisect_right(kernels_of[kind], (start + end) // 2, key=lambda kernel: int(kernel[0]))
        near = kernels_of[kind][max(after - _BACK, 0) : after]
        overlaps = [min(kernel[1], end) - max(kernel[0], start) for kernel in near]
        if max(overlaps, default=0) <= 0:
            continue
        kernel = near[overlaps.index(max(overlaps))]
        count, size = value_of.get("count"), NAMES["nccl_bytes"].get(_kind(value_of.get("dataType")), 0)
        is_known = size > 0 and kind not in _PER_RANK
        operations.append({
            "start_ns": start,
            "end_ns": end,
            "pid": kernel[3],
            "tid": kernel[3],
            "correlation": kernel[2],
            "call": f"nccl{str(text).removeprefix('nccl')}",
            "bytes": count * size if is_known and isinstance(count, int) and 0 <= count < 1 << 46 else -1,
            "communicator": _hexadecimal(value_of.get("commHash")),
            "operation": int(id_) & (1 << 63) - 1,
        })  # fmt: skip
    return operations


def _plain(name: object) -> str:
    return str(name).lower().replace("_", "")


def _kind(name: object) -> str:
    """The kind of a call or operation: ``allreduce``."""
    return _plain(name).removeprefix("nccl")
