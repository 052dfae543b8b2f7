"""A file for another program, made of a capture: the report's page, a trace for Perfetto."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nvprof_kit._report.export.writer import write_file
from nvprof_kit.errors import UsageError


@dataclass(frozen=True, repr=False)
class Document:
    """What is written to a file as it is.

    Attributes:
        data: The file's bytes.
        suffixes: What its name may end in.
        sources: The files that it was made of; none of these is written over.
        warnings: Sentences on what may be missing in it.
    """

    data: bytes
    suffixes: tuple[str, ...]
    sources: tuple[Path, ...] = ()
    warnings: tuple[str, ...] = ()

    def save(self, path: str | Path) -> Path:
        """Write it, whole or not at all.

        Raises:
            UsageError: The name ends in another suffix, is that of a source, or the file cannot be written.
        """
        path = Path(path)
        if path.suffix.lower() not in self.suffixes:
            raise UsageError(f"{path}: no format has this suffix; needed one of {' '.join(self.suffixes)}")
        return write_file(path, self.data, inputs=self.sources)

    def __repr__(self) -> str:
        """What it is, not what is in it."""
        return f"<a document of {len(self.data):,} bytes; save it as {' or '.join(self.suffixes)}>"
