"""The schema of maps: a rank's capture condensed to versioned Parquet tables.

A folder of maps has one subfolder per table, with one Parquet file per capture. Times are int64 nanoseconds on the
capture's clock. The file in ``ranks`` is written last: without it, a map is incomplete. The subfolder ``sums`` has the
checksums of each map's files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from nvprof_kit._trace.schema import Column

if TYPE_CHECKING:
    import pandas as pd

VERSION = 2
"""Version of these tables; incremented by every change that breaks older readers."""

RANKS: Mapping[str, Column] = MappingProxyType(
    {
        "rank": Column("int64", "rank in the job"),
        "version": Column("int64", "version of the map's schema"),
        "capture": Column("object", "path of the capture"),
        "size_bytes": Column("int64", "its size when it was mapped"),
        "changed_ns": Column("int64", "when it had changed last, ns since 1970"),
        "reading": Column("object", "what it was read with: domain and rules"),
        "run": Column("object", "id of the run, '' if unknown"),
        "world_size": Column("int64", "ranks of the job, -1 if unknown"),
        "tool": Column("object", "what wrote the capture"),
        "source": Column("object", "what the map is of: profile, or flight_recorder or nccl_inspector (no profile)"),
        "epoch_ns": Column("int64", "what is added to its times to have ns since 1970, by its host; -1: unknown"),
        "named": Column("bool", "it tells its communicators by ids, and not by their streams alone"),
        "numbered": Column("bool", "all collectives of these have sequence numbers"),
        "gpu": Column("object", "name of the GPU"),
        "rank_told_by": Column("object", "where the rank was read: mark, capture, name, given"),
        "warnings": Column("object", "what may be missing or distorted in the capture, one a line"),
    }
)
"""One row per rank: what was mapped, and what the cache check compares."""

COLLECTIVES: Mapping[str, Column] = MappingProxyType(
    {
        "rank": Column("int64", "rank"),
        "index": Column("int64", "place among the rank's collectives, by launch"),
        "comm": Column("object", "communicator: its id, or the place of its stream among the rank's communicators"),
        "operation": Column("int64", "id that the operation has on every rank, -1: none"),
        "sequence": Column("int64", "sequence number within the communicator, -1: none"),
        "step": Column("int64", "step that launched it, -1 outside steps"),
        "number": Column("int64", "place within communicator and step, by launch"),
        "stream": Column("int64", "place of its stream among the rank's that communicate, by first use"),
        "group": Column("object", "what the program calls the communicator, '' if unknown"),
        "kind": Column("object", "AllReduce, AllGather, ReduceScatter, Broadcast, Send, Recv, SendRecv, …"),
        "bytes": Column("int64", "bytes of the larger buffer, -1: unknown"),
        "size": Column("int64", "ranks of the communicator, -1: unknown"),
        "start_ns": Column("int64", "when its kernel began: the rank's arrival"),
        "end_ns": Column("int64", "when its kernel ended"),
        "launch_ns": Column("int64", "when the host launched it"),
        "alone_ns": Column("int64", "how long it ran while the device did nothing else: what of it is exposed"),
        "ready_ns": Column("int64", "when what was launched before it was done and it was launched itself"),
        "ready_segment": Column("int64", "last of the rank's segments that ends by `ready_ns`"),
        "end_segment": Column("int64", "last of the rank's segments that ends by `end_ns`"),
        "gates": Column("bool", "the device's other work waited for its end"),
        "layer": Column("object", "layer that launched it, or `(none)`"),
        "phase": Column("object", "phase there"),
    }
)
"""One row per communication kernel."""

SEGMENTS: Mapping[str, Column] = MappingProxyType(
    {
        "rank": Column("int64", "rank"),
        "segment": Column("int64", "stretch between two of the rank's moments `ready_ns` and gating ends, by time"),
        "step": Column("int64", "step of the stretch, -1 outside steps"),
        "doing": Column("object", "compute, copy, communication, or idle with its cause: launch, dataloader, …"),
        "layer": Column("object", "layer, or `(none)`"),
        "phase": Column("object", "phase"),
        "collective": Column("int64", "`index` of the collective that runs alone, else -1"),
        "ns": Column("int64", "time spent so"),
        "ops": Column("int64", "operations that began in it"),
    }
)
"""What the device did between the points of comparison; covers its time exactly once."""

LAYERS: Mapping[str, Column] = MappingProxyType(
    {
        "rank": Column("int64", "rank"),
        "step": Column("int64", "step, -1 outside steps"),
        "layer": Column("object", "layer, or `(none)`"),
        "phase": Column("object", "phase"),
        "compute_ns": Column("int64", "sum of the durations of its own kernels that compute"),
        "comm_ns": Column("int64", "the same of communication kernels, waiting included"),
        "copy_ns": Column("int64", "the same of copies and memsets"),
        "ops": Column("int64", "operations that compute"),
        "idle_ns": Column("int64", "time in which the device was idle, by where the launching thread was"),
        "loading_ns": Column("int64", "the part of it that the data loader took"),
    }
)
"""Layer x phase x step."""

STEPS: Mapping[str, Column] = MappingProxyType(
    {
        "rank": Column("int64", "rank"),
        "step": Column("int64", "step"),
        "start_ns": Column("int64", "when it began on the device"),
        "end_ns": Column("int64", "when it ended there"),
        "loading_ns": Column("int64", "time that the host spent fetching data for it"),
        "gc_ns": Column("int64", "time that the host spent in Python's garbage collection in it"),
        "warm_up": Column("bool", "it is warm-up: long, or it loads and compiles code"),
    }
)
"""The steps of a rank."""

TABLES: Mapping[str, Mapping[str, Column]] = MappingProxyType(
    {"ranks": RANKS, "collectives": COLLECTIVES, "segments": SEGMENTS, "layers": LAYERS, "steps": STEPS}
)
"""The tables of a map."""


@dataclass(frozen=True)
class RankMap:
    """The map of one or several ranks: the tables of `TABLES`."""

    ranks: pd.DataFrame
    collectives: pd.DataFrame
    segments: pd.DataFrame
    layers: pd.DataFrame
    steps: pd.DataFrame
