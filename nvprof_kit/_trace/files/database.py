"""The tables of an export, whatever holds them: which there are, and columns of them as NumPy arrays.

A form of exports gives columns as Arrow arrays; all else follows from these. `nvprof_kit._trace.files.sqlite` and
`nvprof_kit._trace.files.parquet` are the forms.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow

from nvprof_kit._trace.joins import Int64Array
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue

_NEAR = 1 << 20
"""A lookup table is used for values up to this far apart."""


class Where(NamedTuple):
    """A condition on rows: the column has one of these integers.

    Attributes:
        column: The column.
        values: The integers.
        excluded: Whether the column must have another integer instead.
        or_null: Whether rows without an integer in the column are taken too, so that the reader checks them.
    """

    column: str
    values: Collection[int]
    excluded: bool = False
    or_null: bool = False


class Database(ABC):
    """A read-only export.

    Args:
        path: The file or folder.
        named: The path to show in messages, if different.

    Attributes:
        kind: What holds the tables.
        export_type: The ``--type`` of ``nsys export`` that writes it.
        in_threads: Whether tables are read sooner by threads.
        tables: The columns of each table.
        views: Names of what looks like a table but is none.
        warnings: What `warn` added.
    """

    kind: ClassVar[str]
    export_type: ClassVar[str]
    in_threads: ClassVar[bool]
    tables: Mapping[str, frozenset[str]]
    views: frozenset[str] = frozenset()

    def __init__(self, path: Path, named: Path | None = None) -> None:
        self.path, self.named = path, named or path
        self.warnings: list[Issue] = []

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the export; a second call does nothing."""

    @abstractmethod
    def broken(self, error: Exception | str) -> CaptureError:
        """The error for a damaged export."""

    @abstractmethod
    def arrays(
        self, table: str, columns: Collection[str], where: Sequence[Where] = (), texts: Collection[str] = ()
    ) -> Iterator[tuple[str, Any]]:
        """Columns of the rows that meet all conditions, piece by piece: a column, and an Arrow array. Thread-safe.

        Args:
            table: The table.
            columns: Its columns to read.
            where: The conditions.
            texts: Which of the columns have text; all others have integers.

        Raises:
            CaptureError: The export is damaged, or has values of another type.
        """

    @abstractmethod
    def rows(
        self, table: str, columns: Sequence[str], where: Sequence[Where] = (), *, limit: int = -1
    ) -> list[tuple[Any, ...]]:
        """Rows of a small table, or few of a large one, with values of any type; None for NULL.

        Raises:
            CaptureError: The export is damaged.
        """

    @abstractmethod
    def count(self, table: str) -> int:
        """Number of rows; 0 without the table."""

    @abstractmethod
    def faults(self, table: str, columns: Mapping[str, str]) -> tuple[int, dict[str, tuple[int, int]]]:
        """Number of rows, and how many have NULL and how many a value of another type in each column.

        Args:
            table: The table.
            columns: The type of each column: ``text``, ``integer``, or '' for any.
        """

    @abstractmethod
    def texts(self) -> Iterator[str]:
        """The texts in all tables but enumerations, each of a column once."""

    def columns(
        self,
        table: str,
        columns: Collection[str],
        where: Sequence[Where] = (),
        *,
        missing: int = -1,
        texts: Collection[str] = (),
    ) -> tuple[dict[str, npt.NDArray[Any]], dict[str, int]]:
        """Columns of a large table, and the number of NULLs in each: integers as int64 arrays with `missing` for NULL,
        text as object arrays with '' for it. Thread-safe.

        Raises:
            CaptureError: The export is damaged, or a column has values of another type.
        """
        rows, nulls = dict.fromkeys(columns, 0), dict.fromkeys(columns, 0)
        size, dtypes = self.count(table), dict.fromkeys(columns, np.int64) | dict.fromkeys(texts, object)
        values = {column: np.broadcast_to(np.zeros(1, dtype), size) for column, dtype in dtypes.items()}
        for column, array in self.arrays(table, columns, where, texts):
            nulls[column] += array.null_count
            if not (is_text if column in texts else is_integer)(array.type):
                raise self.broken(f"{table}.{column} is {array.type}")
            if rows[column] + len(array) > size:
                raise self.broken(f"{table} grew while it was read")
            if len(array):
                piece = as_texts(array) if column in texts else as_integers(array, missing)
                values[column] = extended(values[column], rows[column], piece)
                rows[column] += len(array)
        for column in columns:
            if values[column].strides == (0,):
                values[column] = values[column][: rows[column]]
            else:
                values[column].resize(rows[column], refcheck=False)  # gives back the rest
        pyarrow.default_memory_pool().release_unused()
        return values, nulls

    @cached_property
    def strings(self) -> dict[int, str]:
        """The texts of ``StringIds`` by id."""
        rows = self.rows("StringIds", ("id", "value")) if self.has("StringIds", "id", "value") else []
        texts = {id_: str(text) for id_, text in rows if text is not None}
        if ambiguous := len({*rows}) - len({id_ for id_, _ in rows}):
            raise self.refuse(f"StringIds.id has several values for {ambiguous} ids")
        return texts

    def ids_like(self, *patterns: str) -> dict[int, str]:
        """The ids and texts of ``StringIds`` that match one of these patterns, in which ``%`` is any text, in any
        case.
        """
        regular = "|".join(re.escape(pattern).replace("%", ".*") for pattern in patterns)
        matches = re.compile(regular, re.IGNORECASE | re.DOTALL).fullmatch
        return {id_: text for id_, text in self.strings.items() if matches(text)}

    def has(self, table: str, *columns: str) -> bool:
        """Whether there is the table with all of these columns."""
        return table in self.tables and self.tables[table].issuperset(columns)

    def refuse(self, fault: str) -> CaptureError:
        """The error for an invalid value in a table and column."""
        return CaptureError(f"{self.named}: {fault}; the file is damaged or of an unknown schema: export it again")

    def warn(self, code: str, /, **facts: object) -> None:
        """Add an issue of ``issues.toml`` to `CaptureInfo.warnings`, once."""
        if (issue := Issue.of(code, **facts)) not in self.warnings:
            self.warnings.append(issue)


