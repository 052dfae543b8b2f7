"""Eight summaries of a capture: device, overview, model, distributed, operator, kernel, memory, user.

In views of wall time (device, overview, busy time in model, distributed), overlapping time counts once; in views of
individual items (operator, kernel, memory, user), each item counts in full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from nvprof_kit._analysis.attribution.attribution import Operations, join_warnings
from nvprof_kit._analysis.attribution.intervals import NONE
from nvprof_kit._analysis.attribution.ranges import steps_around
from nvprof_kit._analysis.attribution.steps import ALL_STEPS, StepOptions
from nvprof_kit._analysis.breakdown.transfers import first_collective
from nvprof_kit._analysis.layers.sums import inside_its_like
from nvprof_kit._analysis.summary.facts import Facts
from nvprof_kit._analysis.summary.views import COLUMNS as VIEW_COLUMNS
from nvprof_kit._analysis.summary.views import (
    NO_CPU,
    device_view,
    kernel_view,
    memory_view,
    operator_view,
    sorted_operators,
    user_view,
)
from nvprof_kit._result.result import Result, table_named
from nvprof_kit._trace.schema import OP_KINDS, CaptureInfo
from nvprof_kit.errors import UsageError
from nvprof_kit.issues import Issue
from nvprof_kit.names import Category

if TYPE_CHECKING:
    import pandas as pd

OPTIONAL = ("name", "bytes", "host_memory", "calls", "scheduled", "loads")
"""What `nvprof_kit._trace.open.open_capture` must read."""

_OF_KERNELS = ("name", "duration_ns")


def needed(views: Sequence[str], steps: StepOptions) -> tuple[str, ...]:
    """What `open_capture` must read for these views, all by default; the kernel view alone needs little."""
    return _OF_KERNELS if views and set(views) == {"kernel"} and steps == ALL_STEPS else OPTIONAL


MODEL_PARTS = ("data", "forward", "backward", "recompute", "optimizer", "other")
"""The parts in the model view; `data` is the data loader."""


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
    """Summarize a capture opened with `OPTIONAL`.

    Args:
        operations: The operations.
        views: Which of `VIEWS`, all by default.
        by_step: One row per step instead of one over all.
        sort: Column to sort the rows by, descending; by default each view's own order.
        steps: The steps to include, by default all but warm-up.
    """
    facts, trace = Facts(operations, by_step, steps), operations.trace
    tables = {name: facts.finished(VIEWS[name](facts)) for name in views or VIEWS}
    for name, table in tables.items():
        if "operator" in table and sort in table:
            tables[name] = sorted_operators(table, sort)
        elif sort in table:
            tables[name] = table.sort_values(sort, ascending=False, kind="stable", ignore_index=True)
    return Summary(
        views=tables,
        notes={name: _note(name, table, trace.info) for name, table in tables.items()},
        steps=facts.step_count,
        all_steps=facts.all_steps,
        warnings=(
            *trace.info.warnings,
            *facts.classes.warnings(facts.gpu_ns),
            *join_warnings(trace, facts.ranges),
            *first_collective(facts.trace, facts.classes, facts.counted),
        ),
        info=trace.info,
    )


def _overview(facts: Facts) -> pd.DataFrame:
    """Wall time by kind of event, summed over devices and threads; overlapping time counts once per row."""
    import pandas as pd

    kind, host = facts.trace.ops["kind"].to_numpy(), facts.host
    is_comm = facts.classes.is_a("comm")
    of_ops = {"kernel": (kind == OP_KINDS.index("kernel")) & ~is_comm, "communication": is_comm}
    of_ops |= {name: kind == OP_KINDS.index(name) for name in ("memcpy", "memset", "graph", "operator")}
    of_calls = {"CUDA API": ~(host.overhead | host.operator | host.system)[:-1], "profiler": host.overhead[:-1]}
    unions = [facts.busy_ops(np.flatnonzero(mask), event=name) for name, mask in of_ops.items()]
    for name, mask in of_calls.items():
        calls = np.flatnonzero(mask)
        columns = {"start": host.start, "end": host.end, "lane": host.tid}
        intervals = pd.DataFrame({column: values[calls] for column, values in columns.items()})
        intervals = intervals.assign(step=facts.step_of_calls(calls))
        unions.append(facts.busy(intervals, "cpu_total_ns", event=name))
    return facts.with_ratios(pd.concat(unions), ["event", "calls"])


def _model(facts: Facts) -> pd.DataFrame:
    """Data loading, forward, backward, recompute, optimizer and everything else: CPU and GPU wall time."""
    import pandas as pd

    ranges = facts.attribution.ranges
    part_of_op = np.array([_part(phase) for phase in facts.attribution.phases])[facts.attribution.phase]
    phases = pd.Series(ranges.phase_text).str.lower()
    is_phase = ranges.is_one_of((Category.PHASE, Category.OPTIMIZER, Category.DATA))
    part_of_range = phases.map(_part).where(is_phase, NONE).to_numpy(np.int64)
    is_call = ranges.first & ~inside_its_like(part_of_range, ranges)
    for code, model_part in enumerate(MODEL_PARTS):  # zero_grad is a part of the optimizer, but not a call of it
        is_named = (phases == model_part).to_numpy()
        if (is_named & (part_of_range == code)).any():
            is_call &= is_named | (part_of_range != code)
    columns = {"start": ranges.start, "end": ranges.end, "lane": ranges.tid, "is_call": is_call}
    intervals = pd.DataFrame({**columns, "step": steps_around(ranges, np.arange(len(ranges.start)))})
    tables = []
    for code, model_part in enumerate(MODEL_PARTS):
        gpu = facts.busy_ops(np.flatnonzero(part_of_op == code), part=model_part)
        cpu = facts.busy(intervals[part_of_range == code], "cpu_total_ns", part=model_part)
        tables.append(gpu.rename(columns={"calls": "gpu_ops"}).merge(cpu, on=["step", "part"], how="outer", sort=False))
    return facts.with_ratios(pd.concat(tables), ["part", "calls", "gpu_ops"])


def _part(phase: str) -> int:
    is_known = {"dataloader": "data", "zero_grad": "optimizer"}.get(phase.lower(), phase.lower())
    return MODEL_PARTS.index(is_known) if is_known in MODEL_PARTS else MODEL_PARTS.index("other")


def _distributed(facts: Facts) -> pd.DataFrame:
    """Compute, communication and their overlap on every GPU, in wall time."""
    table = facts.states()
    if not facts.trace.info.on_gpu:
        table = table[table["comm_ns"] > 0].assign(device=None)
    table["overlap_ns"] = table["comm_ns"] - table["exposed_comm_ns"]
    table["comm_ratio"] = table["comm_ns"] / table["wall_ns"].clip(lower=1)
    table["overlap_ratio"] = (table["overlap_ns"] / table["comm_ns"]).where(table["comm_ns"] > 0, 0.0)
    names = ["wall_ns", "compute_ns", "comm_ns", "overlap_ns", "exposed_comm_ns", "comm_ratio", "overlap_ratio"]
    view: pd.DataFrame = table[[*facts.step_columns, "process", "device", *names]]
    return view


VIEWS: Mapping[str, Callable[[Facts], Any]] = MappingProxyType(
    {
        "device": device_view,
        "overview": _overview,
        "model": _model,
        "distributed": _distributed,
        "operator": operator_view,
        "kernel": kernel_view,
        "memory": memory_view,
        "user": user_view,
    }
)
"""The views by name."""

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
