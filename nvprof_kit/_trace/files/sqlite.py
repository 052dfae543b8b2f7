"""Bulk reads of an SQLite file, strictly read-only.

Small queries use `sqlite3`; columns with millions of rows use ADBC, which fills Arrow buffers without a Python object
per value. Both open the file read-only and immutable, so neither creates a journal or a lock next to a capture.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import adbc_driver_manager
import adbc_driver_sqlite
import numpy as np
import numpy.typing as npt
import pyarrow

from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue

Int64Array = npt.NDArray[np.int64]

_BATCH_ROWS = 1 << 16
"""The driver allocates the buffers of a whole batch before it reads the first row, and infers column types from the
first batch. With 2**30 rows it allocated 8 GiB per column, was no faster, and crashed with a segmentation fault under
`ulimit -v`.
"""


def integer_list(values: Iterable[int]) -> str:
    """Integers formatted for an SQL ``IN (…)``."""
    return ", ".join(str(int(value)) for value in values)


class Database:
    """A read-only SQLite file: its tables and columns, with rows as NumPy arrays.

    Args:
        path: The file.
        named: The path to show in messages, if different.

    Raises:
        CaptureError: The file is not SQLite, is truncated, or cannot be opened.
    """

    def __init__(self, path: Path, named: Path | None = None) -> None:
        self.path, self.named = path, named or path
        self.warnings: list[Issue] = []
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
            self.tables: Mapping[str, frozenset[str]] = {table: self._columns(table) for table in tables}
        except (sqlite3.Error, UnicodeDecodeError) as error:  # SQLite's own messages can fail to decode
            self.close()
            raise self.broken(error) from None

    def _columns(self, table: str) -> frozenset[str]:
        return frozenset(row[1] for row in self._small.execute("SELECT 0, name FROM pragma_table_info(?)", (table,)))

    def broken(self, error: Exception | str) -> CaptureError:
        """The error for a damaged file."""
        message = str(error).partition("\n")[0]  # the driver appends the query
        return CaptureError(
            f"{self.named}: not a whole SQLite file ({message}); copy it again, or export the .nsys-rep again"
        )

    def has(self, table: str, *columns: str) -> bool:
        """Whether the file has the table with all of these columns."""
        return table in self.tables and self.tables[table].issuperset(columns)

    def refuse(self, fault: str) -> CaptureError:
        """The error for an invalid value in a table and column."""
        return CaptureError(f"{self.named}: {fault}; the file is damaged or of an unknown schema: export it again")

    def warn(self, fault: str, share: float = 1.0) -> None:
        """Add an issue to `CaptureInfo.warnings`, once; `share` is that of the rows that it concerns."""
        if fault not in self.warnings:
            self.warnings.append(Issue("rows", "warning", share, fault))

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of a small query.

        Raises:
            CaptureError: The file is damaged.
        """
        try:
            return self._small.execute(sql).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self.broken(error) from None

    def columns(
        self,
        sql: str,
        *,
        missing: int = -1,
        texts: Collection[str] = (),
        required: Collection[str] = (),
        diagnose: Callable[[], None] | None = None,
    ) -> dict[str, npt.NDArray[Any]]:
        """The columns of a large query: integers as int64 arrays, text as object arrays. Thread-safe.

        Args:
            sql: The query, with a name for every column.
            missing: The value for NULL in integer columns.
            texts: Text columns, with NULL as ''; all others are integers.
            required: Columns that should not contain NULL, if they are in the query.
            diagnose: Called if a column has values of the wrong type or a needed column contains NULL. It raises an
                error with table and column, or returns if the query can continue.

        Raises:
            CaptureError: The file is damaged, or a column has values of the wrong type.
        """
        try:
            with (
                adbc_driver_sqlite.connect(self._uri) as database,
                adbc_driver_manager.AdbcConnection(database) as connection,
            ):
                table = _fetch(connection, sql, texts)
        except (adbc_driver_manager.Error, pyarrow.ArrowException, OSError) as error:
            if diagnose is not None:
                diagnose()
            raise self.broken(error) from None
        if diagnose is not None and any(table[name].nulls for name in table if name in required):
            diagnose()
        for name, column in table.items():
            if wrong := _wrong(column, required=name in required and diagnose is None):
                if diagnose is not None:
                    diagnose()
                raise self.broken(f"{wrong} for {name}")
        return {name: column.values("" if name in texts else missing) for name, column in table.items()}

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._small.close()


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


def _fetch(connection: Any, sql: str, texts: Collection[str]) -> dict[str, _Column]:
    """The columns of a query."""
    with adbc_driver_manager.AdbcStatement(connection) as statement:
        statement.set_options(**{"adbc.sqlite.query.batch_rows": str(_BATCH_ROWS)})
        statement.set_sql_query(sql)
        stream, _ = statement.execute_query()
        reader = pyarrow.RecordBatchReader._import_from_c(stream.address)
        columns = {field.name: _Column(field.type, field.name in texts) for field in reader.schema}
        for batch in reader:
            for column, chunk in zip(columns.values(), batch.columns, strict=True):
                column.add(chunk)
        return columns


def _wrong(column: _Column, *, required: bool) -> str:
    """What is wrong with a column; '' if nothing."""
    if required and column.nulls:
        return f"{column.nulls} rows without a value"
    if column.fits or column.nulls == column.count:
        return ""
    return f"values that are not {'text' if column.text else 'whole numbers'}"


def _text(raw: bytes) -> str:
    """Decode text; invalid UTF-8 becomes a replacement character."""
    return raw.decode("utf-8", "replace")
