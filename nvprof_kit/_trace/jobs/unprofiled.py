"""Ranks without a profile, known only from PyTorch's Flight Recorder or the NCCL Inspector.

Dumps are detected by content. They contain a rank's collectives, their GPU durations (with
``TORCH_NCCL_ENABLE_TIMING=1``, or from the NCCL Inspector) and the times when the host enqueued them, but no layers or
steps.
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
_INSPECTOR_KEYS = (b'"header"', b'"coll_perf"', b'"p2p_perf"', b'"coll_msg_size_bytes"', b'"inspector_output_format_')
_FLIGHT_KEYS = (b"entries", b"pg_config", b"pg_status", b"profiling_name", b"collective_seq_id")
_TOOLS = {FLIGHT_RECORDER: "PyTorch Flight Recorder", NCCL_INSPECTOR: "NCCL inspector"}


@dataclass(frozen=True)
class Unprofiled:
    """The collectives of a rank without a profile.

    Attributes:
        source: `FLIGHT_RECORDER` or `NCCL_INSPECTOR`.
        tool: The source as shown to the user.
        rank: The rank; -1 if unknown.
        world_size: Number of ranks of its largest communicator; -1 if unknown.
        collectives: See `nvprof_kit._trace.jobs.flight_recorder.COLLECTIVES`.
    """

    source: str
    tool: str
    rank: int
    world_size: int
    collectives: pd.DataFrame


def source_of(path: Path) -> str:
    """`FLIGHT_RECORDER` or `NCCL_INSPECTOR` by the file's content; '' for other files."""
    head = head_of(path)
    begin = head.lstrip()[:1]
    if begin not in (b"{", b"\x80") or b"traceEvents" in head:
        return ""
    # two of the keys are enough: the reader names the one that is missing, while an unknown file would be left out
    if begin == b"{" and sum(key in head for key in _INSPECTOR_KEYS) > 1:
        return NCCL_INSPECTOR
    return FLIGHT_RECORDER if sum(key in head for key in _FLIGHT_KEYS) > 1 else ""


def read_unprofiled(path: Path, source: str, rank: int | None = None) -> Unprofiled:
    """Read a dump or a log.

    Raises:
        CaptureError: The file cannot be read, or neither its content, its name nor the caller provides the rank.
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
