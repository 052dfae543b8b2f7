"""Conversion of plain columns to tables of a `Trace`, with the schema's names, order and types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._trace.schema import TABLES

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
    names = [name for name, column in schema.items() if name in columns or not column.optional]
    typed: dict[str, Any] = {}
    for name in names:
        values, dtype = columns[name], schema[name].dtype
        if dtype == "category":
            typed[name] = values if isinstance(values, pd.Categorical) else pd.Categorical(values)
        elif dtype != "Int64":
            typed[name] = np.asarray(values, dtype=dtype)
        elif isinstance(values, pd.api.extensions.ExtensionArray):
            typed[name] = values
        else:
            plain = np.asarray(values, dtype=np.int64)
            typed[name] = pd.arrays.IntegerArray(plain, plain == MISSING_PAYLOAD)
    return pd.DataFrame(typed | {name: _repeated(typed[name]) for name in _OFTEN_ONE if name in typed}, copy=False)


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


def labels(codes: npt.NDArray[np.integer[Any]], names: Sequence[str]) -> Any:
    """A categorical column from codes into a list of names; the list may contain duplicates."""
    import pandas as pd

    unique, index = np.unique(np.asarray(names, dtype=object), return_inverse=True)
    if len(names):
        codes = index.astype(np.min_scalar_type(~len(unique)))[codes]  # the type that pandas takes
    return pd.Categorical.from_codes(codes, categories=pd.Index(unique, dtype=object))


def appended(table: str, frame: Any, columns: Mapping[str, Any]) -> Any:
    """A table of the schema with more rows.

    Args:
        table: Name of the table in `nvprof_kit._trace.schema.TABLES`.
        frame: The table.
        columns: The required columns of the added rows.
    """
    import pandas as pd

    added = make_frame(table, columns)

    def joined(name: str) -> Any:
        if TABLES[table][name].dtype != "category":
            return pd.concat([frame[name], added[name]], ignore_index=True)
        old, new = frame[name].cat, added[name].cat
        names = [*old.categories, *new.categories, ""]
        codes = old.codes.to_numpy().astype(np.int64)
        codes = np.where(codes < 0, len(names) - 1, codes)
        return labels(np.concatenate([codes, new.codes.to_numpy().astype(np.int64) + len(old.categories)]), names)

    return pd.DataFrame({name: joined(name) for name in added}, copy=False)
