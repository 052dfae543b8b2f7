"""Data that the views of a summary share, each computed once.

The tables of all views have a column ``step``, the step instance (`NONE` outside steps), until they are `finished`; it
is 0 in all rows where views have no row per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pandas as pd

from nvprof_kit._analysis.attribution.attribution import Operations
from nvprof_kit._analysis.attribution.intervals import NONE, Bools, Cover, Int64Array, begins, joined, union_lengths
from nvprof_kit._analysis.attribution.ranges import Elsewhere
from nvprof_kit._analysis.attribution.steps import StepChoice, StepOptions, Windows, choose_steps, step_windows
from nvprof_kit._analysis.breakdown.devices import STATES, activity
from nvprof_kit._analysis.breakdown.host import HostCalls, host_of
from nvprof_kit._trace.joins import distinct

_BLOCK = 1 << 18
"""Calls processed at a time, to limit memory."""


class Facts(Operations):
    """A capture and the data derived from it.

    Args:
        operations: Its operations.
        by_step: Whether views have one row per step.
        sort: Column to sort a view's rows by, where it has it.
        steps: The steps to include.
    """

    def __init__(self, operations: Operations, by_step: bool, sort: str, steps: StepOptions) -> None:
        super().__init__(operations.trace, operations=operations)
        self.by_step, self.sort, self._steps = by_step, sort, steps
        self.duration: Int64Array = (self.trace.ops["end_ns"] - self.trace.ops["start_ns"]).to_numpy()

    @cached_property
    def choice(self) -> StepChoice:
        """The selected steps."""
        return choose_steps(self.trace, self.attribution, self._steps)

    @cached_property
    def is_included(self) -> Bools:
        """Which operations are included: those of the selected steps, by default all but warm-up, shape ``(n,)``."""
        if not len(self.ranges.steps):
            return np.ones(len(self.trace.ops), dtype=bool)  # no operation needs to be attributed
        return self.choice.of_ops(self.attribution)

    @cached_property
    def windows(self) -> Windows:
        """The time of every device, divided into steps."""
        return step_windows(self.trace, self.attribution)

    @cached_property
    def host(self) -> HostCalls:
        """The activity of the host threads."""
        return host_of(self)

    @cached_property
    def gpu_ns(self) -> pd.Series[int]:
        """Sum of the durations of the included operations (by step)."""
        ops = np.flatnonzero(self.is_included)
        step = self.attribution.step[ops] if self.by_step else np.broadcast_to(0, len(ops))
        return pd.Series(self.duration[ops]).groupby(step).sum()

    def included(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Those of some rows whose step instance is included."""
        is_included = np.append(self.choice.shown, self.choice.is_whole)[rows["step"].to_numpy()]
        included: pd.DataFrame = rows if is_included.all() else rows[is_included]
        return included if self.by_step else included.assign(step=0)

    def ops(self, rows: Int64Array) -> pd.DataFrame:
        """One row per operation: step, duration of the launching call, own duration."""
        trace, host = self.trace, self.host
        if trace.calls is None and "duration_ns" in trace.api:  # only the launching calls were read
            launch_ns = np.append(trace.api["duration_ns"].to_numpy(), 0)[trace.launching_calls[rows]]
        else:
            launch_ns = (host.end - host.start)[host.of_op[rows]]
        step = self.attribution.step[rows].astype(np.int64) if self.by_step else 0
        return pd.DataFrame({"step": step, "cpu": launch_ns, "gpu": self.duration[rows]})

    def step_of_calls(self, calls: Int64Array) -> npt.NDArray[np.int32]:
        """The step instance of each given host call: on its thread, else on the one other thread of its process that is
        in a step; -1 if there is none.
        """
        ranges, host = self.attribution.ranges, self.host
        steps, steps_elsewhere = np.full(len(calls), NONE, dtype=np.int32), Elsewhere(ranges, ranges.step >= 0)
        for block in (slice(low, low + _BLOCK) for low in range(0, len(calls), _BLOCK)):
            pid, tid, start = (column[calls[block]] for column in (host.pid, host.tid, host.start))
            step = ranges.step_at(ranges.nesting.innermost(tid, start))
            unattributed = np.flatnonzero(step == NONE)
            enclosing = steps_elsewhere.open_at(pid[unattributed], tid[unattributed], start[unattributed])
            step[unattributed] = np.append(ranges.step, NONE)[enclosing]
            steps[block] = step
        return steps

    @cached_property
    def states(self) -> pd.DataFrame:
        """The time of each device in each state, summed (by step)."""
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
            }
        )
        return self.included(frame).groupby(["step", "process", "device"], as_index=False).sum()

    def busy(self, intervals: pd.DataFrame, length: str, **names: str) -> pd.DataFrame:
        """How many intervals there are, and the length of their union.

        Args:
            intervals: Columns ``step``, ``start``, ``end`` and ``lane``, and ``is_call`` where not each counts; those
                `included`.
            length: The column for the length.
            names: Further columns of the result.

        Returns:
            A row for each step: ``step``, ``calls``, the length.
        """
        start, end, step, lane = (intervals[name].to_numpy(dtype=np.int64) for name in ("start", "end", "step", "lane"))
        (steps, group), lane = distinct(step), distinct(lane)[1]
        is_call = intervals["is_call"].to_numpy(dtype=bool) if "is_call" in intervals else slice(None)
        calls = np.bincount(group[is_call], minlength=len(steps))
        length_ns = union_lengths(start, end, lane, group, len(steps)) if len(steps) else group
        return pd.DataFrame({"step": steps, "calls": calls, length: length_ns, **names})

    def busy_host(self, intervals: pd.DataFrame, **names: str) -> pd.DataFrame:
        """The same of host threads, with columns ``pid`` and ``lane``, as ``cpu_total_ns``; and as ``in_wall_ns`` how
        much of these intervals lies in the wall time of the included steps (of the step) on each device of the process.
        """
        included, windows = self.included(intervals), self.windows
        pid = np.array([device.pid for device in windows.devices])[windows.device]
        wall = {"pid": pid, "step": windows.instance, "start": windows.start, "end": windows.end}
        is_first = ~included["lane"].duplicated()
        lanes = included.loc[is_first, ["pid", "lane"]].merge(self.included(pd.DataFrame(wall)), on="pid")
        included = included.drop(columns="pid")  # of many calls, much memory
        table = self.busy(included, "cpu_total_ns", **names)
        cover = Cover(*(included.pop(name).to_numpy(dtype=np.int64) for name in ("lane", "start", "end")))
        lanes["in_wall_ns"] = cover.inside(*(lanes[name].to_numpy() for name in ("lane", "start", "end")))
        in_wall = lanes.groupby("step", as_index=False)["in_wall_ns"].sum()
        return table.merge(in_wall, on="step", how="left")

    def busy_ops(self, ops: Int64Array, **names: str) -> pd.DataFrame:
        """The same of operations, on their devices."""
        intervals = self.trace.ops[["start_ns", "end_ns"]].iloc[ops].set_axis(["start", "end"], axis=1)
        step, is_call = self.attribution.step[ops].astype(np.int64), begins(self.trace.ops)[ops]
        intervals = intervals.assign(lane=self.windows.of_op[ops], step=step, is_call=is_call)
        return self.busy(self.included(intervals), "gpu_total_ns", **names)

    def with_ratios(self, tables: Sequence[pd.DataFrame], names: Sequence[str]) -> pd.DataFrame:
        """The named columns of some tables, and CPU and GPU time with their shares of the wall time of all devices (in
        the step).
        """
        names = [*names, "cpu_total_ns", "gpu_total_ns", "in_wall_ns"]
        table: pd.DataFrame = pd.concat(tables, ignore_index=True).reindex(columns=["step", *names]).fillna(0)
        table[names[1:]] = table[names[1:]].astype("int64")
        wall_ns = table["step"].map(self.states.groupby("step")["wall_ns"].sum()).fillna(0).clip(lower=1)
        table["cpu_ratio"], table["gpu_ratio"] = table.pop("in_wall_ns") / wall_ns, table["gpu_total_ns"] / wall_ns
        return table

    def statistics(self, frame: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
        """Calls, and total, avg, max, min, p50, p95 and ratio of the columns ``cpu`` and ``gpu``, grouped by columns;
        the costliest first, by the column to sort by, else by GPU time, or by CPU time if there is none.

        Args:
            frame: One row per item: the columns of `by`, ``cpu`` and ``gpu`` in ns, and ``step``.
            by: The columns to group by.
        """
        groups = frame.groupby(["step", *by], observed=True, sort=False, dropna=False)
        table: pd.DataFrame = groups.size().rename("calls").reset_index()
        calls, group = table["calls"].to_numpy(), groups.ngroup().to_numpy()
        first, at_95 = np.cumsum(calls) - calls, 0.95 * (calls - 1)
        for side in ("cpu", "gpu"):
            # by group and time, which NumPy sorts by one integer many times as fast as by two
            ns: Int64Array = frame[side].to_numpy()
            ns = ns[np.lexsort((ns, group)) if (key := joined([group, ns])) is None else np.argsort(key)]
            total, low = np.add.reduceat(ns, first), ns[first + at_95.astype(np.int64)]
            p95 = low + (ns[first + np.ceil(at_95).astype(np.int64)] - low) * (at_95 % 1)
            p50 = (ns[first + (calls - 1) // 2] + ns[first + calls // 2]) / 2
            times = {"total": total, "avg": total / calls, "max": ns[first + calls - 1], "min": ns[first]}
            for name, values in {**times, "p50": p50, "p95": p95}.items():
                table[f"{side}_{name}_ns"] = values.round().astype(np.int64)
            of_step = table.groupby("step")["cpu_total_ns"].sum() if side == "cpu" else self.gpu_ns
            table[f"{side}_ratio"] = total / table["step"].map(of_step).fillna(0).clip(lower=1)
        cost = "gpu_total_ns" if table["gpu_total_ns"].any() else "cpu_total_ns"
        keys = [self.sort, cost] if self.sort in table else [cost]
        return table.sort_values(keys, ascending=False, kind="stable", ignore_index=True)

    def finished(self, table: pd.DataFrame) -> pd.DataFrame:
        """Finish a view's table. By step, sort by step instance with outside steps last, and add the step numbers;
        otherwise drop the column ``step``.
        """
        instance = pd.Series(table.pop("step"), dtype="Int64").replace(NONE, pd.NA)
        if not self.by_step:
            return table
        numbers = pd.Series(dict(enumerate(self.attribution.ranges.steps.tolist())), dtype="Int64")
        table.insert(0, "step", instance.map(numbers).astype("Int64"))
        table.insert(1, "instance", instance)
        return table.sort_values("instance", kind="stable", ignore_index=True)
