"""Open a capture of any kind as a `Trace`.

The kind is detected from the file's first bytes, never from its name alone. A capture is never modified; the SQLite
export of an ``.nsys-rep`` is a separate file next to it.
"""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvprof_kit._trace.files.kinds import description_of
from nvprof_kit._trace.files.packed import UNREADABLE, check_file, unpack
from nvprof_kit._trace.schema import TABLES
from nvprof_kit.errors import CaptureError
from nvprof_kit.names import DOMAIN

if TYPE_CHECKING:
    from nvprof_kit._trace.schema import Trace

_SQLITE = b"SQLite format 3\x00"
_XZ = b"\xfd7zXZ\x00"
_GZIP = b"\x1f\x8b"
_KINDS = "an nsys .sqlite or .nsys-rep, or a PyTorch trace .json or .json.gz, each also packed as .xz"


def open_capture(
    path: str | Path, *, domain: str = DOMAIN, optional: Collection[str] = (), cpu_only: bool = False
) -> Trace:
    """Read a capture into a `Trace`.

    Args:
        path: An nsys ``.sqlite`` or ``.nsys-rep``, a Kineto ``.json`` or ``.json.gz``, or any of them compressed as
            ``.xz``.
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
    try:
        with _unpacked(path) as plain:
            trace: Trace = _reader(plain, path, cpu_only)(plain, domain, optional)
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
        if trace.info.tool.startswith("nsys"):
            from nvprof_kit._trace.nsys.read import read_more

            with nsys_sqlite(path) as plain:
                return read_more(plain, trace, domain, optional, path)
        reopened = open_capture(path, domain=domain, optional=optional)
    except OSError as error:
        raise _for_user(error, path) from None
    if len(reopened.ops) != len(trace.ops):
        raise CaptureError(f"{path}: the file was changed since it was opened; open it again")
    tables: dict[str, Any] = {
        name: getattr(reopened, name) for name in optional if name in TABLES and name != "operators"
    }
    columns = {str(name): reopened.ops[name] for name in reopened.ops if name not in trace.ops}
    return replace(trace, api=reopened.api, ops=trace.ops.assign(**columns), **tables)


@contextmanager
def nsys_sqlite(path: Path) -> Iterator[Path]:
    """The plain ``.sqlite`` of an nsys capture, decompressed or exported if necessary.

    Raises:
        CaptureError: The file cannot be read or is not an nsys capture.
        ToolError: As in `open_capture`.
    """
    try:
        with _unpacked(path) as plain:
            header = _head(plain)
            if header.startswith(_SQLITE):
                yield plain
            elif b"NVIDIA" in header and b"Report" in header:
                from nvprof_kit._trace.nsys.export import exported

                yield exported(plain, beside=path)
            else:
                raise CaptureError(f"{path}: not an nsys capture; needed .sqlite or .nsys-rep (or either as .xz)")
    except OSError as error:
        raise _for_user(error, path) from None


def _for_user(error: CaptureError | OSError, path: Path) -> CaptureError:
    """The error with the user's path instead of a temporary file."""
    if isinstance(error, CaptureError):
        return error
    reason = {
        FileNotFoundError: "no such file",
        IsADirectoryError: f"a directory; needed {_KINDS}",
        PermissionError: "no permission to read it",
    }.get(type(error), error.strerror or str(error))
    return CaptureError(f"{path}: {reason}")


@contextmanager
def _unpacked(path: Path) -> Iterator[Path]:
    """The path itself or, for an xz-compressed capture, a temporary decompressed copy that is deleted afterwards."""
    header = _head(path)
    if not header.startswith(_XZ):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="nvprof-kit-") as folder:
        plain = Path(folder) / (path.stem if path.suffix == ".xz" else path.name)
        unpack(path, plain)
        yield plain


def _head(path: Path) -> bytes:
    check_file(path)
    with path.open("rb") as file:
        header = file.read(64)
    if not header:
        raise CaptureError(f"{path}: the file is empty (0 bytes); needed {_KINDS}")
    return header


def _reader(plain: Path, named: Path, cpu_only: bool) -> Callable[[Path, str, Collection[str]], Any]:
    """The reader for this file, by its first bytes."""
    header = _head(plain)
    if header.startswith(_SQLITE):
        from nvprof_kit._trace.nsys.read import read_nsys

        return lambda path, domain, optional: read_nsys(path, domain, optional, named, cpu_only=cpu_only)
    if b"NVIDIA" in header and b"Report" in header:
        from nvprof_kit._trace.nsys.export import exported
        from nvprof_kit._trace.nsys.read import read_nsys

        # the export is next to the user's report, even if that is compressed
        return lambda path, domain, optional: read_nsys(
            exported(path, beside=named), domain, optional, named, cpu_only=cpu_only
        )
    if not header.startswith(b"[RANK ") and _starts_json(plain, header):
        from nvprof_kit._trace.kineto.read import read_kineto

        return lambda path, domain, optional: read_kineto(path, domain, optional, named)
    if description := description_of(header):
        raise CaptureError(f"{named}: {description}; needed {_KINDS}")
    raise CaptureError(f"{named}: neither SQLite, an nsys report nor JSON (it begins {header[:12]!r}); needed {_KINDS}")


def _starts_json(plain: Path, header: bytes) -> bool:
    if header.startswith(_GZIP):
        try:
            with gzip.open(plain) as file:
                header = file.read(64)
        except UNREADABLE:
            return True  # the Kineto reader reports the damage
    return header.lstrip()[:1] in (b"{", b"[")
