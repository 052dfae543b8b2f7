"""What the views of a summary are made from, each thing computed once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from nvprof_kit.analysis.attribution.nesting import NONE, Int64Array
from nvprof_kit.analysis.attribution.operations import Operations
from nvprof_kit.analysis.attribution.ranges import Elsewhere
from nvprof_kit.analysis.attribution.windows import Windows, step_windows
from nvprof_kit.analysis.breakdown.activity import STATES, Activity, activity
from nvprof_kit.analysis.breakdown.host import HostCalls
from nvprof_kit.analysis.kernels.classes import Rule
from nvprof_kit.trace.schema import Trace

if TYPE_CHECKING:
    import pandas as pd

_STATISTICS: dict[str, Any] = {"total": "sum", "avg": "mean", "max": "max", "min": "min", "p50": 0.5, "p95": 0.95}


class Facts(Operations):
    """A capture and what was found out about it.

    Args:
        trace: The capture.
        own_rules: Rules for kernel classes, asked before the package's.
        by_step: Whether views tell steps apart.
        known: The same operations, where owners and classes are known already.
    """

    def __init__(self, trace: Trace, own_rules: Sequence[Rule], by_step: bool, known: Operations | None = None) -> None:
        super().__init__(trace, own_rules, known)
        self.by_step = by_step

    @cached_property
    def windows(self) -> Windows:
        """The time of every device, cut into steps."""
        return step_windows(self.trace, self.attribution)

    @cached_property
    def active(self) -> Activity:
        """What the devices do at every moment."""
        return activity(self.trace, self.classes, self.windows)

    @cached_property
    def host(self) -> HostCalls:
        """What the host's threads did."""
        return HostCalls(self.trace)

    @cached_property
    def duration(self) -> Int64Array:
        """Of each operation, in ns."""
        found: Int64Array = (self.trace.ops["end_ns"] - self.trace.ops["start_ns"]).to_numpy()
        return found

    @property
    def gpu_ns(self) -> int:
        """Sum of all operations' durations."""
        return int(self.duration.sum())

    @property
    def step_columns(self) -> list[str]:
        """``step`` where views tell steps apart."""
        return ["step"] if self.by_step else []

    @property
    def step_of_op(self) -> Int64Array:
        """Index of the step of each operation, -1 outside steps."""
        return self.attribution.step.astype(np.int64)

    def step_of_calls(self, calls: Int64Array) -> Int64Array:
        """Index of the step that each of some calls of the host is in, on its thread or else on the one other thread of
        its process that is in a step; -1 for none.
        """
        ranges, host = self.attribution.ranges, self.host
        tid, moment = host.tid[calls], host.start[calls]
        step = ranges.step_at(ranges.nesting.innermost(tid, moment))
        unattributed = np.flatnonzero(step == NONE)
        around = Elsewhere(ranges, ranges.step >= 0).open_at(
            host.pid[calls[unattributed]], tid[unattributed], moment[unattributed]
        )
        step[unattributed] = np.append(ranges.step, NONE)[around]
        return step

    def numbers(self, step: Int64Array) -> Any:
        """Step numbers from indices, missing for -1."""
        import pandas as pd

        steps = np.append(self.attribution.ranges.steps, 0)
        return pd.arrays.IntegerArray(steps[step], step < 0)

    def states(self, by: Sequence[str]) -> pd.DataFrame:
        """The time in each state, summed by these columns (and step)."""
        import pandas as pd

        devices = [self.windows.devices[one] for one in self.windows.device.tolist()]
        frame = pd.DataFrame(
            {
                "step": pd.arrays.IntegerArray(self.windows.step, ~self.windows.in_step),
                "process": [one.process for one in devices],
                "device": [one.device for one in devices],
                "wall_ns": self.windows.end - self.windows.start,
                **{f"{state}_ns": self.active.spent[:, place] for place, state in enumerate(STATES)},
                "comm_ns": self.active.comm,
                "copy_ns": self.active.copy,
            }
        )
        keys = [*self.step_columns, *by]
        summed = frame.drop(columns=[] if self.by_step else ["step"]).groupby(keys, dropna=False).sum()
        made: pd.DataFrame = summed.reset_index()
        return made

    def statistics(self, frame: pd.DataFrame, by: Sequence[str], whole: int) -> pd.DataFrame:
        """Calls, and total, avg, max, min, p50, p95 and ratio of the columns ``cpu`` and ``gpu``, by these columns.

        Args:
            frame: A row per thing: the columns of `by`, ``cpu`` and ``gpu`` in ns, and ``step`` as an index.
            by: What to group by.
            whole: What the ratio of GPU time is of; the ratio of CPU time is of the view's.
        """
        keys = [*self.step_columns, *by]
        groups = frame.groupby(keys, observed=True, sort=False, dropna=False)
        table = groups.size().rename("calls").to_frame()
        for side in ("cpu", "gpu"):
            for name, how in _STATISTICS.items():
                values = groups[side].quantile(how) if name in ("p50", "p95") else groups[side].agg(how)
                table[f"{side}_{name}_ns"] = values.round().astype("int64")
            total = max(int(frame["cpu"].sum()), 1) if side == "cpu" else max(whole, 1)
            table[f"{side}_ratio"] = table[f"{side}_total_ns"] / total
        plain = table.reset_index()
        plain = plain.astype({name: str for name in by})
        plain = plain.sort_values("gpu_total_ns", ascending=False, kind="stable", ignore_index=True)
        if self.by_step:
            plain["step"] = self.numbers(plain["step"].to_numpy())
        return self.finished(plain)

    def finished(self, table: pd.DataFrame) -> pd.DataFrame:
        """The table with its steps in order, or without the column."""
        if not self.by_step:
            plain: pd.DataFrame = table.drop(columns=["step"], errors="ignore")
            return plain
        made: pd.DataFrame = table.astype({"step": "Int64"}).sort_values("step", kind="stable", ignore_index=True)
        return made
