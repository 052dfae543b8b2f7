"""What each layer gets out of the GPU, as an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nvprof_kit._analysis.flops.flops import FlopsResult
from nvprof_kit._results.base import Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


@dataclass(frozen=True, repr=False, eq=False)
class Flops(Result, FlopsResult):
    """Floating point operations of each layer, TFLOP/s and MFU.

    Attributes:
        depth: Levels of the model that are printed; None for all.
    """

    depth: int | None = field(default=None, kw_only=True)

    @property
    def schema(self) -> str:
        """Name of the schema of the json answer."""
        return "flops"

    def to_frame(self) -> pd.DataFrame:
        """A row per layer and phase, in the model's order, ``(none)`` last."""
        return self.rows

    def _bars(self) -> tuple[Sequence[str], Sequence[str]]:
        return ("mfu",), ("layer", "phase")

    def parts(self) -> list[RenderableType]:
        """The table, and what the figures lack."""
        from nvprof_kit._report.text.flops import flops_report

        return flops_report(replace(self, rows=self.frame()), self.depth, self.select.top)
