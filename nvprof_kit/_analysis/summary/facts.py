"""Data that the views of a summary share, each computed once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Operations
from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array, begins, union_lengths
from nvprof_kit._analysis.attribution.ranges import Elsewhere
from nvprof_kit._analysis.attribution.steps import StepChoice, StepOptions, Windows, choose_steps, step_windows
from nvprof_kit._analysis.breakdown.devices import STATES, activity
from nvprof_kit._analysis.breakdown.host import HostCalls

if TYPE_CHECKING:
    import pandas as pd


class Facts(Operations):
    """A capture and the data derived from it.

    Args:
        operations: Its operations.
        by_step: Whether views have one row per step.
        steps: The steps to include.
    """

    def __init__(self, operations: Operations, by_step: bool, steps: StepOptions) -> None:
        super().__init__(operations.trace, operations=operations)
        self.by_step, self._steps = by_step, steps

    @cached_property
    def choice(self) -> StepChoice:
        """The selected steps."""
        return choose_steps(self.trace, self.attribution, self._steps)

    @cached_property
    def counted(self) -> npt.NDArray[np.bool_]:
        """Which operations are included: those of the selected steps, by default all but warm-up, shape ``(n,)``."""
        if not len(self.ranges.steps):
            return np.ones(len(self.trace.ops), dtype=bool)  # no operation needs to be attributed
        return self.choice.of_ops(self.attribution)

    @property
    def step_count(self) -> int:
        """Number of included steps."""
        return self.choice.count if len(self.ranges.steps) else 0

    @property
    def all_steps(self) -> int:
        """Number of steps in the capture."""
        return len(self.choice.shown) if self.step_count else 0

    def included(self, instance: Int64Array) -> npt.NDArray[np.bool_]:
        """Which of these step instances are included; -1 stands for outside steps."""
        of_instance: npt.NDArray[np.bool_] = np.append(self.choice.shown, self.choice.is_whole)[instance]
        return of_instance

    @property
    def counted_windows(self) -> Int64Array:
        """The included windows."""
        return np.flatnonzero(self.included(self.windows.instance))

    @property
    def wall_ns(self) -> int:
        """Total duration of these windows over all devices; never 0."""
        windows = self.counted_windows
        return max(int((self.windows.end - self.windows.start)[windows].sum()), 1)

    @cached_property
    def windows(self) -> Windows:
        """The time of every device, divided into steps."""
        return step_windows(self.trace, self.attribution)

    @cached_property
    def host(self) -> HostCalls:
        """The activity of the host threads."""
        return HostCalls(self.trace)

    @cached_property
    def duration(self) -> Int64Array:
        """Duration of each operation, in ns."""
        duration_ns: Int64Array = (self.trace.ops["end_ns"] - self.trace.ops["start_ns"]).to_numpy()
        return duration_ns

    @property
    def gpu_ns(self) -> int:
        """Sum of the durations of the included operations."""
        return int(self.duration[self.counted].sum())

    @property
    def step_columns(self) -> list[str]:
        """``step``, the step instance, if views have one row per step."""
        return ["step"] if self.by_step else []

    def step_of_calls(self, calls: Int64Array) -> Int64Array:
        """The step instance of each given host call: on its thread, else on the one other thread of its process that is
        in a step; -1 if there is none.
        """
        ranges, host = self.attribution.ranges, self.host
        tid, call_start = host.tid[calls], host.start[calls]
        step = ranges.step_at(ranges.nesting.innermost(tid, call_start))
        unattributed = np.flatnonzero(step == NONE)
        enclosing = Elsewhere(ranges, ranges.step >= 0).open_at(
            host.pid[calls[unattributed]], tid[unattributed], call_start[unattributed]
        )
        step[unattributed] = np.append(ranges.step, NONE)[enclosing]
        return step

    def states(self) -> pd.DataFrame:
        """The time of each device in each state, summed (by step)."""
        import pandas as pd

        active = activity(self.trace, self.classes, self.windows)
        devices = [self.windows.devices[device] for device in self.windows.device.tolist()]
        frame = pd.DataFrame(
            {
                "step": self.windows.instance,
                "process": [device.process for device in devices],
                "device": [device.device for device in devices],
                "wall_ns": self.windows.end - self.windows.start,
                **{f"{state}_ns": active.state_ns[:, position] for position, state in enumerate(STATES)},
                "comm_ns": active.comm,
                "copy_ns": active.copy,
            }
        )
        keys = [*self.step_columns, "process", "device"]
        frame = frame.iloc[self.counted_windows].drop(columns=[] if self.by_step else ["step"])
        summed: pd.DataFrame = frame.groupby(keys, dropna=False).sum().reset_index()
        return summed

    def busy(self, intervals: pd.DataFrame, length: str, **names: str) -> pd.DataFrame:
        """How many included intervals there are, and the length of their union.

        Args:
            intervals: Columns ``step``, ``start``, ``end`` and ``lane``, and ``is_call`` where not each counts.
            length: The column for the length.
            names: Further columns of the result.

        Returns:
            A row for each step if views have one, else one; none without intervals: ``step``, ``calls``, the length.
        """
        import pandas as pd

        intervals = intervals[self.included(intervals["step"].to_numpy())]
        steps, group = np.unique(intervals["step"] if self.by_step else np.zeros(len(intervals)), return_inverse=True)
        lane = np.unique(intervals["lane"], return_inverse=True)[1]
        start, end = (intervals[name].to_numpy() for name in ("start", "end"))
        is_call = intervals["is_call"] if "is_call" in intervals else np.ones(len(intervals))
        table = pd.DataFrame(
            {
                "step": steps.astype(np.int64),
                "calls": np.bincount(group, weights=is_call, minlength=len(steps)).astype(np.int64),
                length: union_lengths(start, end, lane, group, len(steps)) if len(steps) else group,
            }
        )
        named: pd.DataFrame = table.assign(**names)
        return named

    def busy_ops(self, ops: Int64Array, **names: str) -> pd.DataFrame:
        """The same of operations, on their devices."""
        intervals = self.trace.ops[["start_ns", "end_ns"]].iloc[ops]
        intervals = intervals.set_axis(["start", "end"], axis=1).assign(
            lane=self.windows.of_op[ops],
            step=self.attribution.step[ops].astype(np.int64),
            is_call=begins(self.trace.ops)[ops],
        )
        return self.busy(intervals, "gpu_total_ns", **names)

    def with_ratios(self, table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
        """The named columns, and CPU and GPU time with their shares of the wall time."""
        columns = ["step", *names, "cpu_total_ns", "gpu_total_ns"]
        filled = (
            table.reindex(columns=columns)
            .fillna(0)
            .astype({name: "int64" for name in columns if name not in ("event", "part")})
        )
        for side in ("cpu", "gpu"):
            filled[f"{side}_ratio"] = filled[f"{side}_total_ns"] / self.wall_ns
        plain: pd.DataFrame = filled.reset_index(drop=True)
        return plain

    def statistics(self, frame: pd.DataFrame, by: Sequence[str], total_ns: int) -> pd.DataFrame:
        """Calls, and total, avg, max, min, p50, p95 and ratio of the columns ``cpu`` and ``gpu``, grouped by columns;
        the costliest first, by GPU time, or by CPU time if there is none.

        Args:
            frame: One row per item: the columns of `by`, ``cpu`` and ``gpu`` in ns, and ``step``.
            by: The columns to group by.
            total_ns: Denominator of the GPU time ratio; that of the CPU time ratio is the view's total.
        """
        keys = [*self.step_columns, *by]
        groups = frame.groupby(keys, observed=True, sort=False, dropna=False)
        table: pd.DataFrame = groups.size().rename("calls").reset_index()
        for side in ("cpu", "gpu"):
            of_side = groups[side]
            total = of_side.sum().to_numpy()
            statistics = {
                "total": total,
                "avg": np.rint(total / table["calls"].to_numpy()),
                "max": of_side.max(),
                "min": of_side.min(),
                "p50": np.rint(of_side.quantile(0.5)),
                "p95": np.rint(of_side.quantile(0.95)),
            }
            for name, values in statistics.items():
                table[f"{side}_{name}_ns"] = np.asarray(values).astype(np.int64)
            table[f"{side}_ratio"] = total / max(int(total.sum()) if side == "cpu" else total_ns, 1)
        cost = "gpu_total_ns" if table["gpu_total_ns"].any() else "cpu_total_ns"
        ranked: pd.DataFrame = table.sort_values(cost, ascending=False, kind="stable", ignore_index=True)
        return ranked

    def finished(self, table: pd.DataFrame) -> pd.DataFrame:
        """Finish a view's table. By step, sort by step instance with outside steps last, and add the step numbers;
        otherwise drop the column ``step``.
        """
        import pandas as pd

        if not self.by_step:
            plain: pd.DataFrame = table.drop(columns=["step"], errors="ignore")
            return plain
        instance, steps = table["step"].to_numpy().astype(np.int64), self.attribution.ranges.steps
        order = np.argsort(np.where(instance < 0, len(steps), instance), kind="stable")
        instance = instance[order]
        numbered: pd.DataFrame = table.iloc[order].reset_index(drop=True).drop(columns="step")
        numbers = np.append(steps, 0)[instance]
        for position, (name, values) in enumerate({"step": numbers, "instance": instance}.items()):
            numbered.insert(position, name, pd.Series(values, dtype="Int64").mask(instance < 0))
        return numbered
