"""Packed files, unpacked no further than the machine has room for.

A few bytes can stand for terabytes, so what is unpacked is counted while it is read.
"""

from __future__ import annotations

import io
import lzma
import os
import shutil
import stat
from pathlib import Path
from typing import IO

from nvprof_kit.errors import CaptureError

_XZ = b"\xfd7zXZ\x00"
_RATIO = 500
"""No capture packs as well: JSON of a trace packs to a twentieth, SQLite with xz to a fifteenth."""
_LEAST = 256 << 20


def room_for(packed_bytes: int) -> int:
    """How many bytes a packed file of this size may become."""
    return max(_LEAST, _RATIO * packed_bytes)


def free_memory() -> int:
    """Bytes of memory that a program may still take."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 40


_OTHERS = (
    (stat.S_ISFIFO, "a pipe, which is read once"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def check_file(path: Path) -> None:
    """Refuse what is no file: a pipe waits for a writer for ever, and a device may give bytes without end.

    Raises:
        CaptureError: It is one of these; a directory, and what is not there, is left to whoever opens it.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    what = next((name for is_one, name in _OTHERS if is_one(mode)), None)
    if what:
        raise CaptureError(f"{path}: {what}; needed a file: write it to one first")


class Bounded(io.RawIOBase):
    """A stream that refuses to give more than some bytes.

    Args:
        source: What is read.
        limit: How many bytes it may give; None for any number.
        named: The path to name in messages.
    """

    def __init__(self, source: IO[bytes], limit: int | None, named: Path) -> None:
        self._source, self._limit, self._named, self._given = source, limit, named, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill the buffer, as far as there is something to read.

        Raises:
            CaptureError: More came out than may.
        """
        data = self._source.read(len(buffer))
        buffer[: len(data)] = data
        self._given += len(data)
        if self._limit is not None and self._given > self._limit:
            raise CaptureError(
                f"{self._named}: it unpacks to more than {self._limit >> 20} MB, more than a capture of its size or "
                "more than the machine has room for; unpack it yourself if it is what you think"
            )
        return len(data)


def unpack(path: Path, target: Path) -> None:
    """Write what an xz file holds to another file.

    Raises:
        CaptureError: It is cut off or damaged, or becomes larger than half of the free disk or than a capture does.
    """
    limit = min(room_for(path.stat().st_size), shutil.disk_usage(target.parent).free // 2)
    try:
        with lzma.open(path) as packed, target.open("wb") as out:
            shutil.copyfileobj(Bounded(packed, limit, path), out, 1 << 20)
    except (EOFError, lzma.LZMAError):
        raise CaptureError(f"{path}: the xz file is cut off or damaged; copy it again") from None


def read_packed(path: Path) -> bytes:
    """The bytes of a file, unpacked where it is packed.

    Raises:
        CaptureError: It is no file, is cut off or damaged, or becomes larger than half of the free memory or than a
            capture does.
        OSError: It cannot be read.
    """
    check_file(path)
    with path.open("rb") as file:
        if not file.read(len(_XZ)).startswith(_XZ):
            file.seek(0)
            return Bounded(file, free_memory() // 2, path).readall()
    limit = min(room_for(path.stat().st_size), free_memory() // 2)
    try:
        with lzma.open(path) as packed:
            return Bounded(packed, limit, path).readall()
    except (EOFError, lzma.LZMAError):
        raise CaptureError(f"{path}: the xz file is cut off or damaged; copy it again") from None
