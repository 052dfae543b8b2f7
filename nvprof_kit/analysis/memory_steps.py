"""Memory from step to step: where each step's events begin and end, and what it left."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd

from nvprof_kit.analysis.nesting import Int64Array

STEPS: Mapping[str, str] = MappingProxyType(
    {
        "step": "the step's number",
        "peak_bytes": "most that was allocated during the step",
        "end_bytes": "allocated at its end",
        "growth_bytes": "the same less that of the step before",
        "allocated_bytes": "sum of all that it allocated",
        "allocations": "how many",
        "largest_bytes": "the largest allocation",
        "kept_bytes": "of what it allocated, held at the snapshot's end",
    }
)
"""Columns of the table of steps."""


def step_table(held: pd.DataFrame, level: Int64Array, step: pd.Series[int]) -> pd.DataFrame:
    """A row for each step, with the columns of `STEPS`.

    Args:
        held: Blocks: columns start, end (numbers of events), size_bytes, step.
        level: Allocated bytes after each event.
        step: The step of each event, NA outside steps.
    """
    which = np.flatnonzero(step.notna().to_numpy())
    if not len(which):
        nothing: pd.DataFrame = pd.DataFrame({name: pd.Series(dtype="int64") for name in STEPS})
        return nothing
    numbers, code = np.unique(step.to_numpy(dtype=np.int64, na_value=0)[which], return_inverse=True)
    first, last = np.full(len(numbers), len(level)), np.zeros(len(numbers), dtype=np.int64)
    np.minimum.at(first, code, which)
    np.maximum.at(last, code, which)
    own = held[held["step"].notna() & (held["start"] >= 0)]
    kept = own["size_bytes"].where(own["end"] == len(level), 0)
    sums = (
        own.assign(kept=kept, step=own["step"].astype("int64"))
        .groupby("step")
        .agg(
            allocated_bytes=("size_bytes", "sum"),
            allocations=("size_bytes", "size"),
            largest_bytes=("size_bytes", "max"),
            kept_bytes=("kept", "sum"),
        )
        .reindex(numbers, fill_value=0)
    )
    end = level[last]
    made: pd.DataFrame = pd.DataFrame(
        {
            "step": numbers,
            "peak_bytes": _most(level, first, last),
            "end_bytes": end,
            "growth_bytes": np.diff(end, prepend=end[0]),
            **{name: sums[name].to_numpy() for name in sums},
        }
    )
    return made


def _most(level: Int64Array, first: Int64Array, last: Int64Array) -> Int64Array:
    """The largest level from each first event to its last."""
    padded = np.append(level, level[-1])
    most: Int64Array = np.maximum.reduceat(padded, np.stack([first, last + 1], axis=1).ravel())[::2]
    return most
