"""Storage of maps as Parquet files with checksums: written atomically, and reused while the capture is unchanged."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nvprof_kit._trace.files.checks import without_doubles
from nvprof_kit._trace.files.duckdb_queries import interruptible, without_progress_bar
from nvprof_kit._trace.jobs.schema import TABLES, VERSION, RankMap, bounds_of
from nvprof_kit.errors import CaptureError, UsageError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_SUMS = "sums"
"""Folder of the checksums of a map's files. Parquet's own sums are of pages only, and DuckDB does not check them."""

_CHECKED = "checked"
"""Beside the checksums, the version of the schema that the tables fitted, column by column, when they were written: a
file with the right checksum then need not be looked into again."""

_TYPES = {"int64": "INT64", "bool": "BOOLEAN", "object": "BYTE_ARRAY"}
"""Parquet types of the columns."""

FINGERPRINT = ("capture", "size_bytes", "changed_ns", "reading")
"""The columns of the table ``ranks`` that tell whether a map is of its capture as it is now."""

_LEAST_BYTES = 12
"""No Parquet file is shorter: it begins and ends with a mark of four bytes, and tells the length of its footer."""


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
            status = capture.stat()
        except OSError as error:
            raise CaptureError(f"{capture}: {error.strerror}") from None
        return cls(str(capture), status.st_size, status.st_mtime_ns, reading)


def is_maps(folder: Path) -> bool:
    """Whether a folder contains maps."""
    return all((folder / table).is_dir() for table in TABLES)


def map_name(capture: Path, rank: int) -> str:
    """File name of a rank's map: the capture's name and a part that makes it unique."""
    digest = hashlib.sha256(str(capture.resolve()).encode()).hexdigest()[:10]
    return f"{capture.name.split('.')[0][:60]}-{digest}-rank{rank:05d}.parquet"


def kept(folder: Path, fingerprints: Sequence[Fingerprint]) -> dict[str, list[str]]:
    """The maps that need not be made again, by capture: complete, of this version, of the capture as it is now."""
    ranks_folder = folder / "ranks"
    stored: dict[str, list[str]] = {}
    for name in sorted(os.listdir(ranks_folder)) if ranks_folder.is_dir() else ():
        if name.endswith(".parquet"):
            stored.setdefault(_of_capture(name), []).append(name)
    by_name = {_of_capture(map_name(Path(expected.capture), 0)): expected for expected in fingerprints}
    names = _whole(folder, [name for start in by_name for name in stored.get(start, [])])
    if not names:
        return {}
    fields = ", ".join(FINGERPRINT)
    reusable: dict[str, list[str]] = {}
    with _Footers() as footers:
        for file, *fingerprint in footers.query(
            f"SELECT DISTINCT filename, {fields} FROM read_parquet(?, filename = true)",
            [ranks_folder / name for name in names],
        ):
            name = Path(file).name
            expected = by_name[_of_capture(name)]
            if fingerprint == [getattr(expected, field) for field in FINGERPRINT]:
                reusable.setdefault(expected.capture, []).append(name)
    return {capture: sorted(names_of_capture) for capture, names_of_capture in reusable.items()}


def _of_capture(name: str) -> str:
    """The part of a map's name that all maps of a capture share."""
    return name.rpartition("-rank")[0]


def _whole(folder: Path, names: list[str]) -> list[str]:
    """The names of the maps without a fault; searches by halves, because nearly all are whole."""
    if not names or not faults(folder, names).first:
        return names
    half = len(names) // 2
    return [] if not half else _whole(folder, names[:half]) + _whole(folder, names[half:])


class Faults(NamedTuple):
    """What is wrong with maps.

    Attributes:
        first: In words, the first fault; '' if there is none.
        unsure: The maps whose columns were not checked when they were written.
    """

    first: str
    unsure: list[str]


def faults(folder: Path, names: Sequence[str] | None = None, tables: Sequence[str] = tuple(TABLES)) -> Faults:
    """What is wrong with maps: a missing or changed file, a missing column or value, or another version.

    Args:
        folder: The folder of maps.
        names: The required maps; None for all maps in the folder.
        tables: The tables to look into where their columns were not checked when they were written.
    """
    names = _all_names(folder) if names is None else list(names)
    if lacking := _lacking(folder, names):
        return Faults(lacking, [])
    written = _as_written(folder, names)
    changed = [name for name in names if written[name].fault]
    if changed:
        return Faults(fault_of(folder, changed) or written[changed[0]].fault, [])
    unsure = [name for name in names if not written[name].checked]
    return Faults(fault_of(folder, unsure, tables) if unsure else "", unsure)


