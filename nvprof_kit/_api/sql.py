"""SQL over a capture's tables, in an in-memory database without access to files or the network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nvprof_kit.errors import ToolError, UsageError

if TYPE_CHECKING:
    import pandas as pd


def answer(query: str, tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The result of a query.

    Args:
        query: A query of DuckDB's SQL.
        tables: The tables by name; only those named in the query are read.

    Raises:
        ToolError: DuckDB is not installed.
        UsageError: The query is invalid, or accesses files or the network.
    """
    try:
        import duckdb
    except ImportError:
        raise ToolError('SQL over a capture needs DuckDB: pip install "nvprof-kit[sql]"') from None
    settings: dict[str, str | bool | int | float | list[str]] = {
        "enable_external_access": "false",
        "python_enable_replacements": "false",
    }
    with duckdb.connect(":memory:", config=settings) as database:
        database.execute("SET lock_configuration = true")
        try:
            named = {name.rpartition(".")[2].strip('"').lower() for name in database.get_table_names(query)}
            for name in sorted(named & {*tables}):
                database.register(name, tables[name])
            found: pd.DataFrame = database.sql(query).df()
        except (duckdb.Error, AttributeError) as error:
            said = str(error).splitlines()[0] if isinstance(error, duckdb.Error) else "it gives no rows"
            raise UsageError(f"this query cannot be answered: {said}; the tables are {', '.join(tables)}") from None
    return found
