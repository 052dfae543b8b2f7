"""Helpers of the nsys readers: columns absent from some schemas, strings by id, missing ids."""

from __future__ import annotations

import numpy as np

from nvprof_kit._trace.files.sqlite import Database, Int64Array, integer_list
from nvprof_kit._trace.frames import MISSING_PAYLOAD


def null_safe(db: Database, table: str, column: str, name: str, default: str = "-1") -> str:
    """A SELECT item: the column with its name in a `Trace`, or the default if the schema lacks it."""
    return f'"{column}" AS {name}' if db.has(table, column) else f"{default} AS {name}"


def strings_of(db: Database, ids: Int64Array) -> dict[int, str]:
    """The strings of the file by id; unknown ids are omitted."""
    wanted = [int(id_) for id_ in ids if id_ not in (-1, MISSING_PAYLOAD)]
    sql = f"SELECT id, CAST(value AS TEXT) FROM StringIds WHERE id IN ({integer_list(wanted)}) AND value IS NOT NULL"
    found = dict(db.rows(sql)) if wanted else {}
    if len(found) < len(set(wanted)):
        db.warn(
            f"StringIds lacks the text of {len(set(wanted)) - len(found)} of {len(set(wanted))} ids that events have"
        )
    return found


def zero_is_missing(ids: Int64Array) -> Int64Array:
    """Exporters before 2022 wrote 0 for a missing id; CUPTI's ids never start at 0."""
    return np.where(ids == 0, -1, ids) if len(ids) and (ids == 0).any() else ids
