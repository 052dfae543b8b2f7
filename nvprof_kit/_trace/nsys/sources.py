"""Columns of an nsys export, checked against `nvprof_kit._trace.schema.NSYS_SOURCES`, and its enumerations.

The existence of columns is checked before reading, values while the columns are read; only after a failure are the
tables queried again, to find the column. An export names the values of its enumerations in tables ``ENUM_...``. The
readers use the numbers, which have been the same in all known releases; a release that numbers them otherwise is
refused, not misread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from nvprof_kit._toml import read_toml
from nvprof_kit._trace.files.database import Database, Where
from nvprof_kit._trace.frames import MISSING_PAYLOAD
from nvprof_kit._trace.joins import Int64Array
from nvprof_kit._trace.schema import NSYS_DESCRIPTIONS, NSYS_SOURCES, NsysTable
from nvprof_kit._trace.validate import check_bounds
from nvprof_kit.errors import CaptureError

NAMES = read_toml("nvprof_kit._trace.nsys", "names.toml")
"""What nsys calls the columns, tables and calls that are read."""

Columns = dict[str, Any]

KERNEL, MEMCPY, MEMSET, GRAPH, RUNTIME = (
    f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE", "RUNTIME")
)
ALWAYS = ("StringIds", "NVTX_EVENTS", KERNEL, MEMCPY, MEMSET, GRAPH, RUNTIME, "PROFILER_OVERHEAD")
"""Tables that are always read."""
_NODE_COLUMNS = ("graphNodeId", "originalGraphNodeId")
_PID_MASK = ~0xFFFFFF  # globalTid: hardware id, VM, process, and thread in the low 24 bits (nsys user guide)


def process_of(tid: Any) -> Any:
    """The process keys (globalPid) of thread keys (globalTid)."""
    return tid & _PID_MASK


def _source(table: str) -> NsysTable:
    return NSYS_SOURCES["CUDA_GRAPH_NODE_EVENTS" if table == "CUDA_GRAPH_EVENTS" else table]


# ---------------------------------------------------------------- columns


def check_columns(db: Database, optional: Iterable[str] = ()) -> None:
    """Reject an export with missing required columns, and with a view, or a table in other letters, in place of a table
    of nsys: it would be read as missing.

    Args:
        db: The export.
        optional: The optional columns and tables of a `Trace` to read.

    Raises:
        CaptureError: A column is missing; the message has the column and its table.
    """
    table_of_folded = {name.casefold(): name for name in NSYS_SOURCES}
    for name in sorted({*db.tables, *db.views}):
        table_name = table_of_folded.get(name.casefold())
        if table_name is not None and table_name not in db.tables:
            fault = "a view" if name in db.views else "in other letters"
            raise db.refuse(f"{name} is {fault}, needed the table {table_name}")
    tables = (*ALWAYS, *(table for option in optional for table in NAMES["tables_of_option"].get(option, ())))
    columns_by_table = {table: columns_of(table) for table in tables if table in db.tables}
    if "NVTX_PAYLOAD_SCHEMA_ENTRIES" in columns_by_table:
        columns_by_table["NVTX_EVENTS"] = (*columns_by_table.get("NVTX_EVENTS", ()), "binaryData")
    if nodes := node_table(db):
        columns_by_table[nodes] = ("start", "globalTid", *_NODE_COLUMNS)
        columns_by_table |= {
            table: (*columns_by_table[table], "graphNodeId")
            for table in (KERNEL, MEMCPY, MEMSET)
            if table in columns_by_table
        }
    for table, columns in columns_by_table.items():
        if missing := [column for column in columns if column not in db.tables.get(table, ())]:
            raise db.refuse(f"the table {table} has no column {' and no column '.join(missing)}")


def columns_of(table: str) -> tuple[str, ...]:
    """The columns that a table must have."""
    source = _source(table)
    return (*source.required, *source.partial, *source.nullable)


def node_table(db: Database) -> str | None:
    """The table of CUDA graph nodes, found by its columns because it was renamed after 2023.4."""
    if "CUDA_GRAPH_NODE_EVENTS" in db.tables:
        return "CUDA_GRAPH_NODE_EVENTS"
    has_nodes = any(db.has("CUDA_GRAPH_EVENTS", column) for column in _NODE_COLUMNS)
    return "CUDA_GRAPH_EVENTS" if has_nodes else None


def read_columns(
    db: Database, table: str, columns: Mapping[str, str], where: Sequence[Where] = (), *, missing: int = -1
) -> Columns:
    """Columns of a table, checked against `NSYS_SOURCES`; none of their rows without the table. Thread-safe.

    Args:
        db: The export.
        table: The table.
        columns: The column of the table for each name of the result; one that the table lacks is `missing` in all rows.
        where: Conditions that a row must meet, all of them.
        missing: The value for NULL in integer columns; NULL is '' in text columns.

    Raises:
        CaptureError: A required value is missing, has the wrong type or is outside of its bounds.
    """
    if table not in db.tables:
        return {name: np.empty(0, dtype=np.int64) for name in columns}
    source = _source(table)
    present = [column for column in dict.fromkeys(columns.values()) if column in db.tables[table]]
    texts = [column for column in present if column in source.texts]
    try:
        read, nulls = db.columns(table, present, where, missing=missing, texts=texts)
    except CaptureError:
        check_rows(db, table)  # says which column it is
        raise
    if any(nulls[column] for column in present if column in (*source.required, *source.partial)):
        check_rows(db, table)
    for column in present:
        if column in source.bounds:
            check_bounds(f"{db.named}: {table}.{column}", read[column], *source.bounds[column])
    absent = np.broadcast_to(np.int64(missing), len(next(iter(read.values()))))
    return {name: read.get(column, absent) for name, column in columns.items()}


def check_rows(db: Database, *tables: str) -> None:
    """Check the values in these tables; missing ones raise an error or add a warning.

    Raises:
        CaptureError: A required value is missing or has the wrong type.
    """
    for table in tables:
        if table not in db.tables:
            continue
        source = _source(table)
        names = dict.fromkeys((*columns_of(table), *_NODE_COLUMNS, "mangledName"))
        kinds = {name: "text" if name in source.texts else "integer" for name in names if db.has(table, name)}
        rows, faults = db.faults(table, kinds)
        for column, (nulls, wrong_count) in faults.items():
            if wrong_count:
                kind = "text" if column in source.texts else "a whole number"
                raise db.refuse(f"{table}.{column} is not {kind} in {wrong_count} of {rows} rows")
            if nulls and (column in source.required or (column in source.partial and nulls == rows)):
                raise db.refuse(f"{table}.{column} is NULL in {nulls} of {rows} rows")
            if nulls and column in source.partial:
                db.warn("rows:some-null", table=table, column=column, nulls=nulls, count=rows)


def warn_of_descriptions(db: Database, *, environment: bool = False) -> None:
    """Warn about tables that describe the system and cannot be read as `NSYS_DESCRIPTIONS` says; those of the
    environment only on request, since no table of a `Trace` is from them.
    """
    for table, columns in NSYS_DESCRIPTIONS.items():
        if table not in db.tables or (table == "TARGET_INFO_SYSTEM_ENV" and not environment):
            continue
        for column in columns.keys() - db.tables[table]:
            db.warn("rows:no-column", table=table, column=column)
        present = {column: kind for column, kind in columns.items() if column in db.tables[table]}
        rows, faults = db.faults(table, present)
        for column, (nulls, wrong_count) in faults.items():
            kind = present[column]
            if nulls + wrong_count and (kind or nulls == rows):
                sort = "a text" if kind == "text" else "a whole number" if kind else "given"
                db.warn("rows:not-read", table=table, column=column, sort=sort, count=nulls + wrong_count, rows=rows)


def export_facts(db: Database) -> dict[str, str]:
    """What nsys wrote about the export, by name."""
    tables = [table for table in ("META_DATA_EXPORT", "EXPORT_META_DATA") if db.has(table, "name", "value")]
    return {str(name): str(value) for name, value in db.rows(tables[0], ("name", "value"))} if tables else {}


def strings_of(db: Database, ids: Iterable[int]) -> dict[int, str]:
    """The strings of the file by id; unknown ids are omitted."""
    named_ids = {int(id_) for id_ in ids} - {-1, MISSING_PAYLOAD}
    texts = {id_: db.strings[id_] for id_ in named_ids if id_ in db.strings}
    if len(texts) < len(named_ids):
        db.warn("rows:no-strings", count=len(named_ids) - len(texts), total=len(named_ids))
    return texts


def zero_is_missing(ids: Int64Array) -> Int64Array:
    """Exporters before 2022 wrote 0 for a missing id; CUPTI's ids never start at 0."""
    return np.where(ids == 0, -1, ids) if len(ids) and (ids == 0).any() else ids


