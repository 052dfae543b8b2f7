"""A format of files: a `Reader`, which gets a `Source` and a `Request` and gives its tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from nvprof_kit.names import DOMAIN

if TYPE_CHECKING:
    from nvprof_kit._trace.schema import Trace

DEFAULT = "default"
"""The default domain in ``--domain``; its actual name is empty."""


def named_domains(domain: str, names: Collection[str] = ()) -> tuple[str, ...]:
    """The domains selected with ``--domain``: one, or several separated by commas; ``''`` is the default domain.

    Args:
        domain: The value of ``--domain``.
        names: The domains of the capture; an exact match with one of them is not split at commas.
    """
    if domain in names:
        return (domain,)
    parts = (name if name in names else name.strip() for name in domain.split(","))
    return tuple(dict.fromkeys("" if name == DEFAULT and name not in names else name for name in parts))


Tables_co = TypeVar("Tables_co", covariant=True)


@dataclass(frozen=True)
class Source:
    """What to read.

    Attributes:
        path: The decompressed file, or the folder.
        named: The path as the user gave it, for messages and for what is kept beside it.
    """

    path: Path
    named: Path


@dataclass(frozen=True)
class Request:
    """What to read of a source.

    Attributes:
        domain: NVTX domain to take the ranges from, or several separated by commas; '' is the default domain.
        optional: The optional columns and tables to read.
        cpu_only: Whether to read an nsys capture without GPU operations too; that table is then empty.
    """

    domain: str = DOMAIN
    optional: frozenset[str] = frozenset()
    cpu_only: bool = False


class Reader(Protocol[Tables_co]):
    """A format of files."""

    def sniff(self, path: Path, header: bytes) -> bool:
        """Whether a path is of this format.

        Args:
            path: The decompressed file, or a folder.
            header: The first bytes of the file; empty for a folder.
        """

    def read(self, source: Source, request: Request) -> Tables_co:
        """Read a file or folder.

        Raises:
            CaptureError: It is damaged, or lacks what its tables need.
        """


class CaptureReader(Reader["Trace"], Protocol):
    """A format of captures; `nvprof_kit._trace.validate` checks what it reads.

    Attributes:
        sources: What the tables of a `Trace` are called in the file, for messages.
    """

    sources: ClassVar[Mapping[str, str]]

    def read_more(self, source: Source, trace: Trace, request: Request) -> Trace:
        """Add optional columns and tables to a capture that is already read.

        Raises:
            CaptureError: The capture is damaged, or has changed since.
        """
