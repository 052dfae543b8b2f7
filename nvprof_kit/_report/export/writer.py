"""Every file that the package leaves is written here: beside its place and renamed, and never over what it was made of.

A reader of the file therefore sees the old one or the new one, whole. What is no regular file (a pipe, ``/dev/null``)
is written as it is.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from nvprof_kit.errors import UsageError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PACKED = ".xz"
_REPORT, _EXPORT = ".nsys-rep", ".sqlite"


class WriteError(UsageError, OSError):
    """A file cannot be written; ``errno`` and ``strerror`` are those of the system."""

    __str__ = Exception.__str__


def write_file(
    path: str | Path, data: bytes | str, *, inputs: Iterable[str | Path] = (), executable: bool = False
) -> Path:
    """Write a file whole.

    Args:
        path: The file; through a symbolic link, what it points to.
        data: What is to be in it; text becomes UTF-8.
        inputs: What it was made of: none of these is overwritten, nor what belongs to them (`belongings`).
        executable: Whether it is a script to run.

    Returns:
        The path.

    Raises:
        UsageError: It is an input.
        WriteError: It cannot be written; a file that was there before is as it was.
    """
    with writing(path, inputs=inputs, executable=executable) as file:
        file.write(data.encode("utf-8", "replace") if isinstance(data, str) else data)
    return Path(path)


@contextmanager
def writing(path: str | Path, *, inputs: Iterable[str | Path] = (), executable: bool = False) -> Iterator[BinaryIO]:
    """The same for what is written piece by piece: the file takes its place when the block ends without an error."""
    path = Path(path)
    refuse_input(path, inputs)
    try:
        target = Path(os.path.realpath(path))
        before = target.stat() if target.exists() else None
        if before is not None and not stat.S_ISREG(before.st_mode):
            with target.open("wb") as file:
                yield file
            return
        with _beside(target, before, executable) as file:
            yield file
    except OSError as error:
        failed = WriteError(f"{path}: cannot write it: {_reason(error, path)}")
        failed.errno, failed.strerror = error.errno, error.strerror
        raise failed from None


def refuse_input(path: str | Path, inputs: Iterable[str | Path]) -> None:
    """Refuse to write over what an answer is made of.

    Args:
        path: Where the answer is to go.
        inputs: What it is made of.

    Raises:
        UsageError: The path is one of them, by whatever name, or belongs to one of them.
    """
    for one in inputs:
        for source in belongings(Path(one)):
            if _same(Path(path), source):
                what = "is the input" if source == Path(one) else f"is {source}, which belongs to the input"
                raise UsageError(f"{path}: {what} {one}: the output must not overwrite it; choose another file")


def belongings(source: Path) -> list[Path]:
    """An input and what belongs to it: the export of an ``.nsys-rep``, the report of an export, SQLite's journals."""
    if not source.name:  # the folder one is in
        return [source]
    plain = source.with_name(source.name.removesuffix(_PACKED))
    found = [source]
    for one, other in ((_REPORT, _EXPORT), (_EXPORT, _REPORT)):
        if plain.suffix == one:
            beside = plain.with_suffix(other)
            found += [beside, beside.with_name(beside.name + _PACKED)]
    found += [one.with_name(one.name + end) for one in tuple(found) for end in ("-wal", "-shm", "-journal")]
    return found


def _same(path: Path, other: Path) -> bool:
    """Whether two names are of one file, through symbolic and hard links; where one is not there, of one place."""
    try:
        return os.path.samefile(path, other)
    except OSError:
        return os.path.realpath(path) == os.path.realpath(other)


def _reason(error: OSError, path: Path) -> str:
    said = error.strerror or str(error)
    return f"{said}; the file that was there is unchanged" if error.errno in _FULL and path.exists() else said


@contextmanager
def _beside(target: Path, before: os.stat_result | None, executable: bool) -> Iterator[BinaryIO]:
    """A new file of an unforeseeable name beside the target, which it replaces in the end.

    Its mode is that of the file before, else what the process's umask leaves of 0666, or of 0777 for a script.
    """
    partial = target.with_name(f".nvprof-kit-{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    handle = os.open(partial, flags, 0o777 if executable else 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            if before is not None and not executable:
                os.fchmod(handle, stat.S_IMODE(before.st_mode))
            yield file
        os.replace(partial, target)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