def fault_of(folder: Path, names: Sequence[str] | None = None, tables: Sequence[str] = tuple(TABLES)) -> str:
    """What is wrong with maps: a missing table, column or value, or another version; '' if nothing.

    Reads the Parquet footers only.

    Args:
        folder: The folder of maps.
        names: The required maps; None for all maps in the folder.
        tables: The tables to look into; of the others, only whether the file is there and was written to its end.
    """
    names = _all_names(folder) if names is None else names
    if lacking := _lacking(folder, names):
        return lacking
    try:
        with _Footers() as footers:
            for table in TABLES:
                files = [folder / table / name for name in names]
                if fault := footers.fault(table, files) if table in tables else _cut_short(files):
                    return fault
            if "ranks" not in tables:
                return ""
            other_version = footers.query(
                f"SELECT max(version) FROM read_parquet(?) WHERE version <> {VERSION}",
                [folder / "ranks" / name for name in names],
            )[0][0]
    except CaptureError as error:
        return f"{folder}: {error}; map again"
    return "" if other_version is None else version_fault(folder, other_version)


def _all_names(folder: Path) -> list[str]:
    return sorted(set().union(*(_listed(folder / table) for table in TABLES)))


def _lacking(folder: Path, names: Sequence[str]) -> str:
    """Which file of the maps is not there; '' if all are."""
    for table in TABLES:
        present = set(_listed(folder / table))
        if (lacking := next((name for name in names if name not in present), None)) is not None:
            return f"{folder / table / lacking}: no such file, and the map is not whole without it; map again"
    return ""


class _Written(NamedTuple):
    """Whether a map is as it was written.

    Attributes:
        fault: Which of its files is not; '' if all are. A file is only read once its checksum is known to be right:
            DuckDB takes endless time and memory over some damaged pages.
        checked: Whether its columns were checked when it was written.
    """

    fault: str
    checked: bool


def _as_written(folder: Path, names: Sequence[str]) -> dict[str, _Written]:
    """Read all files of some maps, and compare them with their checksums."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(partial(_compared, folder), names), strict=True))


def _compared(folder: Path, name: str) -> _Written:
    try:
        sums = json.loads((folder / _SUMS / f"{name}.json").read_bytes(), object_pairs_hook=without_doubles)
        wrong = [table for table in TABLES if zlib.crc32((folder / table / name).read_bytes()) != sums[table]]
        checked = sums.get(_CHECKED) == VERSION
    except FileNotFoundError as error:
        return _Written(f"{error.filename}: no such file, and the map is not whole without it; map again", False)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return _Written(f"{folder / _SUMS / name}.json: damaged ({type(error).__name__}); map again", False)
    if wrong:
        return _Written(f"{folder / wrong[0] / name}: a damaged map (its checksum is wrong); map again", False)
    return _Written("", checked)


def version_fault(folder: Path, version: int) -> str:
    """What is wrong with maps of another version."""
    return f"{folder}: maps of version {version}, this release reads {VERSION}; map again"


def _listed(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".parquet")] if folder.is_dir() else []


def _cut_short(files: Sequence[Path]) -> str:
    """What is wrong with Parquet files by their last bytes alone, which takes a tenth of the time of a footer."""
    for file in files:
        try:
            with file.open("rb") as opened:
                opened.seek(-min(_LEAST_BYTES, file.stat().st_size), os.SEEK_END)
                tail = opened.read()
        except OSError as error:
            return f"{file}: {error.strerror}; map again"
        if len(tail) < _LEAST_BYTES or not tail.endswith(b"PAR1"):
            return f"{file}: a damaged map (it is cut short); map again"
    return ""


def _plausible(table: str, name: str) -> str:
    """A condition on the footer's least and largest value of a column."""
    return "".join(
        f" AND coalesce(try_cast(stats_min_value AS BIGINT) >= {low}, true)"
        f" AND coalesce(try_cast(stats_max_value AS BIGINT) <= {high}, true)"
        for low, high in bounds_of(table, name)
    )


