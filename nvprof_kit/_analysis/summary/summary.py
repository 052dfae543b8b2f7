"""Eight summaries of a capture: device, overview, model, distributed, operator, kernel, memory, user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from nvprof_kit._analysis.attribution.attribution import Operations, join_warnings
from nvprof_kit._analysis.attribution.steps import ALL_STEPS, StepOptions
from nvprof_kit._analysis.breakdown.transfers import first_collective
from nvprof_kit._analysis.layers.layers import BY_STEP
from nvprof_kit._analysis.layers.layers import COLUMNS as LAYER_COLUMNS
from nvprof_kit._analysis.summary.facts import Facts
from nvprof_kit._analysis.summary.views import VIEWS
from nvprof_kit._result.column import Columns, read_columns
from nvprof_kit._result.result import Result, table_named
from nvprof_kit._trace.schema import CaptureInfo
from nvprof_kit.errors import UsageError
from nvprof_kit.issues import Issue

if TYPE_CHECKING:
    import pandas as pd

NO_CPU = (
    "CPU utilization was not recorded: nsys records it with --cpuctxsw=process-tree (which needs the right to use "
    "perf events; check with nsys status -e)"
)
"""What to do if the capture has no CPU data."""

_columns = partial(read_columns, "nvprof_kit._analysis.summary")
_STATISTICS, _GPU = _columns("statistics"), _columns("gpu")
_BY_STEP = {name: LAYER_COLUMNS[name] for name in BY_STEP}

VIEW_COLUMNS: Mapping[str, Columns] = {
    "device": _BY_STEP | _GPU | _columns("device"),
    "overview": _BY_STEP | _columns("overview") | _STATISTICS,
    "model": _BY_STEP | _columns("model") | _STATISTICS,
    "distributed": _BY_STEP | _GPU | _columns("distributed"),
    "operator": _BY_STEP | _columns("operator") | _STATISTICS,
    "kernel": _BY_STEP | _columns("kernel") | _STATISTICS,
    "memory": _BY_STEP | _columns("memory") | _STATISTICS | _columns("traffic"),
    "user": _BY_STEP | _columns("user") | _STATISTICS,
}
"""The columns of each view; an answer has a subset."""

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
class Summary(Result):
    """Up to eight views of a capture.

    Attributes:
        views: Tables by view. Columns ``cpu_*`` and ``gpu_*`` are total, avg, max, min, p50 and p95 in ns;
            ``cpu_ratio`` and ``gpu_ratio`` are fractions of the included steps. By step, there are also ``step`` and
            ``instance``.
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


_NOTES = {
    "device": "a GPU is busy while anything runs on it; the CPU's utilisation counts cores: 200 % are two all the time",
    "overview": "overlapping time counts once in a row; ratios are of the wall time of all GPUs",
    "model": "overlapping time counts once in a row; ratios are of the wall time of all GPUs",
    "distributed": "overlap is the part of communication hidden by compute",
    "operator": "GPU time of an operator includes the operators it calls; its kernels are nested below it",
    "kernel": "CPU is the launching call; ratios are of all GPU time",
    "memory": "CPU is the call that copied; ratios are of all GPU time",
    "user": "GPU time of a range includes nested ranges",
}
_NOTES_WITHOUT_GPU = {
    "device": "this capture has no GPU; operators are busy while any of them runs on the CPU",
    "overview": "overlapping time counts once in a row; ratios are of the recording's wall time",
    "model": "overlapping time counts once in a row; ratios are of the recording's wall time",
    "operator": "CPU time of an operator includes the operators it calls",
    "kernel": "operators, each without the operators it calls; ratios are of all operators' time",
    "memory": "CPU is the call that copied",
    "user": "CPU time of a range includes nested ranges",
}
_EMPTY = {
    "operator": "no operators in this capture: run under torch.autograd.profiler.emit_nvtx(), or nsys with "
    "--pytorch=autograd-nvtx (2024.5 and newer), or record a PyTorch trace",
    "distributed": "no GPU ran anything",
    "memory": "no copies in this capture",
}


def _note(name: str, table: pd.DataFrame, info: CaptureInfo) -> str:
    note = _NOTES[name] if info.on_gpu else _NOTES_WITHOUT_GPU.get(name, _NOTES[name])
    if not len(table):
        note = _EMPTY.get(name, "nothing of this in the capture")
    elif info.on_gpu and name == "device" and table["busy_ns"].isna().any():
        note = NO_CPU
    elif info.on_gpu and name == "distributed" and not int(table["comm_ns"].sum()):
        note = "no communication kernels in this capture: one GPU, or collectives outside the window"
    if name == "user" and info.other_domains:
        domains = ", ".join(info.other_domains)
        note += f"; ranges of other NVTX domains are not in it: {domains} (--domain NAME shows one)"
    return note
