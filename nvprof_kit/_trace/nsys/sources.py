"""Whether an nsys export has what its tables must have (`nvprof_kit._trace.schema.NSYS_SOURCES`).

Which columns there are is asked before anything is read. What the rows hold is told by the columns as they are read,
which costs nothing; only where something is amiss are the tables asked again, for the name of the column.
"""

from __future__ import annotations

from collections.abc import Iterable

from nvprof_kit._trace.files.sqlite import Database
from nvprof_kit._trace.schema import NSYS_SOURCES

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
"""Tables that every question is answered from."""

_BY_OPTION = {
    "samples": ("GPU_METRICS", "TARGET_INFO_GPU_METRICS"),
    "scheduled": ("SCHED_EVENTS",),
    "allocations": ("CUDA_GPU_MEMORY_USAGE_EVENTS",),
    "collectives": ("NVTX_PAYLOAD_SCHEMA_ENTRIES",),
}
_NODE_COLUMNS = ("graphNodeId", "originalGraphNodeId")


def tables_for(optional: Iterable[str]) -> tuple[str, ...]:
    """The tables that are read for these optional columns and tables of a `Trace`."""
    return (*ALWAYS, *(table for option in optional for table in _BY_OPTION.get(option, ())))


def check_columns(db: Database, tables: Iterable[str]) -> None:
    """Refuse an export whose tables lack a column that they must have.

    Raises:
        CaptureError: A column is missing; the message names it and its table.
    """
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


def node_table(db: Database) -> str | None:
    """The table of CUDA-graph nodes; it changed its name after 2023.4, and its columns tell it."""
    if "CUDA_GRAPH_NODE_EVENTS" in db.tables:
        return "CUDA_GRAPH_NODE_EVENTS"
    has_nodes = any(db.has("CUDA_GRAPH_EVENTS", column) for column in _NODE_COLUMNS)
    return "CUDA_GRAPH_EVENTS" if has_nodes else None


def _refuse_missing(db: Database, table: str, columns: Iterable[str]) -> None:
    missing = [column for column in columns if column not in db.tables.get(table, ())]
    if missing:
        raise db.refuse(f"the table {table} has no column {' and no column '.join(missing)}")


def check_rows(db: Database, tables: Iterable[str]) -> None:
    """Ask the rows of these tables, and refuse or note what they lack.

    Raises:
        CaptureError: A column that must hold a value does not in some row, or holds another type.
    """
    for table in tables:
        if table in db.tables:
            _check_table(db, table)


def _check_table(db: Database, table: str) -> None:
    source = NSYS_SOURCES["CUDA_GRAPH_NODE_EVENTS" if table == "CUDA_GRAPH_EVENTS" else table]
    asked = dict.fromkeys((*source.needed, *source.given, *source.nullable, *_NODE_COLUMNS, "mangledName"))
    columns = [one for one in asked if db.has(table, one)]
    counts = ", ".join(
        f'count(*) - count("{one}"), total(typeof("{one}") NOT IN '
        f"('null', '{'text' if one in source.texts else 'integer'}'))"
        for one in columns
    )
    rows, *found = db.rows(f"SELECT count(*), {counts} FROM {table}")[0]
    for column, nulls, others in zip(columns, found[::2], found[1::2], strict=True):
        kind = "text" if column in source.texts else "a whole number"
        if others:
            raise db.refuse(f"{table}.{column} is not {kind} in {int(others)} of {rows} rows")
        if nulls and (column in source.needed or (column in source.given and nulls == rows)):
            raise db.refuse(f"{table}.{column} is NULL in {nulls} of {rows} rows")
        if nulls and column in source.given:
            db.warn(f"{table}.{column} is NULL in {nulls} of {rows} rows: what they tell is not joined with the rest")
