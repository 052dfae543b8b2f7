"""Fragmentation: how much of what is reserved from CUDA lies idle, and in how large pieces."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pandas as pd

SEGMENTS: Mapping[str, str] = MappingProxyType(
    {
        "address": "where the segment begins",
        "kind": "`small`, `large` or `expandable`",
        "stream": "the stream it serves",
        "pool": "the pool it belongs to",
        "total_bytes": "reserved from CUDA",
        "allocated_bytes": "of it in tensors",
        "rounding_bytes": "of the allocated, more than was asked for",
        "free_bytes": "idle, usable by the allocator only",
        "largest_free_bytes": "the largest piece of that",
        "blocks": "blocks in use",
        "fragmentation": "1 less the largest free piece over all that is free: 0 is one piece",
    }
)
"""Columns of the segments' table."""


def segment_table(segments: pd.DataFrame, blocks: pd.DataFrame, device: int) -> pd.DataFrame:
    """A row for each segment of a device, with the columns of `SEGMENTS`, the one with the most idle memory first."""
    used = blocks["state"] != "inactive"
    idle = blocks["size_bytes"].where(~used, 0)
    by_segment = pd.DataFrame(
        {
            "segment": blocks["segment"],
            "rounding_bytes": (blocks["size_bytes"] - blocks["requested_bytes"]).where(used, 0),
            "free_bytes": idle,
            "largest_free_bytes": idle,
            "blocks": used.astype("int64"),
        }
    )
    how = {"rounding_bytes": "sum", "free_bytes": "sum", "largest_free_bytes": "max", "blocks": "sum"}
    sums = by_segment.groupby("segment").agg(how).reindex(range(len(segments)), fill_value=0)
    table = segments.join(sums)[(segments["device"] == device).to_numpy()]
    whole = 1 - table["largest_free_bytes"] / table["free_bytes"].where(table["free_bytes"] > 0)
    table = table.assign(fragmentation=whole.fillna(0.0)).astype({"kind": "str", "pool": "str"})
    table = table.sort_values("free_bytes", ascending=False, kind="stable", ignore_index=True)
    in_order: pd.DataFrame = table[list(SEGMENTS)]
    return in_order
