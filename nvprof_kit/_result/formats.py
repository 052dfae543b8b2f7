"""Tables as CSV, JSON, Markdown or Parquet, with the same columns and units as in Python.

An answer in JSON describes itself: the name and version of its schema, the type, unit and meaning of its columns,
warnings, and why values are missing. A capture contains names from the profiled program: an escape sequence in a
range's name would reach the reader's terminal, and a spreadsheet would evaluate a CSV cell that begins with ``=``, so
texts lose both.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nvprof_kit._result.column import Column, Columns, column_of

if TYPE_CHECKING:
    import pandas as pd


STEERING = (*range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Code points above those of text in ASCII that control a terminal, or turn the direction of the text."""

_SPACES = "\t\n"
_STEERING = {code: "\ufffd" for code in (*range(0x20), *STEERING, *range(0xD800, 0xE000)) if chr(code) not in _SPACES}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def plain(text: str) -> str:
    """Replace control characters, lone surrogates and bidirectional marks in a text."""
    return text if text.isprintable() else text.translate(_STEERING)


def title(name: str) -> str:
    """A path or a name as it is shown: on one line, whatever it holds."""
    return name if name.isprintable() else plain(" ".join(name.expandtabs(1).splitlines()))


def csv_cell(cell: object) -> object:
    """A CSV cell: a text as `plain` makes it; one that a spreadsheet would take for a formula gets an apostrophe."""
    return plain(f"'{cell}" if cell.startswith(_FORMULA) else cell) if isinstance(cell, str) else cell


TABLES = ("csv", "json", "md", "parquet")
"""The formats of tables, by file suffix."""

PICTURES = ("png", "svg", "pdf")
"""The formats of plots, by file suffix."""

_CONTROL = re.compile(f"[{''.join(map(chr, STEERING))}]")


def encode(table: pd.DataFrame, data_format: str) -> bytes:
    """Encode a table as ``csv``, ``md`` or ``parquet``, text in UTF-8.

    CSV has integers as integers, floats with all digits, and missing values as empty cells.
    """
    if data_format == "parquet":
        buffer = io.BytesIO()
        table.to_parquet(buffer, index=False)
        return buffer.getvalue()
    if data_format == "csv":
        texts = [name for name in table if table[name].dtype.kind not in "iufbmM"]
        cells = {str(name): table[name].astype(object).map(csv_cell) for name in texts}
        written: str = table.assign(**cells).to_csv(index=False, lineterminator="\n")
        return written.encode()
    numbers = set(table.select_dtypes("number"))
    rules = ["---:" if name in numbers else "---" for name in table.columns]
    rows = [map(_cell, row) for row in table.astype(object).where(table.notna(), None).itertuples(index=False)]
    return "".join(f"| {' | '.join(line)} |\n" for line in ([*map(str, table.columns)], rules, *rows)).encode()


def with_capture(tables: Iterable[tuple[str, pd.DataFrame]]) -> pd.DataFrame:
    """Concatenate the tables of several captures, with a first column ``capture``."""
    import pandas as pd

    labelled = [table.assign(capture=name)[["capture", *table.columns]] for name, table in tables]
    return pd.concat(labelled, ignore_index=True)


def quoted(warnings: Iterable[str]) -> bytes:
    """Warnings as a block quote below a Markdown table."""
    return "".join(f"\n> {_cell(warning)}\n" for warning in warnings).encode()


VERSION = 1
"""Version of the schemas of JSON. A new column keeps it; it grows where a column goes, or changes its meaning or type.
"""

_INFINITE = (float("inf"), float("-inf"))


def schema_of(name: str) -> dict[str, Any]:
    """The first keys of an answer in JSON: the name of its schema, and the version."""
    return {"schema": f"nvprof-kit/{name}", "version": VERSION}


def json_answer(facts: Mapping[str, Any], table: pd.DataFrame, columns: Columns) -> bytes:
    """A table as an answer in JSON, one row per line.

    Args:
        facts: The first keys.
        table: The rows.
        columns: The columns that the table may have.
    """
    facts = {**facts, "unknown": reasons(table, columns), "columns": described(table, columns)}
    fields = ",\n".join(f"{json.dumps(name)}: {as_json(value)}" for name, value in facts.items())
    rows = ",\n".join(map(as_json, records(table)))
    return f'{{\n{fields},\n"rows": [\n{rows}\n]\n}}\n'.encode("utf-8", "replace")


def described(table: pd.DataFrame, columns: Columns) -> dict[str, dict[str, str]]:
    """Type, unit and meaning of each column of a table; a column that is not among `columns` is left out."""
    by_name = {str(name): column_of(columns, str(name)) for name in table}
    return {name: column.described() for name, column in by_name.items() if column is not None}


def reasons(table: pd.DataFrame, columns: Columns) -> dict[str, str]:
    """Why values are missing, for each column in which some are."""
    floats = table.select_dtypes("float")
    infinite = set(floats.columns[floats.isin(_INFINITE).any()])
    missing = [str(name) for name in table if name in infinite or table[name].isna().any()]
    return {name: (column_of(columns, name) or Column("")).missing for name in missing}


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as dictionaries with plain numbers; missing values are None."""
    plain = table.astype(object).where(table.notna(), None)

    def number(value: Any) -> Any:
        value = value.item() if hasattr(value, "item") else value
        return None if isinstance(value, float) and value in _INFINITE else value

    return [{str(name): number(value) for name, value in row.items()} for row in plain.to_dict("records")]


def as_json(value: object, indent: int | None = None) -> str:
    """A value as JSON, in one line unless ``indent`` is given, without terminal control characters."""
    return _CONTROL.sub(_escaped, json.dumps(value, ensure_ascii=False, indent=indent))


def _escaped(match: re.Match[str]) -> str:
    """Escape a non-ASCII control character, which JSON permits but some terminals interpret."""
    return f"\\u{ord(match.group()):04x}"


_MARKED = re.compile(r"[\\|<\[`]")
"""Characters that Markdown would read as a cell's end, HTML (``kernel<float>`` would vanish), a link or code."""


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is None:
        return ""
    return _MARKED.sub(r"\\\g<0>", plain(str(value))).replace("\n", " ")
