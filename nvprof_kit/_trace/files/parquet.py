"""Tables of a folder with a Parquet or Arrow file each, as ``nsys export --type=parquetdir`` and ``arrowdir`` write.

Only the columns that are asked for are read, and of a group of rows in which no row meets the conditions only the
columns that these need.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
        self._files = _Files({file.stem: file for file in files if file.suffix == suffix}, self._broken)
        self.tables = _Columns(self._files)

    def _broken(self, file: str, error: Exception | str) -> CaptureError:
        message = str(error).partition("\n")[0].rstrip(".")
        return CaptureError(
            f"{self.named}: {file} in it is not a whole file ({message}); copy the folder again, or export the "
            ".nsys-rep again"
        )

    def broken(self, error: Exception | str) -> CaptureError:
        """The error for a damaged folder."""
        return CaptureError(f"{self.named}: a table in it is damaged ({error}); export the .nsys-rep again")

    def _groups(self, table: str, where: Sequence[Where] = ()) -> Iterator[_Group]:
        """The groups of rows of a table, without the rows that do not meet the conditions."""
        file = self._files[table]
        if missing := {condition.column for condition in where} - self.tables[table]:
            raise self.refuse(f"the table {table} has no column {min(missing)}")
        for group in range(file.groups):
            arrays = _Arrays(file, group, self._broken)
            arrays |= {condition.column: arrays[condition.column] for condition in where}
            rows = None
            if where:
                rows = np.logical_and.reduce([_meets(arrays[condition.column], condition) for condition in where])
                if not rows.any():
                    continue
                if rows.all():
                    rows = None
            yield file.rows(group) if rows is None else int(np.count_nonzero(rows)), rows, arrays

    def rows(
        self, table: str, columns: Sequence[str], where: Sequence[Where] = (), *, limit: int = -1
    ) -> list[tuple[Any, ...]]:
        """Rows of a small table, or few of a large one, with values of any type; None for NULL.

        Raises:
            CaptureError: The file is damaged.
        """
        result: list[tuple[Any, ...]] = []
        for _, rows, arrays in self._groups(table, where):
            values = []
            for column in columns:
                array = arrays[column] if rows is None else arrays[column].filter(pyarrow.array(rows))
                array = array if limit < 0 else array[: limit - len(result)]
                values.append([_signed(value) for value in _plain(array)])
            result += zip(*values, strict=True)
            if 0 <= limit <= len(result):
                return result[:limit]
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
        types = self._files[table].types
        sources = {
            name: [column for column in ((item,) if isinstance(item, str) else item) if column in types]
            for name, item in columns.items()
        }
        wrong = [
            column
            for name, present in sources.items()
            for column in present
            if not (_is_text if name in texts else _is_whole)(types[column])
        ]
        unread = {condition.column for condition in where if condition.or_invalid}
        wrong += [column for column in unread if not _is_whole(types[column])]
        if wrong:
            if diagnose is not None:
                diagnose()
            raise self.broken(f"{table}.{wrong[0]} is {types[wrong[0]]}")
        parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in columns}
        nulls = 0
        read_columns = {column for present in sources.values() for column in present}
        for count, rows, arrays in self._groups(table, where):
            nulls += sum(arrays[column].null_count for column in unread - read_columns)
            for name, present in sources.items():
                if name in texts:
                    array = arrays[present[0]] if present else pyarrow.nulls(count, pyarrow.string())
                    values, null_count = _texts(array)
                elif present:
                    values, null_count = _whole_numbers([arrays[column] for column in present], missing)
                else:
                    values, null_count = np.full(count, missing, dtype=np.int64), 0
                if present and rows is not None:
                    if null_count and name in required:
                        null_count = int(np.count_nonzero(_nulls(arrays[present[0]])[rows]))
                    values = values[rows]
                elif name not in texts:
                    values = values.copy()  # the file may change under what is mapped
                parts[name].append(values)
                nulls += null_count if name in required else 0
        pyarrow.default_memory_pool().release_unused()
        if nulls:
            if diagnose is None:
                raise self.broken(f"{nulls} rows of {table} without a value")
            diagnose()
        return {
            name: chunks[0]
            if len(chunks) == 1
            else np.concatenate([*chunks, np.empty(0, dtype=object if name in texts else np.int64)])
            for name, chunks in parts.items()
        }

    def count(self, table: str, where: Sequence[Where] = ()) -> int:
        """Number of rows that meet all conditions; 0 without the table."""
        if table not in self.tables:
            return 0
        if not where:
            file = self._files[table]
            return sum(file.rows(group) for group in range(file.groups))
        return sum(count for count, _, _ in self._groups(table, where))

    def constants(self, table: str, columns: Collection[str]) -> dict[str, int | None]:
        """The value of each of these columns; empty if one of them differs between rows or is not an integer."""
        file, values = self._files[table], {}
        for column in columns:
            if not _is_whole(file.types[column]):
                return {}
            edges = {edge for group in range(file.groups) for edge in self._edges(table, group, column)}
            if len(edges) != 1:
                return {}
            values[column] = edges.pop()
        return values

    def _edges(self, table: str, group: int, column: str) -> set[int | None]:
        """The least and the greatest value of a column in a group of rows, and None if there are NULLs."""
        file = self._files[table]
        if not file.rows(group):
            return set()
        if (recorded := file.statistics(group, column)) is not None:
            return {_signed(value) for value in recorded}
        try:
            array = file.read(group, [column])[column]
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise self._broken(file.path.name, error) from None
        edges = pyarrow.compute.min_max(array).as_py()
        edge_values = {edge for edge in (edges["min"], edges["max"]) if edge is not None}
        return {_signed(value) for value in (edge_values | {None} if array.null_count else edge_values)}

    def faults(self, table: str, columns: Mapping[str, str]) -> tuple[int, dict[str, tuple[int, int]]]:
        """Number of rows, and how many have NULL and how many a value of another type in each column."""
        file, rows = self._files[table], self.count(table)
        counts = {}
        for column, kind in columns.items():
            nulls = sum(file.null_count(group, column) for group in range(file.groups))
            fits = not kind or (_is_text if kind == "text" else _is_whole)(file.types[column])
            counts[column] = nulls, 0 if fits else rows - nulls
        return rows, counts

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
        for table, file in self._files.items():
            names = [] if table.startswith("ENUM_") else [name for name, type_ in file.types.items() if _is_text(type_)]
            for _, _, arrays in self._groups(table):
                values = {text for name in names for text in _plain(arrays[name].unique()) if text is not None}
                texts.update(text for text in values if matches(text))
        return texts

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._files.close()


class _Files(Mapping[str, "_ParquetFile | _ArrowFile"]):
    """The files of a folder by table, each opened when it is first asked for."""

    def __init__(self, paths: Mapping[str, Path], broken: Callable[[str, Exception], CaptureError]) -> None:
        self._paths, self._broken = paths, broken
        self._opened: dict[str, _ParquetFile | _ArrowFile] = {}

    def __getitem__(self, table: str) -> _ParquetFile | _ArrowFile:
        if table not in self._opened:
            path = self._paths[table]
            try:
                self._opened[table] = _ParquetFile(path) if path.suffix == ".parquet" else _ArrowFile(path)
            except (pyarrow.ArrowException, OSError, ValueError) as error:
                raise self._broken(path.name, error) from None
        return self._opened[table]

    def __contains__(self, table: object) -> bool:
        return table in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def close(self) -> None:
        while self._opened:
            self._opened.popitem()[1].close()


class _Columns(Mapping[str, frozenset[str]]):
    """The columns of each table."""

    def __init__(self, files: _Files) -> None:
        self._files = files

    def __getitem__(self, table: str) -> frozenset[str]:
        return frozenset(self._files[table].types)

    def __contains__(self, table: object) -> bool:
        return table in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class _Arrays(dict[str, Any]):
    """The columns of a group of rows; one that is not here is read each time, so that it takes memory only once."""

    def __init__(
        self, file: _ParquetFile | _ArrowFile, group: int, broken: Callable[[str, Exception], CaptureError]
    ) -> None:
        super().__init__()
        self._file, self._group, self._broken = file, group, broken

    def __missing__(self, column: str) -> Any:
        try:
            return self._file.read(self._group, [column])[column]
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise self._broken(self._file.path.name, error) from None


_Group = tuple[int, "npt.NDArray[np.bool_] | None", _Arrays]
"""Number of rows that are taken, which these are (None for all), and the arrays with all rows."""


class _ParquetFile:
    """A Parquet file.

    Attributes:
        types: The types of its columns.
        groups: The number of groups of rows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = pyarrow.parquet.ParquetFile(path)
        schema = self._file.schema_arrow
        self.types = dict(zip(schema.names, schema.types, strict=True))
        self.groups: int = self._file.metadata.num_row_groups
        self._index = {name: position for position, name in enumerate(schema.names)}

    def rows(self, group: int) -> int:
        """Number of rows of a group."""
        return int(self._file.metadata.row_group(group).num_rows)

    def read(self, group: int, columns: Collection[str]) -> dict[str, Any]:
        """Columns of a group."""
        if not columns:
            return {}
        table = self._file.read_row_group(group, [*dict.fromkeys(columns)])
        return {name: table[name].combine_chunks() for name in table.column_names}

    def null_count(self, group: int, column: str) -> int:
        """Number of NULLs of a column."""
        statistics = self._file.metadata.row_group(group).column(self._index[column]).statistics
        if statistics is not None and statistics.has_null_count:
            return int(statistics.null_count)
        return int(self.read(group, [column])[column].null_count)

    def statistics(self, group: int, column: str) -> set[int | None] | None:
        """The least and greatest value of a column, and None for NULLs; None if the file does not say them."""
        recorded = self._file.metadata.row_group(group).column(self._index[column]).statistics
        if recorded is None or not recorded.has_null_count:
            return None
        nulls: set[int | None] = {None} if recorded.null_count else set()
        if recorded.null_count == self.rows(group):
            return nulls
        return nulls | {int(recorded.min), int(recorded.max)} if recorded.has_min_max else None

    def close(self) -> None:
        self._file.close()


