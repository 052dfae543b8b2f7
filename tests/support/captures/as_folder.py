"""An SQLite export as the folder that ``nsys export --type=parquetdir`` or ``arrowdir`` of 2024.2 writes of it.

The types are those of real folders: integers of several widths, global ids without a sign, switches as booleans, text
as UTF-8, and dictionaries in the Parquet files.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

import pyarrow
import pyarrow.parquet

_TYPES = {
    **dict.fromkeys(
        ("globalTid", "globalPid", "endGlobalTid", "domainId", "category", "uint64Value"), pyarrow.uint64()
    ),
    **dict.fromkeys(("deviceId", "gridX", "gridY", "gridZ", "int32Value"), pyarrow.int32()),
    "isSchedIn": pyarrow.bool_(),
    "copyKind": pyarrow.uint8(),
}
"""Types of columns; other integers have 64 bits."""


def as_folder(export: Path, folder: Path, kind: str = "parquet", *, rows_of_group: int = 2048) -> Path:
    """Write the tables of an export as one file each.

    Args:
        export: The SQLite file.
        folder: The folder to make.
        kind: ``parquet`` or ``arrow``.
        rows_of_group: Rows of a row group, or batch; nsys 2024.2 writes 2,048.
    """
    folder.mkdir(parents=True)
    with closing(sqlite3.connect(export)) as db:
        db.text_factory = bytes
        tables = [name.decode() for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for name in tables:
            declared = {row[1].decode(): row[2].decode() for row in db.execute(f"PRAGMA table_info([{name}])")}
            rows = db.execute(f"SELECT * FROM [{name}]").fetchall()
            values = zip(*rows, strict=True) if rows else [()] * len(declared)
            table = pyarrow.table(
                {
                    column: _array(column, type_, items)
                    for (column, type_), items in zip(declared.items(), values, strict=True)
                }
            )
            _write(table, folder / f"{name}.{kind}", rows_of_group)
    return folder


def _array(name: str, declared: str, values: tuple[object, ...]) -> pyarrow.Array:
    """A column with nsys's type; values of a type that no folder can hold raise an error."""
    present = [value for value in values if value is not None]
    if any(isinstance(value, bytes) for value in present):
        if declared.upper() == "BLOB" or name == "binaryData":
            return pyarrow.array(values, pyarrow.binary())
        return pyarrow.Array.from_buffers(
            pyarrow.string(), len(values), pyarrow.array(values, pyarrow.binary()).buffers()
        )
    if any(isinstance(value, float) for value in present) or declared.upper() in ("REAL", "FLOAT"):
        return pyarrow.array(values, pyarrow.float64())
    if not present and ("TEXT" in declared.upper() or name == "text"):
        return pyarrow.array(values, pyarrow.string())
    type_ = _TYPES.get(name, pyarrow.int64())
    if pyarrow.types.is_boolean(type_):
        return pyarrow.array([None if value is None else bool(value) for value in values], type_)
    if pyarrow.types.is_uint64(type_):
        return pyarrow.array(values, pyarrow.int64()).view(type_)
    return pyarrow.array(values, type_)


def _write(table: pyarrow.Table, path: Path, rows_of_group: int) -> None:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, compression="none", row_group_size=rows_of_group)
        return
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=rows_of_group)
