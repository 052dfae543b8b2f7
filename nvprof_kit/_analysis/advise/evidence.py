"""The data that the rules of `advise` examine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import union_lengths
from nvprof_kit._analysis.attribution.nesting import Int64Array
from nvprof_kit._analysis.attribution.operations import Operations, op_owners
from nvprof_kit._analysis.attribution.steps import ALL_STEPS, StepOptions
from nvprof_kit._analysis.attribution.warm_up import StepChoice, choose_steps
from nvprof_kit._analysis.attribution.windows import devices_of
from nvprof_kit._analysis.breakdown.breakdown import BreakdownResult, breakdown_of
from nvprof_kit._analysis.kernels.classes import Rule
from nvprof_kit._trace.schema import Trace

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.ranks.verdict import Verdict


_OF_TRAINING = ("backward", "recompute", "optimizer")


class Evidence(Operations):
    """A capture and what was derived from it; what several rules need is computed once.

    Args:
        trace: The capture, with `nvprof_kit._analysis.breakdown.breakdown.OPTIONAL`.
        own_rules: Rules for kernel classes, tried before the package's.
        steps: Which steps to look at, by default all but warm-up.
        known: The same operations, if their owners and classes are already known.
        late: The verdict on the captures of all ranks.
        times: The result of `nvprof_kit._analysis.breakdown.breakdown.breakdown` for these steps, if known.
    """

    def __init__(
        self,
        trace: Trace,
        own_rules: Sequence[Rule] = (),
        steps: StepOptions = ALL_STEPS,
        known: Operations | None = None,
        late: Verdict | None = None,
        *,
        times: BreakdownResult | None = None,
    ) -> None:
        super().__init__(trace, own_rules, known)
        self._steps, self._late, self._times = steps, late, times

    @property
    def waited_ns(self) -> int:
        """How long a rank waits for the slowest one in these steps; 0 without a verdict that names one."""
        named = self._late is not None and self._late.rank is not None
        return self._late.cost_ns_per_step * max(self.choice.count, 1) if named and self._late is not None else 0

    @cached_property
    def choice(self) -> StepChoice:
        """The steps to look at: those requested, or all but warm-up."""
        return choose_steps(self.trace, self.attribution, self._steps)

    @cached_property
    def times(self) -> BreakdownResult:
        """Where the time goes."""
        if self._times is not None:
            return self._times
        return breakdown_of(self.trace, self.attribution, self.classes, self.choice)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """The rows of the steps, without warm-up; all of the capture if it has no steps."""
        rows = self.times.steps
        inside: pd.DataFrame = rows[np.append(self.choice.shown, False)[self.times.instances]]
        return inside if len(inside) else rows

    @cached_property
    def wall_ns(self) -> int:
        """Wall time of the steps and of the waits for data between them, summed over devices; never 0."""
        return max(int(self.steps["wall_ns"].sum()) + self.loading_ns - self.idle_ns("dataloader"), 1)

    @cached_property
    def loading_ns(self) -> int:
        """Idle time inside the data loader's ranges, in the steps and between them: loops wait in either place."""
        rows = self.times.steps
        return int(rows["idle_dataloader_ns"][(self.times.instances < 0) | rows.index.isin(self.steps.index)].sum())

    @cached_property
    def inside(self) -> npt.NDArray[np.bool_]:
        """Which operations belong to these steps; all of them if the capture has no steps, shape ``(n,)``."""
        return self.choice.of_ops(self.attribution)

    @cached_property
    def ops(self) -> pd.DataFrame:
        """A row per operation: layer, phase, code (of its kernel class), kind, start_ns, end_ns, ns."""
        import pandas as pd

        layer, phase = op_owners(self.attribution)
        start, end = self.trace.ops["start_ns"].to_numpy(), self.trace.ops["end_ns"].to_numpy()
        made: pd.DataFrame = pd.DataFrame(
            {
                "layer": layer,
                "phase": phase,
                "code": self.classes.code,
                "kind": self.trace.ops["kind"].to_numpy(),
                "start_ns": start,
                "end_ns": end,
                "ns": end - start,
            },
            copy=False,
        )
        return made

    @cached_property
    def trains(self) -> bool:
        """Whether the capture is of training: it has backward work or an optimizer."""
        return bool(self.ops["phase"][self.inside].isin(_OF_TRAINING).any()) or bool(
            self.classes.is_a("optimizer")[self.inside].any()
        )

    @property
    def per_step(self) -> str:
        """`` per step`` to append to a number, '' if the capture has no steps."""
        return " per step" if self.choice.count else ""

    def idle(self, *causes: str) -> pd.DataFrame:
        """Idle time of these causes by place, largest first."""
        rows = self.times.idle
        made: pd.DataFrame = rows[rows["cause"].isin(causes)]
        return made

    def idle_ns(self, *causes: str) -> int:
        """Idle time of these causes in the steps."""
        return int(sum(self.steps[f"idle_{cause}_ns"].sum() for cause in causes))

    def busy_ns(self, rows: Int64Array) -> int:
        """Wall time in which any of these operations runs, summed over devices: the most that their removal saves."""
        start, end = (self.ops[name].to_numpy()[rows] for name in ("start_ns", "end_ns"))
        lane = devices_of(self.trace)[1][rows]
        return int(union_lengths(start, end, lane, np.zeros(len(rows), dtype=np.int64), 1)[0])

    def longest(self, rows: Int64Array) -> tuple[int, int]:
        """Start and end of the longest of these operations."""
        one = rows[np.argmax(self.ops["ns"].to_numpy()[rows])]
        return int(self.ops["start_ns"].iloc[one]), int(self.ops["end_ns"].iloc[one])


def ms(ns: float) -> str:
    """A time as text."""
    return f"{ns / 1e6:.3f} ms"


def share(part: float, whole: float) -> str:
    """A share as text."""
    return f"{100 * part / max(whole, 1):.1f} %"