class _Footers:
    """Queries over Parquet footers. Uses DuckDB because pyarrow can crash on damaged files."""

    def __enter__(self) -> _Footers:
        import duckdb

        self._db: Any = duckdb.connect(":memory:", config={"threads": 1})
        without_progress_bar(self._db)
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def query(self, query: str, files: Sequence[Path]) -> list[tuple[Any, ...]]:
        """Rows of a query over files.

        Raises:
            CaptureError: A file is damaged.
        """
        import duckdb

        try:
            with interruptible():
                rows: list[tuple[Any, ...]] = self._db.execute(query, [[str(file) for file in files]]).fetchall()
            return rows
        except duckdb.Error as error:
            raise CaptureError(f"a damaged map ({str(error).partition(chr(10))[0]})") from None

    def fault(self, table: str, files: Sequence[Path]) -> str:
        """What is wrong with a table's files: a missing or wrong column, or a missing value; '' if nothing."""
        good = " OR ".join(
            f"(path_in_schema = '{name}' AND type = '{_TYPES[column.dtype]}'{_plausible(table, name)})"
            for name, column in TABLES[table].items()
        )
        valid_files = {file for (file,) in self.query(
            f"SELECT file_name FROM parquet_metadata(?) GROUP BY file_name HAVING count(*) FILTER "
            f"(({good}) AND coalesce(stats_null_count, 0) = 0) = {len(TABLES[table])} * count(DISTINCT row_group_id)",
            files)}  # fmt: skip
        return next(
            (problem for file in files if str(file) not in valid_files and (problem := self._fault_in(table, file))), ""
        )

    def _fault_in(self, table: str, file: Path) -> str:
        """The same for a single file, which may have no rows, in words."""
        types = dict(self.query("SELECT name, type FROM parquet_schema(?)", [file]))
        nulls = dict(self.query(
            "SELECT path_in_schema, sum(stats_null_count)::BIGINT FROM parquet_metadata(?) GROUP BY ALL", [file]
        ))  # fmt: skip
        ranges = {name: (minimum, maximum) for name, minimum, maximum in self.query(
            "SELECT path_in_schema, min(try_cast(stats_min_value AS BIGINT)), max(try_cast(stats_max_value AS BIGINT)) "
            "FROM parquet_metadata(?) GROUP BY ALL", [file]
        )}  # fmt: skip
        for name, column in TABLES[table].items():
            if name not in types:
                return f"{file}: no column {table}.{name}; map again"
            if types[name] != _TYPES[column.dtype]:
                return f"{file}: {table}.{name} is {types[name]}, not {column.dtype}; map again"
            if nulls.get(name):
                return f"{file}: {table}.{name} lacks {nulls[name]} values; map again"
            for low, high in bounds_of(table, name):
                minimum, maximum = ranges.get(name, (None, None))
                if minimum is not None and (minimum < low or maximum > high):
                    outside = minimum if minimum < low else maximum
                    return f"{file}: {table}.{name} is {outside}, no number of a map; map again"
        return ""


def write_map(folder: Path, name: str, rank_map: RankMap) -> None:
    """Write a map.

    Raises:
        UsageError: The folder cannot be written to.
    """
    write_tables(folder, name, {table: _arrow(getattr(rank_map, table), table) for table in TABLES})


def write_tables(folder: Path, name: str, tables: Mapping[str, pa.Table]) -> None:
    """Write the tables of a map. The file in ``ranks`` is written last, so that an incomplete map is never used.

    Raises:
        UsageError: The folder cannot be written to.
    """
    order = list(TABLES)[::-1]
    with ThreadPoolExecutor(max_workers=2) as pool:  # compression does not hold the GIL
        encoded = dict(zip(order, pool.map(_encoded, (tables[table] for table in order)), strict=True))
    sums = {table: zlib.crc32(data) for table, data in encoded.items()}
    if all(_fits(tables[table], table) for table in TABLES):
        sums[_CHECKED] = VERSION
    try:
        (folder / "ranks" / name).unlink(missing_ok=True)
        _write(json.dumps(sums).encode(), folder / _SUMS / f"{name}.json")
        for table, data in encoded.items():
            _write(data, folder / table / name)
    except OSError as error:
        raise UsageError(f"{folder}: cannot write maps there: {error.strerror or error}") from None


def _arrow(frame: pd.DataFrame, table: str) -> pa.Table:
    import pyarrow as pa

    # explicit types: Arrow cannot infer those of an empty column; text is a dictionary, as Parquet stores it
    text = pa.dictionary(pa.int32(), pa.string())
    fields = [(name, text if column.dtype == "object" else column.dtype) for name, column in TABLES[table].items()]
    return pa.Table.from_pandas(frame, schema=pa.schema(fields), preserve_index=False)


def _fits(arrow: pa.Table, table: str) -> bool:
    """Whether a table has the columns of the schema, with their types and without missing values."""
    text = {"string", "dictionary<values=string, indices=int32, ordered=0>"}
    kinds = {name: text if column.dtype == "object" else {column.dtype} for name, column in TABLES[table].items()}
    columns = zip(arrow.schema.names, arrow.schema.types, arrow.columns, strict=True)
    fitting = {name for name, kind, values in columns if str(kind) in kinds.get(name, ()) and not values.null_count}
    return fitting == set(kinds)


def _encoded(table: pa.Table) -> bytes:
    """A table as a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # numbers hardly repeat: dictionaries of them take time and make the file larger
    text = [name for name, kind in zip(table.schema.names, table.schema.types, strict=True) if not _is_number(kind)]
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, compression="zstd", use_dictionary=text)
    data: bytes = buffer.getvalue().to_pybytes()
    return data


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _write(data: bytes, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{secrets.token_hex(8)}.tmp")  # unpredictable, against symlink attacks
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as opened:
            opened.write(data)
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)
