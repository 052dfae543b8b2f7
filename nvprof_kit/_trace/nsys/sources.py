"""Validation of an nsys export against `nvprof_kit._trace.schema.NSYS_SOURCES`.

The existence of columns is checked before reading. Values are checked while the columns are read, at no cost; only
after a failure are the tables queried again, to find the column. At the end: columns absent from some schemas, strings
by id, and missing ids.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nvprof_kit._trace.files.sqlite import Database, Int64Array, integer_list
from nvprof_kit._trace.frames import MISSING_PAYLOAD
from nvprof_kit._trace.schema import NSYS_DESCRIPTIONS, NSYS_SOURCES

ALWAYS = (
    "StringIds",
    "NVTX_EVENTS",
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_MEMSET",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "PROFILER_OVERHEAD",
)
"""Tables that are always read."""

_BY_OPTION = {
    "samples": ("GPU_METRICS", "TARGET_INFO_GPU_METRICS"),
    "scheduled": ("SCHED_EVENTS",),
    "allocations": ("CUDA_GPU_MEMORY_USAGE_EVENTS",),
    "collectives": ("NVTX_PAYLOAD_SCHEMA_ENTRIES",),
}
_NODE_COLUMNS = ("graphNodeId", "originalGraphNodeId")


def tables_for(optional: Iterable[str]) -> tuple[str, ...]:
    """The source tables for these optional columns and tables of a `Trace`."""
    return (*ALWAYS, *(table for option in optional for table in _BY_OPTION.get(option, ())))


def check_columns(db: Database, tables: Iterable[str]) -> None:
    """Reject an export with missing required columns.

    Raises:
        CaptureError: A column is missing; the message has the column and its table.
    """
    _refuse_lookalikes(db)
    for table in tables:
        if table in db.tables:
            source = NSYS_SOURCES[table]
            _refuse_missing(db, table, (*source.needed, *source.given, *source.nullable))
    if "NVTX_PAYLOAD_SCHEMA_ENTRIES" in tables and "NVTX_PAYLOAD_SCHEMA_ENTRIES" in db.tables:
        _refuse_missing(db, "NVTX_EVENTS", ("binaryData",))
    nodes = node_table(db)
    if nodes is not None:
        _refuse_missing(db, nodes, ("start", "globalTid", *_NODE_COLUMNS))
        for kind in ("KERNEL", "MEMCPY", "MEMSET"):
            if f"CUPTI_ACTIVITY_KIND_{kind}" in db.tables:
                _refuse_missing(db, f"CUPTI_ACTIVITY_KIND_{kind}", ("graphNodeId",))


def _refuse_lookalikes(db: Database) -> None:
    """Reject a view, or a table in other letters, in place of a table of nsys: it would be read as missing.

    Raises:
        CaptureError: There is one.
    """
    table_of_folded = {name.casefold(): name for name in NSYS_SOURCES}
    for name in sorted({*db.tables, *db.views}):
        table = table_of_folded.get(name.casefold())
        if table is not None and table not in db.tables:
            raise db.refuse(
                f"{name} is {'a view' if name in db.views else 'in other letters'}, needed the table {table}"
            )


def node_table(db: Database) -> str | None:
    """The table of CUDA graph nodes, found by its columns because it was renamed after 2023.4."""
    if "CUDA_GRAPH_NODE_EVENTS" in db.tables:
        return "CUDA_GRAPH_NODE_EVENTS"
    has_nodes = any(db.has("CUDA_GRAPH_EVENTS", column) for column in _NODE_COLUMNS)
    return "CUDA_GRAPH_EVENTS" if has_nodes else None


def _refuse_missing(db: Database, table: str, columns: Iterable[str]) -> None:
    missing = [column for column in columns if column not in db.tables.get(table, ())]
    if missing:
        raise db.refuse(f"the table {table} has no column {' and no column '.join(missing)}")


def check_rows(db: Database, tables: Iterable[str]) -> None:
    """Check the values in these tables; missing ones raise an error or add a warning.

    Raises:
        CaptureError: A required value is missing or has the wrong type.
    """
    for table in tables:
        if table in db.tables:
            _check_table(db, table)


def warn_of_descriptions(db: Database, *, environment: bool = False) -> None:
    """Warn about tables that describe the system and cannot be read as `NSYS_DESCRIPTIONS` says; those of the
    environment only on request, since no table of a `Trace` is from them.
    """
    for table, columns in NSYS_DESCRIPTIONS.items():
        if table not in db.tables or (table == "TARGET_INFO_SYSTEM_ENV" and not environment):
            continue
        for column, kind in columns.items():
            if column not in db.tables[table]:
                db.warn(f"the table {table} has no column {column}: what it describes is unknown")
                continue
            wrong = f"typeof({column}) <> '{kind}'" if kind else f"{column} IS NULL"
            rows, bad_count = db.rows(f"SELECT count(*), total({wrong}) FROM {table}")[0]
            if bad_count and (kind or bad_count == rows):
                sort = "a text" if kind == "text" else "a whole number" if kind else "given"
                db.warn(
                    f"{table}.{column} is not {sort} in {int(bad_count)} of {rows} rows: what they describe is unknown"
                )


def _refuse_double_ids(db: Database) -> None:
    """Reject ids with several texts: each join would pick one of them. nsys declares the id as the primary key."""
    if not db.has("StringIds", "id", "value") or db.rows(
        "SELECT 1 FROM pragma_table_info('StringIds') WHERE name = 'id' AND pk = 1 AND lower(type) = 'integer'"
    ):
        return
    double_ids = db.rows(
        "SELECT count(*) FROM (SELECT id FROM StringIds GROUP BY id HAVING min(value) IS NOT max(value))"
    )
    if double_ids[0][0]:
        raise db.refuse(f"StringIds.id has several values for {double_ids[0][0]} ids")


def _check_table(db: Database, table: str) -> None:
    if table == "StringIds":
        _refuse_double_ids(db)
    source = NSYS_SOURCES["CUDA_GRAPH_NODE_EVENTS" if table == "CUDA_GRAPH_EVENTS" else table]
    names = dict.fromkeys((*source.needed, *source.given, *source.nullable, *_NODE_COLUMNS, "mangledName"))
    columns = [column_name for column_name in names if db.has(table, column_name)]
    counts = ", ".join(
        f'count(*) - count("{column_name}"), total(typeof("{column_name}") NOT IN '
        f"('null', '{'text' if column_name in source.texts else 'integer'}'))"
        for column_name in columns
    )
    rows, *column_counts = db.rows(f"SELECT count(*), {counts} FROM {table}")[0]
    for column, nulls, wrong_count in zip(columns, column_counts[::2], column_counts[1::2], strict=True):
        kind = "text" if column in source.texts else "a whole number"
        if wrong_count:
            raise db.refuse(f"{table}.{column} is not {kind} in {int(wrong_count)} of {rows} rows")
        if nulls and (column in source.needed or (column in source.given and nulls == rows)):
            raise db.refuse(f"{table}.{column} is NULL in {nulls} of {rows} rows")
        if nulls and column in source.given:
            db.warn(f"{table}.{column} is NULL in {nulls} of {rows} rows: what they tell is not joined with the rest")


def null_safe(db: Database, table: str, column: str, name: str, default: str = "-1") -> str:
    """A SELECT item: the column with its name in a `Trace`, or the default if the schema lacks it."""
    return f'"{column}" AS {name}' if db.has(table, column) else f"{default} AS {name}"


def strings_of(db: Database, ids: Int64Array) -> dict[int, str]:
    """The strings of the file by id; unknown ids are omitted."""
    asked = [int(id_) for id_ in ids if id_ not in (-1, MISSING_PAYLOAD)]
    sql = f"SELECT id, CAST(value AS TEXT) FROM StringIds WHERE id IN ({integer_list(asked)}) AND value IS NOT NULL"
    texts = dict(db.rows(sql)) if asked else {}
    if len(texts) < len(set(asked)):
        db.warn(f"StringIds lacks the text of {len(set(asked)) - len(texts)} of {len(set(asked))} ids that events have")
    return texts


def zero_is_missing(ids: Int64Array) -> Int64Array:
    """Exporters before 2022 wrote 0 for a missing id; CUPTI's ids never start at 0."""
    return np.where(ids == 0, -1, ids) if len(ids) and (ids == 0).any() else ids