# ---------------------------------------------------------------- enumerations


EVENT_TYPES, COPY_KINDS = "ENUM_NSYS_EVENT_TYPE", "ENUM_CUDA_MEMCPY_OPER"
"""The tables that name the values of `NVTX_EVENTS.eventType` and `CUPTI_ACTIVITY_KIND_MEMCPY.copyKind`."""

_OTHER_EVENT_TYPES = frozenset({32, *range(35, 40), *range(64, 70), *range(72, 75), 76, 97, 98})


@cache
def enumerations() -> dict[str, dict[int, str]]:
    """The values of nsys's enumerations by number, by the table of an export that names them."""
    tables = read_toml("nvprof_kit._trace.nsys", "enumerations.toml")
    return {table: {int(number): name for number, name in names.items()} for table, names in tables.items()}


def check_enums(db: Database) -> None:
    """Check that an export's enumerations number their values as known. A value that merely has a new name causes a
    warning.

    Raises:
        CaptureError: A known value has another number.
    """
    for table, expected in enumerations().items():
        names = _names_in(db, table)
        numbers = {name: number for number, name in names.items()}
        for number, name in expected.items():
            if names.get(number, name) == name:
                continue
            if name in numbers:
                raise db.refuse(f"{table} numbers {name} as {numbers[name]}, where {number} was expected")
            db.warn("rows:numbered-otherwise", table=table, number=number, known=names[number], name=name)


def defined(db: Database, table: str) -> set[int]:
    """The numbers of an enumeration that have a meaning: the known ones, and those that the export names itself."""
    more = _OTHER_EVENT_TYPES if table == EVENT_TYPES else ()
    return {*enumerations()[table], *more, *_names_in(db, table)}


def _names_in(db: Database, table: str) -> dict[int, str]:
    """The names of an enumeration in the export by number; empty if it does not name them."""
    rows = db.rows(table, ("id", "name")) if db.has(table, "id", "name") else ()
    return {number: str(name) for number, name in rows if isinstance(number, int)}
