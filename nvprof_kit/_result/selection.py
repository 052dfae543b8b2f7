"""Selects rows of an answer by layer, sorts them, and limits their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypedDict

from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd


class RowOptions(TypedDict, total=False):
    """Which rows of an answer are printed and written, and in which order; every question takes these arguments.

    Attributes:
        where: Only layers that match, such as 'model.layers.3.*'; ``*`` matches any text. Repeatable.
        sort: Column to sort by, named as in csv, with or without the unit; numbers in descending order.
        top: Rows to print per table, the costliest first.
        fold: Equal blocks as one line, `layers.0-79 x80`; csv and json keep all rows and add the column folded_into.
            [default: in the printed table, if 8 or more blocks are equal]
    """

    where: str | Sequence[str]
    sort: str
    top: int | None
    fold: bool | None


@dataclass(frozen=True)
class Selection:
    """A selection of rows.

    Attributes:
        where: Glob patterns of layers, in which ``*`` matches any text; keeps rows that match one of them. Empty keeps
            all.
        sort: Column to sort by: numbers descending, texts ascending. '' keeps the order.
        top: Maximum number of rows to print; None for the default of the command.
        fold: Whether to print equal blocks as one row; None folds if there are many.
    """

    where: tuple[str, ...] = ()
    sort: str = ""
    top: int | None = None
    fold: bool | None = None

    @property
    def asked(self) -> bool:
        """Whether rows are filtered or sorted."""
        return bool(self.where or self.sort)

    def matches(self, layer: str) -> bool:
        """Whether a layer is selected."""
        return not self.where or any(fnmatchcase(layer, pattern) for pattern in self.where)

    def of(self, table: pd.DataFrame) -> pd.DataFrame:
        """The selected rows, sorted; a table without layers keeps all rows.

        Raises:
            UsageError: The sort column does not exist, or no layer matches.
        """
        return self.each({"": table})[""]

    def among(self, table: pd.DataFrame) -> pd.DataFrame:
        """The rows of the selected layers, in their order.

        Raises:
            UsageError: No layer matches.
        """
        return replace(self, sort="").of(table)

    def sorted(self, table: pd.DataFrame) -> pd.DataFrame:
        """All rows, sorted.

        Raises:
            UsageError: The sort column does not exist.
        """
        return replace(self, where=()).of(table)

    def each(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
        """Select rows from several tables: filters those with layers and sorts those with the sort column.

        Raises:
            UsageError: No table has the sort column, or no layer matches in any table.
        """
        selected = dict(tables)
        if self.where:
            of_tables = {name: table["layer"].astype(str) for name, table in tables.items() if "layer" in table}
            layers = [*dict.fromkeys(layer for of_table in of_tables.values() for layer in of_table.unique())]
            if layers and not any(map(self.matches, layers)):
                examples = ", ".join(layers[:4]) + (", …" if len(layers) > 4 else "")
                raise UsageError(f"--where {' '.join(self.where)}: no layer matches; available: {examples}")
            for name, of_table in of_tables.items():
                selected[name] = tables[name][of_table.map(self.matches).astype(bool).to_numpy()]
        if self.sort:
            sort_columns = {name: matching(self.sort, table) for name, table in tables.items()}
            if not any(sort_columns.values()):
                available = dict.fromkeys(str(column) for table in tables.values() for column in table)
                raise UsageError(f"--sort {self.sort}: no such column; available: {', '.join(available)}")
            for name, columns in sort_columns.items():
                if columns:
                    by, rows = columns[0], selected[name]
                    ascending = rows[by].dtype.kind not in "iufb"
                    selected[name] = rows.sort_values(by, ascending=ascending, kind="stable", na_position="last")
        return selected

    def changed(self, **changes: Any) -> Selection:
        """A copy with some attributes replaced."""
        return replace(self, **changes)


EVERYTHING = Selection()
"""All rows in their original order."""

UNFOLDED = Selection(fold=False)
"""The same without folding."""


def matching(name: str, table: pd.DataFrame) -> list[str]:
    """The columns with this name, with or without unit: ``gpu_total`` also matches ``gpu_total_ns``."""
    text = name.strip().lower().replace("-", "_").replace(" ", "_")
    columns = [str(column) for column in table.columns]
    exact = [column for column in columns if column.lower() == text]
    return exact or [column for column in columns if column.lower().rpartition("_")[0] == text]
