"""Tables of a folder with a Parquet or Arrow file each, as ``nsys export --type=parquetdir`` and ``arrowdir`` write.

Only the columns that are asked for are read, and of a group of rows in which no row meets the conditions only the
columns that these need. nsys writes groups of 2,048 rows, so many of them are read at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from nvprof_kit._trace.files.database import Database, Int64Array, Where
from nvprof_kit.errors import CaptureError

SUFFIXES = (".parquet", ".arrow")
"""Suffixes of the files; a folder has one of them."""

_BATCH_ROWS = 1 << 18
"""So many rows are read at a time, if the groups of rows in the file are not larger."""


class TableFolder(Database):
    """A read-only folder of Parquet or Arrow files.

    Args:
        path: The folder.
        named: The path to show in messages, if different.

    Raises:
        CaptureError: A file in the folder is damaged.
    """

    kind, export_type = "a folder of tables", "parquetdir"

    def __init__(self, path: Path, named: Path | None = None) -> None:
        super().__init__(path, named)
        files = [file for file in sorted(path.iterdir()) if file.suffix in SUFFIXES and file.is_file()]
        suffix = next((suffix for suffix in SUFFIXES if any(file.suffix == suffix for file in files)), "")
        self.tables = self._files = _Files({file.stem: file for file in files if file.suffix == suffix}, self.named)

    def broken(self, error: Exception | str) -> CaptureError:
        """The error for a damaged folder."""
        return CaptureError(f"{self.named}: a table in it is damaged ({error}); export the .nsys-rep again")

    def _read(self, table: str, columns: Iterable[str], where: Sequence[Where] = ()) -> Iterator[Any]:
        """Columns of a table as Arrow tables, without the rows that do not meet the conditions."""
        file, conditions = self._files.file(table), [condition.column for condition in where]
        if missing := {*conditions} - file.types.keys():
            raise self.refuse(f"the table {table} has no column {min(missing)}")
        other_columns = [column for column in dict.fromkeys(columns) if column not in conditions]
        for groups in file.batches():
            if not where:
                yield file.read(groups, other_columns)
                continue
            batch = file.read(groups, dict.fromkeys(conditions))
            meets = np.ones(batch.num_rows, dtype=bool)
            for condition in where:
                array = batch[condition.column]
                if not _is_whole(array.type):
                    meets[:] = False
                    break
                values = np.array([*condition.values], dtype=np.int64)
                is_met = np.isin(_int64(array, -1), values, invert=condition.excluded)
                if array.null_count:
                    is_met = (is_met | _nulls(array)) if condition.or_invalid else (is_met & ~_nulls(array))
                meets &= is_met
            if not meets.any():
                continue
            has_any = np.logical_or.reduceat(meets, np.cumsum(file.sizes[groups]) - file.sizes[groups])
            batch = batch.filter(pyarrow.array(meets))
            if other_columns:
                more = file.read(groups[has_any], other_columns)
                more = more.filter(pyarrow.array(meets[np.repeat(has_any, file.sizes[groups])]))
                batch = pyarrow.table({name: table[name] for table in (batch, more) for name in table.column_names})
            yield batch

    def rows(
        self, table: str, columns: Sequence[str], where: Sequence[Where] = (), *, limit: int = -1
    ) -> list[tuple[Any, ...]]:
        """Rows of a small table, or few of a large one, with values of any type; None for NULL.

        Raises:
            CaptureError: The file is damaged.
        """
        result: list[tuple[Any, ...]] = []
        for batch in self._read(table, columns, where):
            rows = batch if limit < 0 else batch[: limit - len(result)]
            result += zip(*(map(_signed, _plain(rows[column])) for column in columns), strict=True)
            if 0 <= limit <= len(result):
                break
        return result

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
            CaptureError: A file is damaged, or a column has values of the wrong type.
        """
        types = self._files.file(table).types
        sources = {
            name: [column for column in ((item,) if isinstance(item, str) else item) if column in types]
            for name, item in columns.items()
        }
        checked = {condition.column for condition in where if condition.or_invalid}
        wrong = [
            column
            for name, present in (*sources.items(), ("", checked))
            for column in present
            if not (_is_text if name in texts else _is_whole)(types[column])
        ]
        if wrong:
            if diagnose is not None:
                diagnose()
            raise self.broken(f"{table}.{wrong[0]} is {types[wrong[0]]}")
        read_columns = {column for present in sources.values() for column in present}
        parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in columns}
        nulls = 0
        for batch in self._read(table, read_columns | checked, where):
            nulls += sum(batch[column].null_count for column in checked - read_columns)
            for name, present in sources.items():
                if name in texts:
                    values, null_count = _texts(batch[present[0]] if present else pyarrow.nulls(len(batch)))
                else:
                    values, null_count = _whole_numbers([batch[column] for column in present], missing, len(batch))
                parts[name].append(values)
                nulls += null_count if present and name in required else 0
        pyarrow.default_memory_pool().release_unused()
        if nulls:
            if diagnose is None:
                raise self.broken(f"{nulls} rows of {table} without a value")
            diagnose()
        kinds = {name: object if name in texts else np.int64 for name in columns}
        return {name: np.concatenate([np.empty(0, dtype=kinds[name]), *parts.pop(name)]) for name in columns}

    def count(self, table: str, where: Sequence[Where] = ()) -> int:
        """Number of rows that meet all conditions; 0 without the table."""
        if table not in self.tables:
            return 0
        return sum(map(len, self._read(table, (), where))) if where else int(self._files.file(table).sizes.sum())

    def constants(self, table: str, columns: Collection[str]) -> dict[str, int | None]:
        """The value of each of these columns; empty if one of them differs between rows or is not an integer."""
        if not all(_is_whole(self._files.file(table).types[column]) for column in columns):
            return {}
        values: dict[str, set[int | None]] = {column: set() for column in columns}
        for batch in self._read(table, columns):
            for column in columns:
                edges = {*pyarrow.compute.min_max(batch[column]).as_py().values()}
                values[column].update(map(_signed, edges | {None} if batch[column].null_count else edges))
            if any(len(distinct) > 1 for distinct in values.values()):
                return {}
        return {column: distinct.pop() for column, distinct in values.items()}

    def faults(self, table: str, columns: Mapping[str, str]) -> tuple[int, dict[str, tuple[int, int]]]:
        """Number of rows, and how many have NULL and how many a value of another type in each column."""
        nulls, rows = dict.fromkeys(columns, 0), self.count(table)
        for batch in self._read(table, columns):
            for column in columns:
                nulls[column] += batch[column].null_count
        types = self._files.file(table).types
        fits = {
            column: not kind or (_is_text if kind == "text" else _is_whole)(types[column])
            for column, kind in columns.items()
        }
        return rows, {column: (nulls[column], 0 if fits[column] else rows - nulls[column]) for column in columns}

    @cached_property
    def _strings(self) -> dict[int, str]:
        if not self.has("StringIds", "id", "value"):
            return {}
        return {id_: str(text) for id_, text in self.rows("StringIds", ("id", "value")) if text is not None}

    def texts_of_ids(self, ids: Iterable[int]) -> dict[int, str]:
        """The texts of these ids in ``StringIds``; unknown ids are omitted."""
        return {id_: self._strings[id_] for id_ in ids if id_ in self._strings}

    def ids_like(self, *patterns: str) -> dict[int, str]:
        """The ids and texts of ``StringIds`` that match one of these patterns, in any case."""
        matches = _pattern(patterns).fullmatch
        return {id_: text for id_, text in self._strings.items() if matches(text)}

    def ambiguous_ids(self) -> int:
        """Number of ids in ``StringIds`` with several texts."""
        if not self.has("StringIds", "id", "value"):
            return 0
        pairs = {*self.rows("StringIds", ("id", "value"))}
        return len(pairs) - len({id_ for id_, _ in pairs})

    def texts_like(self, *patterns: str) -> set[str]:
        """The texts in any table but enumerations that match one of these patterns, in any case."""
        matches = _pattern(patterns).fullmatch
        texts: set[str] = set()
        for table in self.tables:
            types = {} if table.startswith("ENUM_") else self._files.file(table).types
            names = [name for name, type_ in types.items() if _is_text(type_)]
            for batch in self._read(table, names) if names else ():
                values = {text for name in names for text in _plain(batch[name].unique()) if text is not None}
                texts.update(text for text in values if matches(text))
        return texts

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._files.close()


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
    """A Parquet file, or a stream or file of Arrow, whose batches are the groups of rows.

    Attributes:
        types: The types of its columns.
        sizes: The number of rows of each group that has any.
    """

    def __init__(self, path: Path, named: Path) -> None:
        self._path, self._named = path, named
        with self._reading():
            if path.suffix == ".parquet":
                self._parquet = pyarrow.parquet.ParquetFile(path)
                metadata, schema = self._parquet.metadata, self._parquet.schema_arrow
                sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            else:
                self._parquet, self._source = None, pyarrow.memory_map(str(path))
                try:
                    reader = pyarrow.ipc.open_stream(self._source)
                    self._batches, schema = list(reader), reader.schema
                except pyarrow.ArrowInvalid:
                    self._source.seek(0)
                    file = pyarrow.ipc.open_file(self._source)
                    self._batches = [file.get_batch(index) for index in range(file.num_record_batches)]
                    schema = file.schema
                sizes = [batch.num_rows for batch in self._batches]
        self._schema = schema
        self.types = dict(zip(schema.names, schema.types, strict=True))
        self._groups = np.flatnonzero(sizes)
        self.sizes = np.array(sizes, dtype=np.int64)[self._groups]

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

    def batches(self) -> list[Int64Array]:
        """The groups to read at a time."""
        batch_of_group = (np.cumsum(self.sizes) - 1) // _BATCH_ROWS
        return np.split(np.arange(len(self.sizes)), np.flatnonzero(np.diff(batch_of_group)) + 1)

    def read(self, groups: Int64Array, columns: Iterable[str]) -> Any:
        """Columns of some groups, as an Arrow table."""
        numbers, names = self._groups[groups].tolist(), [*columns]
        with self._reading():
            if self._parquet is not None:
                return self._parquet.read_row_groups(numbers, names, use_threads=False)
            batches = [self._batches[number] for number in numbers]
            return pyarrow.Table.from_batches(batches, self._schema).select(names)

    def close(self) -> None:
        if self._parquet is not None:
            self._parquet.close()
        else:
            self._batches.clear()
            self._source.close()


