"""What the views of a summary are made from, each thing computed once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.nesting import NONE, Int64Array
from nvprof_kit._analysis.attribution.operations import Operations
from nvprof_kit._analysis.attribution.ranges import Elsewhere, steps_around
from nvprof_kit._analysis.attribution.steps import StepOptions
from nvprof_kit._analysis.attribution.warm_up import StepChoice, choose_steps
from nvprof_kit._analysis.attribution.windows import Windows, step_windows
from nvprof_kit._analysis.breakdown.activity import STATES, Activity, activity
from nvprof_kit._analysis.breakdown.host import HostCalls
from nvprof_kit._analysis.kernels.classes import Rule
from nvprof_kit._trace.schema import Trace

if TYPE_CHECKING:
    import pandas as pd

_STATISTICS: dict[str, Any] = {"total": "sum", "avg": "mean", "max": "max", "min": "min", "p50": 0.5, "p95": 0.95}


class Facts(Operations):
    """A capture and what was found out about it.

    Args:
        trace: The capture.
        own_rules: Rules for kernel classes, asked before the package's.
        by_step: Whether views tell steps apart.
        steps: Which steps to look at.
        known: The same operations, where owners and classes are known already.
    """

    def __init__(
        self,
        trace: Trace,
        own_rules: Sequence[Rule],
        by_step: bool,
        steps: StepOptions,
        known: Operations | None = None,
    ) -> None:
        super().__init__(trace, own_rules, known)
        self.by_step, self._steps = by_step, steps

    @cached_property
    def choice(self) -> StepChoice:
        """The steps that were asked for."""
        return choose_steps(self.trace, self.attribution, self._steps)

    @cached_property
    def _of_instance(self) -> npt.NDArray[np.bool_]:
        """Whether each instance of a step counts, and behind the last what lies outside steps."""
        if self.choice.asked:
            return np.append(self.choice.shown, False)
        return np.ones(len(self.choice.shown) + 1, dtype=bool)

    @cached_property
    def counted(self) -> npt.NDArray[np.bool_]:
        """Which operations count: those of the steps asked for, by default all, shape ``(n,)``."""
        found: npt.NDArray[np.bool_] = self._of_instance[self.attribution.step]
        return found

    def counted_ranges(self, ranges: Int64Array) -> Int64Array:
        """Those of some ranges that count."""
        if not self.choice.asked:
            return ranges
        found: Int64Array = ranges[self._of_instance[steps_around(self.attribution.ranges, ranges)]]
        return found

    def counted_calls(self, calls: Int64Array) -> Int64Array:
        """Those of some calls of the host that count."""
        if not self.choice.asked:
            return calls
        found: Int64Array = calls[self._of_instance[self.step_of_calls(calls)]]
        return found

    @property
    def counted_windows(self) -> Int64Array:
        """The windows that count."""
        return np.flatnonzero(self._of_instance[self.windows.instance])

    @property
    def wall_ns(self) -> int:
        """Length of these windows, summed over devices; never 0."""
        windows = self.counted_windows
        return max(int((self.windows.end - self.windows.start)[windows].sum()), 1)

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
        """Sum of the durations of the operations that count."""
        return int(self.duration[self.counted].sum())

    @property
    def step_columns(self) -> list[str]:
        """``step``, the instance of a step, where views tell steps apart."""
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

    def states(self, by: Sequence[str]) -> pd.DataFrame:
        """The time in each state, summed by these columns (and step)."""
        import pandas as pd

        devices = [self.windows.devices[one] for one in self.windows.device.tolist()]
        frame = pd.DataFrame(
            {
                "step": self.windows.instance,
                "process": [one.process for one in devices],
                "device": [one.device for one in devices],
                "wall_ns": self.windows.end - self.windows.start,
                **{f"{state}_ns": self.active.spent[:, place] for place, state in enumerate(STATES)},
                "comm_ns": self.active.comm,
                "copy_ns": self.active.copy,
            }
        )
        frame = frame.iloc[self.counted_windows]
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
        made: pd.DataFrame = plain
        return made

    def finished(self, table: pd.DataFrame) -> pd.DataFrame:
        """A view's table, whose column ``step`` is the instance of a step, by instance, what lies outside steps last,
        with the numbers of the steps beside it; or without the column.
        """
        import pandas as pd

        if not self.by_step:
            plain: pd.DataFrame = table.drop(columns=["step"], errors="ignore")
            return plain
        instance, steps = table["step"].to_numpy().astype(np.int64), self.attribution.ranges.steps
        order = np.argsort(np.where(instance < 0, len(steps), instance), kind="stable")
        instance = instance[order]
        made: pd.DataFrame = table.iloc[order].reset_index(drop=True).drop(columns="step")
        numbers = np.append(steps, 0)[instance]
        for place, (name, values) in enumerate({"step": numbers, "instance": instance}.items()):
            made.insert(place, name, pd.Series(values, dtype="Int64").mask(instance < 0))
        return made
