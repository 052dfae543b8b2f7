"""A file for another program, made of a capture: the report's page, a trace for Perfetto, a profile for pprof."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from nvprof_kit._report.export.writer import write_file, writing
from nvprof_kit.errors import UsageError


@dataclass(frozen=True, repr=False)
class Document:
    """What is written to a file as it is.

    Attributes:
        made: The file's bytes, or what makes them piece by piece, so that a large file is never whole in memory.
        suffixes: What its name may end in.
        sources: The files that it was made of; none of these is written over.
        warnings: Sentences on what may be missing in it.
    """

    made: bytes | Callable[[], Iterable[bytes]]
    suffixes: tuple[str, ...]
    sources: tuple[Path, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def data(self) -> bytes:
        """The file's bytes."""
        return self.made if isinstance(self.made, bytes) else b"".join(self.made())

    def pieces(self) -> Iterable[bytes]:
        """The file's bytes, piece by piece."""
        return (self.made,) if isinstance(self.made, bytes) else self.made()

    def save(self, path: str | Path) -> Path:
        """Write it, whole or not at all.

        Raises:
            UsageError: The name ends in another suffix, is that of a source, or the file cannot be written.
        """
        path = Path(path)
        if not path.name.lower().endswith(self.suffixes):
            raise UsageError(f"{path}: no format has this suffix; needed one of {' '.join(self.suffixes)}")
        if isinstance(self.made, bytes):
            return write_file(path, self.made, inputs=self.sources)
        with writing(path, inputs=self.sources) as file:
            file.writelines(self.made())
        return path

    def __repr__(self) -> str:
        """What it is, not what is in it."""
        size = f"of {len(self.made):,} bytes" if isinstance(self.made, bytes) else "that is made as it is written"
        return f"<a document {size}; save it as {' or '.join(self.suffixes)}>"
