"""Open a file of any format, as the tables of its reader.

The format is detected from the file's first bytes, never from its name alone. A file is never modified; the export of
an ``.nsys-rep`` is separate, next to it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nvprof_kit._trace.files.kinds import NEEDED, NEEDED_NSYS, description_of
from nvprof_kit._trace.files.packed import XZ, check_file, unpack
from nvprof_kit._trace.kineto.reader import KinetoReader
from nvprof_kit._trace.ncu.reader import PageReader, ReportReader
from nvprof_kit._trace.nsys.reader import NsysReader
from nvprof_kit._trace.reader import DEFAULT, CaptureReader, Reader, Request, Source
from nvprof_kit._trace.torch_memory.snapshot import Snapshot, SnapshotReader
from nvprof_kit.errors import CaptureError
from nvprof_kit.names import DOMAIN

if TYPE_CHECKING:
    from nvprof_kit._trace.files.database import Database
    from nvprof_kit._trace.ncu.schema import NcuReport
    from nvprof_kit._trace.schema import Trace

READERS: list[CaptureReader] = [NsysReader(), KinetoReader()]
"""The formats of captures."""
NCU_READERS: list[Reader[NcuReport]] = [ReportReader(), PageReader()]
"""The formats of ncu's results."""
SNAPSHOT_READERS: list[Reader[Snapshot]] = [SnapshotReader()]
"""The format of snapshots of PyTorch's allocator."""
_NEEDED_NCU = "a raw or details page of ncu, or an .ncu-rep"
_NEEDED_SNAPSHOT = "a snapshot of torch.cuda.memory._dump_snapshot"


def open_capture(
    path: str | Path, *, domain: str = DOMAIN, optional: Collection[str] = (), cpu_only: bool = False
) -> Trace:
    """Read a capture into a `Trace`.

    Args:
        path: An nsys ``.sqlite`` or ``.nsys-rep``, a folder of ``nsys export --type=parquetdir`` or ``arrowdir``, a
            Kineto ``.json`` or ``.json.gz``; a file also compressed as ``.xz``.
        domain: NVTX domain to take the ranges from; '' is the default domain.
        optional: The optional columns of `nvprof_kit._trace.schema` to read, and the optional tables: ``calls``,
            ``samples``, ``marks``, ``allocations``, ``collectives``, ``scheduled``, ``loads``, ``shapes``,
            ``frames``; with `BUSY_CALLS`, only calls that launch, wait, allocate or free.
        cpu_only: Whether to read an nsys capture without GPU operations too: see `CaptureInfo.no_ops_reason`.

    Returns:
        The capture's tables. `CaptureInfo.path` is the path as given.

    Raises:
        CaptureError: The file cannot be read, is not a capture, is damaged, or lacks ranges or operations.
        ToolError: An ``.nsys-rep`` needs nsys, which is not installed or is older than the report.
    """
    from nvprof_kit._trace.validate import validate

    with _opened(path, READERS, NEEDED) as (reader, source):
        trace = reader.read(source, Request(domain, frozenset(optional), cpu_only))
        return validate(trace, source.named, reader.sources)


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
    from nvprof_kit._trace.validate import check_tables

    with _opened(trace.info.path, READERS, NEEDED) as (reader, source):
        more = reader.read_more(source, trace, Request(domain, frozenset(optional)))
        added = [name for name, table in vars(more).items() if table is not vars(trace)[name] and name != "info"]
        check_tables(more, source.named, reader.sources, added)
    return more


def open_ncu(path: str | Path, *, domain: str = DOMAIN) -> NcuReport:
    """Read an ncu report.

    Args:
        path: The raw or details page as CSV (``ncu --import FILE --page raw --csv``), or an ``.ncu-rep``; each also
            compressed as ``.xz``.
        domain: NVTX domain to take the ranges from; '' or ``default`` is the default domain.

    Raises:
        CaptureError: The file cannot be read, is another page, or contains no result.
        ToolError: An ``.ncu-rep`` needs the ncu-report package or an installed ncu.
    """
    with _opened(path, NCU_READERS, _NEEDED_NCU) as (reader, source):
        return reader.read(source, Request("" if domain == DEFAULT else domain))


def open_snapshot(path: str | Path) -> Snapshot:
    """Read a snapshot of PyTorch's CUDA caching allocator, also compressed as ``.xz``.

    Raises:
        CaptureError: The file cannot be read, is not a pickle, contains more than plain data, or is not a snapshot.
    """
    with _opened(path, SNAPSHOT_READERS, _NEEDED_SNAPSHOT) as (reader, source):
        return reader.read(source, Request())


@contextmanager
def nsys_export(path: Path) -> Iterator[Database]:
    """The tables of an nsys capture, decompressed or exported if necessary.

    Raises:
        CaptureError: The file cannot be read or is not an nsys capture.
        ToolError: As in `open_capture`.
    """
    with _opened(path, [NsysReader()], NEEDED_NSYS) as (reader, source), reader.opened(source) as db:
        yield db


_Format = TypeVar("_Format", bound="Reader[Any]")


@contextmanager
def _opened(path: str | Path, readers: Iterable[_Format], expected: str) -> Iterator[tuple[_Format, Source]]:
    """The reader of a file, and the file; of an xz file a temporary decompressed copy, which is deleted afterwards.

    Raises:
        CaptureError: The file cannot be read, or is of none of these formats.
    """
    path = Path(path)
    try:
        with ExitStack() as stack:
            source = Source(path, path)
            if _header(path, expected).startswith(XZ):
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="nvprof-kit-"))
                source = Source(Path(folder) / (path.stem if path.suffix == ".xz" else path.name), path)
                unpack(path, source.path)
            header = _header(source.path, expected)
            reader = next((reader for reader in readers if reader.sniff(source.path, header)), None)
            if reader is None:
                description = description_of(header) or f"of an unknown format (it begins {header[:12]!r})"
                if source.path.is_dir():
                    description = "a directory without tables of nsys" if "folder" in expected else "a directory"
                raise CaptureError(f"{path}: {description}; needed {expected}")
            yield reader, source
    except OSError as error:
        reason = {
            FileNotFoundError: "no such file",
            IsADirectoryError: f"a directory; needed {expected}",
            PermissionError: "no permission to read it",
        }.get(type(error), error.strerror or str(error))
        raise CaptureError(f"{path}: {reason}") from None


def _header(path: Path, expected: str) -> bytes:
    """The first bytes of a file; none of a folder."""
    if path.is_dir():
        return b""
    check_file(path)
    with path.open("rb") as file:
        header = file.read(64)
    if not header:
        raise CaptureError(f"{path}: the file is empty (0 bytes); needed {expected}")
    return header
