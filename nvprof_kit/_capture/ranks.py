"""Which rank of a job this process is, as its launcher says, and whether it is one to profile."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from nvprof_kit._instrument.ranks import RANK_VARIABLES, who
from nvprof_kit.errors import UsageError
from nvprof_kit.names import RankName

_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_LOCAL_WORLD_SIZE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::0*([1-9]\d{0,8}))?)?")


class Rank(NamedTuple):
    """This process in its job.

    Attributes:
        rank: The rank.
        run_id: What the ranks of one run have in common; '' if nothing is known.
        is_chosen: Whether it is to be profiled.
        gpu: nsys's number for its GPU; '' if no local rank is known.
    """

    rank: int
    run_id: str
    is_chosen: bool
    gpu: str

    def report_name(self, beginning: str) -> str:
        """The name of its report: ``run-RUN-HOST-rank3-20261122-221300``."""
        # HOSTNAME may be another's, which Slurm brings along
        host = re.sub(r"[^A-Za-z0-9._-]", "_", os.uname().nodename)
        parts = [beginning, self.run_id, host, f"rank{self.rank}", time.strftime("%Y%m%d-%H%M%S")]
        return "-".join(piece for piece in parts if piece)


def choose_rank(ranks: str = "0") -> Rank:
    """Find out which rank this process is.

    Args:
        ranks: Which ranks: all, or numbers, ranges and strides such as 0,3 or 0-7 or 0-31:8.

    Raises:
        UsageError: No rank is known, or the list is none.
    """
    process, local_rank = who(), _number(_LOCAL_RANK)
    if process is None:
        raise UsageError.of("no-rank", variables=", ".join(RANK_VARIABLES))
    is_chosen = ranks == "all"
    for item in () if is_chosen else ranks.removesuffix(",").split(","):
        match = _PART.fullmatch(item)
        if match is None:
            raise UsageError(f"--ranks {ranks}: '{item}' is no rank, no range 0-7 and no stride 0-31:8")
        first, last, stride = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if first > last:
            raise UsageError(f"--ranks {ranks}: no rank lies from {first} to {last}")
        is_chosen |= process.rank in range(first, last + 1, stride)
    return Rank(process.rank, _run_id(process), is_chosen, "" if local_rank is None else _gpu(local_rank))


def _number(variables: tuple[str, ...]) -> int | None:
    """The value of the first variable that is set to a number."""
    values = (os.environ.get(variable, "") for variable in variables)
    return next((int(value) for value in values if re.fullmatch(r"[0-9]+", value)), None)


def _run_id(process: RankName) -> str:
    """What the ranks of one run have in common: from the user or the launcher, or the launcher's process and start."""
    run_id = process.run or ""
    if not run_id and process.world is not None and process.world == _number(_LOCAL_WORLD_SIZE):
        launcher = os.getppid()
        start = Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[19]  # in ticks since the boot
        run_id = f"{launcher}.{start}"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if run_id and restarts != "0":
        run_id += f".restart{restarts}"
    return re.sub(r"[^A-Za-z0-9._-]", "_", run_id)


def _gpu(local_rank: int) -> str:
    """The number that nsys has for a local rank's GPU: CUDA_VISIBLE_DEVICES renames GPUs for the program alone."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    index = 0 if len(visible) == 1 else local_rank  # a launcher that shows each rank one GPU, srun for one
    gpu = visible[index] if index < len(visible) else str(index)
    if gpu.startswith(("GPU-", "MIG-")):
        try:
            query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
            listing = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60).stdout
        except (OSError, subprocess.TimeoutExpired):
            return gpu
        for line in listing.splitlines():
            number, _, uuid = line.partition(", ")
            if uuid.startswith(gpu):
                return number
    return gpu
