"""The schema of maps: a rank's capture condensed to versioned Parquet tables.

A folder of maps has one subfolder per table, with one Parquet file per capture. Times are int64 nanoseconds on the
capture's clock. The file in ``ranks`` is written last: without it, a map is incomplete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvprof_kit._trace.schema import Column

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

VERSION = 5
"""Version of these tables; incremented by every change that breaks older readers."""

RANKS: Mapping[str, Column] = {
    "rank": Column("int64", "rank in the job"),
    "version": Column("int64", "version of the map's schema"),
    "capture": Column("object", "path of the capture"),
    "reading": Column("object", "NVTX domain and rules that it was read with"),
    "run": Column("object", "id of the run, '' if unknown"),
    "world_size": Column("int64", "ranks of the job, -1 if unknown"),
    "tool": Column("object", "tool that wrote the capture"),
    "named": Column("bool", "True if communicators have ids, False if they are only distinguished by stream"),
    "numbered": Column("bool", "True if all collectives of communicators with ids have sequence numbers"),
    "groups": Column("object", "process groups of the rank, as its mark lists them; '' if unknown"),
    "evidence": Column("object", "what its layers are from: operators, structure, …; '' if from named ranges"),
    "gpu": Column("object", "name of the GPU"),
    "rank_told_by": Column("object", "how the rank was found: mark, capture, name (of the file), device, given"),
    "warnings": Column("object", "what may be missing or distorted in the capture, one a line"),
}
"""One row per rank: what was mapped."""

COLLECTIVES: Mapping[str, Column] = {
    "rank": Column("int64", "rank"),
    "index": Column("int64", "index among the rank's collectives, in order of launch"),
    "comm": Column("object", "communicator: its id, or the index of its stream among the rank's communicators"),
    "operation": Column("int64", "id of the operation, the same on every rank; -1 if none"),
    "sequence": Column("int64", "sequence number within the communicator, -1: none"),
    "step": Column("int64", "step that launched it, -1 outside steps"),
    "number": Column(
        "int64",
        "index within communicator and step, in order of launch; of messages between two known ranks, three times "
        "the index within their direction, plus 0 (to the higher rank), 1 (to the lower) or 2 (both)",
    ),
    "stream": Column("int64", "index of its stream among the rank's communication streams, in order of first use"),
    "group": Column("object", "name that the program gave the communicator, '' if unknown"),
    "kind": Column("object", "AllReduce, AllGather, ReduceScatter, Broadcast, Send, Recv, SendRecv, …"),
    "bytes": Column("int64", "bytes of the larger buffer, -1: unknown"),
    "size": Column("int64", "ranks of the communicator, -1: unknown"),
    "start_ns": Column("int64", "start of its kernel: the arrival of the rank"),
    "end_ns": Column("int64", "end of its kernel"),
    "alone_ns": Column("int64", "exposed time: the device ran nothing else"),
    "ready_ns": Column("int64", "when it was launched and all work launched before it was done"),
    "ready_segment": Column("int64", "index of the last segment of the rank that ends by `ready_ns`"),
    "end_segment": Column("int64", "index of the last segment of the rank that ends by `end_ns`"),
    "gates": Column("bool", "True if other work of the device waited for its end"),
    "layer": Column("object", "layer that launched it, or `(none)`"),
    "phase": Column("object", "phase of that layer, or of the loop"),
}
"""One row per communication kernel."""

SEGMENTS: Mapping[str, Column] = {
    "rank": Column("int64", "rank"),
    "segment": Column(
        "int64",
        "index of the segment in time; segments are separated by `ready_ns` and the ends that other work waited for",
    ),
    "step": Column("int64", "step of the segment, -1 outside steps"),
    "doing": Column("object", "compute, copy, communication, or idle with its cause: launch, dataloader, …"),
    "layer": Column("object", "layer, or `(none)`"),
    "phase": Column("object", "phase"),
    "collective": Column("int64", "`index` of the collective that runs alone, -1 if none"),
    "ns": Column("int64", "duration in ns"),
    "ops": Column("int64", "number of operations that began in it"),
}
"""What the device did between the points of comparison; covers its time exactly once."""

LAYERS: Mapping[str, Column] = {
    "rank": Column("int64", "rank"),
    "step": Column("int64", "step, -1 outside steps"),
    "layer": Column("object", "layer, or `(none)`"),
    "phase": Column("object", "phase"),
    "compute_ns": Column("int64", "sum of the durations of its own compute kernels"),
    "comm_ns": Column("int64", "the same for communication kernels, including waiting"),
    "copy_ns": Column("int64", "the same for copies and memsets"),
    "ops": Column("int64", "number of compute operations"),
    "idle_ns": Column("int64", "time in which the device was idle while the launching thread was in this layer"),
    "loading_ns": Column("int64", "the part in which it waited for the data loader"),
}
"""Layer x phase x step."""

STEPS: Mapping[str, Column] = {
    "rank": Column("int64", "rank"),
    "step": Column("int64", "step"),
    "start_ns": Column("int64", "when it began on the device"),
    "end_ns": Column("int64", "when it ended there"),
    "loading_ns": Column("int64", "time that the host spent fetching data for it"),
    "gc_ns": Column("int64", "time that the host spent in Python's garbage collection in it"),
    "warm_up": Column("bool", "True for warm-up: unusually long, or loading or compiling code"),
}
"""The steps of a rank."""

TABLES: Mapping[str, Mapping[str, Column]] = {
    "ranks": RANKS,
    "collectives": COLLECTIVES,
    "segments": SEGMENTS,
    "layers": LAYERS,
    "steps": STEPS,
}
"""The tables of a map."""


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
