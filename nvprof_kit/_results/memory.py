"""The result of `MemorySnapshot.memory`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from nvprof_kit._analysis.memory.memory import COLUMNS, MemoryResult
from nvprof_kit._result.result import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from nvprof_kit._trace.torch_memory.snapshot import Snapshot

VIEWS = ("layer", "stack", "size", "allocation", "step", "segment", "leak")
"""The tables of `Memory`, by name."""


@dataclass(frozen=True, repr=False, eq=False)
class Memory(Result, MemoryResult):
    """Which layers held GPU memory at the peak, how memory grew between steps, leaks, and fragmentation.

    Attributes:
        snapshot: The snapshot, for the plot of its segments.
        by: The table to print and to return from `to_frame`; None prints all and returns ``layer``.
    """

    snapshot: Snapshot = field(kw_only=True)
    by: str | None = field(default=None, kw_only=True)

    columns: ClassVar = {f"memory-{view}": columns for view, columns in COLUMNS.items()}

    @property
    def schema(self) -> str:
        """Name of the JSON schema."""
        return f"memory-{self.by or 'layer'}"

    def to_frame(self, view: str | None = None) -> pd.DataFrame:
        """One table: memory held at the peak by ``layer``, ``stack`` or ``size``; all allocations by layer
        (``allocation``); growth by ``step``; ``segment``; ``leak``.
        """
        from nvprof_kit._report.text.memory import view as table

        return table(self, view or self.by or "layer")

    def frame(self) -> pd.DataFrame:
        """The selected rows; where equal blocks are folded, with the columns ``folded_into`` and ``unlike``."""
        from nvprof_kit._analysis.layers.fold_ranked import mark_ranked
        from nvprof_kit._report.text.memory import ALIKE, COSTS

        rows, name = self.to_frame(), self.by or "layer"
        if self.select.fold and name in COSTS:
            rows = mark_ranked(rows, COSTS[name], ALIKE[name])
        return self.select.of(rows)

    def parts(self) -> list[RenderableType]:
        """The printed tables."""
        from nvprof_kit._report.text.memory import memory_report

        return memory_report(self, (self.by,) if self.by else VIEWS, self.select)

    def figure(self) -> Figure:
        """Draw allocated memory over time, or the segments with ``by="segment"``."""
        from nvprof_kit._report.plots.memory import segments_figure, timeline_figure

        return segments_figure(self.snapshot, self.summary.device) if self.by == "segment" else timeline_figure(self)

    def page(self) -> bytes:
        """A self-contained HTML page with both plots and all tables."""
        from nvprof_kit._report.text.memory import memory_page

        return memory_page(self, self.snapshot)
