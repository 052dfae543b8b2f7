"""Selects rows of an answer by layer, sorts them, and limits their number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
        return self.sorted(self.among(table))

    def among(self, table: pd.DataFrame) -> pd.DataFrame:
        """The rows of the selected layers.

        Raises:
            UsageError: No layer matches.
        """
        if not self.where or "layer" not in table:
            return table
        layers = table["layer"].astype(object)
        selected = {layer: self.matches(str(layer)) for layer in layers.unique()}
        if len(table) and not any(selected.values()):
            raise self._unmatched([str(layer) for layer in selected])
        rows: pd.DataFrame = table[layers.map(selected).astype(bool).to_numpy()]
        return rows

    def sorted(self, table: pd.DataFrame) -> pd.DataFrame:
        """The rows, sorted.

        Raises:
            UsageError: The sort column does not exist.
        """
        if not self.sort:
            return table
        names = matching(self.sort, table)
        if len(names) != 1:
            raise _no_column(self.sort, map(str, table.columns))
        name = names[0]
        ascending = table[name].dtype.kind not in "iufb"
        rows: pd.DataFrame = table.sort_values(name, ascending=ascending, kind="stable", na_position="last")
        return rows

    def each(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
        """Select rows from several tables: filters those with layers and sorts those with the sort column.

        Raises:
            UsageError: No table has the sort column, or no layer matches in any table.
        """
        with_layers = {name: table for name, table in tables.items() if "layer" in table and len(table)}
        if self.where and with_layers:
            layers = {
                layer for table in with_layers.values() for layer in map(str, table["layer"].astype(object).unique())
            }
            if not any(map(self.matches, layers)):
                raise self._unmatched(sorted(layers))
        if self.sort and not any(matching(self.sort, table) for table in tables.values()):
            raise _no_column(self.sort, dict.fromkeys(str(name) for table in tables.values() for name in table))
        selected = {}
        for name, table in tables.items():
            rows = table
            if self.where and "layer" in table:
                rows = table[[self.matches(str(layer)) for layer in table["layer"].astype(object)]]
            selected[name] = self.sorted(rows) if self.sort and matching(self.sort, rows) else rows
        return selected

    def _unmatched(self, layers: Sequence[str]) -> UsageError:
        examples = ", ".join(layers[:4]) + (", …" if len(layers) > 4 else "")
        return UsageError(f"--where {' '.join(self.where)}: no layer matches; available: {examples}")

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


def _no_column(name: str, columns: Iterable[str]) -> UsageError:
    return UsageError(f"--sort {name}: no such column; available: {', '.join(columns)}")
