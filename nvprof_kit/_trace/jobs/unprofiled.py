"""Ranks of which there is no profile, only what PyTorch's Flight Recorder or NCCL's inspector noted of them.

A dump is known by its content. It tells a rank's collectives, how long each ran on the GPU (with
``TORCH_NCCL_ENABLE_TIMING=1``, or by the inspector), and when the host enqueued them; nothing of layers or steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nvprof_kit._trace.jobs.finding import head_of, rank_of_name
from nvprof_kit._trace.jobs.flight_recorder import read_flight_recorder
from nvprof_kit._trace.jobs.nccl_inspector import read_nccl_inspector
from nvprof_kit.errors import CaptureError

if TYPE_CHECKING:
    import pandas as pd

FLIGHT_RECORDER, NCCL_INSPECTOR = "flight_recorder", "nccl_inspector"
_TOOLS = {FLIGHT_RECORDER: "PyTorch Flight Recorder", NCCL_INSPECTOR: "NCCL inspector"}


@dataclass(frozen=True)
class Unprofiled:
    """What is known of a rank without a profile.

    Attributes:
        source: `FLIGHT_RECORDER` or `NCCL_INSPECTOR`.
        tool: The same for a person.
        rank: The rank, -1 where nothing tells it.
        world_size: Ranks of its largest communicator, -1 where that is not told.
        collectives: See `nvprof_kit._trace.jobs.flight_recorder.COLLECTIVES`.
    """

    source: str
    tool: str
    rank: int
    world_size: int
    collectives: pd.DataFrame


def source_of(path: Path) -> str:
    """`FLIGHT_RECORDER` or `NCCL_INSPECTOR` where the content of a file is theirs, else ''."""
    head = head_of(path)
    begin = head.lstrip()[:1]
    if begin == b"{" and b'"header"' in head and (b'"coll_perf"' in head or b'"p2p_perf"' in head):
        return NCCL_INSPECTOR
    is_dump = b"entries" in head and (b"pg_config" in head or b"profiling_name" in head)
    if is_dump and begin in (b"{", b"\x80") and b"traceEvents" not in head:
        return FLIGHT_RECORDER
    return ""


def read_unprofiled(path: Path, source: str, rank: int | None = None) -> Unprofiled:
    """Read a dump or a log.

    Raises:
        CaptureError: It cannot be read, or its rank is told neither in it nor in its name nor by the caller.
    """
    if source == FLIGHT_RECORDER:
        dump = read_flight_recorder(path, rank)
        found = dump.collectives
        number = -1 if dump.rank is None else dump.rank
    else:
        found = read_nccl_inspector(path)
        largest = found[found["ranks"] == found["ranks"].max()]
        named = rank_of_name(path).rank
        number = rank if rank is not None else named if named >= 0 else int(largest["rank"].iloc[0])
    if number < 0:
        raise CaptureError(f"{path}: its rank is not in its name; rename it to …rank3… or pass --rank {path.name}=3")
    size = int(found["ranks"].max()) if len(found) else -1
    return Unprofiled(source, _TOOLS[source], number, size, found.assign(rank=number))