def _is_whole(type_: Any) -> bool:
    types = pyarrow.types
    return bool(types.is_integer(type_) or types.is_boolean(type_) or types.is_null(type_))


def _is_text(type_: Any) -> bool:
    types = pyarrow.types
    return bool(types.is_string(type_) or types.is_large_string(type_) or types.is_null(type_))


def _pattern(likes: Sequence[str]) -> re.Pattern[str]:
    """The regular expression for patterns of LIKE."""
    return re.compile("|".join(re.escape(like).replace("%", ".*") for like in likes), re.IGNORECASE | re.DOTALL)


def _signed(value: Any) -> Any:
    """A value as SQLite would hold it: 64-bit integers are signed."""
    if isinstance(value, bool):
        return int(value)
    return value - (1 << 64) if isinstance(value, int) and value >= 1 << 63 else value


def _plain(array: Any) -> list[Any]:
    """The values of an array; texts may have any encoding."""
    if _is_text(array.type) and not pyarrow.types.is_null(array.type):
        raw = array.cast(pyarrow.binary()).to_pylist()
        return [None if value is None else value.decode("utf-8", "replace") for value in raw]
    values: list[Any] = array.to_pylist()
    return values


def _chunks(array: Any) -> list[Any]:
    """The parts of a column, none of which is chunked itself."""
    chunks: list[Any] = array.chunks if isinstance(array, pyarrow.ChunkedArray) else [array]
    return chunks


