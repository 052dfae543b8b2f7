"""Tables of a `Trace` made from plain columns: the schema's names, order and types, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._trace.schema import TABLES, Column

MISSING_PAYLOAD = int(np.iinfo(np.int64).min)
"""Stands for "no payload" while a column is still plain int64."""


def make_frame(table: str, columns: Mapping[str, Any]) -> Any:
    """A table of the schema from its columns, without copying those that already have their type.

    Args:
        table: Name of the table in `nvprof_kit._trace.schema.TABLES`.
        columns: Column name to values, all of one length; an optional column may be left out.

    Returns:
        A DataFrame with the schema's columns in the schema's order.

    Raises:
        KeyError: A column that is not optional is missing.
    """
    import pandas as pd

    schema = TABLES[table]
    wanted = [name for name, column in schema.items() if name in columns or not column.optional]
    return pd.DataFrame({name: _typed(columns[name], schema[name]) for name in wanted}, copy=False)


def empty_frame(table: str) -> Any:
    """A table of the schema without rows."""
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
    """A categorical column from codes into a list of names in which one name may stand more than once."""
    import pandas as pd

    unique, index = (
        np.unique(np.asarray(names, dtype=object), return_inverse=True)
        if len(names)
        else (np.array([], object), np.array([], int))
    )
    return pd.Categorical.from_codes(
        index.astype(np.int32)[codes] if len(names) else codes, categories=pd.Index(unique, dtype=object)
    )


_SPARSE = 8
"""A table over the span of ids is made where it has at most this many places for each id."""


def distinct(ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.integer[Any]]]:
    """The distinct ids, ascending, and the place of each id among them; as `numpy.unique`, without sorting where the
    ids lie close together, as those of names do.
    """
    low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, -1)
    if high - low > max(_SPARSE * len(ids), 1 << 16):
        return np.unique(ids, return_inverse=True)
    there = np.zeros(high - low + 1, dtype=np.bool_)
    there[ids - low] = True
    known = np.flatnonzero(there)
    place = np.zeros(len(there), dtype=np.int32)
    place[known] = np.arange(len(known), dtype=np.int32)
    return known + low, place[ids - low]


def spared(parts: Sequence[npt.NDArray[np.int64]], spare: int) -> npt.NDArray[np.int64]:
    """Columns one behind the other, in front of one more value: `with_spare` then copies nothing."""
    return np.concatenate([*parts, np.array([spare], dtype=np.int64)])[:-1]


def with_spare(column: npt.NDArray[np.int64], spare: int) -> npt.NDArray[np.int64]:
    """A column with one more value behind it, for the index -1; the same memory where it came from `spared`."""
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
