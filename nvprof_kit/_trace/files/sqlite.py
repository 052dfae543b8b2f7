"""Bulk reads of an SQLite file, strictly read-only.

Small queries use `sqlite3`; columns with millions of rows use ADBC, which fills Arrow buffers without a Python object
per value. Both open the file read-only and immutable, so neither creates a journal or a lock next to a capture.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import adbc_driver_manager
import adbc_driver_sqlite
import pyarrow

from nvprof_kit._trace.files.database import Database, Where
from nvprof_kit.errors import CaptureError

_BATCH_ROWS = 1 << 16
"""The driver allocates the buffers of a whole batch before it reads the first row, and infers column types from the
first batch. With 2**30 rows it allocated 8 GiB per column, was no faster, and crashed with a segmentation fault under
`ulimit -v`.
"""


class SqliteFile(Database):
    """A read-only SQLite file.

    Args:
        path: The file.
        named: The path to show in messages, if different.

    Raises:
        CaptureError: The file is not SQLite, is truncated, or cannot be opened.
    """

    kind, export_type, in_threads = "SQLite", "sqlite", True

    def __init__(self, path: Path, named: Path | None = None) -> None:
        super().__init__(path, named)
        journal = any(path.with_name(path.name + end).exists() for end in ("-wal", "-journal"))
        self._uri = f"file:{quote(os.fsencode(path.resolve()))}?mode=ro" + ("" if journal else "&immutable=1")
        try:
            self._connection = sqlite3.connect(self._uri, uri=True, check_same_thread=False)
        except sqlite3.Error as error:
            raise self.broken(error) from None
        self._connection.text_factory = lambda raw: raw.decode("utf-8", "replace")  # NVTX texts may have any encoding
        try:
            entries = self._query("SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view')")
            self.views = frozenset(name for name, kind in entries if kind == "view")
            self.tables = {
                table: frozenset(name for (name,) in self._query("SELECT name FROM pragma_table_info(?)", table))
                for table, kind in entries
                if kind == "table"
            }
        except CaptureError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._connection.close()

    def broken(self, error: Exception | str) -> CaptureError:
        """The error for a damaged file."""
        message = str(error).partition("\n")[0]  # the driver appends the query
        return CaptureError(
            f"{self.named}: not a whole SQLite file ({message}); copy it again, or export the .nsys-rep again"
        )

    def _query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows of a small query.

        Raises:
            CaptureError: The file is damaged.
        """
        try:
            return self._connection.execute(sql, values).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:  # SQLite's own messages can fail to decode
            raise self.broken(error) from None

    def arrays(
        self, table: str, columns: Collection[str], where: Sequence[Where] = (), texts: Collection[str] = ()
    ) -> Iterator[tuple[str, Any]]:
        """Columns of the rows that meet all conditions, by batch; see `Database.arrays`."""
        numbers = " OR ".join(f"typeof([{column}]) NOT IN ('null', 'text')" for column in texts)
        if numbers and self._query(f"SELECT 1 FROM {table} WHERE {numbers} LIMIT 1"):
            raise self.broken("values that are not text")  # the driver would take them for text
        # text is never NULL, as the driver takes a column without values in its first rows for integers
        items = ", ".join(f"coalesce([{name}], '') AS [{name}]" if name in texts else f"[{name}]" for name in columns)
        try:
            with (
                adbc_driver_sqlite.connect(self._uri) as database,
                adbc_driver_manager.AdbcConnection(database) as connection,
                adbc_driver_manager.AdbcStatement(connection) as statement,
            ):
                statement.set_options(**{"adbc.sqlite.query.batch_rows": str(_BATCH_ROWS)})
                statement.set_sql_query(f"SELECT {items} FROM {table}{_clause(where)}")
                stream, _ = statement.execute_query()
                with pyarrow.RecordBatchReader._import_from_c(stream.address) as reader:
                    for batch in reader:
                        yield from zip(columns, batch.columns, strict=True)
        except (adbc_driver_manager.Error, pyarrow.ArrowException, OSError) as error:
            raise self.broken(error) from None

    def rows(
        self, table: str, columns: Sequence[str], where: Sequence[Where] = (), *, limit: int = -1
    ) -> list[tuple[Any, ...]]:
        """Rows of a small table, or few of a large one; see `Database.rows`."""
        items = ", ".join(f"[{column}]" for column in columns)
        return self._query(f"SELECT {items} FROM {table}{_clause(where)} LIMIT {limit}")

    def count(self, table: str) -> int:
        """Number of rows; 0 without the table."""
        return int(self._query(f"SELECT count(*) FROM {table}")[0][0]) if table in self.tables else 0

    def faults(self, table: str, columns: Mapping[str, str]) -> tuple[int, dict[str, tuple[int, int]]]:
        """Number of rows, and how many have NULL and how many a value of another type in each column."""
        is_wrong = {name: f"typeof([{name}]) NOT IN ('null', '{kind}')" for name, kind in columns.items() if kind}
        counts = ", ".join(["count(*)", *(f"count([{column}])" for column in columns)])
        rows, *filled = self._query(f"SELECT {counts} FROM {table}")[0]
        wrong = dict.fromkeys(columns, 0)
        # to look for the first row with a fault takes half the time of counting them
        if is_wrong and self._query(f"SELECT 1 FROM {table} WHERE {' OR '.join(is_wrong.values())} LIMIT 1"):
            sums = ", ".join(f"sum({condition})" for condition in is_wrong.values())
            wrong |= zip(is_wrong, self._query(f"SELECT {sums} FROM {table}")[0], strict=True)
        return rows, {name: (rows - count, wrong[name]) for name, count in zip(columns, filled, strict=True)}

    def texts(self) -> Iterator[str]:
        """The texts in all tables but enumerations, each of a column once."""
        for table, column in text_columns(self._query, self.tables):
            for (text,) in self._query(f'SELECT DISTINCT "{column}" FROM "{table}" WHERE "{column}" IS NOT NULL'):
                yield str(text)


def _clause(where: Sequence[Where]) -> str:
    """The WHERE clause of conditions."""
    parts = []
    for column, values, excluded, or_null in where:
        condition = f"[{column}] {'NOT IN' if excluded else 'IN'} ({integer_list(values)})"
        # SQLite orders all text and blobs after numbers
        if or_null:
            condition = f"({condition} OR [{column}] IS NULL OR [{column}] >= '')"
        elif excluded:
            condition = f"({condition} AND [{column}] < '')"
        parts.append(condition)
    return f" WHERE {' AND '.join(parts)}" if parts else ""


def integer_list(values: Iterable[int]) -> str:
    """Integers formatted for an SQL ``IN (…)``."""
    return ", ".join(str(int(value)) for value in values)


def text_columns(rows: Callable[[str], Iterable[tuple[Any, ...]]], tables: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The columns that may hold text of the host or the program, as (table, column); enumerations only hold nsys's.

    Args:
        rows: Gives the rows of a query.
        tables: The tables of the file.
    """
    for table in sorted(tables):
        if re.fullmatch(r"\w+", table) and not table.startswith(("ENUM_", "sqlite_")):
            for column, declared in rows(f"SELECT name, upper(type) FROM pragma_table_info('{table}')"):
                if re.fullmatch(r"\w+", column) and (not declared or "TEXT" in declared or "CHAR" in declared):
                    yield table, column
