"""The tables of an export, whatever holds them: which there are, and columns of them as NumPy arrays.

A reader names the columns that it needs and the integers that a column must have; how they are found is a matter of
`nvprof_kit._trace.files.sqlite` and `nvprof_kit._trace.files.parquet`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue

Int64Array = npt.NDArray[np.int64]


class Where(NamedTuple):
    """A condition on rows: the column has one of these integers.

    Attributes:
        column: The column.
        values: The integers.
        excluded: Whether the column must have another integer instead.
        or_invalid: Whether rows without an integer in the column are taken too, so that the reader checks them.
    """

    column: str
    values: Collection[int]
    excluded: bool = False
    or_invalid: bool = False


class Database(ABC):
    """A read-only export.

    Args:
        path: The file or folder.
        named: The path to show in messages, if different.

    Attributes:
        kind: What holds the tables.
        export_type: The ``--type`` of ``nsys export`` that writes it.
        tables: The columns of each table.
        views: Names of what looks like a table but is none.
        warnings: What `warn` added.
    """

    kind: ClassVar[str]
    export_type: ClassVar[str]
    tables: Mapping[str, frozenset[str]]
    views: frozenset[str] = frozenset()

    def __init__(self, path: Path, named: Path | None = None) -> None:
        self.path, self.named = path, named or path
        self.warnings: list[Issue] = []

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def has(self, table: str, *columns: str) -> bool:
        """Whether there is the table with all of these columns."""
        return table in self.tables and self.tables[table].issuperset(columns)

    @abstractmethod
    def broken(self, error: Exception | str) -> CaptureError:
        """The error for a damaged export."""

    def refuse(self, fault: str) -> CaptureError:
        """The error for an invalid value in a table and column."""
        return CaptureError(f"{self.named}: {fault}; the file is damaged or of an unknown schema: export it again")

    def warn(self, fault: str, share: float = 1.0) -> None:
        """Add an issue to `CaptureInfo.warnings`, once; `share` is that of the rows that it concerns."""
        if fault not in self.warnings:
            self.warnings.append(Issue("rows", "warning", share, fault))

    @abstractmethod
    def rows(
        self, table: str, columns: Sequence[str], where: Sequence[Where] = (), *, limit: int = -1
    ) -> list[tuple[Any, ...]]:
        """Rows of a small table, or few of a large one, with values of any type; None for NULL.

        Raises:
            CaptureError: The export is damaged.
        """

    @abstractmethod
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
        """Columns of a large table: integers as int64 arrays, text as object arrays. Thread-safe.

        Args:
            table: The table.
            columns: The column of the table for each name of the result, or several of which the first with a value
                counts; one that the table lacks is `missing` in all rows.
            where: Conditions that a row must meet, all of them. If a condition is `Where.or_invalid` and its column is
                not read, an invalid value in it counts as NULL in a required column.
            missing: The value for NULL in integer columns.
            texts: Names of text columns, with NULL as ''; all others are integers.
            required: Names of columns that should not contain NULL, if they are read.
            diagnose: Called if a column has values of the wrong type or a required column contains NULL. It raises an
                error with table and column, or returns if the query can continue.

        Raises:
            CaptureError: The export is damaged, or a column has values of the wrong type.
        """

    @abstractmethod
    def count(self, table: str, where: Sequence[Where] = ()) -> int:
        """Number of rows that meet all conditions; 0 without the table."""

    @abstractmethod
    def constants(self, table: str, columns: Collection[str]) -> dict[str, int | None]:
        """The value of each of these columns of a table with rows; empty if one of them differs between rows, or is not
        an integer or NULL.
        """

    @abstractmethod
    def faults(self, table: str, columns: Mapping[str, str]) -> tuple[int, dict[str, tuple[int, int]]]:
        """Number of rows, and how many have NULL and how many a value of another type in each column.

        Args:
            table: The table.
            columns: The type of each column: ``text``, ``integer``, or '' for any.
        """

    @abstractmethod
    def texts_of_ids(self, ids: Iterable[int]) -> dict[int, str]:
        """The texts of these ids in ``StringIds``; unknown ids are omitted."""

    @abstractmethod
    def ids_like(self, *patterns: str) -> dict[int, str]:
        """The ids and texts of ``StringIds`` that match one of these patterns, in which ``%`` is any text, in any
        case.
        """

    @abstractmethod
    def ambiguous_ids(self) -> int:
        """Number of ids in ``StringIds`` with several texts."""

    @abstractmethod
    def texts_like(self, *patterns: str) -> set[str]:
        """The texts in any table but enumerations that match one of these patterns, as in `ids_like`."""

    @abstractmethod
    def close(self) -> None:
        """Close the export; a second call does nothing."""
