"""Tables of a folder with a Parquet or Arrow file each, as ``nsys export --type=parquetdir`` and ``arrowdir`` write.

Only the columns that are asked for are read. nsys writes groups of 2,048 rows, so many of them are read at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from pyarrow import compute

from nvprof_kit._trace.files.database import Database, Where, among, as_integers, is_integer, is_text, plain
from nvprof_kit.errors import CaptureError

SUFFIXES = (".parquet", ".arrow")
"""Suffixes of the files; a folder has one of them."""

_BATCH_ROWS = 1 << 16
"""So many rows are read at a time: what they take stays in the processor's cache, and is used again for the next."""


class TableFolder(Database):
    """A read-only folder of Parquet or Arrow files.

    Args:
        path: The folder.
        named: The path to show in messages, if different.
    """

    kind, export_type, in_threads = "a folder of tables", "parquetdir", False

    def __init__(self, path: Path, named: Path | None = None) -> None:
        super().__init__(path, named)
        files = [file for file in sorted(path.iterdir()) if file.suffix in SUFFIXES and file.is_file()]
        suffix = next((suffix for suffix in SUFFIXES if any(file.suffix == suffix for file in files)), "")
        self.tables = self._files = _Files({file.stem: file for file in files if file.suffix == suffix}, self.named)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._files.close()

    def broken(self, error: Exception | str) -> CaptureError:
        """The error for a damaged folder."""
        return CaptureError(f"{self.named}: a table in it is damaged ({error}); export the .nsys-rep again")

    def arrays(
        self, table: str, columns: Collection[str], where: Sequence[Where] = (), texts: Collection[str] = ()
    ) -> Iterator[tuple[str, Any]]:
        """Columns of the rows that meet all conditions, column by column; see `Database.arrays`."""
        chosen = self._chosen(table, where)
        for column in columns:
            for batch in self._batches(table, [column], chosen):
                yield column, batch.column(0)

    def _batches(self, table: str, columns: Collection[str], chosen: Sequence[Any] | None = None) -> Iterator[Any]:
        """The chosen rows as Arrow batches, no batch behind the last of them; all rows for None."""
        batches = self._files.file(table).batches([*columns])
        if chosen is None:
            yield from batches
        for is_met, batch in zip(chosen or (), batches, strict=False):
            yield batch.filter(is_met)

    def _chosen(self, table: str, where: Sequence[Where]) -> list[Any] | None:
        """Which rows of each batch meet all conditions, as Arrow arrays, to the last batch with such a row; None
        without conditions.
        """
        if not where:
            return None
        file, chosen = self._files.file(table), []
        if missing := {condition.column for condition in where} - file.types.keys():
            raise self.refuse(f"the table {table} has no column {min(missing)}")
        for batch in file.batches([*{condition.column for condition in where}]):
            is_met: Any = True
            for condition in where:
                array = batch.column(condition.column)
                if not is_integer(array.type):
                    raise self.broken(f"{table}.{condition.column} is {array.type}")
                is_among = among(as_integers(array, 0), condition.values) != condition.excluded
                bits = pyarrow.py_buffer(np.packbits(is_among, bitorder="little"))
                meets = pyarrow.Array.from_buffers(pyarrow.bool_(), len(array), [None, bits])
                if array.null_count and condition.or_null:
                    meets = compute.or_(meets, array.is_null())
                elif array.null_count:
                    meets = compute.and_(meets, array.is_valid())
                is_met = meets if is_met is True else compute.and_(is_met, meets)
            chosen.append(is_met)
        while chosen and not chosen[-1].true_count:
            chosen.pop()
        return chosen

    def rows(
        self, table: str, columns: Sequence[str], where: Sequence[Where] = (), *, limit: int = -1
    ) -> list[tuple[Any, ...]]:
        """Rows of a small table, or few of a large one; see `Database.rows`."""
        rows: list[tuple[Any, ...]] = []
        for batch in self._batches(table, columns, self._chosen(table, where)):
            batch = batch if limit < 0 else batch.slice(0, limit - len(rows))  # noqa: PLW2901
            rows += zip(*(plain(batch.column(column)) for column in columns), strict=True)
            if 0 <= limit <= len(rows):
                break
        return rows

    def count(self, table: str) -> int:
        """Number of rows; 0 without the table."""
        return int(self._files.file(table).rows) if table in self.tables else 0

    def faults(self, table: str, columns: Mapping[str, str]) -> tuple[int, dict[str, tuple[int, int]]]:
        """Number of rows, and how many have NULL and how many a value of another type in each column."""
        file, nulls = self._files.file(table), dict.fromkeys(columns, 0)
        for batch in self._batches(table, columns):
            for column in columns:
                nulls[column] += batch.column(column).null_count
        is_right = {"": lambda _: True, "text": is_text, "integer": is_integer}
        return file.rows, {
            column: (nulls[column], 0 if is_right[kind](file.types[column]) else file.rows - nulls[column])
            for column, kind in columns.items()
        }

    def texts(self) -> Iterator[str]:
        """The texts in all tables but enumerations, each of a column once."""
        for table in self.tables:
            types = {} if table.startswith("ENUM_") else self._files.file(table).types
            names = [name for name, type_ in types.items() if is_text(type_) and not pyarrow.types.is_null(type_)]
            for batch in self._batches(table, names) if names else ():
                for name in names:
                    yield from filter(None, plain(batch.column(name).unique()))


class _Files(Mapping[str, frozenset[str]]):
    """The columns of each table; a file is opened when its columns are first asked for."""

    def __init__(self, paths: Mapping[str, Path], named: Path) -> None:
        self._paths, self._named = paths, named
        self._opened: dict[str, _File] = {}

    def file(self, table: str) -> _File:
        """The file of a table."""
        if table not in self._opened:
            self._opened[table] = _File(self._paths[table], self._named)
        return self._opened[table]

    def __getitem__(self, table: str) -> frozenset[str]:
        return frozenset(self.file(table).types)

    def __contains__(self, table: object) -> bool:
        return table in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def close(self) -> None:
        while self._opened:
            self._opened.popitem()[1].close()


class _File:
    """A Parquet file, or a stream of Arrow.

    Attributes:
        types: The types of its columns.
        rows: The number of its rows.
    """

    def __init__(self, path: Path, named: Path) -> None:
        self._path, self._named = path, named
        with self._reading():
            if path.suffix == ".parquet":
                self._source = pyarrow.parquet.ParquetFile(path, pre_buffer=False)  # it would keep what it read
                schema, self.rows = self._source.schema_arrow, self._source.metadata.num_rows
            else:
                self._source = pyarrow.memory_map(str(path))
                reader = pyarrow.ipc.open_stream(self._source)
                self._table, schema = reader.read_all(), reader.schema
                self.rows = self._table.num_rows
        self.types = dict(zip(schema.names, schema.types, strict=True))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            message = str(error).partition("\n")[0].rstrip(".")
            raise CaptureError.of("cut-table", path=self._named, table=self._path.name, message=message) from None

    def batches(self, columns: list[str]) -> Iterator[Any]:
        """Columns of all rows, many rows at a time."""
        with self._reading():
            if self._path.suffix == ".parquet":
                yield from self._source.iter_batches(_BATCH_ROWS, columns=columns, use_threads=False)
            else:
                yield from self._table.select(columns).to_batches()

    def close(self) -> None:
        self._source.close()
