"""Claim a rank's folder or file for one process, also on a file system shared by many machines.

A process without a known rank is rank 0, and two jobs may use one folder. So the first process locks a file in the
folder while it runs, and another one uses a folder next to it. The operating system releases the lock when the process
ends. It works between machines if the file system's locks do (NFS, GPFS, Lustre mounted with ``flock``).
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
"""File in a claimed folder, locked by its process and removed when that ends."""

_claimed: dict[tuple[int, Path], Path] = {}


def claim(folder: Path) -> Path:
    """Make a folder and claim it for this process until that ends.

    Returns:
        The folder; where another process has it, one beside it, named by machine and process.

    Raises:
        OSError: The folder cannot be made or written to.
    """
    key = (os.getpid(), folder.absolute())
    if key not in _claimed or not (_claimed[key] / OWNER).exists():  # else the folder was deleted meanwhile
        _claimed[key] = next(one for one in _names(folder) if _take(one))
        _warn(folder, _claimed[key])
    return _claimed[key]


def claim_file(path: Path) -> TextIO:
    """Open a file to write to, anew, that no other process writes to: this one, or one beside it.

    Raises:
        OSError: It cannot be written to.
    """
    for one in _names(path):
        file = one.open("a", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        except OSError:  # no locks on this file system
            pass
        file.truncate(0)
        _warn(path, one)
        return file
    raise AssertionError("names do not end")


def _names(path: Path) -> Iterator[Path]:
    """The name itself, then ones of this machine and process."""
    yield path
    for number in itertools.count(1):
        own = f"{socket.gethostname()}-{os.getpid()}" + f"-{number}" * (number > 1)
        yield path.with_name(f"{path.stem}.{own}{path.suffix}")


def _warn(asked: Path, given: Path) -> None:
    if given != asked:
        warnings.warn(f"{asked} belongs to another process, so this one writes to {given.name}", stacklevel=4)


def _take(folder: Path) -> bool:
    """Make a folder and lock the owner's file in it, or say that another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    owner = folder / OWNER
    while True:
        try:
            fresh, file = _open(owner)
        except FileNotFoundError:  # its owner ended a moment ago
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        except OSError:  # no locks on this file system: whoever made the file has the folder
            if not fresh:
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
    """Whether the open file is still the one that others see."""
    with suppress(FileNotFoundError):
        return os.path.samestat(owner.stat(), os.fstat(file.fileno()))
    return False


def _keep(owner: Path, file: TextIO) -> None:
    file.truncate()
    file.write(f"{socket.gethostname()} {os.getpid()}\n")
    file.flush()
    atexit.register(_release, owner, file, os.getpid())


def _release(owner: Path, file: TextIO, process: int) -> None:
    """At the process's end: take the owner's file away while it is locked still, then let go of it."""
    if os.getpid() == process:  # and not a child that was forked
        with suppress(OSError):
            owner.unlink()
    file.close()
