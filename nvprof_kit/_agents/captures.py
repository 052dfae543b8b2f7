"""The captures that a server may open: the files of one folder, read-only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from nvprof_kit._api.capture import Capture
from nvprof_kit._api.sources import read_beside
from nvprof_kit.errors import UsageError

SUFFIXES = (".sqlite", ".sqlite.xz", ".json", ".json.gz", ".json.xz", ".nsys-rep")
_KEPT = 4
_LISTED = 200


class Captures:
    """The captures of a folder; the last few stay open.

    Args:
        folder: Files outside it are not opened, also not through symbolic links.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._open: OrderedDict[tuple[Path, int, int], Capture] = OrderedDict()

    def path(self, named: str) -> Path:
        """Check the path of a capture.

        Args:
            named: Its path, absolute or relative to the folder.

        Raises:
            UsageError: The file is outside the folder, does not exist, or is not a capture.
        """
        path = (self.folder / named).resolve() if "\0" not in named else self.folder
        if not path.is_relative_to(self.folder):
            raise UsageError(f"{named}: outside {self.folder}; only files in that folder are opened")
        if not path.is_file():
            raise UsageError(f"{named}: no such file in {self.folder}; the tool captures lists those that there are")
        if not path.name.lower().endswith(SUFFIXES):
            raise UsageError(f"{named}: no capture; needed one of {' '.join(SUFFIXES)}")
        if path.name.lower().endswith(".nsys-rep"):
            path = _exported(path, named)
        for one in (path, *read_beside(path)):
            if not one.resolve().is_relative_to(self.folder):
                raise UsageError(
                    f"{named}: {one.name} is a link that leads outside {self.folder}; nothing there is read"
                )
        return path.resolve()

    def open(self, named: str) -> Capture:
        """Open a capture; an unchanged capture that is still open is reused.

        Raises:
            UsageError: As in `path`.
        """
        path = self.path(named)
        state = path.stat()
        key = path, state.st_mtime_ns, state.st_size
        if key not in self._open:
            self._open[key] = Capture(path)
        self._open.move_to_end(key)
        while len(self._open) > _KEPT:
            self._open.popitem(last=False)
        return self._open[key]

    def listed(self) -> tuple[list[dict[str, str | int]], int]:
        """The first captures of the folder, and the number of further ones."""
        found = sorted(self._found())
        rows: list[dict[str, str | int]] = [
            {"capture": str(path.relative_to(self.folder)), "bytes": path.stat().st_size} for path in found[:_LISTED]
        ]
        return rows, max(len(found) - _LISTED, 0)

    def _found(self) -> Iterator[Path]:
        for path in self.folder.rglob("*"):
            hidden = any(part.startswith(".") for part in path.relative_to(self.folder).parts)
            name = path.name.lower()
            inside = not hidden and name.endswith(SUFFIXES) and not name.endswith(".flops.json") and path.is_file()
            if inside and path.resolve().is_relative_to(self.folder):
                yield path


def _exported(report: Path, named: str) -> Path:
    """The export next to an ``.nsys-rep``. None is created, because the server does not write.

    Raises:
        UsageError: There is no export, or it is older than the report.
    """
    export = report.with_suffix(".sqlite")
    if not export.is_file() or export.stat().st_mtime < report.stat().st_mtime:
        raise UsageError(f"{named}: not exported yet, and nothing is written here; run: nvprof-kit layers {report}")
    return export
