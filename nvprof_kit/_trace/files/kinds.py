"""File type detection from the first bytes, compressed or not, and the verb that reads each type."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from nvprof_kit._trace.files.packed import GZIP, UNREADABLE, beginning_of
from nvprof_kit.errors import CaptureError

_READERS = "`nvprof-kit layers` and similar commands read it"
_HEAD = 4096
PARQUET_FOLDER = "_pqtdir"
"""What ``nsys export --type=parquetdir run.nsys-rep`` appends to ``run``."""
_TABLE = re.compile(r"(StringIds|META_DATA_EXPORT|NVTX_EVENTS|CUPTI_ACTIVITY_KIND_\w+)\.(parquet|arrow)")


class Kind(NamedTuple):
    """A file type.

    Attributes:
        description: What it is.
        read_by: The verb that reads it.
        magic: How such files may begin.
        contains: What tells it from other JSON, in the first bytes.
    """

    description: str
    read_by: str
    magic: tuple[bytes, ...] = ()
    contains: tuple[bytes, ...] = ()

    @property
    def sentence(self) -> str:
        """The description followed by the verb."""
        return f"{self.description}: {self.read_by}"


_END = "it is the end of the way; name the capture that it was made of"

SQLITE = Kind("an SQLite file, as nsys exports", _READERS, (b"SQLite format 3\x00",))
NSYS_REPORT = Kind("an nsys report", _READERS)
TABLES = Kind("a folder of tables, as nsys exports", _READERS)
TRACE = Kind(
    "a PyTorch trace", _READERS, contains=(b'"traceEvents"', b'"deviceProperties"', b'"schemaVersion"', b'"ph":')
)
JSON = Kind("JSON, but no trace that is known", f"of a PyTorch trace {_READERS}")
NCU_REPORT = Kind("an ncu report", "`nvprof-kit ncu layers` reads it", (b"NVR\x00",))
NCU_PAGE = Kind("a page of ncu", "`nvprof-kit ncu layers` reads it", (b'"ID",', b"==PROF=="))
TIMERS = Kind("a log of global_timer", "`nvprof-kit timers` reads it", (b"[RANK ",))
PICKLE = Kind("a pickle", "`nvprof-kit memory` reads snapshots of PyTorch's allocator")
FLIGHT = Kind("a dump of PyTorch's Flight Recorder", "no verb reads it", contains=(b'"comm_lib_version"',))
FLOPS = Kind(
    "counted operations", "`nvprof-kit flops CAPTURE --counts FILE` reads them", contains=(b'"nvprof_kit flops"',)
)
ANSWER = Kind("an answer of nvprof-kit", _END, contains=(b'"schema": "nvprof-kit/',))
HTML = Kind("a page of HTML", "a browser shows it", (b"<!DOCTYPE html",))
PICTURE = Kind("a picture", "no verb reads it", (b"\x89PNG", b"%PDF"))
PARQUET = Kind("a parquet file", "of a table that nsys exported, name the folder", (b"PAR1",))
CSV = Kind("a table of ours as csv", _END)

CAPTURES = (SQLITE, NSYS_REPORT, TABLES, TRACE, JSON)
"""Kinds that are captures."""
NSYS = (SQLITE, NSYS_REPORT, TABLES)
"""Kinds that are nsys captures."""
NEEDED_NSYS = "an nsys .sqlite, .nsys-rep or folder of `nsys export --type=parquetdir`, a file also packed as .xz"
"""The expected input of what reads nsys captures."""
NEEDED = (
    "an nsys .sqlite, .nsys-rep or folder of `nsys export --type=parquetdir`, or a PyTorch trace .json or .json.gz, a "
    "file also packed as .xz"
)
"""The expected input of what reads captures."""
NCU = (NCU_REPORT, NCU_PAGE)
"""Kinds that are ncu results."""


def kind_of(header: bytes) -> Kind | None:
    """Kind of a file with these first bytes; None if unknown."""
    if b"NVIDIA" in header[:64] and b"Report" in header[:64]:
        return NSYS_REPORT
    for kind in (SQLITE, NCU_REPORT, NCU_PAGE, TIMERS, PICTURE, PARQUET, HTML):
        if header.startswith(kind.magic):
            return kind
    if header.startswith(b"\x80"):
        return FLIGHT if b"pg_config" in header else PICKLE
    if header.startswith(b"==") and b'"ID",' in header:
        return NCU_PAGE
    if header.lstrip()[:1] in (b"{", b"["):
        kinds = (kind for kind in (TRACE, FLOPS, ANSWER, FLIGHT) if any(word in header for word in kind.contains))
        return next(kinds, JSON)
    first = header.split(b"\n", 1)[0]
    return CSV if b"," in first and b"_ns" in first else None


def description_of(header: bytes) -> str:
    """Description of a file with these first bytes and the verb that reads it; '' if unknown."""
    kind = TRACE if header.startswith(GZIP) else kind_of(header)
    return kind.sentence if kind else ""


def has_tables(path: Path) -> bool:
    """Whether a path is a folder with a table of nsys in it, as ``nsys export --type=parquetdir`` writes."""
    try:
        return path.is_dir() and any(_TABLE.fullmatch(name) for name in os.listdir(path))
    except OSError:
        return False


def recognised(path: Path) -> Kind | None:
    """Kind of a file; None if unknown or if the file cannot be read."""
    if has_tables(path):
        return TABLES
    try:
        return kind_of(beginning_of(path, _HEAD)) if path.is_file() else None
    except UNREADABLE:
        return None


def expect(path: str | Path, kinds: tuple[Kind, ...], need: str) -> None:
    """Reject a file that is known to be of a kind that the verb does not read.

    Args:
        path: The file; a missing, damaged or unknown file is left to its reader.
        kinds: The accepted kinds.
        need: The accepted kinds in words.

    Raises:
        CaptureError: The file is of another kind.
    """
    kind = recognised(Path(path))
    if kind is not None and kind not in kinds:
        raise CaptureError(f"{path}: {kind.sentence}; needed {need}")
