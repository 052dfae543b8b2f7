"""The result of `Capture.breakdown`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from nvprof_kit._analysis.breakdown.breakdown import COLUMNS, IDLE_COLUMNS, BreakdownResult
from nvprof_kit._analysis.breakdown.critical_path import PATH_COLUMNS
from nvprof_kit._analysis.breakdown.launches import LAUNCH_COLUMNS
from nvprof_kit._analysis.breakdown.queue import QUEUE_TIME_COLUMNS
from nvprof_kit._analysis.breakdown.transfers import COMM_COLUMNS, COPY_COLUMNS
from nvprof_kit._result.result import Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


_BARS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "steps": (("compute_ns", "exposed_comm_ns", "exposed_copy_ns", "idle_ns"), ("step", "process", "device")),
    "idle": (("idle_ns",), ("cause", "layer", "phase", "call")),
    "communication": (("exposed_ns",), ("collective", "layer", "phase")),
    "copies": (("gpu_ns",), ("copy", "memory", "layer", "phase")),
    "launches": (("idle_ns",), ("layer", "phase")),
    "critical-path": (("gpu_ns", "host_ns", "wait_ns"), ("layer", "phase")),
}
"""Plotted columns and labels by table; the queue is drawn by ``Capture.plot("queue")``."""


@dataclass(frozen=True, repr=False, eq=False)
class Breakdown(Result, BreakdownResult):
    """Where the time of each step goes on each GPU.

    Attributes:
        view: The table to print and to return from `to_frame`; None prints all and returns ``steps``.
    """

    view: str | None = field(default=None, kw_only=True)

    columns: ClassVar = {
        "breakdown-steps": COLUMNS,
        "breakdown-idle": IDLE_COLUMNS,
        "breakdown-communication": COMM_COLUMNS,
        "breakdown-copies": COPY_COLUMNS,
        "breakdown-launches": LAUNCH_COLUMNS,
        "breakdown-queue": QUEUE_TIME_COLUMNS,
        "breakdown-critical-path": PATH_COLUMNS,
    }
    bars: ClassVar = {f"breakdown-{view}": drawn for view, drawn in _BARS.items()}

    @property
    def schema(self) -> str:
        """Name of the JSON schema."""
        return f"breakdown-{self.view or 'steps'}"

    def table(self, view: str | None = None) -> pd.DataFrame:
        """One table: ``steps``, ``idle``, ``communication``, ``copies``, ``launches``, ``queue`` or
        ``critical-path``.
        """
        return BreakdownResult.table(self, view or self.view or "steps")

    def to_frame(self, view: str | None = None) -> pd.DataFrame:
        """The selected rows; where equal blocks are folded, with the columns ``folded_into`` and ``unlike``."""
        from nvprof_kit._analysis.layers.fold_ranked import mark_ranked
        from nvprof_kit._report.text.breakdown import ALIKE, COSTS, with_cost

        rows, view = self.table(view), view or self.view or "steps"
        if self.select.fold and view in COSTS:
            marked = mark_ranked(with_cost(view, rows), COSTS[view], ALIKE.get(view, ()))
            rows = marked[[*rows.columns, "folded_into", "unlike"]]
        return self.select.of(rows)

    def parts(self) -> list[RenderableType]:
        """The printed tables, the first rows of each."""
        from nvprof_kit._report.text.breakdown import breakdown_report

        return [*breakdown_report(self, self.view, self.select.top or 10, self.select), ""]
