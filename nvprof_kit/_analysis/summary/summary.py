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

from nvprof_kit._analysis.attribution.attribution import Operations
from nvprof_kit._analysis.attribution.intervals import NONE, begins, union_lengths
from nvprof_kit._analysis.attribution.ranges import steps_around
from nvprof_kit._analysis.attribution.steps import ALL_STEPS, StepOptions
from nvprof_kit._analysis.breakdown.transfers import first_collective
from nvprof_kit._analysis.kernels.classes import Rule
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
from nvprof_kit._trace.schema import OP_KINDS, CaptureInfo, Trace
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
        steps: Number of steps.
        warnings: What may be missing or distorted.
        info: Recording tool, GPUs and processes of the capture.
    """

    views: Mapping[str, pd.DataFrame]
    notes: Mapping[str, str]
    steps: int
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
            raise UsageError(f"a table holds one view; name it, one of {', '.join(self.views)}")
        return table_named(self.views, view or next(iter(self.views)))


def summary(
    trace: Trace,
    views: Sequence[str] = (),
    operations: Operations | None = None,
    *,
    by_step: bool = False,
    sort: str = "",
    own_rules: tuple[Rule, ...] = (),
    steps: StepOptions = ALL_STEPS,
) -> Summary:
    """Summarize a capture opened with `OPTIONAL`.

    Args:
        trace: The capture.
        views: Which of `VIEWS`, all by default.
        operations: The same operations, if their owners and classes are already known.
        by_step: One row per step instead of one over all.
        sort: Column to sort the rows by, descending; by default each view's own order.
        own_rules: The user's rules for kernel classes, tried before the built-in ones.
        steps: The steps to include, by default all but warm-up.
    """
    facts = Facts(trace, own_rules, by_step, steps, operations)
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
        warnings=(
            *trace.info.warnings,
            *facts.classes.warnings(facts.gpu_ns),
            *facts.join_warnings(),
            *first_collective(facts.trace, facts.classes, facts.counted),
        ),
        info=trace.info,
    )


def _overview(facts: Facts) -> pd.DataFrame:
    """Wall time by kind of event, summed over devices and threads; overlapping time counts once per row."""
    import pandas as pd

    ops, rows = facts.trace.ops, []
    columns, first = [ops[name].to_numpy() for name in ("start_ns", "end_ns")], begins(ops)
    wall_ns = facts.wall_ns
    kind = ops["kind"].to_numpy()
    sorts = {
        "kernel": (kind == OP_KINDS.index("kernel")) & ~facts.classes.is_a("comm"),
        "communication": facts.classes.is_a("comm"),
        **{name: kind == OP_KINDS.index(name) for name in ("memcpy", "memset", "graph", "operator")},
    }
    for name, mask in sorts.items():
        selected = np.flatnonzero(mask & facts.counted)
        if len(selected):
            lane, step = facts.windows.of_op[selected], facts.step_of_op[selected]
            busy = _busy(facts, columns[0][selected], columns[1][selected], lane, step, counts=first[selected])
            rows += [(step, name, count, 0, ns, 0.0, ns / wall_ns) for step, count, ns in busy]
    host = facts.host
    for name, mask in {"CUDA API": ~(host.overhead | host.operator | host.system), "profiler": host.overhead}.items():
        selected = facts.counted_calls(np.flatnonzero(mask[:-1]))
        if len(selected):
            lane = pd.factorize(host.tid[selected])[0]
            step = facts.step_of_calls(selected) if facts.by_step else selected
            busy = _busy(facts, host.start[selected], host.end[selected], lane, step)
            rows += [(step, name, count, ns, 0, ns / wall_ns, 0.0) for step, count, ns in busy]
    names = ["step", "event", "calls", "cpu_total_ns", "gpu_total_ns", "cpu_ratio", "gpu_ratio"]
    view: pd.DataFrame = pd.DataFrame(rows, columns=names)
    return view


def _busy(
    facts: Facts, start: Any, end: Any, lane: Any, step: Any, *, counts: Any = None
) -> list[tuple[Any, int, int]]:
    """Step instance, number of intervals and length of their union; a single entry for all unless by step. `counts`
    selects the intervals to count, by default all.
    """
    group = step + 1 if facts.by_step else np.zeros(len(start), dtype=np.int64)
    groups = int(group.max(initial=0)) + 1
    interval = group if counts is None else group[counts]
    numbers, lengths = np.bincount(interval, minlength=groups), union_lengths(start, end, lane, group, groups)
    return [
        (union - 1, int(numbers[union]), int(lengths[union]))
        for union in range(groups)
        if numbers[union] or lengths[union]
    ]


def _model(facts: Facts) -> pd.DataFrame:
    """Data loading, forward, backward, recompute, optimizer and everything else: CPU and GPU wall time."""
    import pandas as pd

    ranges, ops = facts.attribution.ranges, facts.trace.ops
    part_of_phase = np.array([_part(phase) for phase in facts.attribution.phases])[facts.attribution.phase]
    chosen = np.flatnonzero(ranges.is_one_of((Category.PHASE, Category.OPTIMIZER, Category.DATA)))
    phases = [str(phase).lower() for phase in ranges.phase_text[chosen].tolist()]
    part_of_range = np.array([_part(phase) for phase in phases], dtype=np.int64)
    part_of_all = np.full(len(ranges.start), NONE, dtype=np.int64)
    part_of_all[chosen] = part_of_range
    is_call = ranges.first[chosen] & ~inside_its_like(part_of_all, ranges)[chosen]
    for code, model_part in enumerate(MODEL_PARTS):  # zero_grad is a part of the optimizer, but not a call of it
        of_part = part_of_range == code
        is_named = np.array([phase == model_part for phase in phases], dtype=bool)
        if (of_part & is_named).any():
            is_call &= ~of_part | is_named
    wall_ns, rows = facts.wall_ns, []
    columns, first = [ops[name].to_numpy() for name in ("start_ns", "end_ns")], begins(ops)
    threads = np.unique(ranges.tid, return_inverse=True)[1]
    for code, model_part in enumerate(MODEL_PARTS):
        selected = np.flatnonzero((part_of_phase == code) & facts.counted)
        on_cpu = facts.counted_ranges(chosen[part_of_range == code])
        gpu = {step: (count, ns) for step, count, ns in _busy(
            facts, columns[0][selected], columns[1][selected], facts.windows.of_op[selected],
            facts.step_of_op[selected],
            counts=first[selected])}  # fmt: skip
        cpu = {step: (count, ns) for step, count, ns in _busy(
            facts, ranges.start[on_cpu], ranges.end[on_cpu], threads[on_cpu],
            steps_around(ranges, on_cpu), counts=is_call[np.searchsorted(chosen, on_cpu)])}  # fmt: skip
        for step in dict.fromkeys((*gpu, *cpu)):
            ops_count, gpu_ns = gpu.get(step, (0, 0))
            calls, cpu_ns = cpu.get(step, (0, 0))
            rows.append((step, model_part, calls, ops_count, cpu_ns, gpu_ns, cpu_ns / wall_ns, gpu_ns / wall_ns))
    names = ["step", "part", "calls", "gpu_ops", "cpu_total_ns", "gpu_total_ns", "cpu_ratio", "gpu_ratio"]
    view: pd.DataFrame = pd.DataFrame(rows, columns=names)
    return view


def _part(phase: str) -> int:
    is_known = {"dataloader": "data", "zero_grad": "optimizer"}.get(phase.lower(), phase.lower())
    return MODEL_PARTS.index(is_known) if is_known in MODEL_PARTS else MODEL_PARTS.index("other")


def _distributed(facts: Facts) -> pd.DataFrame:
    """Compute, communication and their overlap on every GPU, in wall time."""
    table = facts.states(("process", "device"))
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
