"""SQL over a capture's tables, in an in-memory database without access to files or the network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nvprof_kit._trace.files.duckdb_queries import interruptible
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd


def answer(query: str, tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
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
        names: pd.DataFrame = pd.DataFrame({"name": list(tables)})
        return names
    # without temp_directory, DuckDB may write into a folder in the current one
    settings = {"enable_external_access": "false", "python_enable_replacements": "false", "temp_directory": ""}
    with duckdb.connect(":memory:", config=settings) as database, interruptible():
        database.execute("SET lock_configuration = true")
        try:
            types = [statement.type.name for statement in database.extract_statements(query)]
            if len(types) != 1 or types[0] not in ("SELECT", "EXPLAIN"):  # WITH, FROM, DESCRIBE and others are SELECT
                raise UsageError(
                    "this query cannot be answered: it needs exactly one statement, which only reads (SELECT, …), "
                    f"and has {', '.join(types) or 'none'}"
                )
            used = {name.rpartition(".")[2].strip('"').lower() for name in database.get_table_names(query)}
            for name in sorted(used & {*tables}):
                database.register(name, tables[name])
            rows: pd.DataFrame = database.execute(query).fetch_df()
        except duckdb.Error as error:
            message = str(error).splitlines()[0]
            raise UsageError(f"this query cannot be answered: {message}; the tables are {', '.join(tables)}") from None
    return rows
