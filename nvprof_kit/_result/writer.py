"""Writes all output files of the package: to a temporary file that is then renamed, and never over an input.

So a reader sees either the old file or the complete new one. Files that are not regular (a pipe, ``/dev/null``) are
written directly.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from nvprof_kit.errors import UsageError
from nvprof_kit.issues import Issue

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PACKED = ".xz"
_REPORT, _EXPORT, _FOLDER = ".nsys-rep", ".sqlite", "_pqtdir"


class WriteError(UsageError, OSError):
    """A file cannot be written; ``errno`` and ``strerror`` are from the operating system."""

    __str__ = Exception.__str__


def write_file(
    path: str | Path, data: bytes | str, *, inputs: Iterable[str | Path] = (), executable: bool = False
) -> Path:
    """Write a file atomically.

    Args:
        path: The file; symbolic links are followed.
        data: The content; text is encoded as UTF-8.
        inputs: Input files; neither these nor their related files (`belongings`) are overwritten.
        executable: Whether the file is a script to run.

    Returns:
        The path.

    Raises:
        UsageError: The file is an input.
        WriteError: The file cannot be written; an existing file is unchanged.
    """
    with writing(path, inputs=inputs, executable=executable) as file:
        file.write(data.encode("utf-8", "replace") if isinstance(data, str) else data)
    return Path(path)


@contextmanager
def writing(path: str | Path, *, inputs: Iterable[str | Path] = (), executable: bool = False) -> Iterator[BinaryIO]:
    """The same for a file written in pieces; it replaces the target when the block ends without an error."""
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
    """Raise an error if the output would overwrite an input.

    Args:
        path: The output file.
        inputs: The input files.

    Raises:
        UsageError: The path is one of the inputs, under any name, or a related file of one.
    """
    for input_path in inputs:
        for source in belongings(Path(input_path)):
            try:
                is_same = os.path.samefile(Path(path), source)  # through symbolic and hard links
            except OSError:  # one is missing
                is_same = os.path.realpath(Path(path)) == os.path.realpath(source)
            if is_same:
                reason = "is the input" if source == Path(input_path) else f"is {source}, which belongs to the input"
                raise UsageError.of("overwrites-input", path=path, reason=reason, input_path=input_path)


def belongings(source: Path) -> list[Path]:
    """An input and its related files: the export of an ``.nsys-rep``, the report of an export, SQLite's journals, the
    files in a folder.
    """
    if not source.name:  # the current folder or the root
        return [source]
    plain = source.with_name(source.name.removesuffix(_PACKED))
    paths = [source]
    for path, other in ((_REPORT, _EXPORT), (_EXPORT, _REPORT)):
        if plain.suffix == path:
            beside = plain.with_suffix(other)
            paths += [beside, beside.with_name(beside.name + _PACKED), plain.with_name(plain.stem + _FOLDER)]
    paths += [path.with_name(path.name + end) for path in tuple(paths) for end in ("-wal", "-shm", "-journal")]
    paths += source.iterdir() if source.is_dir() else ()
    return paths


def _reason(error: OSError, path: Path) -> str:
    reason = error.strerror or str(error)
    return f"{reason}; the file that was there is unchanged" if error.errno in _FULL and path.exists() else reason


@contextmanager
def _beside(target: Path, before: os.stat_result | None, executable: bool) -> Iterator[BinaryIO]:
    """A temporary file with a random name next to the target, which it replaces at the end.

    The mode of a script is 0777 less the umask; else it is that of the existing file, or 0666 less the umask.
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


@dataclass(frozen=True, repr=False)
class Document:
    """A file for another program, not yet written.

    Attributes:
        content: The bytes, or a function that yields them in chunks, so that a large file need not fit in memory.
        suffixes: Allowed file suffixes.
        sources: The input files; `save` refuses to overwrite them.
        warnings: What may be missing in it.
    """

    content: bytes | Callable[[], Iterable[bytes]]
    suffixes: tuple[str, ...]
    sources: tuple[Path, ...] = ()
    warnings: tuple[Issue, ...] = ()

    @property
    def data(self) -> bytes:
        """The content as bytes."""
        return self.content if isinstance(self.content, bytes) else b"".join(self.content())

    def pieces(self) -> Iterable[bytes]:
        """The content in chunks of bytes."""
        return (self.content,) if isinstance(self.content, bytes) else self.content()

    def save(self, path: str | Path) -> Path:
        """Write the file. It appears complete or not at all.

        Returns:
            The path.

        Raises:
            UsageError: The suffix is not allowed, or the file is an input or cannot be written.
        """
        path = Path(path)
        if not path.name.lower().endswith(self.suffixes):
            raise UsageError(f"{path}: no format has this suffix; needed one of {' '.join(self.suffixes)}")
        with writing(path, inputs=self.sources) as file:
            file.writelines(self.pieces())
        return path

    def __repr__(self) -> str:
        """The size and the allowed suffixes, without the content."""
        size = f"of {len(self.content):,} bytes" if isinstance(self.content, bytes) else "that is made as it is written"
        return f"<a document {size}; save it as {' or '.join(self.suffixes)}>"
