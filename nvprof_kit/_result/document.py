"""A file for another program: an HTML page or a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from nvprof_kit._result.writer import write_file, writing
from nvprof_kit.errors import UsageError
from nvprof_kit.issues import Issue


@dataclass(frozen=True, repr=False)
class Document:
    """A file for another program, not yet written.

    Attributes:
        made: The bytes, or a function that yields them in chunks, so that a large file need not fit in memory.
        suffixes: Allowed file suffixes.
        sources: The input files; `save` refuses to overwrite them.
        warnings: What may be missing in it.
    """

    made: bytes | Callable[[], Iterable[bytes]]
    suffixes: tuple[str, ...]
    sources: tuple[Path, ...] = ()
    warnings: tuple[Issue, ...] = ()

    @property
    def data(self) -> bytes:
        """The content as bytes."""
        return self.made if isinstance(self.made, bytes) else b"".join(self.made())

    def pieces(self) -> Iterable[bytes]:
        """The content in chunks of bytes."""
        return (self.made,) if isinstance(self.made, bytes) else self.made()

    def save(self, path: str | Path) -> Path:
        """Write the file. It appears complete or not at all.

        Returns:
            The path.

        Raises:
            UsageError: The suffix is not allowed, or the file is an input or cannot be written.
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
        """The size and the allowed suffixes, without the content."""
        size = f"of {len(self.made):,} bytes" if isinstance(self.made, bytes) else "that is made as it is written"
        return f"<a document {size}; save it as {' or '.join(self.suffixes)}>"
