"""The rank of this process, the mark that identifies it in a capture, and its output folder."""

from __future__ import annotations

import fcntl
import itertools
import os
import socket
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from nvprof_kit._instrument import session
from nvprof_kit._instrument.patches import uncompiled
from nvprof_kit._instrument.ranges.ranges import Range
from nvprof_kit.names import RANK_MARK, Category, GroupName, RankName, groups_text, rank_text


def group_count() -> tuple[int, int]:
    """A number that changes if a group is created or destroyed; zeros without torch.distributed.

    It is compared in each step, so it only reads two lengths.
    """
    module = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        world = module._world  # type: ignore[union-attr]
        return len(world.pg_map), world.group_count
    except Exception:  # private to PyTorch, and optional
        return 0, 0


def groups_mark() -> str:
    """The text of the mark that lists the groups of this process; '' without groups, or if this PyTorch differs."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        world = module._world
        groups = []
        for group, name in list(world.pg_names.items()):
            if group in world.pg_map:
                description = str(getattr(group, "group_desc", "") or "")
                ranks = tuple(sorted(module.get_process_group_ranks(group)))
                groups.append(GroupName(str(name), "" if description == "undefined" else description, ranks))
    except Exception:  # private to PyTorch, and optional
        return ""
    return groups_text(groups)


RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
"""Set by torchrun, mpirun and srun. Slurm's comes last: batch scripts, and mpirun inside them, also have it."""

_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
"""The same for the number of ranks."""


class _Marks:
    """What a tool or recording has been told: the rank, and the groups with the mark that lists them."""

    def __init__(self) -> None:
        self.has_rank = False
        self.group_count = (0, 0)
        self.groups: Range | None = None
        self.changes = 0


_marks: weakref.WeakKeyDictionary[Any, _Marks] = weakref.WeakKeyDictionary()
"""By the per-thread states of backends; backends in a chain share one."""

_MAX_CHANGES = 64
"""Maximum number of times that changed groups are listed again."""


def rank() -> int:
    """The rank from torch.distributed if initialized, else from the launcher's environment, else 0."""
    return _found("get_rank", RANK_VARIABLES, 0)


def world_size() -> int:
    """The number of ranks from torch.distributed if initialized, else from the launcher's environment, else 1."""
    return _found("get_world_size", _SIZES, 1)


def _found(question: str, variables: tuple[str, ...], otherwise: int) -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(getattr(distributed, question)())
    return next((int(value) for value in map(os.environ.get, variables) if value and value.isdecimal()), otherwise)


def who() -> RankName | None:
    """The rank, world size and run of this process; None if neither torch.distributed nor a launcher gives the rank."""
    number = _found("get_rank", RANK_VARIABLES, -1)
    world = _found("get_world_size", _SIZES, 0)
    return None if number < 0 else RankName(number, world or None, run_id())


