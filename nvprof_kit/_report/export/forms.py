"""Export formats, selected by file suffix."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from nvprof_kit._report.export.perfetto import perfetto_packets
from nvprof_kit._report.export.trace_events import trace_events
from nvprof_kit._trace.schema import CaptureInfo
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    from nvprof_kit._analysis.timeline import Timeline

BY_SUFFIX: Mapping[str, str] = MappingProxyType(
    {
        ".json.gz": "json.gz",
        ".pb.gz": "pprof",
        ".gz": "json.gz",
        ".json": "json",
        ".pftrace": "pftrace",
        ".perfetto-trace": "pftrace",
        ".folded": "folded",
    }
)
"""Formats by suffix, longer suffixes first."""

STACKS = ("pprof", "folded")
"""Formats that are profiles, not traces."""


def form_of(path: Path) -> str:
    """The format for a file name.

    Raises:
        UsageError: The suffix is unknown.
    """
    for suffix, form in BY_SUFFIX.items():
        if path.name.lower().endswith(suffix):
            return form
    raise UsageError(f"{path}: no format has this suffix; needed one of {' '.join(BY_SUFFIX)}")


def suffixes_of(form: str) -> tuple[str, ...]:
    """The file suffixes of a format."""
    return tuple(suffix for suffix, one in BY_SUFFIX.items() if one == form)


def packed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Gzip chunks of bytes, without a timestamp."""
    packer = zlib.compressobj(2, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    for piece in pieces:
        yield packer.compress(piece)
    yield packer.flush()


def _packed_events(shown: Timeline, info: CaptureInfo) -> Iterator[bytes]:
    return packed(trace_events(shown, info))


TRACES: Mapping[str, Callable[[Timeline, CaptureInfo], Iterator[bytes]]] = MappingProxyType(
    {"json.gz": _packed_events, "json": trace_events, "pftrace": perfetto_packets}
)
"""The writer of each trace format; yields chunks."""
