"""GPU operations in an nsys export: kernels with launch configuration, copies, memsets, whole-graph replays."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from nvprof_kit._trace.files.database import Database, Int64Array
from nvprof_kit._trace.frames import distinct, few, labels
from nvprof_kit._trace.nsys.calls import host_memory, host_memory_names
from nvprof_kit._trace.nsys.sources import COPY_KINDS, defined, read_columns, strings_of, zero_is_missing
from nvprof_kit._trace.schema import OP_KINDS, OPS

Columns = dict[str, Any]

_OP_TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "kernel",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "memcpy",
    "CUPTI_ACTIVITY_KIND_MEMSET": "memset",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "graph",
}
_OFTEN_ONE = {"device": "deviceId", "pid": "globalPid", "graph_node": "graphNodeId"}
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
    "mangled": "mangledName",
    "grid_x": "gridX",
    "grid_y": "gridY",
    "grid_z": "gridZ",
    "block_x": "blockX",
    "block_y": "blockY",
    "block_z": "blockZ",
    "registers": "registersPerThread",
}
_PARTS = {"static_bytes": "staticSharedMemory", "dynamic_bytes": "dynamicSharedMemory"}
"""The parts of ``shared_bytes``."""


def op_tables(db: Database) -> list[str]:
    """The non-empty tables of GPU operations."""
    return [table for table in _OP_TABLES if table in db.tables and db.rows(table, ("start",), limit=1)]


def read_ops(db: Database, optional: Collection[str]) -> Columns:
    """Columns of the schema's ``ops``, all kinds concatenated, with names as ids. Does not need pandas.

    Each table is read alone, because in a union of them SQLite copies every value once more. Most captures have one
    process, one GPU and no graphs: such columns are not read.
    """
    tables, parts = op_tables(db), []
    for table in tables:
        columns = {name: column for name, column in _OFTEN_ONE.items() if db.has(table, column)}
        constants = db.constants(table, columns.values())
        if any(value is None and column != "graphNodeId" for column, value in constants.items()):
            constants = {}  # the full read says what is wrong
        read = read_columns(db, table, _sources(db, table, optional, constants))
        if "host_memory" in optional:
            read["host_memory"] = host_memory(read.pop("source_memory"), read.pop("destination_memory"))
        if "shared_bytes" in optional:
            static, dynamic = (read.pop(name) for name in _PARTS)
            read["shared_bytes"] = np.where((static == -1) | (dynamic == -1), -1, static + dynamic)
        for name, column in columns.items():
            if column in constants:
                value = constants[column]
                read[name] = np.broadcast_to(np.int64(-1 if value is None else value), len(read["start_ns"]))
        parts.append(read)
    kinds = [OP_KINDS.index(_OP_TABLES[table]) for table in tables]
    kind = np.repeat(np.array(kinds, dtype=np.int8), [len(table_columns["start_ns"]) for table_columns in parts])
    # pop: a part's column is free before the next is joined
    return {name: _joined([table_columns.pop(name) for table_columns in parts]) for name in [*parts[0]]} | {
        "kind": kind
    }


def _joined(parts: list[Int64Array]) -> Int64Array:
    """The concatenated parts; if all of them have the same single value, without memory for each row."""
    if all(array.strides == (0,) and array[0] == parts[0][0] for array in parts):
        return np.broadcast_to(parts[0][:1], sum(map(len, parts)))
    return np.concatenate(parts)


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
        "kind": read["kind"].astype(np.int8, copy=False),
    }
    if "name" in optional:
        copies = read["name"][ops["kind"] == OP_KINDS.index("memcpy")]
        if strange := {*few(copies).tolist()} - defined(db, COPY_KINDS) - {_UNKNOWN}:
            rows = int(np.isin(copies, [*strange]).sum())
            db.warn(
                f"CUPTI_ACTIVITY_KIND_MEMCPY.copyKind is {min(strange)} in {rows} rows: copies of unknown direction"
            )
        # a kernel's name is a string in the file, other names follow from kind and direction
        pairs, index = distinct(read["name"] * len(OP_KINDS) + ops["kind"])
        strings = strings_of(db, pairs[pairs % len(OP_KINDS) == OP_KINDS.index("kernel")] // len(OP_KINDS))
        names = []
        for id_, code in zip((pairs // len(OP_KINDS)).tolist(), (pairs % len(OP_KINDS)).tolist(), strict=True):
            kernel, copy, _, graph, _ = (code == kind_code for kind_code in range(len(OP_KINDS)))
            names.append(
                strings.get(id_, "(unnamed kernel)") if kernel else f"memcpy {_COPY_KINDS.get(id_, '')}".strip() if copy
                else "whole CUDA graph" if graph else OP_KINDS[code]
            )  # fmt: skip
        ops["name"] = labels(index, names)
    if "host_memory" in optional:
        ops["host_memory"] = host_memory_names(read["host_memory"])
    if "mangled" in optional:
        if not (read["mangled"] >= 0).any():
            db.warn("CUPTI_ACTIVITY_KIND_KERNEL.mangledName is missing: kernels have no linker names")
        ids, index = np.unique(read["mangled"], return_inverse=True)
        strings = strings_of(db, ids)
        ops["mangled"] = labels(index, [strings.get(id_, "") for id_ in ids.tolist()])
    return ops


def _sources(
    db: Database, table: str, optional: Collection[str], constants: Collection[str]
) -> dict[str, str | tuple[str, ...]]:
    """The column of a table for each column to read, without those that are the same in all rows."""
    sources: dict[str, str | tuple[str, ...]] = {
        "start_ns": "start",
        "end_ns": "end",
        "correlation": "correlationId",
        **{name: column for name, column in _OFTEN_ONE.items() if column not in constants},
    }
    is_copy = table.endswith("MEMCPY")
    if "stream" in optional:
        sources["stream"] = "streamId"
    if "bytes" in optional:
        sources["bytes"] = "bytes"
    if "host_memory" in optional:
        sources |= {"source_memory": "srcKind" if is_copy else (), "destination_memory": "dstKind" if is_copy else ()}
    if "name" in optional:
        sources["name"] = {"kernel": "demangledName", "memcpy": "copyKind"}.get(_OP_TABLES[table], ())
    if "shared_bytes" in optional:
        sources |= _PARTS
    return sources | {name: column for name, column in _SOURCES.items() if name in optional}
