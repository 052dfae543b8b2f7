"""Whether the numbers of a capture can be, by the schema: one pass over a `Trace` of any format.

What cannot be is refused, or warned of, by table and column. It never becomes a time, a duration or a size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._trace.joins import Int64Array, few
from nvprof_kit._trace.schema import TABLES, Column, Trace
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue
from nvprof_kit.names import LAYER_PHASES, Category

if TYPE_CHECKING:
    import pandas as pd

DAY_NS = 86_400 * 10**9
_LONGEST_DAYS = 100
"""No capture is longer."""
_EXACT_NS = 1 << 53
"""Sums up to this are exact in float64."""
_NOTABLE = 0.01
"""Up to this share of the layers, or one step, may begin after the last launch: a window can end there."""
_CLOCKS_NS = 100_000
"""The clocks of CPU and GPU are aligned to within a few microseconds."""
_TIMES = ("start_ns", "end_ns", "time_ns")
_NOUNS = {"api": "CUDA calls", "ops": "operations"}
FILE_DAMAGED = "the file is damaged: copy it again, export it again or record it again"


def validate(trace: Trace, path: Path, sources: Mapping[str, str]) -> Trace:
    """Check a capture that was read, and add warnings about what is doubtful in it.

    Args:
        trace: The capture.
        path: The file, as the user gave it.
        sources: What the tables of a `Trace` are called in the file.

    Raises:
        CaptureError: A column is missing, has another type or NULLs, or a value is outside of its column's bounds; a
            span ends before it begins, or times are too far apart or durations too long for exact sums.
    """
    check_tables(trace, path, sources, TABLES)
    issues = lost_launches(trace)
    for name in ("ranges", "api", "ops"):
        start = getattr(trace, name)["start_ns"].to_numpy()
        if count := int(np.count_nonzero(start < 0)):
            issues.append(Issue.of("early", count / len(start), table=sources.get(name, name), count=count))
    ops = trace.ops
    keys = ("start_ns", "end_ns", "device", "pid", "correlation", "graph_node")
    if count := repeated(*(ops[key].to_numpy() for key in keys)):
        issues.append(Issue.of("repeated", count / len(ops), count=count))
    call = trace.launching_calls
    launched = np.flatnonzero(call >= 0)
    launch_start = trace.api["start_ns"].to_numpy()[call[launched]]
    if count := int(np.count_nonzero(ops["start_ns"].to_numpy()[launched] < launch_start - _CLOCKS_NS)):
        issues.append(Issue.of("early:launches", count / len(ops), count=count))
    return replace(trace, info=replace(trace.info, warnings=(*trace.info.warnings, *issues))) if issues else trace


def lost_launches(trace: Trace) -> list[Issue]:
    """Layers, or steps of a program without layers, that begin after the last launch of their process.

    nsys records no more CUDA calls, but ranges, after a call that it does not know: nsys 2023.4 under a CUDA 13 driver.
    """
    category = trace.ranges["category"]
    noun, is_checked = "layers", category.isin(LAYER_PHASES).to_numpy()
    if not is_checked.any():
        noun, is_checked = "steps", (category == Category.STEP.value).to_numpy()
    start, pid = (trace.ranges[name].to_numpy()[is_checked] for name in ("start_ns", "pid"))
    launch_ns, launch_pid = (trace.api[name].to_numpy() for name in ("start_ns", "pid"))
    count = sum(
        int(np.count_nonzero(start[pid == process] > launch_ns[launch_pid == process].max()))
        for process in few(launch_pid).tolist()
    )
    if count <= max(_NOTABLE * len(start), noun == "steps"):
        return []
    advice = "record a few steps (record --schedule)"
    if trace.info.tool.startswith("nsys"):
        advice = "use an nsys as new as the driver, or capture a window (profile --step N, or -x --delay=S)"
    total = len(start)
    return [Issue.of("lost-launches", count / total, count=count, total=total, noun=noun, advice=advice)]


def check_tables(trace: Trace, path: Path, sources: Mapping[str, str], table_names: Collection[str]) -> None:
    """Check the named tables of a capture, and that the times of all its tables are near each other.

    Raises:
        CaptureError: As in `validate`.
    """
    tables = {name: table for name in TABLES if (table := getattr(trace, name)) is not None}
    check_time_span(path, (table[edge].to_numpy() for table in tables.values() for edge in _TIMES if edge in table))
    for name in tables.keys() & {*table_names}:
        noun = f"{_NOUNS.get(name, name)} ({sources[name]})" if name in sources else _NOUNS.get(name, name)
        table, where = tables[name], f"{path}: {noun}"
        check_columns(where, table, TABLES[name])
        if "end_ns" in table:
            start, end = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
            if backwards := int(np.count_nonzero(end < start)):
                raise CaptureError(f"{where}: {backwards} end before they begin; {FILE_DAMAGED}")
            total = float(np.sum(end, dtype=np.float64) - np.sum(start, dtype=np.float64))
            if name == "ops" and total > _EXACT_NS:
                days, limit_days = total / DAY_NS, _EXACT_NS // DAY_NS
                raise CaptureError.of("long-durations", where=where, count=len(start), days=days, limit_days=limit_days)


def check_columns(where: str, table: pd.DataFrame, columns: Mapping[str, Column]) -> None:
    """Check the columns of a table by their schema.

    Args:
        where: File and table, for messages.
        table: The table.
        columns: The schema.

    Raises:
        CaptureError: A required column is missing, or one has another type, NULL, or a value outside of its bounds.
    """
    for name, column in columns.items():
        if name not in table:
            if not column.optional:
                raise CaptureError(f"{where}: no column {name}; {FILE_DAMAGED}")
            continue
        values = table[name]
        if values.dtype != column.dtype:
            raise CaptureError(f"{where}: {name} is {values.dtype}, needed {column.dtype}; {FILE_DAMAGED}")
        if column.dtype == "category" and (nulls := int(np.count_nonzero(values.cat.codes.to_numpy() < 0))):
            raise CaptureError(f"{where}: {name} is NULL in {nulls} rows; {FILE_DAMAGED}")
        if column.bounds is not None:
            check_bounds(f"{where}: {name}", values.to_numpy(), *column.bounds)


def check_bounds(where: str, values: npt.NDArray[Any], low: float, high: float) -> None:
    """Reject values outside of bounds, and NaN.

    Args:
        where: File and column, for the message.
        values: The values without missing ones, shape ``(n,)``.
        low: The least that can be.
        high: The most that can be.

    Raises:
        CaptureError: A value is outside.
    """
    if len(values) and not (values.min() >= low and values.max() <= high):
        wrong = values[~((values >= low) & (values <= high))]
        need = f", needed {low} or {high}" if high - low == 1 else ""
        raise CaptureError(f"{where} is {wrong[0]} in {len(wrong)} rows{need}; {FILE_DAMAGED}")


def check_time_span(path: str | Path, columns: Iterable[Int64Array]) -> None:
    """Reject a file if its timestamps are too far apart for exact sums.

    Raises:
        CaptureError: They are more than 100 days apart.
    """
    edges = [(int(times.min()), int(times.max())) for times in columns if len(times)]
    first, last = min((low for low, _ in edges), default=0), max((high for _, high in edges), default=0)
    if last - first > _LONGEST_DAYS * DAY_NS:
        raise CaptureError.of("times-apart", path=path, first=first, last=last, limit_days=_LONGEST_DAYS)


def repeated(*keys: Int64Array) -> int:
    """Number of duplicate rows, by the keys that identify a row; the first key is the row's time."""
    times = keys[0]
    order = np.argsort(times, kind="stable")
    in_order = times[order]
    tied = in_order[1:] == in_order[:-1]
    ties = order[np.append(tied, False) | np.append(False, tied)] if tied.any() else order[:0]
    ties = ties[np.lexsort([key[ties] for key in keys])]
    return int(np.count_nonzero(np.logical_and.reduce([key[ties[1:]] == key[ties[:-1]] for key in keys])))
