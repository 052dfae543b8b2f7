"""Conversion of plain columns to tables of a `Trace`, with the schema's names, order and types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._trace.schema import TABLES, Column

MISSING_PAYLOAD = int(np.iinfo(np.int64).min)
"""Means "no payload" in plain int64 columns."""


def make_frame(table: str, columns: Mapping[str, Any]) -> Any:
    """Build a table of the schema; columns that already have the right type are not copied.

    Args:
        table: Name of the table in `nvprof_kit._trace.schema.TABLES`.
        columns: Values by column name, all of the same length; optional columns may be omitted.

    Returns:
        A DataFrame with the schema's columns in the schema's order.

    Raises:
        KeyError: A required column is missing.
    """
    import pandas as pd

    schema = TABLES[table]
    wanted = [name for name, column in schema.items() if name in columns or not column.optional]
    made = {name: _typed(columns[name], schema[name]) for name in wanted}
    return pd.DataFrame(made | {name: _repeated(made[name]) for name in _OFTEN_ONE if name in made}, copy=False)


_OFTEN_ONE = ("pid", "device", "graph_node")
"""Columns that have one value in most captures."""


def _repeated(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A column of one value without memory for each row; else the column itself."""
    if len(values) and values[0] == values[-1] and values.min() == values.max():
        return np.broadcast_to(values[:1].copy(), len(values))
    return values


def empty_frame(table: str) -> Any:
    """An empty table of the schema."""
    return make_frame(table, {name: () for name in TABLES[table]})


def _typed(values: Any, column: Column) -> Any:
    import pandas as pd

    if column.dtype == "category":
        return values if isinstance(values, pd.Categorical) else pd.Categorical(values)
    if column.dtype == "Int64" and not isinstance(values, pd.api.extensions.ExtensionArray):
        plain = np.asarray(values, dtype=np.int64)
        return pd.arrays.IntegerArray(plain, plain == MISSING_PAYLOAD)
    return values if column.dtype == "Int64" else np.asarray(values, dtype=column.dtype)


def labels(codes: npt.NDArray[np.integer[Any]], names: Sequence[str]) -> Any:
    """A categorical column from codes into a list of names; the list may contain duplicates."""
    import pandas as pd

    unique, index = (
        np.unique(np.asarray(names, dtype=object), return_inverse=True)
        if len(names)
        else (np.array([], object), np.array([], int))
    )
    narrow = next(one for one in (np.int8, np.int16, np.int32) if len(unique) <= np.iinfo(one).max)  # pandas' choice
    return pd.Categorical.from_codes(
        index.astype(narrow)[codes] if len(names) else codes, categories=pd.Index(unique, dtype=object)
    )


_SPARSE = 8
"""A lookup table is used if the range of ids has at most this many entries per id."""


def distinct(ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.integer[Any]]]:
    """The sorted distinct ids and the inverse index, as from `numpy.unique`, but without sorting if the ids are dense,
    as string ids are.
    """
    low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, -1)
    if high - low > max(_SPARSE * len(ids), 1 << 16):
        import pandas as pd

        code, values = pd.factorize(ids, sort=True)
        return np.asarray(values, dtype=np.int64), code
    there = np.zeros(high - low + 1, dtype=np.bool_)
    there[ids - low] = True
    known = np.flatnonzero(there)
    place = np.zeros(len(there), dtype=np.int32)
    place[known] = np.arange(len(known), dtype=np.int32)
    return known + low, place[ids - low]


def distinct_rows(
    *columns: npt.NDArray[np.int64],
) -> tuple[list[npt.NDArray[np.int64]], npt.NDArray[np.integer[Any]]]:
    """The sorted distinct rows of some columns, and the index of each row into them, as from ``numpy.unique`` with
    ``axis=0``, which sorts whole rows and takes many times as long.
    """
    which: npt.NDArray[np.integer[Any]] = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, code = distinct(column)
        if len(values) > 1:
            which = distinct(which.astype(np.int64) * len(values) + code)[1]
    row = np.empty(int(which.max(initial=-1)) + 1, dtype=np.int64)
    row[which] = np.arange(len(which))
    return [column[row] for column in columns], which


def few(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The sorted distinct values of a long column with few of them in long runs, such as process ids."""
    fresh = np.flatnonzero(values[1:] != values[:-1]) + 1
    return np.unique(np.append(values[:1], values[fresh]))


def spared(parts: Sequence[npt.NDArray[np.int64]], spare: int) -> npt.NDArray[np.int64]:
    """Concatenate columns and reserve one more value at the end, so that `with_spare` needs no copy."""
    return np.concatenate([*parts, np.array([spare], dtype=np.int64)])[:-1]


def with_spare(column: npt.NDArray[np.int64], spare: int) -> npt.NDArray[np.int64]:
    """A column with one value appended, for the index -1; without a copy if the column is from `spared`."""
    whole = column.base
    if (
        isinstance(whole, np.ndarray)
        and whole.shape == (len(column) + 1,)
        and whole.dtype == column.dtype
        and whole.ctypes.data == column.ctypes.data
        and whole.strides == column.strides
        and whole[-1] == spare
    ):
        return whole
    return np.append(column, spare)
