"""The result of `Capture.layers`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from nvprof_kit._analysis.layers.layers import COLUMNS, LayersResult
from nvprof_kit._analysis.layers.memory import MEMORY
from nvprof_kit._analysis.layers.split import COLUMNS as SPLIT_COLUMNS
from nvprof_kit._result.result import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import RenderableType


@dataclass(frozen=True, repr=False, eq=False)
class Layers(Result, LayersResult):
    """GPU and CPU time of each layer of a capture.

    `to_frame` returns `rows`: one row per layer and phase, or per step, layer and phase with ``by_step``.

    Attributes:
        depth: How many levels of the model to print and draw; None for all.
    """

    depth: int | None = field(default=None, kw_only=True)

    columns: ClassVar = {"layers": {**COLUMNS, **MEMORY, **SPLIT_COLUMNS}}

    def table(self, view: str | None = None) -> pd.DataFrame:
        """The rows in model order, ``(none)`` last."""
        return self.rows

    def to_frame(self, view: str | None = None) -> pd.DataFrame:
        """The selected rows; if equal blocks are folded, with the columns ``folded_into`` and ``unlike``."""
        rows = self.table()
        if self.select.fold:
            from nvprof_kit._analysis.layers.fold import fold

            rows = fold(self.tree).folding(self.tree).marked(rows)
        return self.select.of(rows)

    def parts(self) -> list[RenderableType]:
        """The printed tree of the model with times; with ``by_step``, one column per step."""
        from nvprof_kit._report.text.layers import LayersView, layers_report
        from nvprof_kit._report.text.layers_by_step import layers_by_step_report

        report = layers_by_step_report if "step" in self.rows else layers_report
        return report(self, LayersView(self.depth, self.select))

    def figure(self) -> Figure:
        """Draw one bar per layer, split by phase."""
        from nvprof_kit._report.plots.layers import layers_figure

        return layers_figure(self, self.depth)
