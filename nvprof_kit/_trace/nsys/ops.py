"""GPU operations in an nsys export: kernels with launch configuration, copies, memsets, whole-graph replays; and the
nodes of CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from nvprof_kit._trace.files.database import Database, is_integer
from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.joins import concatenated, distinct, few
from nvprof_kit._trace.nsys.sources import (
    COPY_KINDS,
    GRAPH,
    KERNEL,
    MEMCPY,
    MEMSET,
    NAMES,
    Columns,
    check_rows,
    columns_of,
    defined,
    node_table,
    process_of,
    read_columns,
    strings_of,
    zero_is_missing,
)
from nvprof_kit._trace.schema import OP_KINDS, OPS

OP_TABLES = {KERNEL: "kernel", MEMCPY: "memcpy", MEMSET: "memset", GRAPH: "graph"}
_COLUMNS, _OPTIONAL = NAMES["ops"], NAMES["optional_ops"]
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
_COPIES |= {11: "unified HtoD", 12: "unified DtoH", 13: "unified DtoD"}
_HOST_MEMORY = {0: "pageable", 1: "pinned", 4: "managed"}  # ENUM_CUDA_MEM_KIND; other values are device memory
_UNKNOWN = 0


def op_tables(db: Database) -> list[str]:
    """The non-empty tables of GPU operations."""
    return [table for table in OP_TABLES if table in db.tables and db.rows(table, ("start",), limit=1)]


def read_ops(db: Database, optional: Collection[str]) -> Columns:
    """Columns of the schema's ``ops``, all kinds concatenated, with names as ids for `named_ops`. Does not need pandas.
    Each table is read alone, because in a union of them SQLite copies every value once more.
    """
    columns = _COLUMNS | {name: column for option in optional for name, column in _OPTIONAL.get(option, {}).items()}
    empty = np.zeros(0, dtype=np.int64)
    ops_of_kind: list[Columns] = [dict.fromkeys(columns, empty) | {"kind": empty.astype(np.int8)}]
    for table in op_tables(db):
        # a copy has no name but a kind
        of_name = {"name_id": "copyKind"} if table == MEMCPY and "name_id" in columns else {}
        read = read_columns(db, table, columns | of_name)
        kind = np.full(len(read["start_ns"]), OP_KINDS.index(OP_TABLES[table]), dtype=np.int8)
        ops_of_kind.append({**read, "kind": kind})
    # pop: a column is free before the next is joined
    return {name: concatenated([ops.pop(name) for ops in ops_of_kind]) for name in [*columns, "kind"]}


def check_ops(db: Database) -> None:
    """Check what of GPU operations is read on request only; nothing of it is kept.

    Raises:
        CaptureError: A required value is missing or has the wrong type.
    """
    on_request = {column for columns in _OPTIONAL.values() for column in columns.values()}
    for table in op_tables(db):
        columns = [column for column in columns_of(table) if column in on_request]
        arrays = db.arrays(table, columns) if columns else ()
        if any(not is_integer(array.type) or array.null_count for _, array in arrays):
            check_rows(db, table)


def named_ops(db: Database, read: Columns, optional: Collection[str]) -> Columns:
    """Replace ids with text. Separate from `read_ops` because it needs pandas, and worker threads must not wait for its
    import.
    """
    is_copy = read["kind"] == OP_KINDS.index("memcpy")
    ops: Columns = {name: values for name, values in read.items() if name in OPS and name != "mangled"}
    ops |= {name: zero_is_missing(read[name]) for name in ("correlation", "graph_node")}
    if "name" in optional:
        copies = read["name_id"][is_copy]
        if unknown := {*few(copies).tolist()} - defined(db, COPY_KINDS) - {_UNKNOWN}:
            rows = int(np.isin(copies, [*unknown]).sum())
            db.warn("rows:copy-kind", table=MEMCPY, kind=min(unknown), rows=rows)
        # a kernel's name is a string in the file, other names follow from kind and direction
        pairs, index = distinct(read["name_id"] * len(OP_KINDS) + ops["kind"])
        named = [(OP_KINDS[pair % len(OP_KINDS)], pair // len(OP_KINDS)) for pair in pairs.tolist()]
        strings = strings_of(db, [id_ for kind, id_ in named if kind == "kernel"])
        names = {"memset": "memset", "graph": "whole CUDA graph"}
        ops["name"] = labels(index, [
            strings.get(id_, "(unnamed kernel)") if kind == "kernel"
            else names.get(kind, f"memcpy {_COPIES.get(id_, '')}".strip())
            for kind, id_ in named
        ])  # fmt: skip
    if "host_memory" in optional:
        source, destination, host = read["source_memory"][is_copy], read["destination_memory"][is_copy], [*_HOST_MEMORY]
        memory = np.where(np.isin(source, host), source, np.where(np.isin(destination, host), destination, -1))
        codes, index = np.unique(memory, return_inverse=True)
        index_of_op = np.zeros(len(is_copy), dtype=np.int8)
        index_of_op[is_copy] = index + 1
        ops["host_memory"] = labels(index_of_op, ["", *(_HOST_MEMORY.get(code, "") for code in codes.tolist())])
    if "mangled" in optional:
        if not (read["mangled"] >= 0).any():
            db.warn("rows:no-linker-names", table=KERNEL)
        ids, index = np.unique(read["mangled"], return_inverse=True)
        strings = strings_of(db, ids)
        ops["mangled"] = labels(index, [strings.get(id_, "") for id_ in ids.tolist()])
    if "shared_bytes" in optional:
        static, dynamic = read["static_bytes"], read["dynamic_bytes"]
        ops["shared_bytes"] = np.where((static == -1) | (dynamic == -1), -1, static + dynamic)
    return ops


def read_graph_nodes(db: Database) -> Columns:
    """Columns of the schema's ``graph_nodes``."""
    columns = {"node": "graphNodeId", "original": "originalGraphNodeId", "start_ns": "start", "tid": "globalTid"}
    read: dict[str, Any] = read_columns(db, node_table(db) or "", columns)
    return {**read, "original": zero_is_missing(read["original"]), "pid": process_of(read["tid"])}
