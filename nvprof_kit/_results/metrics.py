"""The result of `Capture.metrics`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from nvprof_kit._analysis.metrics import COLUMNS, MetricsResult
from nvprof_kit._report.by_layer import ByLayer
from nvprof_kit._result.result import Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


@dataclass(frozen=True, repr=False, eq=False)
class Metrics(Result, MetricsResult):
    """How busy each layer keeps SMs, Tensor Cores, DRAM, NVLink and PCIe, from nsys GPU Metrics samples.

    Attributes:
        depth: How many levels of the model to print; None for all.
    """

    depth: int | None = field(default=None, kw_only=True)

    columns: ClassVar = {"metrics": COLUMNS}
    bars: ClassVar = {"metrics": (("sm_active_pct",), ("layer", "phase"))}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What may be missing or distorted in the capture; each sentence says what to do about it."""
        return self.info.warnings

    def to_frame(self) -> pd.DataFrame:
        """One row per layer and phase, in order of first execution, ``(none)`` last."""
        return self.rows

    def frame(self) -> pd.DataFrame:
        """The selected rows; if equal blocks are folded, with the columns ``folded_into`` and ``unlike``."""
        return ByLayer(self.rows, self.blocks, self.select).written()

    def parts(self) -> list[RenderableType]:
        """What was sampled, and the printed table."""
        from nvprof_kit._report.text.metrics import metrics_report

        rows = ByLayer(self.rows, self.blocks, self.select).read(
            self.depth, "busy_ns", lambda _path, _phase, rows: self.joined(rows)
        )
        return metrics_report(replace(self, rows=rows), self.select)
