"""JSON answers: rows with the name and version of their schema, warnings, missing values and omitted rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nvprof_kit._report.export import schemas
from nvprof_kit._report.export.bounds import Bounded, bounded
from nvprof_kit._report.export.tables import as_json
from nvprof_kit._report.selection import Selection

if TYPE_CHECKING:
    import pandas as pd

_INFINITE = (float("inf"), float("-inf"))


def json_answer(
    schema: str, table: pd.DataFrame, warnings: Sequence[str], sources: Sequence[str], select: Selection
) -> bytes:
    """A table as a JSON answer, one row per line.

    Args:
        schema: Name of the schema, one of `nvprof_kit._report.export.schemas.TABLES`.
        table: The rows.
        warnings: What may be missing or distorted.
        sources: The input files.
        select: The limit on rows or bytes.
    """
    found = bounded(table, select)
    texts = [as_json(row) for row in records(found.rows)]
    facts = {"warnings": list(warnings), "sources": list(sources)}
    whole = _written(schema, found, texts, facts)
    if select.budget is None or len(whole) <= select.budget:
        return whole
    empty = len(_written(schema, bounded(table, select, 0, "budget"), [], facts))
    size = (select.budget - empty) / max(sum(len(one.encode()) + 2 for one in texts) / len(texts), 1) if texts else 0
    most = min(max(int(size), 0), len(texts))
    while True:
        found = bounded(table, select, most, "budget")
        whole = _written(schema, found, [as_json(row) for row in records(found.rows)], facts)
        if len(whole) <= select.budget or not most:
            return whole
        most = most * 9 // 10


def _written(schema: str, found: Bounded, texts: Sequence[str], facts: Mapping[str, Any]) -> bytes:
    missing = missing_in(found.rows)
    head = {
        "schema": schemas.name_of(schema),
        "version": schemas.version_of(schema),
        **facts,
        "unknown": schemas.reasons(schema, missing),
        "truncated": found.truncated,
    }
    fields = ",\n".join(f"{json.dumps(name)}: {as_json(value)}" for name, value in head.items())
    rows = ",\n".join(texts)
    return f'{{\n{fields},\n"rows": [\n{rows}\n]\n}}\n'.encode("utf-8", "replace")


def missing_in(table: pd.DataFrame) -> list[str]:
    """The columns with a value that `records` gives as None."""
    floats = table.select_dtypes("float")
    infinite = set(floats.columns[floats.isin(_INFINITE).any()])
    return [str(name) for name in table if name in infinite or table[name].isna().any()]


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as dictionaries with plain numbers; missing values are None."""
    plain = table.astype(object).where(table.notna(), None)
    rows: list[dict[str, Any]] = plain.to_dict("records")
    return [{str(name): _plain(value) for name, value in row.items()} for row in rows]


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and value in _INFINITE else value