def run_id() -> str | None:
    """Identifier shared by the ranks of one run, from ``ranks profile``, torchrun, Slurm or mpirun; None if unknown.

    torchrun sets ``none`` if it has no id.
    """
    named = os.environ.get("NVPROF_KIT_RUN_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if named and named != "none":
        return named
    job, job_step = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID")
    if job:
        return f"{job}.{job_step}" if job_step else job
    return os.environ.get("PMIX_NAMESPACE") or None


@uncompiled
def mark_rank(*, repeat: bool = False) -> None:
    """Emit a mark with the rank, once per tool or recording, if the rank is known; and one with the process groups,
    again if there are others.

    A capture that starts after the program would miss these marks. So recipes for such captures set `RANK_MARK`, and
    the marks are then emitted in every step.

    Args:
        repeat: Emit the marks again, at the start of a window of the program.
    """
    backend = session.backend
    if backend is None:
        return
    marks = _marks.setdefault(backend.thread, _Marks())
    repeat = repeat or os.environ.get(RANK_MARK) == "step"
    name = who() if repeat or not marks.has_rank else None
    if name is not None:
        marks.has_rank = True
        backend.mark(Range(rank_text(name), Category.USER, name.rank))
    count = group_count()
    has_changed = count != marks.group_count
    if has_changed:
        text = groups_mark() if marks.changes < _MAX_CHANGES else ""
        marks.groups = Range(text, Category.USER) if text else None
        marks.group_count, marks.changes = count, marks.changes + 1
    if count[0] and marks.groups is not None and (repeat or has_changed):
        backend.mark(marks.groups)


def rank_folder(mesh: Any = None) -> str:
    """Name of this rank's folder: ``rank3_dp1_tp1_pp0``.

    Args:
        mesh: A ``DeviceMesh`` with named dimensions: ``tp`` and ``pp`` are used as such, all others count as data
            parallel. Without a mesh, ranks differ in ``dp`` only.
    """
    number = rank()
    names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    if not names or mesh.get_coordinate() is None:
        return f"rank{number}_dp{number}_tp0_pp0"
    places = dict(zip(names, zip(mesh.get_coordinate(), mesh.shape, strict=True), strict=True))
    data = 0
    for name, (coordinate, size) in places.items():
        if name not in ("tp", "pp"):
            data = data * size + coordinate
    return f"rank{number}_dp{data}_tp{places.get('tp', (0, 1))[0]}_pp{places.get('pp', (0, 1))[0]}"


def mesh_of(model: Any) -> Any:
    """The ``DeviceMesh`` of the first parameter that is distributed over one; None without such a parameter."""
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    return next((mesh for mesh in meshes if mesh is not None), None)


OWNER = ".owner"
"""File in a claimed folder that its process has locked."""

_claimed: dict[tuple[int, Path], Path] = {}


def claim(folder: Path) -> Path:
    """Create a folder and claim it for this process, also on a file system shared by many machines.

    A process without a known rank is rank 0, and two jobs may use one folder. So the first process locks a file in the
    folder while it runs, and other processes use a folder next to it. The operating system releases the lock when the
    process ends. Across machines, this requires a file system with working locks (NFS, GPFS, Lustre mounted with
    ``flock``).

    Returns:
        The folder; if another process has claimed it, one next to it, named after the machine and process.

    Raises:
        OSError: The folder cannot be created or written to.
    """
    key = (os.getpid(), folder.absolute())
    if key not in _claimed or not (_claimed[key] / OWNER).exists():  # otherwise the folder was deleted
        for candidate in _names(folder):
            candidate.mkdir(parents=True, exist_ok=True)
            file = os.open(candidate / OWNER, os.O_RDWR | os.O_CREAT)  # open, and locked, as long as the process
            if _lock(file):
                _claimed[key] = candidate
                break
            os.close(file)
        _warn(folder, _claimed[key])
    return _claimed[key]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file to write, which becomes the path at the end of the block, so that no reader sees a part of it;
    after an error nothing is left of it.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def claim_file(path: Path) -> TextIO:
    """Open and truncate a file for writing that no other process writes to: this one, or one next to it.

    Raises:
        OSError: The file cannot be written to.
    """
    for candidate in _names(path):
        file = candidate.open("a", encoding="utf-8")
        if _lock(file.fileno()):
            file.truncate(0)
            _warn(path, candidate)
            return file
        file.close()
    raise AssertionError("names do not end")


def _names(path: Path) -> Iterator[Path]:
    """The path, then alternatives with the names of this machine and process."""
    yield path
    for number in itertools.count(1):
        suffix = f"{socket.gethostname()}-{os.getpid()}" + f"-{number}" * (number > 1)
        yield path.with_name(f"{path.stem}.{suffix}{path.suffix}")


def _lock(file: int) -> bool:
    """Lock a file; False if another process has it. On a file system without locks, every process has every file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _warn(requested: Path, claimed: Path) -> None:
    if claimed != requested:
        warnings.warn(f"{requested} belongs to another process, so this one writes to {claimed.name}", stacklevel=4)
