"""Folds equal blocks of a model into one row of the page's table; a switch shows the individual rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvprof_kit._analysis.layers.fold import MANY, FoldedTree, fold

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._report.page.data import Sheet


@dataclass(frozen=True)
class Fold:
    """Equal blocks folded into one row.

    Attributes:
        name: The combined path: ``layers.0-79``.
        rows: The rows of the blocks on the page.
        place: The row in the folded tree.
        each: Time of one block, as text.
    """

    name: str
    rows: tuple[int, ...]
    place: int
    each: str


@dataclass(frozen=True)
class Folds:
    """The folds of a page's table, in table order.

    Attributes:
        tree: The folded tree, with the columns of the tree and of `nvprof_kit._analysis.layers.fold`.
        folds: The folds with several blocks.
        unlike: For each row of the page, how it differs from its equals; '' if it does not.
    """

    tree: pd.DataFrame
    folds: tuple[Fold, ...]
    unlike: tuple[str, ...]

    @property
    def wanted(self) -> bool:
        """Whether blocks are folded by default."""
        return any(len(equal_blocks.rows) >= MANY for equal_blocks in self.folds)


def folds_of(sheet: Sheet, rows: tuple[int, ...]) -> Folds:
    """Fold rows of the tree.

    Args:
        sheet: The capture.
        rows: The rows of its tree on the page.
    """
    folded: FoldedTree = fold(sheet.layers.tree.iloc[list(rows)].reset_index(drop=True))
    members: dict[int, list[int]] = {}
    for row, line in enumerate(folded.line.tolist()):
        members.setdefault(line, []).append(row)
    records = folded.tree.to_dict("records")
    folds = [
        Fold(records[line]["layer"], tuple(members_of_line), line, _each(records[line]))
        for line, members_of_line in members.items()
        if len(members_of_line) > 1
    ]
    unlike = tuple(records[line]["unlike"] for line in folded.line.tolist())
    return Folds(folded.tree, tuple(sorted(folds, key=lambda one: one.rows[0])), unlike)


def _each(row: dict[Any, Any]) -> str:
    median, shortest, longest = (row[name] / 1e6 for name in ("median_ns", "min_ns", "max_ns"))
    return (
        f"each {median:,.3f} ms in all steps that are shown, {shortest:,.3f} to {longest:,.3f}, without communication"
    )
