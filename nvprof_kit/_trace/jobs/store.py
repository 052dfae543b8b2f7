"""Storage of maps as Parquet files with checksums: written atomically, and reused while the capture is unchanged."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvprof_kit._trace.files.interrupts import interruptible
from nvprof_kit._trace.jobs.schema import TABLES, VERSION, RankMap
from nvprof_kit.errors import CaptureError, UsageError

if TYPE_CHECKING:
    import pandas as pd


_SUMS = "sums"
"""Folder of the checksums of a map's files. Parquet's own sums are of pages only, and DuckDB does not check them."""

_ARROW = {"object": "string"}
_TYPES = {"int64": "INT64", "bool": "BOOLEAN", "object": "BYTE_ARRAY"}
"""Arrow types of the columns."""


@dataclass(frozen=True)
class Fingerprint:
    """Identifies the input of a map; a change of size, time or options invalidates the map.

    Attributes:
        capture: The capture's path.
        size_bytes: Its size.
        changed_ns: Modification time, ns since 1970.
        reading: The options it is read with: domain and rules.
    """

    capture: str
    size_bytes: int
    changed_ns: int
    reading: str

    @classmethod
    def of(cls, capture: Path, reading: str) -> Fingerprint:
        """The fingerprint of a capture as it is now.

        Raises:
            CaptureError: The file does not exist.
        """
        try:
            found = capture.stat()
        except OSError as error:
            raise CaptureError(f"{capture}: {error.strerror}") from None
        return cls(str(capture), found.st_size, found.st_mtime_ns, reading)


def is_maps(folder: Path) -> bool:
    """Whether a folder contains maps."""
    return all((folder / table).is_dir() for table in TABLES)


def map_name(capture: Path, rank: int) -> str:
    """File name of a rank's map: the capture's name and a part that makes it unique."""
    digest = hashlib.sha256(str(capture.resolve()).encode()).hexdigest()[:10]
    return f"{capture.name.split('.')[0][:60]}-{digest}-rank{rank:05d}.parquet"


def current(folder: Path, name: str, wanted: Fingerprint) -> bool:
    """Whether the folder has a complete, current map of this capture, written by this version."""
    if fault_of(folder, [name]):
        return False
    fields = ("capture", "size_bytes", "changed_ns", "reading")
    rows = _query(f"SELECT {', '.join(fields)} FROM read_parquet(?)", [folder / "ranks" / name])
    return bool(rows) and all(row == tuple(getattr(wanted, field) for field in fields) for row in rows)


def fault_of(folder: Path, names: Sequence[str] | None = None) -> str:
    """What is wrong with maps: a missing table, column or value, or another version; '' if nothing.

    Reads the Parquet footers, and all bytes for the checksums.

    Args:
        folder: The folder of maps.
        names: The required maps; None for all maps in the folder.
    """
    if names is None:
        names = sorted({path.name for table in TABLES for path in (folder / table).glob("*.parquet")})
    files = {table: [folder / table / name for name in names] for table in TABLES}
    lacking = next((file for some in files.values() for file in some if not file.is_file()), None)
    if lacking is not None:
        return f"{lacking}: no such file, and the map is not whole without it; map again"
    try:
        for table, some in files.items():
            if found := _fault(table, some):
                return found
        versions = [row[0] for row in _query("SELECT DISTINCT version FROM read_parquet(?)", files["ranks"])]
    except CaptureError as error:
        return f"{folder}: {error}; map again"
    others = [version for version in versions if version != VERSION]
    if others:
        return f"{folder}: maps of version {max(others)}, this release reads {VERSION}; map again"
    return next((found for name in names if (found := _changed(folder, name))), "")


def _changed(folder: Path, name: str) -> str:
    """Which file of a map is not as it was written; '' if none is, or if the map has no checksums."""
    try:
        sums = json.loads((folder / _SUMS / f"{name}.json").read_bytes())
        wrong = [table for table in TABLES if zlib.crc32((folder / table / name).read_bytes()) != sums[table]]
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"{folder / _SUMS / name}.json: damaged ({type(error).__name__}); map again"
    return f"{folder / wrong[0] / name}: a damaged map (its checksum is wrong); map again" if wrong else ""


def _fault(table: str, files: Sequence[Path]) -> str:
    told = {(file, name): kind for file, name, kind in _query(
        "SELECT file_name, name, type FROM parquet_schema(?)", files)}  # fmt: skip
    nulls = {(file, name): int(count) for file, name, count in _query(
        "SELECT file_name, path_in_schema, sum(stats_null_count) FROM parquet_metadata(?) "
        "WHERE stats_null_count > 0 GROUP BY ALL", files)}  # fmt: skip
    for file in map(str, files):
        for name, column in TABLES[table].items():
            kind = told.get((file, name))
            if kind is None:
                return f"{file}: no column {table}.{name}; map again"
            if kind != _TYPES[column.dtype]:
                return f"{file}: {table}.{name} is {kind}, not {column.dtype}; map again"
            if (file, name) in nulls:
                return f"{file}: {table}.{name} lacks {nulls[file, name]} values; map again"
    return ""


def _query(query: str, files: Sequence[Path]) -> list[tuple[Any, ...]]:
    """Rows of a query over Parquet files. Uses DuckDB because pyarrow can crash on damaged files.

    Raises:
        CaptureError: A file is damaged.
    """
    import duckdb

    with duckdb.connect(":memory:") as database, interruptible():
        try:
            rows: list[tuple[Any, ...]] = database.execute(query, [[str(file) for file in files]]).fetchall()
            return rows
        except duckdb.Error as error:
            raise CaptureError(f"a damaged map ({str(error).partition(chr(10))[0]})") from None


def write_map(folder: Path, name: str, made: RankMap) -> None:
    """Write a map. The file in ``ranks`` is written last, so that an incomplete map is never used.

    Raises:
        UsageError: The folder cannot be written to.
    """
    tables = {table: _encoded(getattr(made, table), table) for table in reversed(list(TABLES))}
    sums = json.dumps({table: zlib.crc32(data) for table, data in tables.items()}).encode()
    try:
        (folder / "ranks" / name).unlink(missing_ok=True)
        _write(sums, folder / _SUMS / f"{name}.json")
        for table, data in tables.items():
            _write(data, folder / table / name)
    except OSError as error:
        raise UsageError(f"{folder}: cannot write maps there: {error.strerror or error}") from None


def _encoded(frame: pd.DataFrame, table: str) -> bytes:
    """A table as a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # explicit types: Arrow cannot infer those of an empty column
    fields = [(name, _ARROW.get(column.dtype, column.dtype)) for name, column in TABLES[table].items()]
    arrow = pa.Table.from_pandas(frame, schema=pa.schema(fields), preserve_index=False)
    made = pa.BufferOutputStream()
    pq.write_table(arrow, made, compression="zstd")
    data: bytes = made.getvalue().to_pybytes()
    return data


def _write(data: bytes, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{secrets.token_hex(8)}.tmp")  # unpredictable, against symlink attacks
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as opened:
            opened.write(data)
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)
