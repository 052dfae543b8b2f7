"""The forms in which nsys gives a capture: an SQLite file, a folder of Parquet or Arrow files, and its report, which is
exported first. All of them have the same tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from nvprof_kit._trace.files.kinds import has_tables
from nvprof_kit._trace.reader import Request, Source
from nvprof_kit._trace.schema import NSYS_TABLES

if TYPE_CHECKING:
    from nvprof_kit._trace.files.database import Database
    from nvprof_kit._trace.schema import Trace


class NsysReader:
    """Captures of nsys in any form."""

    sources: ClassVar[Mapping[str, str]] = NSYS_TABLES

    def sniff(self, path: Path, header: bytes) -> bool:
        """Whether a path is a capture of nsys."""
        return header.startswith(b"SQLite format 3\x00") or _is_report(header) or has_tables(path)

    def opened(self, source: Source) -> Database:
        """The tables of a capture; close them. A report is exported first.

        Raises:
            CaptureError: The capture is damaged.
            ToolError: A report needs nsys, which is not installed or is older than the report.
        """
        from nvprof_kit._trace.nsys.export import exported, open_export

        path = source.path
        if path.is_file():
            with path.open("rb") as file:
                if _is_report(file.read(64)):
                    # the export is next to the user's report, even if that is compressed
                    path = exported(path, beside=source.named)
        return open_export(path, source.named)

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


def _is_report(header: bytes) -> bool:
    return b"NVIDIA" in header and b"Report" in header
