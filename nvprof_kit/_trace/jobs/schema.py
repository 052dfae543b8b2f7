"""The schema of maps: a rank's capture condensed to versioned Parquet tables.

A folder of maps has one subfolder per table, with one Parquet file per capture. Times are int64 nanoseconds on the
capture's clock. The file in ``ranks`` is written last: without it, a map is incomplete.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvprof_kit._trace.schema import read_tables

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

VERSION = 5
"""Version of these tables; incremented by every change that breaks older readers."""

TABLES = read_tables("nvprof_kit._trace.jobs")
"""The tables of a map, and their columns."""


@dataclass(frozen=True)
class RankMap:
    """The map of one or several ranks: the tables of `TABLES`."""

    ranks: pd.DataFrame
    collectives: pd.DataFrame
    segments: pd.DataFrame
    layers: pd.DataFrame
    steps: pd.DataFrame


def to_arrow(frame: pd.DataFrame, table: str) -> pa.Table:
    """A table of a map for Parquet and DuckDB."""
    import pyarrow as pa

    # explicit types: Arrow cannot infer those of an empty column; text is a dictionary, as Parquet stores it
    text = pa.dictionary(pa.int32(), pa.string())
    fields = [(name, text if column.dtype == "object" else column.dtype) for name, column in TABLES[table].items()]
    return pa.Table.from_pandas(frame, schema=pa.schema(fields), preserve_index=False)
