"""Gates: how much slower a step, a phase, a layer or a kernel class may become: ``step:+5%``, ``phase:backward:+5%``,
``model.layers.*:+10%``, ``model.layers.* backward:+10%``.
"""

from __future__ import annotations

import fnmatch
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.attribution.intervals import Floats
    from nvprof_kit._analysis.diff.effects import Noise

_FORM = re.compile(r"(?:(?P<level>phase|class):)?(?P<target>.+):\+(?P<percent>\d+(?:\.\d+)?)%")
ONE_SIDED = 1.645 * math.sqrt(2)
"""How far 95 % of the changes between two runs lie below, in standard deviations of one run."""


@dataclass(frozen=True)
class Gate:
    """A limit on a relative change.

    Attributes:
        text: The gate as given.
        level: ``step``, ``phase``, ``class`` or ``layer``.
        target: What it limits: '' for the step; a phase; a kernel class; a glob pattern of layers, with or without a
            phase.
        limit: The relative change at which it fails, 0.05 for 5 %.
    """

    text: str
    level: str
    target: str
    limit: float


@dataclass(frozen=True)
class GateOutcome:
    """The outcome of a gate.

    Attributes:
        gate: The gate.
        held: Whether it holds.
        reason: One sentence that says why.
        undecided: Whether the captures are too noisy to decide it.
    """

    gate: Gate
    held: bool
    reason: str
    undecided: bool = False


def parse_gate(text: str) -> Gate:
    """A gate from ``step:+5%``, ``phase:backward:+5%``, ``class:gemm:+5%``, ``LAYER:+5%`` or ``LAYER backward:+5%``,
    where LAYER may have ``*`` and ``?``.

    Raises:
        UsageError: The text has another form.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise UsageError.of("gate", text=text)
    level = match["level"] or ("step" if match["target"] == "step" else "layer")
    return Gate(text, level, "" if level == "step" else match["target"], float(match["percent"]) / 100)


def corrected(p: Floats) -> Floats:
    """The p values of tests made together, corrected for their number (Benjamini-Hochberg)."""
    from scipy import stats

    p_values: Floats = stats.false_discovery_control(p)
    return p_values


LEVEL, NOISE, NEGLIGIBLE = 0.05, 0.01, 0.001
"""The probability of reporting a change where there is none; the relative change below which none is reported; and the
share of the step's time below which a possible loss is never undecided.
"""


def judge(gate: Gate, rows: pd.DataFrame, assumed: Noise | None, allow_undecided: bool = False) -> GateOutcome:
    """Whether a gate holds. It fails if a row became slower by the limit or more, beyond the noise; only the rows that
    the gate names are tested, so p is corrected for their number. It also fails if the captures cannot rule out such a
    slowdown: the upper bound (95 %) of a row reaches the limit, or a row is gone while NEW has others that may be the
    same work under another name.

    Args:
        gate: The gate.
        rows: `nvprof_kit._analysis.diff.diff.Diff.rows`.
        assumed: The noise between runs where it is assumed; a change within it holds.
        allow_undecided: Whether a gate that the captures cannot decide counts as held.

    Raises:
        UsageError: It limits nothing that either capture has.
    """
    rows_of_gate = rows[rows["level"] == gate.level]
    if gate.level in ("phase", "class"):
        rows_of_gate = rows_of_gate[rows_of_gate["phase" if gate.level == "phase" else "kernel_class"] == gate.target]
    elif gate.level == "layer":
        pattern = re.compile(fnmatch.translate(gate.target))
        with_phase = rows_of_gate["layer"] + " " + rows_of_gate["phase"]
        rows_of_gate = rows_of_gate[rows_of_gate["layer"].str.match(pattern) | with_phase.str.match(pattern)]
    if not len(rows_of_gate):
        raise UsageError.of("gate:absent", text=gate.text, level=gate.level)
    is_significant: Any
    change, at_most, verdict = rows_of_gate["change"], rows_of_gate["at_most"], rows_of_gate["verdict"]
    if assumed:
        is_significant = verdict == "slower"
    else:
        is_significant = (corrected(rows_of_gate["p_alone"].to_numpy()) < LEVEL) & ~(change.abs() < NOISE)
    slower = rows_of_gate[((change >= gate.limit) & is_significant) | (verdict == "new")]
    if len(slower):
        row = slower.iloc[int(slower["change_ns"].argmax())]
        reason = f"{named(row)} {_change(row)}, the limit is +{100 * gate.limit:g} %"
        return GateOutcome(gate, False, reason + ", beyond the noise assumed for one run a side" * bool(assumed))
    step_ns = int(rows.loc[rows["level"] == "step", "base_ns"].iloc[0])
    is_undecided = ~(at_most < gate.limit) & (rows_of_gate["new_ns"] > 0)
    is_undecided &= ~(at_most * rows_of_gate["base_ns"] < NEGLIGIBLE * step_ns)
    if assumed:  # what the assumed noise alone leaves open holds; what the steps leave open does not
        noise = assumed.step if gate.level == "step" else assumed.operations
        is_undecided &= ~((1 + at_most) / (1 + change) <= math.exp(2 * ONE_SIDED * noise))
    if is_undecided.any():
        undecided = rows_of_gate[is_undecided]
        row = undecided.sort_values("at_most", ascending=False, kind="stable", na_position="first").iloc[0]
        bound = "bounded by nothing" if math.isnan(row["at_most"]) else f"at most {100 * row['at_most']:+.1f} %"
        reason = f"undecided: {named(row)} {_change(row)}, {bound}; capture more steps, or more runs of each"
        reason += f" ({len(undecided)} of {len(rows_of_gate)} rows)" if len(undecided) > 1 else ""
        return GateOutcome(gate, allow_undecided, reason, undecided=True)
    gone, new = rows_of_gate[verdict == "gone"], rows[(rows["level"] == gate.level) & (rows["verdict"] == "new")]
    if len(gone) and len(new):
        reason = f"undecided: {named(gone.iloc[0])} is gone, and {named(new.iloc[0])} is new and not in the gate"
        reason += f"; if it was renamed, name it so in both ({len(gone)} of {len(rows_of_gate)} rows are gone)"
        return GateOutcome(gate, allow_undecided, reason, undecided=True)
    row = rows_of_gate.sort_values("change", ascending=False, kind="stable").iloc[0]
    is_bound = bool(row["at_most"] < gate.limit)
    bound = f", at most {100 * row['at_most']:+.1f} %" if is_bound else ""
    bound = bound or (", within the noise assumed for one run a side" if assumed else "")
    reason = f"largest change {_change(row)} ({named(row)}){bound}"
    return GateOutcome(gate, True, reason, undecided=bool(assumed) and not is_bound)


def named(row: pd.Series) -> str:
    """What a row is about, as text."""
    level = row["level"]
    if level == "phase":
        return f"all {row['phase']}"
    return "step" if level == "step" else row["kernel_class"] if level == "class" else f"{row['layer']} {row['phase']}"


def _change(row: pd.Series) -> str:
    if row["verdict"] == "new":
        return "is new"
    return f"{100 * row['change']:+.1f} %" if row["base_ns"] else "+0.0 %"
