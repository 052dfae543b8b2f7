"""SQL over a capture's tables, in an in-memory database without access to files or the network, within limits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nvprof_kit._trace.files.packed import free_memory
from nvprof_kit.errors import ToolError, UsageError

if TYPE_CHECKING:
    import pandas as pd

LONGEST_S = 600.0
"""Default time limit of a query."""
_LEAST_BYTES = 256 << 20
_VECTORS = 64
"""Rows that are fetched at a time, in DuckDB's vectors of 2048."""
_READ_ONLY = {"SELECT", "EXPLAIN"}
"""DuckDB's types of statements that read. WITH, FROM, VALUES, PIVOT, DESCRIBE and SUMMARIZE are of type SELECT."""


def answer(
    query: str, tables: Mapping[str, pd.DataFrame], longest_s: float = LONGEST_S, most_bytes: int | None = None
) -> pd.DataFrame:
    """The result of a query.

    Args:
        query: One statement of DuckDB's SQL that only reads.
        tables: The tables by name; only those named in the query are read.
        longest_s: Time limit in seconds.
        most_bytes: Memory limit of the database, and of the result; half of the free memory if None.

    Raises:
        ToolError: DuckDB is not installed.
        UsageError: The query is invalid, does not only read, accesses files or the network, or exceeds a limit.
    """
    try:
        import duckdb
    except ImportError:
        raise ToolError('SQL over a capture needs DuckDB: pip install "nvprof-kit[sql]"') from None
    limit = most_bytes or max(free_memory() // 2, _LEAST_BYTES)
    settings: dict[str, str | bool | int | float | list[str]] = {
        "enable_external_access": "false",
        "python_enable_replacements": "false",
        "memory_limit": f"{limit >> 20}MiB",
        "temp_directory": "",  # its default is a folder in the current one
    }
    with duckdb.connect(":memory:", config=settings) as database, _limited(database, longest_s):
        database.execute("SET lock_configuration = true")
        try:
            _refuse_all_but_one_that_reads([part.type.name for part in database.extract_statements(query)])
            named = {name.rpartition(".")[2].strip('"').lower() for name in database.get_table_names(query)}
            for name in sorted(named & {*tables}):
                database.register(name, tables[name])
            return _interruptible(database, lambda: _fetched(database.execute(query), limit))
        except duckdb.InterruptException:
            raise UsageError(f"this query was ended after {longest_s:g} s; restrict it") from None
        except duckdb.OutOfMemoryException:
            raise UsageError(f"this query takes more than {limit >> 20} MiB of memory; restrict it") from None
        except duckdb.Error as error:
            message = str(error).splitlines()[0]
            raise UsageError(f"this query cannot be answered: {message}; the tables are {', '.join(tables)}") from None


def _refuse_all_but_one_that_reads(types: Sequence[str]) -> None:
    """Refuse statements by their types.

    Raises:
        UsageError: There is none, there are several, or it does something else than to read.
    """
    if len(types) != 1 or types == ["MULTI"]:  # of PIVOT without IN, DuckDB makes several
        found = "none" if not types else "several, as is PIVOT without IN (...)"
        raise UsageError(f"this query cannot be answered: it needs exactly one statement, and has {found}")
    if types[0] not in _READ_ONLY:
        raise UsageError(
            f"this query cannot be answered: it is a statement of type {types[0]}, and only reading is possible; "
            "use SELECT, and WITH for intermediate results"
        )


@contextmanager
def _limited(database: Any, longest_s: float) -> Iterator[None]:
    """Interrupt the database's queries after a time."""
    timer = threading.Timer(longest_s, database.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _interruptible(database: Any, ask: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """Ask in a thread of its own: DuckDB heeds Ctrl-C only between the tasks of a query, and some are a single one."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            return asked.result()
        except KeyboardInterrupt:
            while not asked.done():  # what has not begun yet cannot be interrupted yet
                database.interrupt()
                wait([asked], timeout=0.05)
            raise


def _fetched(database: Any, most_bytes: int) -> pd.DataFrame:
    """The rows of the query that was executed, piece by piece.

    Raises:
        UsageError: It gives no rows, or more bytes than allowed.
    """
    import pandas as pd

    if not database.description:
        raise UsageError("this query cannot be answered: it gives no rows")
    found, size = [database.fetch_df_chunk(_VECTORS)], 0
    while len(found[-1]):
        size += int(found[-1].memory_usage(deep=True).sum())
        if size > most_bytes:
            raise UsageError(
                f"this query's result is larger than {most_bytes >> 20} MiB; aggregate in it, or end it with LIMIT"
            )
        found.append(database.fetch_df_chunk(_VECTORS))
    whole = found[:-1] or found
    made: pd.DataFrame = whole[0] if len(whole) == 1 else pd.concat(whole, ignore_index=True)
    return made
