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
        where: Glob patterns of layers; ``*`` matches any text.
        sort: Column to sort by, with or without its unit; numbers in descending order.
        top: Maximum number of rows to print per table.
        fold: Whether to print equal blocks as one row; None folds if there are many.
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
        known = table["layer"].astype(object)
        wanted = {layer: self.matches(str(layer)) for layer in known.unique()}
        if len(table) and not any(wanted.values()):
            raise self._unmatched([str(layer) for layer in wanted])
        kept: pd.DataFrame = table[known.map(wanted).astype(bool).to_numpy()]
        return kept

    def sorted(self, table: pd.DataFrame) -> pd.DataFrame:
        """The rows, sorted.

        Raises:
            UsageError: The sort column does not exist.
        """
        if not self.sort:
            return table
        found = matching(self.sort, table)
        if len(found) != 1:
            raise _no_column(self.sort, map(str, table.columns))
        name = found[0]
        ascending = table[name].dtype.kind not in "iufb"
        made: pd.DataFrame = table.sort_values(name, ascending=ascending, kind="stable", na_position="last")
        return made

    def each(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
        """Select rows from several tables: filters those with layers and sorts those with the sort column.

        Raises:
            UsageError: No table has the sort column, or no layer matches in any table.
        """
        with_layers = {name: one for name, one in tables.items() if "layer" in one and len(one)}
        if self.where and with_layers:
            known = {layer for one in with_layers.values() for layer in map(str, one["layer"].astype(object).unique())}
            if not any(map(self.matches, known)):
                raise self._unmatched(sorted(known))
        if self.sort and not any(matching(self.sort, one) for one in tables.values()):
            raise _no_column(self.sort, dict.fromkeys(str(name) for one in tables.values() for name in one))
        return {name: self._where_it_can(one) for name, one in tables.items()}

    def _where_it_can(self, table: pd.DataFrame) -> pd.DataFrame:
        if self.where and "layer" in table:
            table = table[[self.matches(str(layer)) for layer in table["layer"].astype(object)]]
        return self.sorted(table) if self.sort and matching(self.sort, table) else table

    def _unmatched(self, known: Sequence[str]) -> UsageError:
        shown = ", ".join(known[:4]) + (", …" if len(known) > 4 else "")
        return UsageError(f"--where {' '.join(self.where)}: no layer matches; available: {shown}")

    def changed(self, **changes: Any) -> Selection:
        """A copy with some attributes replaced."""
        return replace(self, **changes)


EVERYTHING = Selection()
"""All rows in their original order."""

UNFOLDED = Selection(fold=False)
"""The same without folding."""


def matching(name: str, table: pd.DataFrame) -> list[str]:
    """The columns with this name, with or without unit: ``gpu_total`` also matches ``gpu_total_ns``."""
    wanted = name.strip().lower().replace("-", "_").replace(" ", "_")
    columns = [str(one) for one in table.columns]
    exact = [one for one in columns if one.lower() == wanted]
    return exact or [one for one in columns if one.lower().rpartition("_")[0] == wanted]


def _no_column(name: str, columns: Iterable[str]) -> UsageError:
    return UsageError(f"--sort {name}: no such column; available: {', '.join(columns)}")
