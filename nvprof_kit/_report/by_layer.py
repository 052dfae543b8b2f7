"""Rows by layer and phase, selected by layer and depth, with equal blocks folded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvprof_kit._analysis.layers.fold import Blocks, Folding, Join
from nvprof_kit._result.selection import Selection

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class ByLayer:
    """Rows by layer and phase.

    Attributes:
        rows: All rows.
        blocks: The layers, for the comparison of blocks.
        select: The selection.
    """

    rows: pd.DataFrame
    blocks: Blocks
    select: Selection

    def written(self) -> pd.DataFrame:
        """The selected rows for a file; if equal blocks are to be folded, with the block that each row folds into."""
        rows = self._folding(self.rows).marked(self.rows) if self.select.fold else self.rows
        return self.select.of(rows)

    def read(self, depth: int | None, cost: str, join: Join) -> pd.DataFrame:
        """The selected rows for display, with the columns of `nvprof_kit._analysis.layers.fold.COLUMNS`.

        Args:
            depth: Levels of the model; None for all.
            cost: The column of times.
            join: Computes the columns of a folded row.
        """
        kept = self.select.among(self.rows)
        if depth is not None:
            kept = kept[[self.blocks.depths.get(layer, 0) < depth for layer in kept["layer"]]]
        return self.select.sorted(self._folding(kept).rows(kept, cost, join))

    def _folding(self, rows: pd.DataFrame) -> Folding:
        return Folding.of(self.blocks.among(set(rows["layer"])), self.select.fold)
