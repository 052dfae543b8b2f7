"""The result of `Capture.summary`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nvprof_kit._analysis.summary.summary import SummaryResult
from nvprof_kit._analysis.summary.views import COLUMNS
from nvprof_kit._result.result import Result
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


_BARS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "device": (("busy_ns",), ("name", "process", "device")),
    "overview": (("gpu_total_ns",), ("event",)),
    "model": (("gpu_total_ns",), ("part",)),
    "distributed": (("compute_ns", "exposed_comm_ns"), ("process", "device")),
    "operator": (("gpu_total_ns",), ("operator", "kernel")),
    "kernel": (("gpu_total_ns",), ("name",)),
    "memory": (("gpu_total_ns",), ("copy", "memory")),
    "user": (("gpu_total_ns",), ("range", "category")),
}
"""Plotted columns and labels by view, for a summary of a single view."""


@dataclass(frozen=True, repr=False, eq=False)
class Summary(Result, SummaryResult):
    """Up to eight views of a capture."""

    columns: ClassVar = {f"summary-{view}": columns for view, columns in COLUMNS.items()}
    bars: ClassVar = {f"summary-{view}": drawn for view, drawn in _BARS.items()}

    @property
    def schema(self) -> str:
        """Name of the JSON schema."""
        return "-".join(("summary", *self.views)) if len(self.views) == 1 else "summary"

    def table(self, view: str | None = None) -> pd.DataFrame:
        """One view; the name may be omitted if there is only one.

        Raises:
            UsageError: There are several views and none is named, or the view is not included.
        """
        names = ", ".join(self.views)
        if view is None and len(self.views) > 1:
            raise UsageError(f"a table holds one view; name it, one of {names}")
        if view is not None and view not in self.views:
            raise UsageError(f"{view}: no such view here; available: {names}")
        return self.views[view or next(iter(self.views))]

    def parts(self) -> list[RenderableType]:
        """The printed views, the first rows of each."""
        from nvprof_kit._report.text.summary import summary_report

        return [*summary_report(self, self.select.top or 12), ""]
