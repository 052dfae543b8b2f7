"""Rows by layer and phase as they are wanted: of some layers and levels of the model, equal layers as one row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvprof_kit._analysis.layers.fold import Blocks, Folding, Join
from nvprof_kit._report.selection import Selection

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class ByLayer:
    """Rows by layer and phase.

    Attributes:
        rows: All of them.
        blocks: The layers as they are compared.
        select: Which are wanted.
    """

    rows: pd.DataFrame
    blocks: Blocks
    select: Selection

    def written(self) -> pd.DataFrame:
        """The wanted rows for a file; where equal layers are to be folded, with what each folds into."""
        rows = self._folding(self.rows).marked(self.rows) if self.select.fold else self.rows
        return self.select.of(rows)

    def read(self, depth: int | None, cost: str, join: Join) -> pd.DataFrame:
        """The wanted rows for reading, with the columns of `nvprof_kit._analysis.layers.fold.COLUMNS`.

        Args:
            depth: Levels of the model, None for all.
            cost: The column of times.
            join: Gives the columns of a folded row.
        """
        kept = self.select.among(self.rows)
        if depth is not None:
            kept = kept[[self.blocks.depths.get(layer, 0) < depth for layer in kept["layer"]]]
        return self.select.sorted(self._folding(kept).rows(kept, cost, join))

    def _folding(self, rows: pd.DataFrame) -> Folding:
        return Folding.of(self.blocks.among(set(rows["layer"])), self.select.fold)
