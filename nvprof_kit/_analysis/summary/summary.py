"""Eight summaries of a capture: device, overview, model, distributed, operator, kernel, memory, user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nvprof_kit._analysis.attribution.attribution import Operations, join_warnings
from nvprof_kit._analysis.attribution.steps import ALL_STEPS, StepOptions
from nvprof_kit._analysis.breakdown.transfers import first_collective
from nvprof_kit._analysis.layers.layers import BY_STEP
from nvprof_kit._analysis.layers.layers import COLUMNS as LAYER_COLUMNS
from nvprof_kit._analysis.summary.facts import Facts
from nvprof_kit._analysis.summary.views import VIEWS
from nvprof_kit._result.column import Column, Columns
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

_STATISTICS: Columns = {
    "calls": Column("number of calls"),
    **{
        f"{clock}_{name}_ns": Column(f"{meaning}, in ns", "ns")
        for clock, time in (("cpu", "CPU time"), ("gpu", "GPU time"))
        for name, meaning in (
            ("total", f"{time}, sum over the calls"),
            ("avg", "mean over the calls"),
            ("max", "maximum"),
            ("min", "minimum"),
            ("p50", "median"),
            ("p95", "95th percentile"),
        )
    },
    "cpu_ratio": Column("`cpu_total_ns` divided by that of the capture", "share", kind="float"),
    "gpu_ratio": Column("`gpu_total_ns` divided by that of the capture", "share", kind="float"),
}
_BY_STEP: Columns = {name: LAYER_COLUMNS[name] for name in BY_STEP}
_GPU: Columns = {
    "process": Column("index of the process in the capture; missing for a CPU used by several"),
    "device": Column("device ordinal in the process; missing for a CPU"),
    "wall_ns": Column("duration of the recording, in ns", "ns"),
}

VIEW_COLUMNS: Mapping[str, Columns] = {
    "device": {
        **_BY_STEP,
        **_GPU,
        "name": Column("name of the GPU, `CPU`, or `CPU operators` in a capture without a GPU", kind="str"),
        "busy_ns": Column("time in which it was busy, in ns; missing without context switches", "ns"),
        "utilisation": Column("`busy_ns` over `wall_ns`; above 1 for several threads on a CPU", "share", kind="float"),
    },
    "overview": {
        **_BY_STEP,
        "event": Column("kind of activity; overlapping time counts once", kind="str"),
        **_STATISTICS,
    },
    "model": {
        **_BY_STEP,
        "part": Column("part of the loop", kind="str"),
        "gpu_ops": Column("number of GPU operations"),
        **_STATISTICS,
    },
    "distributed": {
        **_BY_STEP,
        **_GPU,
        "compute_ns": Column("time in which it computed, in ns", "ns"),
        "comm_ns": Column("time in which it communicated, in ns", "ns"),
        "overlap_ns": Column("time of both, in ns", "ns"),
        "exposed_comm_ns": Column("exposed communication, in ns", "ns"),
        "comm_ratio": Column("`comm_ns` over `wall_ns`", "share", kind="float"),
        "overlap_ratio": Column("`overlap_ns` over `comm_ns`", "share", kind="float"),
    },
    "operator": {
        **_BY_STEP,
        "operator": Column("name of the operator", kind="str"),
        "kernel": Column("a kernel that it launched; '' for the operator itself", kind="str"),
        **_STATISTICS,
    },
    "kernel": {
        **_BY_STEP,
        "name": Column("name of the kernel", kind="str"),
        "kernel_class": Column("its class", kind="str", heading="class"),
        "family": Column("the rule that classified it", kind="str"),
        **_STATISTICS,
    },
    "memory": {
        **_BY_STEP,
        "copy": Column("direction of the copy, or memset", kind="str"),
        "memory": Column("host memory, '' if none", kind="str"),
        **_STATISTICS,
        "bytes": Column("sum of their bytes", "bytes"),
        "gb_per_s": Column("10^9 bytes per second", "gb_per_s", kind="float"),
    },
    "user": {
        **_BY_STEP,
        "range": Column("text of the range", kind="str"),
        "category": Column("its category", kind="str"),
        **_STATISTICS,
    },
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
