"""Bulk reads of an SQLite file, strictly read-only.

Small queries use `sqlite3`; columns with millions of rows use ADBC, which fills Arrow buffers without a Python object
per value. Both open the file read-only and immutable, so neither creates a journal or a lock next to a capture.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import adbc_driver_manager
import adbc_driver_sqlite
import numpy as np
import numpy.typing as npt
import pyarrow

from nvprof_kit._trace.files.database import Database, Int64Array, Where
from nvprof_kit.errors import CaptureError

_BATCH_ROWS = 1 << 16
"""The driver allocates the buffers of a whole batch before it reads the first row, and infers column types from the
first batch. With 2**30 rows it allocated 8 GiB per column, was no faster, and crashed with a segmentation fault under
`ulimit -v`.
"""


def integer_list(values: Iterable[int]) -> str:
    """Integers formatted for an SQL ``IN (…)``."""
    return ", ".join(str(int(value)) for value in values)


_TEXT_COLUMNS = (
    "SELECT name FROM pragma_table_info('{}') WHERE type = '' OR upper(type) LIKE '%TEXT%' OR upper(type) LIKE '%CHAR%'"
)


def text_columns(rows: Callable[[str], Iterable[tuple[Any, ...]]], tables: Iterable[str]) -> list[tuple[str, str]]:
    """The columns that may hold text of the host or the program, as (table, column); enumerations only hold nsys's.

    Args:
        rows: Gives the rows of a query.
        tables: The tables of the file.
    """
    return [
        (table, column)
        for table in sorted(tables)
        if re.fullmatch(r"\w+", table) and not table.startswith(("ENUM_", "sqlite_"))
        for (column,) in rows(_TEXT_COLUMNS.format(table))
        if re.fullmatch(r"\w+", column)
    ]


class SqliteFile(Database):
    """A read-only SQLite file.

    Args:
        path: The file.
        named: The path to show in messages, if different.

    Raises:
        CaptureError: The file is not SQLite, is truncated, or cannot be opened.
    """

    kind, export_type = "SQLite", "sqlite"

    def __init__(self, path: Path, named: Path | None = None) -> None:
        super().__init__(path, named)
        journal = any(path.with_name(path.name + end).exists() for end in ("-wal", "-journal"))
        self._uri = f"file:{quote(os.fsencode(path.resolve()))}?mode=ro" + ("" if journal else "&immutable=1")
        try:
            self._small = sqlite3.connect(self._uri, uri=True, check_same_thread=False)
        except sqlite3.Error as error:
            raise self.broken(error) from None
        self._small.text_factory = _text  # NVTX texts may have any encoding
        try:
            entries = self._small.execute(
                "SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view')"
            ).fetchall()
            tables = [name for name, kind in entries if kind == "table"]
            self.views = frozenset(name for name, kind in entries if kind == "view")
            self.tables = {
                table: frozenset(name for (name,) in self._query("SELECT name FROM pragma_table_info(?)", table))
                for table in tables
            }
        except (sqlite3.Error, UnicodeDecodeError) as error:  # SQLite's own messages can fail to decode
            self.close()
            raise self.broken(error) from None
        except CaptureError:
            self.close()
            raise

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
            return self._small.execute(sql, values).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self.broken(error) from None

    def rows(
        self, table: str, columns: Sequence[str], where: Sequence[Where] = (), *, limit: int = -1
    ) -> list[tuple[Any, ...]]:
        """Rows of a small table, or few of a large one, with values of any type; None for NULL.

        Raises:
            CaptureError: The file is damaged.
        """
        items = ", ".join(f"[{column}]" for column in columns)
        return self._query(f"SELECT {items} FROM {table}{_clause(where)} LIMIT {limit}")

    def columns(
        self,
        table: str,
        columns: Mapping[str, str | tuple[str, ...]],
        *,
        where: Sequence[Where] = (),
        missing: int = -1,
        texts: Collection[str] = (),
        required: Collection[str] = (),
        diagnose: Callable[[], None] | None = None,
    ) -> dict[str, npt.NDArray[Any]]:
        """Columns of a large table; see `Database.columns`.

        Raises:
            CaptureError: The file is damaged, or a column has values of the wrong type.
        """
        sources = {
            name: [column for column in ((item,) if isinstance(item, str) else item) if self.has(table, column)]
            for name, item in columns.items()
        }
        # an item is the first of its columns with a value; text is never NULL, as the driver takes a column without
        # values in its first rows for integers
        values_of = {
            name: [f"[{column}]" for column in present] + (["''"] if name in texts else [])
            for name, present in sources.items()
            if present
        }
        items = {
            name: values[0] if len(values) == 1 else f"coalesce({', '.join(values)})"
            for name, values in values_of.items()
        }
        read_columns = {column for present in sources.values() for column in present}
        unread = [
            _invalid(condition.column)
            for condition in where
            if condition.or_invalid and condition.column not in read_columns
        ]
        first_required = next((name for name in items if name in required), None)
        if unread and first_required:  # to read the column too takes a tenth of the time
            items[first_required] = f"CASE WHEN {' OR '.join(unread)} THEN NULL ELSE {items[first_required]} END"
        if not items:
            items["rows of the table"] = "1"
        sql = f"SELECT {', '.join(f'{item} AS [{name}]' for name, item in items.items())} FROM {table}{_clause(where)}"
        try:
            with self._stream(sql) as reader:
                read = {field.name: _Column(field.type, field.name in texts) for field in reader.schema}
                for batch in reader:
                    for column, chunk in zip(read.values(), batch.columns, strict=True):
                        column.add(chunk)
        except (adbc_driver_manager.Error, pyarrow.ArrowException, OSError) as error:
            if diagnose is not None:
                diagnose()
            raise self.broken(error) from None
        if diagnose is not None and any(read[name].nulls for name in read if name in required):
            diagnose()
        for name, column in read.items():
            wrong = ""
            if name in required and diagnose is None and column.nulls:
                wrong = f"{column.nulls} rows without a value"
            elif not column.fits and column.nulls < column.count:
                wrong = f"values that are not {'text' if column.text else 'whole numbers'}"
            if wrong:
                if diagnose is not None:
                    diagnose()
                raise self.broken(f"{wrong} for {name}")
        count = next(iter(read.values())).count
        return {
            name: read[name].values("" if name in texts else missing)
            if name in read
            else np.full(count, "" if name in texts else missing, dtype=object if name in texts else np.int64)
            for name in columns
        }

    def count(self, table: str, where: Sequence[Where] = ()) -> int:
        """Number of rows that meet all conditions; 0 without the table."""
        if table not in self.tables:
            return 0
        return int(self._query(f"SELECT count(*) FROM {table}{_clause(where)}")[0][0])

    def constants(self, table: str, columns: Collection[str]) -> dict[str, int | None]:
        """The value of each of these columns; empty if one of them differs between rows, or is not an integer or NULL.

        To ask SQLite whether a column has one value takes half the time of reading it, and no memory.
        """
        first = self.rows(table, [*columns], limit=1)[0]
        if not all(value is None or isinstance(value, int) for value in first):
            return {}
        differ = " OR ".join(
            f"[{column}] IS NOT {'NULL' if value is None else value}"
            for column, value in zip(columns, first, strict=True)
        )
        if self._query(f"SELECT 1 FROM {table} WHERE {differ} LIMIT 1"):
            return {}
        return dict(zip(columns, first, strict=True))

    def faults(self, table: str, columns: Mapping[str, str]) -> tuple[int, dict[str, tuple[int, int]]]:
        """Number of rows, and how many have NULL and how many a value of another type in each column."""
        unsound = " OR ".join(f"typeof([{column}]) <> '{kind}'" for column, kind in columns.items() if kind)
        if all(columns.values()) and not self._query(f"SELECT 1 FROM {table} WHERE {unsound} LIMIT 1"):
            return self.count(table), dict.fromkeys(columns, (0, 0))
        if (sound := self._nulls(table, columns)) is not None:
            return sound
        counts = "".join(
            f", count(*) - count([{column}]), "
            + (f"total(typeof([{column}]) NOT IN ('null', '{kind}'))" if kind else "0")
            for column, kind in columns.items()
        )
        rows, *numbers = self._query(f"SELECT count(*){counts} FROM {table}")[0]
        pairs = zip(numbers[::2], map(int, numbers[1::2]), strict=True)
        return rows, dict(zip(columns, pairs, strict=True))

    def _nulls(self, table: str, columns: Mapping[str, str]) -> tuple[int, dict[str, tuple[int, int]]] | None:
        """The same as `faults` if no value has another type, else None: faster than to ask for each type."""
        texts = [f"typeof([{column}]) NOT IN ('null', 'text')" for column, kind in columns.items() if kind == "text"]
        if texts and self._query(f"SELECT 1 FROM {table} WHERE {' OR '.join(texts)} LIMIT 1"):
            return None  # the driver takes integers among texts for texts
        items = ", ".join(f"[{column}]" for column in columns)
        count, nulls = 0, dict.fromkeys(columns, 0)
        try:
            with self._stream(f"SELECT {items} FROM {table}") as reader:
                for batch in reader:
                    count += len(batch)
                    for column, chunk in zip(columns, batch.columns, strict=True):
                        nulls[column] += chunk.null_count
                types = dict(zip(columns, reader.schema.types, strict=True))
        except (adbc_driver_manager.Error, pyarrow.ArrowException, OSError):
            return None
        is_type = {"text": pyarrow.types.is_string, "integer": pyarrow.types.is_integer}
        if not all(
            kind and (nulls[column] == count or is_type[kind](types[column])) for column, kind in columns.items()
        ):
            return None
        return count, {column: (null_count, 0) for column, null_count in nulls.items()}

    @contextmanager
    def _stream(self, sql: str) -> Iterator[Any]:
        """The rows of a large query in batches. Thread-safe."""
        with (
            adbc_driver_sqlite.connect(self._uri) as database,
            adbc_driver_manager.AdbcConnection(database) as connection,
            adbc_driver_manager.AdbcStatement(connection) as statement,
        ):
            statement.set_options(**{"adbc.sqlite.query.batch_rows": str(_BATCH_ROWS)})
            statement.set_sql_query(sql)
            stream, _ = statement.execute_query()
            yield pyarrow.RecordBatchReader._import_from_c(stream.address)

    def texts_of_ids(self, ids: Iterable[int]) -> dict[int, str]:
        """The texts of these ids in ``StringIds``; unknown ids are omitted."""
        where = f"id IN ({integer_list(ids)}) AND value IS NOT NULL"
        return dict(self._query(f"SELECT id, CAST(value AS TEXT) FROM StringIds WHERE {where}"))

    def ids_like(self, *patterns: str) -> dict[int, str]:
        """The ids and texts of ``StringIds`` that match one of these patterns, in any case."""
        likes = " OR ".join(["value LIKE ?"] * len(patterns))
        sql = f"SELECT id, CAST(value AS TEXT) FROM StringIds WHERE typeof(id) = 'integer' AND ({likes})"
        return dict(self._query(sql, *patterns))

    def ambiguous_ids(self) -> int:
        """Number of ids in ``StringIds`` with several texts; nsys declares the id as the primary key."""
        if not self.has("StringIds", "id", "value") or self._query(
            "SELECT 1 FROM pragma_table_info('StringIds') WHERE name = 'id' AND pk = 1 AND lower(type) = 'integer'"
        ):
            return 0
        groups = "SELECT id FROM StringIds GROUP BY id HAVING min(value) IS NOT max(value)"
        return int(self._query(f"SELECT count(*) FROM ({groups})")[0][0])

    def texts_like(self, *patterns: str) -> set[str]:
        """The texts in any table but enumerations that match one of these patterns, in any case."""
        texts: set[str] = set()
        for table, column in text_columns(self._query, self.tables):
            likes = " OR ".join([f'"{column}" LIKE ?'] * len(patterns))
            rows = self._query(f'SELECT DISTINCT "{column}" FROM "{table}" WHERE {likes}', *patterns)
            texts.update(str(text) for (text,) in rows)
        return texts

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._small.close()


def _invalid(column: str) -> str:
    """A condition for rows without an integer in the column."""
    return f"([{column}] IS NULL OR [{column}] >= '')"  # SQLite orders all text and blobs after numbers


def _clause(where: Sequence[Where]) -> str:
    """The WHERE clause of conditions."""
    parts = []
    for column, values, excluded, or_invalid in where:
        condition = f"[{column}] {'NOT IN' if excluded else 'IN'} ({integer_list(values)})"
        if or_invalid:
            parts.append(f"({condition} OR {_invalid(column)})")
        else:
            parts.append(f"({condition} AND [{column}] < '')" if excluded else condition)
    return f" WHERE {' AND '.join(parts)}" if parts else ""


class _Column:
    """A column under construction. Each batch is copied immediately, so its memory is free before the next is read.

    Attributes:
        text: Whether the column is text; otherwise integers.
        fits: Whether the actual type matches.
        count, nulls: Number of rows, and number of NULLs.
    """

    def __init__(self, type_: Any, text: bool) -> None:
        self.text, self.count, self.nulls = text, 0, 0
        self.fits = pyarrow.types.is_string(type_) if text else pyarrow.types.is_integer(type_)
        self._values: npt.NDArray[Any] = np.empty(0, dtype=np.int64)
        self._texts: list[str] = []
        self._empty: list[Int64Array] = []

    def add(self, chunk: Any) -> None:
        """Append a batch."""
        before = self.count
        self.count, self.nulls = self.count + len(chunk), self.nulls + chunk.null_count
        if not self.fits:
            return
        if self.text:
            raw = chunk.cast(pyarrow.binary()).to_pylist()
            self._texts += ["" if value is None else _text(value) for value in raw]
            return
        if self.count > len(self._values):  # in place: realloc can move the memory without a copy
            self._values.resize(max(self.count, len(self._values) * 5 // 4), refcheck=False)
        # chunk.to_numpy() would import pandas: if Ctrl-C interrupts the main thread's import, this thread deadlocks
        values = np.frombuffer(chunk.buffers()[1], dtype=np.int64)[chunk.offset : chunk.offset + len(chunk)]
        self._values[before : self.count] = values
        if chunk.null_count:
            self._empty.append(before + np.flatnonzero(_nulls(chunk)))

    def values(self, missing: int | str) -> npt.NDArray[Any]:
        """The complete column; callable once."""
        if self.nulls == self.count:  # without values the driver cannot infer a type
            return np.full(self.count, missing, dtype=object if self.text else np.int64)
        if self.text:
            return np.array(self._texts, dtype=object)
        self._values.resize(self.count, refcheck=False)
        for empty in self._empty:
            self._values[empty] = missing
        return self._values


def _nulls(chunk: Any) -> npt.NDArray[np.bool_]:
    """Mask of the NULL rows of a batch."""
    bits = np.unpackbits(np.frombuffer(chunk.buffers()[0], dtype=np.uint8), bitorder="little")
    is_null: npt.NDArray[np.bool_] = bits[chunk.offset : chunk.offset + len(chunk)] == 0
    return is_null


def _text(raw: bytes) -> str:
    """Decode text; invalid UTF-8 becomes a replacement character."""
    return raw.decode("utf-8", "replace")
