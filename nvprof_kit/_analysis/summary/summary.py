"""Eight summaries of a capture: device, overview, model, distributed, operator, kernel, memory, user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from nvprof_kit._analysis.attribution.attribution import Operations, join_warnings
from nvprof_kit._analysis.attribution.steps import ALL_STEPS, StepOptions
from nvprof_kit._analysis.breakdown.transfers import first_collective
from nvprof_kit._analysis.layers.layers import BY_STEP
from nvprof_kit._analysis.layers.layers import COLUMNS as LAYER_COLUMNS
from nvprof_kit._analysis.summary.facts import Facts
from nvprof_kit._analysis.summary.views import VIEWS
from nvprof_kit._result.column import Columns, read_columns
from nvprof_kit._result.result import Result, table_named
from nvprof_kit._toml import read_toml
from nvprof_kit._trace.schema import CaptureInfo
from nvprof_kit.errors import UsageError
from nvprof_kit.issues import Issue

if TYPE_CHECKING:
    import pandas as pd

_VIEWS: Mapping[str, Mapping[str, Any]] = read_toml("nvprof_kit._analysis.summary", "views.toml")
_columns = partial(read_columns, "nvprof_kit._analysis.summary")
_BY_STEP = {name: LAYER_COLUMNS[name] for name in BY_STEP}

VIEW_COLUMNS: Mapping[str, Columns] = {
    name: _BY_STEP | {key: column for table in view["columns"] for key, column in _columns(table).items()}
    for name, view in _VIEWS.items()
}
"""The columns of each view; an answer has a subset."""


@dataclass(frozen=True, repr=False, eq=False)
class Summary(Result):
    """Up to eight views of a capture.

    Attributes:
        views: Tables by view. Columns ``cpu_*`` and ``gpu_*`` are total, avg, max, min, p50 and p95 in ns;
            ``cpu_ratio`` and ``gpu_ratio`` are fractions of the included steps, by step of that step. By step, there
            are also ``step`` and ``instance``.
        notes: Notes by view: why it is empty, or what its ratios refer to.
        steps: Number of included steps.
        all_steps: Number of steps in the capture.
        warnings: What may be missing or distorted.
        info: Recording tool, GPUs and processes of the capture.
    """

    views: Mapping[str, pd.DataFrame]
    notes: Mapping[str, str]
    steps: int
    all_steps: int
    warnings: tuple[Issue, ...]
    info: CaptureInfo

    columns: ClassVar = {f"summary-{view}": columns for view, columns in VIEW_COLUMNS.items()}
    bars: ClassVar = {f"summary-{name}": (view["bars"], view["labels"]) for name, view in _VIEWS.items()}

    @property
    def schema(self) -> str:
        """Name of the JSON schema."""
        return "-".join(("summary", *self.views)) if len(self.views) == 1 else "summary"

    def table(self, view: str | None = None) -> pd.DataFrame:
        """One view; the name may be omitted if there is only one.

        Raises:
            UsageError: There are several views and none is named, or the view is not included.
        """
        if view is None and len(self.views) > 1:
            raise UsageError(f"a table holds one view; name it (--view), one of {', '.join(self.views)}")
        return table_named(self.views, view or next(iter(self.views)))


def summary(
    operations: Operations,
    views: Sequence[str] = (),
    *,
    by_step: bool = False,
    sort: str = "",
    steps: StepOptions = ALL_STEPS,
) -> Summary:
    """Summarize a capture.

    Args:
        operations: The operations.
        views: Which of `VIEWS`, all by default.
        by_step: One row per step instead of one over all.
        sort: Column to sort the rows by, descending; by default each view's own order.
        steps: The steps to include, by default all but warm-up.
    """
    facts, trace = Facts(operations, by_step, sort, steps), operations.trace
    tables = {name: facts.finished(VIEWS[name](facts)) for name in views or VIEWS}
    for name, table in tables.items():
        if sort in table and name != "operator":  # its kernels stay below each operator
            tables[name] = table.sort_values(sort, ascending=False, kind="stable", ignore_index=True)
    included = facts.choice.shown if len(facts.ranges.steps) else ()
    return Summary(
        views=tables,
        notes={name: _note(name, table, trace.info) for name, table in tables.items()},
        steps=sum(included),
        all_steps=len(included) if any(included) else 0,
        warnings=(
            *trace.info.warnings,
            *facts.classes.warnings(),
            *join_warnings(trace, facts.ranges),
            *first_collective(trace, facts.classes, facts.is_included),
        ),
        info=trace.info,
    )


def _note(name: str, table: pd.DataFrame, info: CaptureInfo) -> str:
    view = _VIEWS[name]
    note: str = view["note"] if info.on_gpu else view.get("without_gpu", view["note"])
    if not len(table):
        note = view.get("empty", "nothing of this in the capture")
    elif info.on_gpu and name == "device" and table["busy_ns"].isna().any():
        note = view["without_cpu"]
    elif info.on_gpu and name == "distributed" and not int(table["comm_ns"].sum()):
        note = view["without_communication"]
    if name == "user" and info.other_domains:
        domains = ", ".join(info.other_domains)
        note += f"; ranges of other NVTX domains are not in it: {domains} (--domain NAME shows one)"
    return note