def extended(column: npt.NDArray[Any], rows: int, piece: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A column with a piece behind its first rows; it takes memory for each row only once two of them differ."""
    values = column if rows else np.broadcast_to(piece[:1].copy(), len(column))
    if values.strides == (0,) and (piece != values[0]).any():
        column, values = values, np.empty(len(column), piece.dtype)
        values[:rows] = column[:rows]
    if values.strides != (0,):
        values[rows : rows + len(piece)] = piece
    return values


def is_integer(type_: Any) -> bool:
    """Whether an Arrow type has integers; a column without any value has."""
    types = pyarrow.types
    return bool(types.is_integer(type_) or types.is_boolean(type_) or types.is_null(type_))


def is_text(type_: Any) -> bool:
    """Whether an Arrow type has text; a column without any value has."""
    types = pyarrow.types
    return bool(types.is_string(type_) or types.is_large_string(type_) or types.is_null(type_))


def int64(array: Any) -> Any:
    """An Arrow array of integers as one of int64; 64 bits without a sign are those with one, as in SQLite."""
    return array.view(pyarrow.int64()) if pyarrow.types.is_uint64(array.type) else array.cast(pyarrow.int64())


def as_integers(array: Any, missing: int) -> Int64Array:
    """The integers of an Arrow array. `to_numpy` would import pandas, in a thread: if Ctrl-C interrupts the import in
    the main thread, that thread would wait forever.
    """
    if array.null_count == len(array):
        return np.broadcast_to(np.int64(missing), len(array))
    integers = int64(array)
    integers = integers.fill_null(missing) if integers.null_count else integers
    return np.frombuffer(integers.buffers()[1], np.int64)[integers.offset : integers.offset + len(integers)]


def among(integers: Int64Array, values: Collection[int]) -> npt.NDArray[np.bool_]:
    """Which integers are among some values, as from `numpy.isin`; in a fifth of its time if these are near each other,
    as the ids of texts are.
    """
    chosen = np.array([*values], dtype=np.int64)
    low, high = int(chosen.min(initial=0)), int(chosen.max(initial=0))
    if high - low > _NEAR:
        return np.isin(integers, chosen)
    is_chosen = np.zeros(high - low + 3, dtype=bool)
    is_chosen[chosen - low + 1] = True
    return is_chosen.take(integers - (low - 1), mode="clip")


def as_texts(array: Any) -> npt.NDArray[Any]:
    """The texts of an Arrow array; equal texts are one object."""
    if array.null_count == len(array):
        return np.full(len(array), "", dtype=object)
    encoded = array.dictionary_encode()
    texts = np.array([*plain(encoded.dictionary), ""], dtype=object)
    return texts[as_integers(encoded.indices, len(texts) - 1)]


def plain(array: Any) -> list[Any]:
    """The values of an Arrow array as SQLite would hold them: switches are 0 and 1, 64 bits have a sign, and text in
    another encoding than UTF-8 has replacement characters.
    """
    if pyarrow.types.is_null(array.type):
        return [None] * len(array)
    if is_text(array.type):
        raw = array.cast(pyarrow.binary()).to_pylist()
        return [None if value is None else value.decode("utf-8", "replace") for value in raw]
    values: list[Any] = (int64(array) if is_integer(array.type) else array).to_pylist()
    return values