def _nulls(array: Any) -> npt.NDArray[np.bool_]:
    """Which values are NULL. `to_numpy` would import pandas, in a thread."""
    parts = [np.empty(0, dtype=np.bool_)]
    for chunk in map(pyarrow.Array.is_null, _chunks(array)):
        bits = np.unpackbits(np.frombuffer(chunk.buffers()[1], dtype=np.uint8), bitorder="little")
        parts.append(bits[chunk.offset : chunk.offset + len(chunk)].view(np.bool_))
    return np.concatenate(parts)


def _int64(array: Any, missing: int) -> Int64Array:
    """The integers of an array, 64 bits of them, with NULLs replaced."""
    parts = [np.empty(0, dtype=np.int64)]
    for chunk in _chunks(array):
        if chunk.null_count == len(chunk):
            parts.append(np.full(len(chunk), missing, dtype=np.int64))
            continue
        integers = chunk.view(pyarrow.int64()) if pyarrow.types.is_uint64(chunk.type) else chunk.cast(pyarrow.int64())
        integers = integers.fill_null(missing) if integers.null_count else integers
        parts.append(np.frombuffer(integers.buffers()[1], np.int64)[integers.offset : integers.offset + len(integers)])
    return parts[1] if len(parts) == 2 else np.concatenate(parts)


def _whole_numbers(arrays: Sequence[Any], missing: int, count: int) -> tuple[Int64Array, int]:
    """The first value of each row in these arrays, and the number of rows without one."""
    if len(arrays) == 1:
        return _int64(arrays[0], missing), arrays[0].null_count
    values = np.full(count, missing, dtype=np.int64)
    is_open = np.ones(count, dtype=bool)
    for array in arrays:
        if array.null_count < len(array):
            has_value = is_open & ~_nulls(array)
            values[has_value] = _int64(array, missing)[has_value]
            is_open &= ~has_value
    return values, int(np.count_nonzero(is_open))


def _texts(array: Any) -> tuple[npt.NDArray[Any], int]:
    """The texts of an array, with NULL as '', and the number of NULLs; equal texts are one object."""
    if array.null_count == len(array):
        return np.full(len(array), "", dtype=object), array.null_count
    parts = []
    for chunk in _chunks(array):
        encoded = chunk.dictionary_encode()
        texts = np.array([*_plain(encoded.dictionary), ""], dtype=object)
        parts.append(texts[_int64(encoded.indices, len(texts) - 1)])
    return np.concatenate(parts), array.null_count
