"""The columns of a breakdown."""

from __future__ import annotations

from collections.abc import Mapping

from nvprof_kit._result.column import Columns, read_columns

VIEWS = ("steps", "idle", "communication", "copies", "launches", "queue", "critical-path")
"""The tables of a breakdown."""

COLUMNS: Mapping[str, Columns] = {view: read_columns("nvprof_kit._analysis.breakdown", view) for view in VIEWS}
"""The columns of each table."""

CAUSES: Mapping[str, str] = {
    name.removeprefix("idle_").removesuffix("_ns"): column.meaning.removeprefix("idle: ")
    for name, column in COLUMNS["steps"].items()
    if column.meaning.startswith("idle: ")
}
"""The causes of idle time and what they mean."""
