"""Decompression, limited to the available memory and disk space.

A few bytes can expand to terabytes, so the output is counted while it is read.
"""

from __future__ import annotations

import io
import lzma
import os
import shutil
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from nvprof_kit.errors import CaptureError

XZ, GZIP = b"\xfd7zXZ\x00", b"\x1f\x8b"
"""How these files begin."""

_RATIO = 500
"""Higher than any capture's compression ratio: about 20 for trace JSON, about 15 for SQLite with xz."""
_LEAST = 256 << 20
UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""What reading a damaged xz or gzip file raises."""


def room_for(packed_bytes: int) -> int:
    """Maximum decompressed size of a file of this size."""
    return max(_LEAST, _RATIO * packed_bytes)


_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and use of a container's memory, in both versions of control groups."""


def free_memory() -> int:
    """Available memory in bytes, of the machine or of the container."""
    free = 1 << 40
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for limit, used in _CGROUPS:
        try:
            left = int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
        free = min(free, max(left, 0))
    return free


def check_file(path: Path) -> None:
    """Reject anything but a regular file: a pipe may block forever and a device may be endless.

    Raises:
        CaptureError: It is a pipe or a device. A directory or a missing file is left to the caller.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        kind = (
            "a pipe, which is read once" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
        )
        raise CaptureError(f"{path}: {kind}; needed a file: write it to one first")


class Bounded(io.RawIOBase):
    """A stream that raises an error if it exceeds a number of bytes.

    Args:
        source: The stream to read.
        limit: Maximum number of bytes; None for no limit.
        named: The path to name in messages.
    """

    def __init__(self, source: IO[bytes], limit: int | None, named: Path) -> None:
        self._source, self._limit, self._named, self._given = source, limit, named, 0

    def readable(self) -> bool:
        """Always true."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Read into the buffer; fewer bytes at the end of the stream.

        Raises:
            CaptureError: The stream exceeds the limit.
        """
        data = self._source.read(len(buffer))
        buffer[: len(data)] = data
        self._given += len(data)
        if self._limit is not None and self._given > self._limit:
            raise CaptureError.of("too-large", path=self._named, limit_mb=self._limit >> 20)
        return len(data)


def beginning_of(path: Path, count: int) -> bytes:
    """The first bytes of a file, decompressed, also where it is compressed twice.

    Raises:
        CaptureError: The path is not a regular file.
        OSError, EOFError, lzma.LZMAError, zlib.error: It cannot be read or decompressed.
    """
    check_file(path)
    with path.open("rb") as file:
        start = file.read(len(XZ))
    with lzma.open(path) if start.startswith(XZ) else path.open("rb") as file:
        header = file.read(count)
    return zlib.decompressobj(31).decompress(header, count) if header.startswith(GZIP) else header


@contextmanager
def _unpacked(path: Path, room: int) -> Iterator[Bounded]:
    """The bytes of a file, decompressed if it is an xz file, as a stream that ends with an error at `room` bytes."""
    with path.open("rb") as file:
        is_xz = file.read(len(XZ)) == XZ
    limit = min(room_for(path.stat().st_size), room) if is_xz else room
    try:
        with lzma.open(path) if is_xz else path.open("rb") as stream:
            yield Bounded(stream, limit, path)
    except (EOFError, lzma.LZMAError):
        raise CaptureError(f"{path}: the xz file is cut off or damaged; copy it again") from None


def unpack(path: Path, target: Path) -> None:
    """Decompress an xz file into another file.

    Raises:
        CaptureError: The file is truncated or damaged, or its decompressed size exceeds half of the free disk or that
            of any capture.
    """
    with _unpacked(path, shutil.disk_usage(target.parent).free // 2) as stream, target.open("wb") as file:
        shutil.copyfileobj(stream, file, 1 << 20)


def read_packed(path: Path) -> bytes:
    """The bytes of a file, decompressed if necessary.

    Raises:
        CaptureError: The path is not a regular file, the file is truncated or damaged, or its decompressed size exceeds
            half of the free memory or that of any capture.
        OSError: It cannot be read.
    """
    check_file(path)
    with _unpacked(path, free_memory() // 2) as stream:
        return stream.readall()
