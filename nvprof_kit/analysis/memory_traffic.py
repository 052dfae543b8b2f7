"""What each layer allocates over the whole history, held at the peak or not."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd

from nvprof_kit.analysis.nesting import Int64Array

TRAFFIC: Mapping[str, str] = MappingProxyType(
    {
        "layer": "module path that was running, `(none)` outside every layer",
        "phase": "its phase",
        "allocations": "how often it allocated",
        "allocated_bytes": "sum of these",
        "largest_bytes": "the largest of them",
        "peak_bytes": "most that it held at a time",
        "kept_bytes": "what of it is held at the snapshot's end",
    }
)
"""Columns of the table of allocations."""


def traffic_table(held: pd.DataFrame, events: int) -> pd.DataFrame:
    """A row for each layer and phase, with the columns of `TRAFFIC`, the one that held most at a time first.

    Args:
        held: Blocks: columns start, end (numbers of events), size_bytes, layer, phase.
        events: How many events there are: a block with this end is held at the end.
    """
    own = held[held["start"] >= 0]
    groups = own.groupby(["layer", "phase"], observed=True, sort=False)
    made = groups["size_bytes"].agg(allocations="size", allocated_bytes="sum", largest_bytes="max")
    made["peak_bytes"] = _most_held(groups.ngroup().to_numpy(), own)
    kept = own["size_bytes"].where(own["end"] == events, 0)
    made["kept_bytes"] = kept.groupby([own["layer"], own["phase"]], observed=True, sort=False).sum()
    typed = made.reset_index().astype({"layer": "str", "phase": "str"})[list(TRAFFIC)]
    in_order: pd.DataFrame = typed.sort_values("peak_bytes", ascending=False, kind="stable", ignore_index=True)
    return in_order


def _most_held(group: Int64Array, own: pd.DataFrame) -> Int64Array:
    """Most bytes that each group held at a time."""
    if not len(own):
        return np.array([], dtype=np.int64)
    size = own["size_bytes"].to_numpy()
    groups = np.concatenate([group, group])
    moments = np.concatenate([own["start"].to_numpy(), own["end"].to_numpy()])
    change = np.concatenate([size, -size])
    order = np.lexsort((moments, groups))
    level = np.cumsum(change[order])  # each group's changes cancel out, so the next begins at 0
    first = np.flatnonzero(np.diff(groups[order], prepend=-1))
    most: Int64Array = np.maximum.reduceat(level, first)
    return most
