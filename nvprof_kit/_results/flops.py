"""The result of `Capture.flops`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from nvprof_kit._analysis.flops.flops import COLUMNS, FlopsResult, joined
from nvprof_kit._report.by_layer import ByLayer
from nvprof_kit._result.result import Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


@dataclass(frozen=True, repr=False, eq=False)
class Flops(Result, FlopsResult):
    """Floating point operations, TFLOP/s and MFU of each layer.

    Attributes:
        depth: How many levels of the model to print; None for all.
    """

    depth: int | None = field(default=None, kw_only=True)

    columns: ClassVar = {"flops": COLUMNS}
    bars: ClassVar = {"flops": (("mfu",), ("layer", "phase"))}

    def to_frame(self) -> pd.DataFrame:
        """One row per layer and phase, in model order, ``(none)`` last."""
        return self.rows

    def frame(self) -> pd.DataFrame:
        """The selected rows; if equal blocks are folded, with the columns ``folded_into`` and ``unlike``."""
        return ByLayer(self.rows, self.blocks, self.select).written()

    def parts(self) -> list[RenderableType]:
        """The printed table and its caveats."""
        from nvprof_kit._report.text.flops import flops_report

        rows = ByLayer(self.rows, self.blocks, self.select).read(
            self.depth, "gpu_busy_ns", lambda _path, _phase, rows: joined(rows)
        )
        return flops_report(replace(self, rows=rows), self.select)
