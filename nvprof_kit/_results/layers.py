"""What each layer costs, as an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from nvprof_kit._analysis.layers.layers import LayersResult
from nvprof_kit._results.base import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import RenderableType


@dataclass(frozen=True, repr=False, eq=False)
class Layers(Result, LayersResult):
    """What each layer of a capture costs.

    `to_frame` gives `rows`: a row per layer and phase, and per step where that was asked for.

    Attributes:
        depth: Levels of the model that are printed and drawn; None for all.
    """

    depth: int | None = field(default=None, kw_only=True)

    has_plot: ClassVar[bool] = True

    @property
    def schema(self) -> str:
        """Name of the schema of the json answer."""
        return "layers"

    def to_frame(self) -> pd.DataFrame:
        """The rows, in the model's order, ``(none)`` last."""
        return self.rows

    def frame(self) -> pd.DataFrame:
        """The rows that are wanted; where equal blocks are folded, with the columns ``folded_into`` and ``unlike``."""
        rows = self.to_frame()
        if self.select.fold:
            from nvprof_kit._analysis.layers.fold import fold

            rows = fold(self.tree).folding(self.tree).marked(rows)
        return self.select.of(rows)

    def parts(self) -> list[RenderableType]:
        """The tree of the model, each layer with its times; by step a column for each step."""
        from nvprof_kit._report.text.layers import LayersView, layers_report
        from nvprof_kit._report.text.layers_by_step import layers_by_step_report

        report = layers_by_step_report if "step" in self.rows else layers_report
        return report(self, LayersView(self.depth, self.select))

    def figure(self) -> Figure:
        """A bar per layer, by phase."""
        from nvprof_kit._report.plots.layers import layers_figure

        return layers_figure(self, self.depth)
