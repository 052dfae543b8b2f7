"""Tables as CSV, JSON, Markdown or Parquet, with the same columns and units as in Python."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from nvprof_kit._report.plain import STEERING, csv_cell, plain

if TYPE_CHECKING:
    import pandas as pd


_CONTROL = re.compile(f"[{''.join(map(chr, STEERING))}]")


def encode(table: pd.DataFrame, data_format: str) -> bytes:
    """Encode a table in one of `FORMATS`, in UTF-8.

    CSV and JSON write integers as integers, floats with all digits, and missing values as empty or ``null``. JSON is a
    list of objects, one per row, as in `nvprof_kit._report.export.answer`.
    """
    return FORMATS[data_format](table)


def with_capture(tables: Iterable[tuple[str, pd.DataFrame]]) -> pd.DataFrame:
    """Concatenate the tables of several captures, with a first column ``capture``."""
    import pandas as pd

    labelled = [table.assign(capture=name)[["capture", *table.columns]] for name, table in tables]
    together: pd.DataFrame = pd.concat(labelled, ignore_index=True)
    return together


def quoted(warnings: Iterable[str]) -> bytes:
    """Warnings as a block quote below a Markdown table."""
    return "".join(f"\n> {_cell(warning)}\n" for warning in warnings).encode()


def _csv(table: pd.DataFrame) -> bytes:
    return _mapped(table, csv_cell).to_csv(index=False, lineterminator="\n").encode()


def _mapped(table: pd.DataFrame, write: Callable[[str], str]) -> pd.DataFrame:
    """Apply a function to all texts in a table; numbers and missing values are unchanged."""
    texts = [str(name) for name in table if table[name].dtype.kind not in "iufbmM"]
    written = {name: table[name].astype(object).map(lambda one: write(one) if isinstance(one, str) else one)
               for name in texts}  # fmt: skip
    return table.assign(**written) if written else table


def _json(table: pd.DataFrame) -> bytes:
    plain = table.astype(object).where(table.notna(), None)
    rows = [as_json(row) for row in plain.to_dict("records")]
    return ("[\n" + ",\n".join(rows) + "\n]\n").encode()


def as_json(value: object, indent: int | None = None) -> str:
    """A value as JSON, in one line unless ``indent`` is given, without terminal control characters."""
    return _CONTROL.sub(_escaped, json.dumps(value, ensure_ascii=False, indent=indent))


def _escaped(found: re.Match[str]) -> str:
    """Escape a non-ASCII control character, which JSON permits but some terminals interpret."""
    return f"\\u{ord(found.group()):04x}"


_MARKED = re.compile(r"[\\|<\[`]")
"""Characters that Markdown would read as a cell's end, HTML (``kernel<float>`` would vanish), a link or code."""


def _markdown(table: pd.DataFrame) -> bytes:
    numbers = set(table.select_dtypes("number"))
    rules = ["---:" if name in numbers else "---" for name in table.columns]
    plain = table.astype(object).where(table.notna(), None)
    rows = [[_cell(value) for value in row] for row in plain.itertuples(index=False)]
    return "".join(f"| {' | '.join(line)} |\n" for line in ([*map(str, table.columns)], rules, *rows)).encode()


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is None:
        return ""
    return _MARKED.sub(r"\\\g<0>", plain(str(value))).replace("\n", " ")


def _parquet(table: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False)
    return buffer.getvalue()


FORMATS: Mapping[str, Callable[[pd.DataFrame], bytes]] = MappingProxyType(
    {"csv": _csv, "json": _json, "md": _markdown, "parquet": _parquet}
)
"""The data formats by file suffix."""
