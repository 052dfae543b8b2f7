"""Gates: how much slower a step, a phase, a layer or a kernel class may become: ``step:+5%``, ``phase:backward:+5%``,
``model.layers.*:+10%``, ``model.layers.* backward:+10%``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

_FORM = re.compile(r"(?P<target>.+):\+(?P<percent>\d+(?:\.\d+)?)%")
_COLUMN = {"phase": "phase", "class": "kernel_class"}


@dataclass(frozen=True)
class Gate:
    """A limit.

    Attributes:
        text: As it was given.
        level: ``step``, ``phase``, ``class`` or ``layer``.
        target: What it limits: '' for the step, a phase, a class, or a pattern of layers, also with their phase.
        limit: The relative change that fails, 0.05 for 5 %.
    """

    text: str
    level: str
    target: str
    limit: float


@dataclass(frozen=True)
class GateOutcome:
    """What became of a gate: whether it held, and the sentence that says why."""

    gate: Gate
    held: bool
    reason: str


def parse_gate(text: str) -> Gate:
    """A gate from ``step:+5%``, ``phase:backward:+5%``, ``class:gemm:+5%``, ``LAYER:+5%`` or ``LAYER backward:+5%``,
    where LAYER may have ``*`` and ``?``.

    Raises:
        UsageError: The text has another form.
    """
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise UsageError(
            f"--fail-on {text!r}: needed TARGET:+N%, like step:+5%, phase:backward:+5%, class:gemm:+5%, "
            "model.layers.*:+10% or 'model.layers.* backward:+10%'"
        )
    target, limit = found["target"], float(found["percent"]) / 100
    if target == "step":
        return Gate(text, "step", "", limit)
    for level in ("phase", "class"):
        if target.startswith(f"{level}:"):
            return Gate(text, level, target.removeprefix(f"{level}:"), limit)
    return Gate(text, "layer", target, limit)


def corrected(p: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The p of questions that are asked together, corrected for their number (Benjamini-Hochberg)."""
    from scipy import stats

    found: npt.NDArray[np.float64] = stats.false_discovery_control(p)
    return found


def judge(gate: Gate, rows: pd.DataFrame, level: float, noise: float) -> GateOutcome:
    """Whether a gate holds; it fails where something became slower by the limit, beyond step-to-step variation. That is
    asked of the rows it names alone, so p is corrected for their number.

    Args:
        gate: The gate.
        rows: `nvprof_kit.analysis.diff.diff.DiffResult.rows`.
        level: As in `nvprof_kit.analysis.diff.diff.DiffOptions`.
        noise: The same.

    Raises:
        UsageError: It limits nothing that either capture has.
    """
    mine = rows[rows["level"] == gate.level]
    if gate.level in _COLUMN:
        mine = mine[mine[_COLUMN[gate.level]] == gate.target]
    elif gate.level == "layer":
        texts = zip(mine["layer"], mine["layer"] + " " + mine["phase"], strict=True)
        mine = mine[[any(fnmatchcase(text, gate.target) for text in pair) for pair in texts]]
    if not len(mine):
        raise UsageError(f"--fail-on {gate.text!r}: neither capture has such a {gate.level}")
    mine = mine.assign(told=corrected(mine["p_alone"].to_numpy()) < level)
    grown = (mine["base_ns"] == 0) & (mine["new_ns"] > 0)
    over = mine[(mine["change"] >= gate.limit) | grown | (mine["verdict"] == "new")]
    slower = over[(over["told"] & ~(over["change"] < noise)) | (over["verdict"] == "new")]
    if len(slower):
        worst = slower.sort_values("change_ns", ascending=False, kind="stable").iloc[0]
        return GateOutcome(gate, False, f"{named(worst)} {_change(worst)}, the limit is +{100 * gate.limit:g} %")
    if len(over):
        worst = over.sort_values("change_ns", ascending=False, kind="stable").iloc[0]
        alone = worst["p_alone"] < level
        why = f"too few steps to tell it among {len(mine)} rows" if alone else "within step-to-step variation"
        return GateOutcome(gate, True, f"{named(worst)} {_change(worst)}, but {why}")
    worst = mine.sort_values("change", ascending=False, kind="stable").iloc[0]
    return GateOutcome(gate, True, f"at most {_change(worst)} ({named(worst)})")


def named(row: pd.Series) -> str:
    """What a row is of, in words."""
    level = row["level"]
    if level == "phase":
        return f"all {row['phase']}"
    return "step" if level == "step" else row["kernel_class"] if level == "class" else f"{row['layer']} {row['phase']}"


def _change(row: pd.Series) -> str:
    if row["verdict"] == "new":
        return "is new"
    if row["base_ns"]:
        return f"{100 * row['change']:+.1f} %"
    return "ran in fewer than half of the steps before and runs in most now" if row["new_ns"] else "+0.0 %"
