"""The forms in which nsys gives a capture: an SQLite file, a folder of Parquet or Arrow files, and its report, which is
exported first. All of them have the same tables.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from nvprof_kit._trace.files.kinds import has_tables
from nvprof_kit._trace.reader import Request, Source
from nvprof_kit.errors import CaptureError

if TYPE_CHECKING:
    from nvprof_kit._trace.files.database import Database
    from nvprof_kit._trace.schema import Trace


class NsysReader(ABC):
    """A form of an nsys capture."""

    sources: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **dict.fromkeys(("ranges", "marks", "collectives"), "NVTX_EVENTS"),
            **dict.fromkeys(("api", "loads"), "CUPTI_ACTIVITY_KIND_RUNTIME"),
            "calls": "CUPTI_ACTIVITY_KIND_RUNTIME or PROFILER_OVERHEAD",
            "ops": "CUPTI_ACTIVITY_KIND_*",
            "graph_nodes": "CUDA_GRAPH_NODE_EVENTS",
            "allocations": "CUDA_GPU_MEMORY_USAGE_EVENTS",
            "samples": "GPU_METRICS",
            "scheduled": "SCHED_EVENTS",
        }
    )

    @abstractmethod
    def sniff(self, path: Path, header: bytes) -> bool:
        """Whether a path is of this format."""

    @abstractmethod
    def opened(self, source: Source) -> Database:
        """The tables of a capture; close them."""

    def read(self, source: Source, request: Request) -> Trace:
        """Read a capture.

        Raises:
            CaptureError: The capture is damaged, or lacks ranges or operations.
        """
        from nvprof_kit._trace.nsys.read import read_nsys

        with self.opened(source) as db:
            return read_nsys(db, request)

    def read_more(self, source: Source, trace: Trace, request: Request) -> Trace:
        """Add optional columns and tables to a capture without another read of existing ones.

        Raises:
            CaptureError: The capture is damaged, or has changed since.
        """
        from nvprof_kit._trace.nsys.read import read_more

        with self.opened(source) as db:
            return read_more(db, trace, request)


class SqliteReader(NsysReader):
    """An SQLite file, as ``nsys export --type=sqlite`` writes."""

    def sniff(self, path: Path, header: bytes) -> bool:
        """Whether a path is of this format."""
        return header.startswith(b"SQLite format 3\x00")

    def opened(self, source: Source) -> Database:
        """The tables of the file."""
        from nvprof_kit._trace.files.sqlite import SqliteFile

        return SqliteFile(source.path, source.named)


class FolderReader(NsysReader):
    """A folder, as ``nsys export --type=parquetdir`` and ``arrowdir`` write."""

    def sniff(self, path: Path, header: bytes) -> bool:
        """Whether a path is of this format."""
        return has_tables(path)

    def opened(self, source: Source) -> Database:
        """The tables of the folder; no file is open yet."""
        from nvprof_kit._trace.files.parquet import TableFolder

        db = TableFolder(source.path, source.named)
        if "StringIds" in db.tables and not {"META_DATA_EXPORT", "EXPORT_META_DATA"} & {*db.tables}:
            raise CaptureError(
                f"{source.named}: only part of an export (no META_DATA_EXPORT in it); copy the whole folder, or export "
                "the .nsys-rep again"
            )
        return db


class ReportReader(NsysReader):
    """A report, which the installed nsys exports once."""

    def sniff(self, path: Path, header: bytes) -> bool:
        """Whether a path is of this format."""
        return b"NVIDIA" in header and b"Report" in header

    def opened(self, source: Source) -> Database:
        """The tables of the report's export."""
        from nvprof_kit._trace.nsys.export import exported

        # the export is next to the user's report, even if that is compressed
        export = Source(exported(source.path, beside=source.named), source.named)
        return (FolderReader() if export.path.is_dir() else SqliteReader()).opened(export)


NSYS_READERS: tuple[NsysReader, ...] = (SqliteReader(), FolderReader(), ReportReader())
