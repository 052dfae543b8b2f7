"""Maps of ranks as Parquet files in a folder: written whole or not at all, and reused while a capture is unchanged."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nvprof_kit._trace.jobs.schema import TABLES, VERSION, RankMap
from nvprof_kit.errors import CaptureError, UsageError

if TYPE_CHECKING:
    import pandas as pd


_ARROW = {"object": "string"}


@dataclass(frozen=True)
class Fingerprint:
    """What a map was made from: another size, time or reading makes another map.

    Attributes:
        capture: The capture's path.
        size_bytes: Its size.
        changed_ns: When it changed last, ns since 1970.
        reading: What it is read with: domain and rules.
    """

    capture: str
    size_bytes: int
    changed_ns: int
    reading: str

    @classmethod
    def of(cls, capture: Path, reading: str) -> Fingerprint:
        """The fingerprint of a capture as it is now.

        Raises:
            CaptureError: The file is not there.
        """
        try:
            found = capture.stat()
        except OSError as error:
            raise CaptureError(f"{capture}: {error.strerror}") from None
        return cls(str(capture), found.st_size, found.st_mtime_ns, reading)


def is_maps(folder: Path) -> bool:
    """Whether a folder holds maps."""
    return all((folder / table).is_dir() for table in TABLES)


def map_name(capture: Path, rank: int) -> str:
    """What the files of a rank's map are called: the capture's name, and where it is told from others of this name."""
    digest = hashlib.sha256(str(capture.resolve()).encode()).hexdigest()[:10]
    return f"{capture.name.split('.')[0][:60]}-{digest}-rank{rank:05d}.parquet"


def current(folder: Path, name: str, wanted: Fingerprint) -> bool:
    """Whether the folder holds a whole map of this capture as it is now, made by this version."""
    import pyarrow.parquet as pq

    file = folder / "ranks" / name
    try:
        rows = pq.read_table(file).to_pylist()
    except (OSError, ValueError):
        return False
    fields = ("capture", "size_bytes", "changed_ns", "reading")
    return (
        bool(rows)
        and all(row.get("version") == VERSION for row in rows)
        and all(row.get(field) == getattr(wanted, field) for row in rows for field in fields)
        and all((folder / table / name).is_file() for table in TABLES)
    )


def write_map(folder: Path, name: str, made: RankMap) -> None:
    """Write a map; its file in ``ranks`` comes last, so that a map that is not whole is not taken for one.

    Raises:
        UsageError: The folder cannot be written to.
    """
    try:
        (folder / "ranks" / name).unlink(missing_ok=True)
        for table in reversed(list(TABLES)):
            place = folder / table
            place.mkdir(parents=True, exist_ok=True)
            _write(getattr(made, table), table, place / name)
    except OSError as error:
        raise UsageError(f"{folder}: cannot write maps there: {error.strerror or error}") from None


def _write(frame: pd.DataFrame, table: str, file: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # the types are said: those of an empty column would be guessed
    fields = [(name, _ARROW.get(column.dtype, column.dtype)) for name, column in TABLES[table].items()]
    arrow = pa.Table.from_pandas(frame, schema=pa.schema(fields), preserve_index=False)
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    pq.write_table(arrow, beside, compression="zstd")
    beside.replace(file)
