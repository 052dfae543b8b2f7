"""An SQLite file read in bulk, without ever writing to it.

Small queries go through `sqlite3`; columns of millions of rows go through ADBC, which fills Arrow buffers without
a Python object per value. Both open the file read-only and immutable, so that neither a journal nor a lock is ever
made beside a capture.
"""

from __future__ import annotations

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
import pyarrow.compute  # here, and not in a thread that fills missing values

from nvprof_kit.errors import CaptureError

Int64Array = npt.NDArray[np.int64]

_BATCH_ROWS = 1 << 16
"""The driver reserves a batch's whole buffers before it reads the first row, and tells a column's type from the first
batch. With 2**30 rows it reserved 8 GiB a column, was no faster, and ended in a segmentation fault under `ulimit -v`.
"""

_MAP_BYTES = 1 << 40


def integer_list(values: Iterable[int]) -> str:
    """Whole numbers as the inside of an SQL ``IN (…)``."""
    return ", ".join(str(int(value)) for value in values)


class Database:
    """A read-only SQLite file: which tables and columns it has, and their rows as NumPy columns.

    Args:
        path: The file.
        named: The path to name in messages, where it is another.

    Raises:
        CaptureError: The file is not SQLite, is truncated, or cannot be opened.
    """

    def __init__(self, path: Path, named: Path | None = None) -> None:
        self.path, self.named = path, named or path
        self.warnings: list[str] = []
        journal = any(path.with_name(path.name + end).exists() for end in ("-wal", "-journal"))
        self._uri = f"file:{quote(str(path.resolve()))}?mode=ro" + ("" if journal else "&immutable=1")
        try:
            self._small = sqlite3.connect(self._uri, uri=True, check_same_thread=False)
        except sqlite3.Error as error:
            raise self.broken(error) from None
        self._small.text_factory = _text  # a program may give NVTX texts of any encoding
        try:
            tables = [name for (name,) in self._small.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            self.tables: Mapping[str, frozenset[str]] = {table: self._columns(table) for table in tables}
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter from a message of SQLite's own
            self.close()
            raise self.broken(error) from None

    def _columns(self, table: str) -> frozenset[str]:
        return frozenset(row[1] for row in self._small.execute("SELECT 0, name FROM pragma_table_info(?)", (table,)))

    def broken(self, error: Exception | str) -> CaptureError:
        """The error that says what is wrong with the file."""
        what = str(error).partition("\n")[0]  # the driver adds the query
        return CaptureError(
            f"{self.named}: not a whole SQLite file ({what}); copy it again, or export the .nsys-rep again"
        )

    def has(self, table: str, *columns: str) -> bool:
        """Whether the file has the table, and all of these columns in it."""
        return table in self.tables and self.tables[table].issuperset(columns)

    def refuse(self, found: str) -> CaptureError:
        """The error that says which table and column hold what they must not."""
        return CaptureError(f"{self.named}: {found}; the file is damaged or of an unknown schema: export it again")

    def warn(self, found: str) -> None:
        """Note what the file lacks, for `CaptureInfo.warnings`; once for each sentence."""
        if found not in self.warnings:
            self.warnings.append(found)

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
        needed: Collection[str] = (),
        diagnose: Callable[[], None] | None = None,
    ) -> dict[str, npt.NDArray[Any]]:
        """The columns of a query over many rows; whole numbers come as int64, text as object arrays. Callable from any
        thread.

        Args:
            sql: The query, with a name for every column.
            missing: What stands for NULL in a column of whole numbers.
            texts: Columns of text, in which NULL is ''; all others are whole numbers.
            needed: Columns, as far as the query has them, in which no row should lack a value.
            diagnose: Called where a column holds what it should not, or a needed one lacks a value: raises an error
                that names table and column, or returns where the query can live with it.

        Raises:
            CaptureError: The file is damaged, or a column holds what it should not.
        """
        try:
            with (
                adbc_driver_sqlite.connect(self._uri) as database,
                adbc_driver_manager.AdbcConnection(database) as connection,
            ):
                _fetch(connection, f"PRAGMA mmap_size = {_MAP_BYTES}")
                table = _fetch(connection, sql)
        except (adbc_driver_manager.Error, pyarrow.ArrowException, OSError) as error:
            if diagnose is not None:
                diagnose()
            raise self.broken(error) from None
        if diagnose is not None and any(table.column(name).null_count for name in table.column_names if name in needed):
            diagnose()
        for name in table.column_names:
            if wrong := _wrong(table.column(name), text=name in texts, needed=name in needed and diagnose is None):
                if diagnose is not None:
                    diagnose()
                raise self.broken(f"{wrong} for {name}")
        return {name: _as_numpy(table.column(name), "" if name in texts else missing) for name in table.column_names}

    def close(self) -> None:
        """Close the file; it may be called twice."""
        self._small.close()


def _fetch(connection: Any, sql: str) -> Any:
    """The Arrow table that a query gives."""
    with adbc_driver_manager.AdbcStatement(connection) as statement:
        statement.set_options(**{"adbc.sqlite.query.batch_rows": str(_BATCH_ROWS)})
        statement.set_sql_query(sql)
        stream, _ = statement.execute_query()
        return pyarrow.RecordBatchReader._import_from_c(stream.address).read_all()


def _wrong(column: Any, *, text: bool, needed: bool) -> str:
    """What is wrong with a column, '' for nothing."""
    if needed and column.null_count:
        return f"{column.null_count} rows without a value"
    fits = pyarrow.types.is_string(column.type) if text else pyarrow.types.is_integer(column.type)
    if fits or column.null_count == len(column):
        return ""
    return f"values that are not {'text' if text else 'whole numbers'}"


def _text(raw: bytes) -> str:
    """Text of the file; a sign stands for what is not UTF-8."""
    return raw.decode("utf-8", "replace")


def _as_numpy(column: Any, missing: int | str) -> npt.NDArray[Any]:
    if isinstance(missing, str) and column.null_count < len(column):
        raw = column.cast(pyarrow.binary()).to_pylist()
        return np.array([missing if one is None else _text(one) for one in raw], dtype=object)
    if column.null_count == len(column):  # the driver cannot tell the type of nothing
        return np.full(len(column), missing, dtype=object if isinstance(missing, str) else np.int64)
    if column.null_count:
        column = column.fill_null(missing)
    # column.to_numpy() imports pandas: a thread that does so while Ctrl-C interrupts the main thread's never ends
    return np.concatenate([_chunk(chunk) for chunk in column.chunks])


def _chunk(chunk: Any) -> Int64Array:
    values = np.frombuffer(chunk.buffers()[1], dtype=np.int64)
    return values[chunk.offset : chunk.offset + len(chunk)]
