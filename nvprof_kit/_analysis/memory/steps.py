"""Tables of the segments, of the steps, and of all allocations of each layer, held at the peak or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.intervals import Int64Array
from nvprof_kit._result.column import read_tables
from nvprof_kit._trace.joins import distinct

_TABLES = read_tables("nvprof_kit._analysis.memory")
COLUMNS = _TABLES | {view: {**_TABLES["layer"], **_TABLES[view]} for view in ("stack", "size")}
"""The columns of each table."""


def segment_table(segments: pd.DataFrame, blocks: pd.DataFrame, device: int) -> pd.DataFrame:
    """A row for each segment of a device, the one with the most idle memory first."""
    used = blocks["state"] != "inactive"
    by_segment = blocks.assign(
        rounding=(blocks["size_bytes"] - blocks["requested_bytes"]).where(used, 0),
        free=blocks["size_bytes"].where(~used, 0),
        used=used.astype("int64"),
    ).groupby("segment")
    sums = by_segment.agg(
        rounding_bytes=("rounding", "sum"),
        free_bytes=("free", "sum"),
        largest_free_bytes=("free", "max"),
        blocks=("used", "sum"),
    ).reindex(range(len(segments)), fill_value=0)
    table = segments.join(sums)[(segments["device"] == device).to_numpy()]
    fragmentation = 1 - table["largest_free_bytes"] / table["free_bytes"].where(table["free_bytes"] > 0)
    table = table.assign(fragmentation=fragmentation.fillna(0.0)).astype({"kind": "str", "pool": "str"})
    table = table.sort_values("free_bytes", ascending=False, kind="stable", ignore_index=True)
    return table[list(COLUMNS["segment"])]


def step_table(allocations: pd.DataFrame, level: Int64Array, step: pd.Series[int]) -> pd.DataFrame:
    """A row for each step.

    Args:
        allocations: Blocks allocated in the history: columns start, end (numbers of events), size_bytes, step.
        level: Allocated bytes after each event.
        step: The step of each event, NA outside steps.
    """
    rows = np.flatnonzero(step.notna().to_numpy())
    if not len(rows):
        return pd.DataFrame({name: pd.Series(dtype="int64") for name in COLUMNS["step"]})
    numbers, code = distinct(np.asarray(step.iloc[rows], dtype=np.int64))
    first, last = np.empty_like(numbers), np.empty_like(numbers)
    first[code[::-1]], last[code] = rows[::-1], rows
    in_steps = allocations[allocations["step"].notna()].astype({"step": "int64"})
    of_step = in_steps.groupby("step")["size_bytes"]
    sums: Any = of_step.agg(allocated_bytes="sum", allocations="size", largest_bytes="max")
    sums["kept_bytes"] = in_steps[in_steps["end"] == len(level)].groupby("step")["size_bytes"].sum()
    sums = sums.reindex(numbers).fillna(0).astype("int64")
    end, edges = level[last], np.stack([first, last + 1], axis=1)
    return pd.DataFrame(
        {
            "step": numbers,
            "peak_bytes": np.maximum.reduceat(np.append(level, level[-1]), edges.ravel())[::2],
            "end_bytes": end,
            "growth_bytes": np.diff(end, prepend=end[0]),
            **{str(name): values.to_numpy() for name, values in sums.items()},
        }
    )


def traffic_table(allocations: pd.DataFrame, events: int) -> pd.DataFrame:
    """A row for each layer and phase, the one that held most at a time first.

    Args:
        allocations: Blocks allocated in the history: columns start, end (numbers of events), size_bytes, layer, phase.
        events: How many events there are: a block with this end is held at the end.
    """
    owners = allocations.groupby(["layer", "phase"], observed=True, sort=False)
    table = owners["size_bytes"].agg(allocations="size", allocated_bytes="sum", largest_bytes="max")
    start, end, size = (allocations[name].to_numpy() for name in ("start", "end", "size_bytes"))
    owner = np.full(events + 1, len(table), np.min_scalar_type(len(table)))  # of each event, and of what is never freed
    change = np.zeros(events + 1, dtype=np.int64)
    owner[end] = owner[start] = owners.ngroup().to_numpy()
    change[end], change[start] = -size, size
    order = np.argsort(owner[:events], kind="stable")
    level, first = np.cumsum(change[order]), np.searchsorted(owner[order], np.arange(len(table)))
    table["peak_bytes"] = np.maximum.reduceat(level, first) - np.append(0, level)[first]
    table["kept_bytes"] = np.add.reduceat(change[order], first)
    typed: pd.DataFrame = table.reset_index().astype({"layer": "str", "phase": "str"})[list(COLUMNS["allocation"])]
    return typed.sort_values("peak_bytes", ascending=False, kind="stable", ignore_index=True)
