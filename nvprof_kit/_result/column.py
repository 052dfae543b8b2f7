"""The columns of answers. What is to know of a column stands in its `Column`: heading, csv name, unit, meaning, type,
and how it folds; documentation, JSON and printed tables follow from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from nvprof_kit._toml import read_toml

Unit = Literal["", "ns", "bytes", "flop", "share", "percent", "gb_per_s", "tflops_per_s", "ppm"]
"""Shares are fractions of 1; ``gb_per_s`` are 10⁹ bytes, ``tflops_per_s`` 10¹² operations per second."""

Kind = Literal["int", "float", "str", "bool"]
Fold = Literal["sum", "max", "min", "mean", "first", "key"]

_MISSING = re.compile(r"(?:missing|none|NaN) (?:for|if|where|outside|in|as|with|without)[^;.(]*")


@dataclass(frozen=True)
class Column:
    """What a column of an answer holds. Its name in csv, JSON and frames is its key in a mapping of columns.

    Attributes:
        meaning: What the values are, for the documentation and for readers of JSON.
        unit: Unit of the numbers; '' for counts, texts and flags.
        kind: Type of the values.
        heading: Heading in printed tables; '' for its name without the unit.
        fold: How the values of equal blocks become one value.
    """

    meaning: str
    unit: Unit = ""
    kind: Kind = "int"
    heading: str = ""
    fold: Fold = "sum"

    @property
    def missing(self) -> str:
        """When a value is missing, in the words of `meaning`."""
        match = _MISSING.search(self.meaning)
        return match.group().strip() if match else "the capture does not contain it, or it does not apply to the row"

    def described(self) -> dict[str, str]:
        """The column for readers of JSON: type, unit and meaning."""
        return {"type": self.kind, **({"unit": self.unit} if self.unit else {}), "meaning": self.meaning}


Columns = Mapping[str, Column]
"""Columns by name, in their order; a ``NAME`` in a key stands for any text, such as a kernel class."""


@lru_cache
def read_columns(package: str, table: str) -> dict[str, Column]:
    """The columns of a table in the ``columns.toml`` of a package: of each its fields, or its meaning alone."""
    entries = read_toml(package, "columns.toml")[table].items()
    return {name: Column(entry) if isinstance(entry, str) else Column(**entry) for name, entry in entries}


def read_tables(package: str) -> dict[str, Columns]:
    """The columns of all tables in the ``columns.toml`` of a package, by table."""
    return {table: read_columns(package, table) for table in read_toml(package, "columns.toml")}


def column_of(columns: Columns, name: str) -> Column | None:
    """The column with a name, which may have a text in place of ``NAME``; None if there is none."""
    if name in columns:
        return columns[name]
    patterns = (key for key in columns if "NAME" in key)
    key = next((key for key in patterns if re.fullmatch(re.escape(key).replace("NAME", ".+"), name)), None)
    return None if key is None else columns[key]


FOLDED: Columns = read_columns("nvprof_kit._result", "folded")
"""The columns that ``--fold`` adds to rows of layers."""

CAPTURE = Column("the file, with several captures", kind="str", fold="key")
"""The first column of an answer about several captures."""