class _ArrowFile:
    """An Arrow stream, as a `_ParquetFile`; its batches are the groups of rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._source = pyarrow.memory_map(str(path))
        try:
            reader = pyarrow.ipc.open_stream(self._source)
        except pyarrow.ArrowInvalid:
            self._source.seek(0)
            file = pyarrow.ipc.open_file(self._source)
            self._batches = [file.get_batch(index) for index in range(file.num_record_batches)]
            schema = file.schema
        else:
            self._batches, schema = list(reader), reader.schema
        self.types = dict(zip(schema.names, schema.types, strict=True))
        self.groups = len(self._batches)

    def rows(self, group: int) -> int:
        return int(self._batches[group].num_rows)

    def read(self, group: int, columns: Collection[str]) -> dict[str, Any]:
        return {name: self._batches[group].column(name) for name in columns}

    def null_count(self, group: int, column: str) -> int:
        return int(self._batches[group].column(column).null_count)

    def statistics(self, group: int, column: str) -> set[int | None] | None:
        return None

    def close(self) -> None:
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


def _nulls(array: Any) -> npt.NDArray[np.bool_]:
    is_null: npt.NDArray[np.bool_] = _bits(array.is_null())
    return is_null


def _bits(array: Any) -> npt.NDArray[np.bool_]:
    """A boolean array without NULLs. `to_numpy` would import pandas, in a thread."""
    bits = np.unpackbits(np.frombuffer(array.buffers()[1], dtype=np.uint8), bitorder="little")
    return bits[array.offset : array.offset + len(array)].view(np.bool_)


def _int64(array: Any, missing: int) -> Int64Array:
    """The integers of an array, 64 bits of them, with NULLs replaced."""
    if pyarrow.types.is_null(array.type):
        return np.full(len(array), missing, dtype=np.int64)
    integers = array.view(pyarrow.int64()) if pyarrow.types.is_uint64(array.type) else array.cast(pyarrow.int64())
    if integers.null_count:
        integers = integers.fill_null(missing)
    return np.frombuffer(integers.buffers()[1], dtype=np.int64)[integers.offset : integers.offset + len(integers)]


def _whole_numbers(arrays: Sequence[Any], missing: int) -> tuple[Int64Array, int]:
    """The first value of each row in these arrays, and the number of rows without one."""
    if len(arrays) == 1:
        return _int64(arrays[0], missing), arrays[0].null_count
    values = np.full(len(arrays[0]), missing, dtype=np.int64)
    is_open = np.ones(len(values), dtype=bool)
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
    encoded = array.dictionary_encode()
    texts = np.array([*_plain(encoded.dictionary), ""], dtype=object)
    return texts[_int64(encoded.indices, len(texts) - 1)], array.null_count


def _meets(array: Any, condition: Where) -> npt.NDArray[np.bool_]:
    """Which rows of a column meet a condition."""
    if not _is_whole(array.type):
        return np.zeros(len(array), dtype=bool)
    is_met = np.isin(_int64(array, -1), np.array([*condition.values], dtype=np.int64), invert=condition.excluded)
    if array.null_count:
        is_met = (is_met | _nulls(array)) if condition.or_invalid else (is_met & ~_nulls(array))
    return is_met
