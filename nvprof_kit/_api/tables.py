"""A capture's tables as DataFrames, and in SQL: an in-memory database without access to files or the network."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from nvprof_kit._trace.files.process import interruptible
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.attribution.attribution import Operations

ATTRIBUTED = "operations"
"""Name of the table of attributed operations, next to those of `nvprof_kit._trace.schema.TABLES`."""


class Tables(Mapping[str, "pd.DataFrame"]):
    """The tables of a capture by name, as DataFrames.

    The page "Tables and SQL" of the documentation lists all tables and columns. The table ``operations`` has one row
    per kernel, memcpy, memset or graph replay, with the ``layer``, ``phase`` and ``step`` that it belongs to.

    The texts of ``ranges`` are translated by the capture's rules. A table without data is empty, not absent. Times are
    int64 nanoseconds since the start of the capture.
    """

    def __init__(
        self, read_operations: Callable[[Collection[str]], Operations], operators: Callable[[], pd.DataFrame | None]
    ) -> None:
        """Tables that are read when they are asked for.

        Args:
            read_operations: Returns the attributed operations of a trace that has these optional columns and tables.
            operators: The operators as they were recorded; None without any.
        """
        self._read_operations, self._operators = read_operations, operators
        self._frames: dict[str, pd.DataFrame] = {}

    def __getitem__(self, name: str) -> pd.DataFrame:
        """A table.

        Raises:
            KeyError: No table has this name.
        """
        from nvprof_kit._analysis.attribution.attribution import attributed
        from nvprof_kit._trace.frames import empty_frame
        from nvprof_kit._trace.schema import TABLES

        if name not in {*self}:
            raise KeyError(f"{name!r}: no such table; available: {', '.join(self)}")
        if name == ATTRIBUTED and name not in self._frames:
            self._frames[name] = attributed(self._read_operations(()), self["ops"])
        elif name not in self._frames:
            optional = optional_columns() - {*TABLES} if name == "ops" else optional_columns() & {name}
            trace = self._read_operations(optional).trace
            table: pd.DataFrame | None = self._operators() if name == "operators" else getattr(trace, name)
            self._frames[name] = empty_frame(name) if table is None else table
        return self._frames[name]

    def __iter__(self) -> Iterator[str]:
        """The names."""
        from nvprof_kit._trace.schema import TABLES

        return iter((*TABLES, ATTRIBUTED))

    def __len__(self) -> int:
        """The number of tables."""
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        """The names."""
        return f"<tables {', '.join(self)}>"


def optional_columns() -> set[str]:
    """The optional columns and tables of a capture."""
    from nvprof_kit._trace.schema import OPS, TABLES

    always = {"ranges", "api", "ops", "graph_nodes", "operators"}
    return {name for name, column in OPS.items() if column.optional} | ({*TABLES} - always)


def run_query(query: str, tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The result of a query.

    Args:
        query: One statement of DuckDB's SQL that only reads.
        tables: The tables by name; only those named in the query are read.

    Raises:
        UsageError: The query is invalid, does not only read, or accesses files or the network.
    """
    import duckdb
    import pandas as pd

    if re.fullmatch(r"\s*show\s+(all\s+)?tables\s*;?\s*", query, re.IGNORECASE):
        return pd.DataFrame({"name": list(tables)})
    # without temp_directory, DuckDB may write into a folder in the current one; with several threads, DuckDB 2.0 may
    # wait for ever for a query that was interrupted
    settings = {
        "enable_external_access": "false",
        "python_enable_replacements": "false",
        "temp_directory": "",
        "threads": "1",
    }
    with duckdb.connect(":memory:", config=settings) as database, interruptible():
        database.execute("SET lock_configuration = true")
        try:
            types = [statement.type.name for statement in database.extract_statements(query)]
            if len(types) != 1 or types[0] not in ("SELECT", "EXPLAIN"):  # WITH, FROM, DESCRIBE and others are SELECT
                raise UsageError.of("query", statements=", ".join(types) or "none")
            used = {name.rpartition(".")[2].strip('"').lower() for name in database.get_table_names(query)}
            for name in sorted(used & {*tables}):
                database.register(name, tables[name])
            rows: pd.DataFrame = database.execute(query).fetch_df()
        except duckdb.Error as error:
            message = str(error).splitlines()[0]
            raise UsageError(f"this query cannot be answered: {message}; the tables are {', '.join(tables)}") from None
    return rows
