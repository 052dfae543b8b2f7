"""Answers with a row for each layer and phase: selected by layer and depth, with equal blocks folded."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.operations import Operations, op_owners
from nvprof_kit._analysis.layers.fold import NO_BLOCKS, Blocks, Folding
from nvprof_kit._analysis.layers.tree import layer_parents
from nvprof_kit._result.result import Result

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False, eq=False)
class ByLayer(Result):
    """An answer with a row for each layer and phase.

    Attributes:
        rows: The rows, in model order, ``(none)`` last.
        blocks: The layers as they are compared, to fold the equal ones.
        depth: How many levels of the model to print; None for all.
        time: The column of times: the median, minimum and maximum of folded rows are of it.
    """

    rows: pd.DataFrame = field(kw_only=True)
    blocks: Blocks = field(default=NO_BLOCKS, kw_only=True)
    depth: int | None = field(default=None, kw_only=True)

    time: ClassVar[str]

    def table(self, view: str | None = None) -> pd.DataFrame:
        """One row per layer and phase, in model order, ``(none)`` last."""
        return self.rows

    def to_frame(self, view: str | None = None) -> pd.DataFrame:
        """The selected rows; if equal blocks are folded, with the columns ``folded_into`` and ``unlike``."""
        return self.select.of(self._folding(self.rows).marked(self.rows) if self.select.fold else self.rows)

    def printed(self) -> pd.DataFrame:
        """The selected rows as they are printed: down to `depth`, and where equal blocks are folded, one row for all,
        with the columns of `nvprof_kit._analysis.layers.fold.COLUMNS`.
        """
        rows = self.select.among(self.rows)
        if self.depth is not None:
            rows = rows[[self.blocks.depths.get(layer, 0) < self.depth for layer in rows["layer"]]]
        return self.select.sorted(self._folding(rows).rows(rows, self.time, self.join))

    def join(self, path: str, phase: str, rows: pd.DataFrame) -> dict[str, Any]:
        """The values of equal layers in a phase together: by each column's `fold`; means are weighted by `time`.

        Args:
            path: The path of the folded row.
            phase: Its phase.
            rows: The rows of the layers, with their index in `rows`.
        """
        weight, joined = rows[self.time], {}
        for name, column in self.columns[self.schema].items():
            if column.fold == "sum" and column.kind in ("int", "float"):
                joined[name] = rows[name].sum(skipna=False)
            elif column.fold == "mean":
                total = (rows[name] * weight)[weight > 0].sum(skipna=False)
                joined[name] = total / weight.sum() if weight.sum() else math.nan
        return joined

    def _folding(self, rows: pd.DataFrame) -> Folding:
        return Folding.of(self.blocks.among(set(rows["layer"])), self.select.fold)


def computing_blocks(operations: Operations, is_wanted: npt.NDArray[np.bool_]) -> Blocks:
    """The layers with their compute times, as `nvprof_kit._analysis.layers.fold.fold` compares them.

    Args:
        operations: The operations; communication is excluded if their names were read.
        is_wanted: The operations to include, shape ``(n,)``.
    """
    import pandas as pd

    trace = operations.trace
    computing = is_wanted & ~operations.classes.is_a("comm") if "name" in trace.ops else is_wanted
    layer, phase = op_owners(operations.attribution)
    frame = pd.DataFrame({"layer": layer, "phase": phase, "ns": trace.ops["end_ns"] - trace.ops["start_ns"]})
    self_ns = frame[computing].groupby(["layer", "phase"], observed=True)["ns"].sum()
    parents = layer_parents(operations.attribution.ranges)
    return Blocks.of(
        {(str(layer_name), str(of)): float(ns) for (layer_name, of), ns in self_ns.items()}, parents, parents
    )
