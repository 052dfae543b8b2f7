"""GPU metrics of each layer, as an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nvprof_kit._analysis.metrics import MetricsResult
from nvprof_kit._results.base import Result
from nvprof_kit._results.by_layer import ByLayer

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


@dataclass(frozen=True, repr=False, eq=False)
class Metrics(Result, MetricsResult):
    """How busy each layer keeps the GPU's parts, as nsys sampled them.

    Attributes:
        depth: Levels of the model that are printed; None for all.
    """

    depth: int | None = field(default=None, kw_only=True)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the capture says may be missing or distorted."""
        return self.info.warnings

    @property
    def schema(self) -> str:
        """Name of the schema of the json answer."""
        return "metrics"

    def to_frame(self) -> pd.DataFrame:
        """A row per layer and phase, in the order in which they first ran, ``(none)`` last."""
        return self.rows

    def frame(self) -> pd.DataFrame:
        """The rows that are wanted; where equal blocks are folded, with the columns ``folded_into`` and ``unlike``."""
        return ByLayer(self.rows, self.blocks, self.select).written()

    def _bars(self) -> tuple[Sequence[str], Sequence[str]]:
        return ("sm_active_pct",), ("layer", "phase")

    def parts(self) -> list[RenderableType]:
        """What was sampled, and the table."""
        from nvprof_kit._report.text.metrics import metrics_report

        rows = ByLayer(self.rows, self.blocks, self.select).read(
            self.depth, "busy_ns", lambda _path, _phase, rows: self.joined(rows)
        )
        return metrics_report(replace(self, rows=rows), self.select.top)
