"""Claims a rank's folder or file for one process, also on a file system shared by many machines.

A process without a known rank is rank 0, and two jobs may use one folder. So the first process locks a file in the
folder while it runs, and other processes use a folder next to it. The operating system releases the lock when the
process ends. Across machines, this requires a file system with working locks (NFS, GPFS, Lustre mounted with
``flock``).
"""

from __future__ import annotations

import atexit
import fcntl
import itertools
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

OWNER = ".owner"
"""Lock file in a claimed folder; removed when the process ends."""

_claimed: dict[tuple[int, Path], Path] = {}


def claim(folder: Path) -> Path:
    """Create a folder and claim it for this process.

    Returns:
        The folder; if another process has claimed it, one next to it, named after the machine and process.

    Raises:
        OSError: The folder cannot be created or written to.
    """
    key = (os.getpid(), folder.absolute())
    if key not in _claimed or not (_claimed[key] / OWNER).exists():  # otherwise the folder was deleted
        _claimed[key] = next(candidate for candidate in _names(folder) if _take(candidate))
        _warn(folder, _claimed[key])
    return _claimed[key]


def claim_file(path: Path) -> TextIO:
    """Open and truncate a file for writing that no other process writes to: this one, or one next to it.

    Raises:
        OSError: The file cannot be written to.
    """
    for candidate in _names(path):
        file = candidate.open("a", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        except OSError:  # no locks on this file system
            pass
        file.truncate(0)
        _warn(path, candidate)
        return file
    raise AssertionError("names do not end")


def _names(path: Path) -> Iterator[Path]:
    """The path, then alternatives with the names of this machine and process."""
    yield path
    for number in itertools.count(1):
        suffix = f"{socket.gethostname()}-{os.getpid()}" + f"-{number}" * (number > 1)
        yield path.with_name(f"{path.stem}.{suffix}{path.suffix}")


def _warn(requested: Path, claimed: Path) -> None:
    if claimed != requested:
        warnings.warn(f"{requested} belongs to another process, so this one writes to {claimed.name}", stacklevel=4)


def _take(folder: Path) -> bool:
    """Create a folder and lock its lock file; returns False if another process has claimed it."""
    folder.mkdir(parents=True, exist_ok=True)
    owner = folder / OWNER
    while True:
        try:
            created, file = _open(owner)
        except FileNotFoundError:  # its owner has just ended
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        except OSError:  # no locks on this file system: the process that created the file keeps the folder
            if not created:
                file.close()
                return False
        if _is(owner, file):
            _keep(owner, file)
            return True
        file.close()


def _open(owner: Path) -> tuple[bool, TextIO]:
    try:
        return True, owner.open("x", encoding="utf-8")
    except FileExistsError:
        return False, owner.open("r+", encoding="utf-8")


def _is(owner: Path, file: TextIO) -> bool:
    """Whether the open file is still the one at this path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(owner.stat(), os.fstat(file.fileno()))
    return False


def _keep(owner: Path, file: TextIO) -> None:
    file.truncate()
    file.write(f"{socket.gethostname()} {os.getpid()}\n")
    file.flush()
    atexit.register(_release, owner, file, os.getpid())


def _release(owner: Path, file: TextIO, process: int) -> None:
    """At exit, delete the lock file while it is locked, then release the lock."""
    if os.getpid() == process:  # not in a forked child
        with suppress(OSError):
            owner.unlink()
    file.close()
