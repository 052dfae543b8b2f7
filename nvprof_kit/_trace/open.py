"""Open a capture of any kind as a `Trace`.

The kind is detected from the file's first bytes, never from its name alone. A capture is never modified; the SQLite
export of an ``.nsys-rep`` is a separate file next to it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nvprof_kit._trace.files.kinds import NEEDED, NEEDED_NSYS, description_of
from nvprof_kit._trace.files.packed import check_file, unpack
from nvprof_kit._trace.kineto.reader import KinetoReader
from nvprof_kit._trace.nsys.reader import NSYS_READERS
from nvprof_kit._trace.reader import Reader, Request, Source
from nvprof_kit.errors import CaptureError
from nvprof_kit.names import DOMAIN

if TYPE_CHECKING:
    from nvprof_kit._trace.files.database import Database
    from nvprof_kit._trace.schema import Trace

_XZ = b"\xfd7zXZ\x00"
READERS: tuple[Reader, ...] = (*NSYS_READERS, KinetoReader())
"""The formats of captures."""


def open_capture(
    path: str | Path, *, domain: str = DOMAIN, optional: Collection[str] = (), cpu_only: bool = False
) -> Trace:
    """Read a capture into a `Trace`.

    Args:
        path: An nsys ``.sqlite`` or ``.nsys-rep``, a folder of ``nsys export --type=parquetdir`` or ``arrowdir``, a
            Kineto ``.json`` or ``.json.gz``; a file also compressed as ``.xz``.
        domain: NVTX domain to take the ranges from; '' is the default domain.
        optional: The optional columns of `nvprof_kit._trace.schema` to read, and the optional tables: ``calls``,
            ``samples``, ``marks``, ``allocations``, ``collectives``, ``scheduled``, ``loads``, ``shapes``; with
            `BUSY_CALLS`, only calls that launch, wait, allocate or free.
        cpu_only: Whether to read an nsys capture without GPU operations too; `CaptureInfo.lacks` then has the reason.

    Returns:
        The capture's tables. `CaptureInfo.path` is the path as given.

    Raises:
        CaptureError: The file cannot be read, is not a capture, is damaged, or lacks ranges or operations.
        ToolError: An ``.nsys-rep`` needs nsys, which is not installed or is older than the report.
    """
    path = Path(path)
    request = Request(domain, frozenset(optional), cpu_only)
    try:
        with _unpacked(path) as source:
            trace = _reader(source).read(source, request)
    except (CaptureError, OSError) as error:
        raise _for_user(error, path) from None
    return replace(trace, info=replace(trace.info, path=str(path)))


def open_more(trace: Trace, *, domain: str, optional: Collection[str]) -> Trace:
    """Add optional columns and tables to a capture.

    Args:
        trace: The result of `open_capture`.
        domain: The NVTX domain it was opened with.
        optional: What to add, as in `open_capture`.

    Returns:
        The capture with the existing and the added data. For an nsys capture only missing data is read; a PyTorch trace
        is read again completely.

    Raises:
        CaptureError: As in `open_capture`, or the file has changed since.
    """
    path = Path(trace.info.path)
    try:
        with _unpacked(path) as source:
            return _reader(source).read_more(source, trace, Request(domain, frozenset(optional)))
    except (CaptureError, OSError) as error:
        raise _for_user(error, path) from None


@contextmanager
def nsys_export(path: Path) -> Iterator[Database]:
    """The tables of an nsys capture, decompressed or exported if necessary.

    Raises:
        CaptureError: The file cannot be read or is not an nsys capture.
        ToolError: As in `open_capture`.
    """
    try:
        with _unpacked(path) as source:
            header = _head(source.path)
            reader = next((reader for reader in NSYS_READERS if reader.sniff(source.path, header)), None)
            if reader is None:
                raise CaptureError(f"{path}: not an nsys capture; needed {NEEDED_NSYS}")
            with reader.opened(source) as db:
                yield db
    except OSError as error:
        raise _for_user(error, path) from None


def _for_user(error: CaptureError | OSError, path: Path) -> CaptureError:
    """The error with the user's path instead of a temporary file."""
    if isinstance(error, CaptureError):
        return error
    reason = {
        FileNotFoundError: "no such file",
        IsADirectoryError: f"a directory; needed {NEEDED}",
        PermissionError: "no permission to read it",
    }.get(type(error), error.strerror or str(error))
    return CaptureError(f"{path}: {reason}")


@contextmanager
def _unpacked(path: Path) -> Iterator[Source]:
    """The path itself or, for an xz-compressed capture, a temporary decompressed copy that is deleted afterwards."""
    if not _head(path).startswith(_XZ):
        yield Source(path, path)
        return
    with tempfile.TemporaryDirectory(prefix="nvprof-kit-") as folder:
        plain = Path(folder) / (path.stem if path.suffix == ".xz" else path.name)
        unpack(path, plain)
        yield Source(plain, path)


def _head(path: Path) -> bytes:
    """The first bytes of a file; none of a folder."""
    if path.is_dir():
        return b""
    check_file(path)
    with path.open("rb") as file:
        header = file.read(64)
    if not header:
        raise CaptureError(f"{path}: the file is empty (0 bytes); needed {NEEDED}")
    return header


def _reader(source: Source) -> Reader:
    """The reader for a file, by its first bytes, or for a folder, by its files."""
    header = _head(source.path)
    for reader in READERS:
        if reader.sniff(source.path, header):
            return reader
    if source.path.is_dir():
        raise CaptureError(f"{source.named}: a directory without tables of nsys; needed {NEEDED}")
    if description := description_of(header):
        raise CaptureError(f"{source.named}: {description}; needed {NEEDED}")
    raise CaptureError(
        f"{source.named}: neither SQLite, an nsys report nor JSON (it begins {header[:12]!r}); needed {NEEDED}"
    )
