"""Tables of a folder with a Parquet or Arrow file each, as ``nsys export --type=parquetdir`` and ``arrowdir`` write.

Only the columns that are asked for are read. nsys writes groups of 2,048 rows, so many of them are read at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from pyarrow import compute

from nvprof_kit._trace.files.database import Database, Where, int64, is_integer, is_text, plain
from nvprof_kit.errors import CaptureError

SUFFIXES = (".parquet", ".arrow")
"""Suffixes of the files; a folder has one of them."""

_BATCH_ROWS = 1 << 18
"""So many rows are read at a time."""


class TableFolder(Database):
    """A read-only folder of Parquet or Arrow files.

    Args:
        path: The folder.
        named: The path to show in messages, if different.
    """

    kind, export_type = "a folder of tables", "parquetdir"

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

    def batches(
        self, table: str, columns: Collection[str], where: Sequence[Where] = (), texts: Collection[str] = ()
    ) -> Iterator[Any]:
        """The rows that meet all conditions, as Arrow batches; see `Database.batches`."""
        file = self._files.file(table)
        if missing := {condition.column for condition in where} - file.types.keys():
            raise self.refuse(f"the table {table} has no column {min(missing)}")
        for batch in file.batches([*dict.fromkeys((*columns, *(condition.column for condition in where)))]):
            for condition in where:
                array = batch.column(condition.column)
                if not is_integer(array.type):
                    raise self.broken(f"{table}.{condition.column} is {array.type}")
                is_met = compute.is_in(int64(array), value_set=pyarrow.array([*condition.values], pyarrow.int64()))
                is_met = compute.invert(is_met) if condition.excluded else is_met
                if array.null_count and condition.or_null:
                    is_met = compute.or_(is_met, array.is_null())
                elif array.null_count:
                    is_met = compute.and_(is_met, array.is_valid())
                batch = batch.filter(is_met)  # noqa: PLW2901
            if batch.num_rows:
                yield batch

    def rows(
        self, table: str, columns: Sequence[str], where: Sequence[Where] = (), *, limit: int = -1
    ) -> list[tuple[Any, ...]]:
        """Rows of a small table, or few of a large one; see `Database.rows`."""
        rows: list[tuple[Any, ...]] = []
        for batch in self.batches(table, columns, where):
            batch = batch if limit < 0 else batch.slice(0, limit - len(rows))  # noqa: PLW2901
            rows += zip(*(plain(batch.column(column)) for column in columns), strict=True)
            if 0 <= limit <= len(rows):
                break
        return rows

    def count(self, table: str, where: Sequence[Where] = ()) -> int:
        """Number of rows that meet all conditions; 0 without the table."""
        if table not in self.tables:
            return 0
        return (
            sum(batch.num_rows for batch in self.batches(table, (), where)) if where else self._files.file(table).rows
        )

    def faults(self, table: str, columns: Mapping[str, str]) -> tuple[int, dict[str, tuple[int, int]]]:
        """Number of rows, and how many have NULL and how many a value of another type in each column."""
        file, nulls = self._files.file(table), dict.fromkeys(columns, 0)
        for batch in self.batches(table, columns):
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
            for batch in self.batches(table, names) if names else ():
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
            raise CaptureError(
                f"{self._named}: {self._path.name} in it is not a whole file ({message}); copy the folder again, or "
                "export the .nsys-rep again"
            ) from None

    def batches(self, columns: list[str]) -> Iterator[Any]:
        """Columns of all rows, many rows at a time."""
        with self._reading():
            if self._path.suffix == ".parquet":
                yield from self._source.iter_batches(_BATCH_ROWS, columns=columns, use_threads=False)
            else:
                yield from self._table.select(columns).to_batches()

    def close(self) -> None:
        self._source.close()
