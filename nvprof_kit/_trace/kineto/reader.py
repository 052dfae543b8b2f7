"""PyTorch's own traces as captures."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from nvprof_kit._trace.files.packed import GZIP, UNREADABLE
from nvprof_kit._trace.reader import Request, Source
from nvprof_kit._trace.schema import TABLES, Trace
from nvprof_kit.errors import CaptureError


class KinetoReader:
    """A trace of PyTorch's profiler."""

    sources: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def sniff(self, path: Path, header: bytes) -> bool:
        """Whether a path is of this format."""
        if header.startswith(b"[RANK "):
            return False
        if header.startswith(GZIP):
            try:
                with gzip.open(path) as file:
                    header = file.read(64)
            except UNREADABLE:
                return True  # the reader reports the damage
        return header.lstrip()[:1] in (b"{", b"[")

    def read(self, source: Source, request: Request) -> Trace:
        """Read a trace.

        Raises:
            CaptureError: The trace is damaged, or lacks operations.
        """
        from nvprof_kit._trace.kineto.read import read_kineto

        return read_kineto(source, request)

    def read_more(self, source: Source, trace: Trace, request: Request) -> Trace:
        """Add optional columns and tables to a trace, which is read again completely.

        Raises:
            CaptureError: The trace is damaged, or has changed since.
        """
        reopened = self.read(source, request)
        if len(reopened.ops) != len(trace.ops):
            raise CaptureError(f"{source.named}: the file was changed since it was opened; open it again")
        names = {*request.optional} & (TABLES.keys() - {"operators"})
        tables: dict[str, Any] = {name: getattr(reopened, name) for name in names}
        columns = {str(name): reopened.ops[name] for name in reopened.ops if name not in trace.ops}
        return replace(trace, api=reopened.api, ops=trace.ops.assign(**columns), **tables)
