"""GPU operations in an nsys export: kernels with launch configuration, copies, memsets, whole-graph replays."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._trace.files.checks import check_sizes
from nvprof_kit._trace.files.sqlite import Database, Int64Array
from nvprof_kit._trace.frames import distinct, few, labels
from nvprof_kit._trace.nsys.calls import host_memory_item, host_memory_names
from nvprof_kit._trace.nsys.enums import COPY_KINDS, defined
from nvprof_kit._trace.nsys.sources import check_rows, null_safe, strings_of, zero_is_missing
from nvprof_kit._trace.schema import OP_KINDS, OPS

Columns = dict[str, Any]

_OP_TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "kernel",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "memcpy",
    "CUPTI_ACTIVITY_KIND_MEMSET": "memset",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "graph",
}
_UNKNOWN = 0
_COPY_KINDS = {
    1: "HtoD",
    2: "DtoH",
    8: "DtoD",
    9: "HtoH",
    10: "PtoP",
    11: "unified HtoD",
    12: "unified DtoH",
    13: "unified DtoD",
}
_SOURCES = {
    "mangled": ("mangledName",),
    "grid_x": ("gridX",),
    "grid_y": ("gridY",),
    "grid_z": ("gridZ",),
    "block_x": ("blockX",),
    "block_y": ("blockY",),
    "block_z": ("blockZ",),
    "registers": ("registersPerThread",),
    "shared_bytes": ("staticSharedMemory", "dynamicSharedMemory"),
}


def op_tables(db: Database) -> list[str]:
    """The non-empty tables of GPU operations."""
    return [table for table in _OP_TABLES if table in db.tables and db.rows(f"SELECT 1 FROM {table} LIMIT 1")]


def read_ops(db: Database, optional: Collection[str]) -> Columns:
    """Columns of the schema's ``ops``, all kinds concatenated, with names as ids. Does not need pandas."""
    there = op_tables(db)
    read = db.columns(
        " UNION ALL ".join(_op_select(db, table, optional) for table in there),
        needed=("start_ns", "end_ns", "device", "correlation", "pid", "name", "stream", "bytes", *_SOURCES),
        diagnose=lambda: check_rows(db, there),
    )
    return read


def read_no_ops(db: Database, optional: Collection[str]) -> Columns:
    """Empty columns, for a capture without GPU operations."""
    names = ["start_ns", "end_ns", "device", "correlation", "pid", "graph_node", "kind"]
    return {name: np.zeros(0, dtype=np.int64) for name in (*names, *optional) if name in OPS}


def named_ops(db: Database, read: Columns, optional: Collection[str]) -> Columns:
    """Replace ids with text. Separate from `read_ops` because it needs pandas, and worker threads must not wait for its
    import.
    """
    ops: Columns = {
        **{name: values for name, values in read.items() if name not in ("name", "mangled")},
        "correlation": zero_is_missing(read["correlation"]),
        "graph_node": zero_is_missing(read["graph_node"]),
        "kind": read["kind"].astype(np.int8),
    }
    if "bytes" in optional:
        moves = np.isin(ops["kind"], [OP_KINDS.index(kind) for kind in ("memcpy", "memset")])
        check_sizes(db.named, "the size (bytes) of copies and memsets", ops["bytes"][moves])
    if "name" in optional:
        _warn_of_copy_kinds(db, read["name"][ops["kind"] == OP_KINDS.index("memcpy")])
        ops["name"] = _op_names(db, ops["kind"], read["name"])
    if "host_memory" in optional:
        ops["host_memory"] = host_memory_names(read["host_memory"])
    if "mangled" in optional:
        if not (read["mangled"] >= 0).any():
            db.warn("CUPTI_ACTIVITY_KIND_KERNEL.mangledName is missing: kernels have no linker names")
        ops["mangled"] = _names_of(db, read["mangled"])
    return ops


def _warn_of_copy_kinds(db: Database, kinds: Int64Array) -> None:
    strange = {*few(kinds).tolist()} - defined(db, COPY_KINDS) - {_UNKNOWN}
    if strange:
        count = int(np.isin(kinds, [*strange]).sum())
        db.warn(f"CUPTI_ACTIVITY_KIND_MEMCPY.copyKind is {min(strange)} in {count} rows: copies of unknown direction")


def _op_select(db: Database, table: str, optional: Collection[str]) -> str:
    kind = _OP_TABLES[table]
    items = [
        "start AS start_ns",
        "[end] AS end_ns",
        "deviceId AS device",
        "correlationId AS correlation",
        "globalPid AS pid",
        null_safe(db, table, "graphNodeId", "graph_node"),
        f"{OP_KINDS.index(kind)} AS kind",
    ]
    if "stream" in optional:
        items.append("streamId AS stream")
    if "bytes" in optional:
        items.append(null_safe(db, table, "bytes", "bytes"))
    if "host_memory" in optional:
        items.append(host_memory_item(db, table))
    if "name" in optional:
        items.append({"kernel": "demangledName AS name", "memcpy": "copyKind AS name"}.get(kind, "0 AS name"))
    items += _config_items(db, table, optional)
    return f"SELECT {', '.join(items)} FROM {table}"


def _names_of(db: Database, ids: Int64Array) -> Any:
    """Strings of the file by id; '' if unknown."""
    distinct, index = np.unique(ids, return_inverse=True)
    strings = strings_of(db, distinct)
    return labels(index, [strings.get(id_, "") for id_ in distinct.tolist()])


def _op_names(db: Database, kind: npt.NDArray[np.int8], ids: Int64Array) -> Any:
    """Names of the operations: a kernel's is a string in the file, other names follow from kind and direction."""
    pairs, index = distinct(ids * len(OP_KINDS) + kind)
    strings = strings_of(db, pairs[pairs % len(OP_KINDS) == OP_KINDS.index("kernel")] // len(OP_KINDS))
    named = []
    for id_, code in zip((pairs // len(OP_KINDS)).tolist(), (pairs % len(OP_KINDS)).tolist(), strict=True):
        kernel, copy, _, graph, _ = (code == place for place in range(len(OP_KINDS)))
        named.append(
            strings.get(id_, "(unnamed kernel)") if kernel else f"memcpy {_COPY_KINDS.get(id_, '')}".strip() if copy
            else "whole CUDA graph" if graph else OP_KINDS[code]
        )  # fmt: skip
    return labels(index, named)


def _config_items(db: Database, table: str, optional: Collection[str]) -> list[str]:
    """SELECT items for the requested parts of the launch configuration; -1 for absent columns."""
    return [
        f"{' + '.join(columns)} AS {name}" if db.has(table, *columns) else f"-1 AS {name}"
        for name, columns in _SOURCES.items()
        if name in optional
    ]
