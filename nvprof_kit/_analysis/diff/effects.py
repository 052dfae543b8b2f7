"""How much longer each row takes in NEW than in BASE, and how sure that is: an effect model with power for few steps.

The model, on the logarithm of the times: a run has its own level (clocks, temperature, where memory lies), and its
steps vary about that. So the run is the sampling unit. The standard error of a change has two parts:

- steps: each run's variance from step to step, but not below the median of its equals (the layers that differ only in
  their number), so that four steps that happen to agree prove nothing (Welch's t, Satterthwaite's degrees of freedom);
- runs: where a side has several runs, the variance of the runs' means about their side, moderated over the rows as
  limma does (Smyth 2004, doi:10.2202/1544-6115.1027), and never below the floor; with one run a side, the floor alone.

Where equal layers disagree about the change by more than that error predicts, it is widened until they fit (Birge's
ratio). A row that does not run in every step has no logarithm and is compared by its mean in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.intervals import Bools, Floats, Int64Array

TRIM = 0.1
"""Share of steps trimmed at each end of a run's mean, from ten steps on: one stalled step must not shift it."""

MOST_WIDENING = 3.0
"""The largest factor: beyond it, equal layers disagree because some of them changed, not because of noise."""

STALL, STALL_RATIO, STALL_STEPS = 0.05, 3.0, 4
"""A row stalled in a step that is more than 5 % above the row's median, and more than three times as far from it as any
other step. That step is not counted: one of four would leave every row undecided. Needs four steps; trimmed means need
no such rule.
"""

RUN_NOISE = 0.0075
"""Least relative standard deviation from run to run of GPU time, where several runs a side measure it."""

ASSUMED_NOISE = 0.02
"""The same where a side has one run: 95 % of changes are within ±5.7 %. Of 73 pairs of equal programs on H100s, the
layer that differed most differed by 5.0 % (``docs/diff.md``).
"""

HOST_RUN_NOISE = 0.25
"""The least of the time in which the GPU waits for the host, where several runs a side measure it: a host drifts, so
that runs taken one after the other agree better than those of another hour. Ten runs of one eager program of which the
GPU was idle for 60 % of a step had steps of 16.7 to 25.8 ms, 15 % of standard deviation (``docs/diff.md``).
"""

HOST_NOISE = 0.4
"""Assumed relative standard deviation from run to run of time that depends on the host: CPU time, and the part of a
step in which the GPU waits. 95 % of changes are within a factor of 3. Step times of the same 73 pairs, with the GPU
idle for most of a step, differed by up to 42 % on quiet hosts; on a loaded one, by a factor of 2.2.
"""


_EQUALS, _RESIDUALS, _MODERATED = 4, 8, 10
_FLOOR_DF = 4
_KNOWN = 1e6
_MAD_TO_SIGMA = 1.4826
_MAD_ERROR = 1.167  # standard error of MAD over sigma, times the root of the number of values


class Noise(NamedTuple):
    """How much runs of one program differ, as relative standard deviations of a run.

    Attributes:
        operations: Of the time of operations.
        step: Of the step time.
        assumed: Whether a side has one run, so that the captures cannot show it.
    """

    operations: float
    step: float
    assumed: bool

    @classmethod
    def between(cls, runs: int, idle: float, on_gpu: bool, run_noise: float | None) -> Noise:
        """The least noise where several runs a side measure it; where they do not, what is assumed.

        Args:
            runs: How many a side has, the fewer of both.
            idle: Share of the step time in which the GPU waits for the host.
            on_gpu: Whether the operations ran on a GPU, and not on the CPU.
            run_noise: The noise of GPU time, if the user knows it.
        """
        if runs > 1:
            minimum = RUN_NOISE if run_noise is None else run_noise
            return cls(minimum, max(minimum, HOST_RUN_NOISE * idle), assumed=False)
        operations = HOST_NOISE if not on_gpu else ASSUMED_NOISE if run_noise is None else run_noise
        return cls(operations, max(operations, HOST_NOISE * idle), assumed=True)


def is_within(noise: float, ratio: float) -> bool:
    """Whether two runs of one program can differ by a factor, given the noise of a run: 95 % do not differ by more."""
    return abs(math.log(max(ratio, 1e-9))) < 1.96 * math.sqrt(2) * noise


def within(noise: float) -> str:
    """Where 95 % of the changes between two runs of one program lie, given the noise of a run."""
    factor = math.exp(1.96 * math.sqrt(2) * noise)
    return f"within a factor of {factor:.1f}" if factor > 1.5 else f"within ±{100 * (factor - 1):.1f} %"


class Effects(NamedTuple):
    """The changes of all rows.

    Attributes:
        rows: Columns ``base`` and ``new``, the time per step of each side: the geometric mean, or the mean of a row
            that some step lacks; ``change``, NaN where BASE lacks the row; ``low`` and ``high``, its 95 % interval, and
            ``at_most``, below which it lies with 95 %, NaN where the samples do not bound it or a side lacks the row;
            ``p`` of no change; ``error``, the standard error of `change`, and its degrees of freedom ``df``.
        widening: The factor by which the errors were widened because equal layers disagree; 1.0 if they do not.
        stalled: For each run, BASE's first, the step in which each row stalled and which is not counted, or -1.
    """

    rows: pd.DataFrame
    widening: float
    stalled: tuple[Int64Array, ...]


class _Run(NamedTuple):
    """A run's level by row, the variance of that level estimated from its steps, its degrees of freedom, and the step
    that is not counted, or -1.
    """

    level: Floats
    variance: Floats
    df: Floats
    stalled: Int64Array


def effects(
    base: Sequence[Floats], new: Sequence[Floats], equals: Int64Array, run_noise: float, widen: bool = True
) -> Effects:
    """The change of each row.

    Args:
        base: The runs of BASE, each the times by row and step, shape ``(rows, its steps)``.
        new: The same of NEW, with the same rows.
        equals: Which rows are equal work: rows of one number, shape ``(rows,)``.
        run_noise: Least standard deviation from run to run, relative.
        widen: Whether `equals` are many layers, whose disagreement widens the error.
    """
    from scipy import stats

    # logarithms, or parts of the mean in BASE: changes of both are relative
    is_log = np.logical_and.reduce([(times > 0).all(axis=1) for times in (*base, *new)])
    mean = np.mean([times.mean(axis=1) for times in base], axis=0)
    scale = np.where(is_log | (mean == 0), 1.0, mean)
    runs = [
        _run(np.log(times, where=is_log[:, None], out=times / scale[:, None]), is_log, equals)
        for times in (*base, *new)
    ]
    sides = runs[: len(base)], runs[len(base) :]
    levels = [np.mean([run.level for run in side], axis=0) for side in sides]
    floors = [np.where(is_log, 1.0, level) ** 2 / len(side) for level, side in zip(levels, sides, strict=True)]
    variance, df = _variance(sides, run_noise**2 * (floors[0] + floors[1]), is_log)
    effect = levels[1] - levels[0]
    widening = _widening(effect, variance, equals, is_log) if widen else 1.0
    error = np.sqrt(variance) * widening
    base_time, new_time = (np.where(is_log, np.exp(np.where(is_log, level, 0.0)), level * scale) for level in levels)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(effect == 0, 0.0, np.abs(effect) / error)

    def relative(by: Floats | float, is_known: Bools) -> Floats:
        with np.errstate(over="ignore"):
            change = np.where(is_log, np.expm1(effect + by), effect + by)
        return np.where(is_known & np.isfinite(by) & np.isfinite(change), change, np.nan)

    in_base, in_both = base_time > 0, (base_time > 0) & (new_time > 0)
    half = stats.t.ppf(0.975, df) * error
    at_most = relative(stats.t.ppf(0.95, df) * error, in_both)
    # a stall of NEW may come back in each run, which is a slowdown and few steps cannot tell: count it in the bound
    rows = np.flatnonzero(np.logical_or.reduce([run.stalled >= 0 for run in sides[1]]))
    base_mean, new_mean = (np.mean([times[rows].mean(axis=1) for times in side], axis=0) for side in (base, new))
    at_most[rows] = np.fmax(at_most[rows], new_mean / base_mean - 1)
    table = pd.DataFrame(
        {
            "base": base_time,
            "new": new_time,
            "change": np.maximum(relative(0.0, in_base), -1.0),  # of a row that is gone but for rounding
            "low": relative(-half, in_both),
            "high": relative(half, in_both),
            "at_most": at_most,
            "p": 2 * stats.t.sf(t, df),
            "error": np.where(np.isfinite(error) & in_base, error, np.nan),
            "df": df,
        }
    )
    return Effects(table, widening, tuple(run.stalled for run in runs))


def _run(values: Floats, is_log: Bools, equals: Int64Array) -> _Run:
    """A run, of the logarithms of its times or of its times, by row and step. A mean over few steps leaves out the one
    in which its row stalled, one over many steps is trimmed, and its variance then that of Yuen (1974).
    """
    from scipy import stats

    count = values.shape[1]
    cut = int(TRIM * count)
    level, spread = values.mean(axis=1), values
    stalled = np.full(len(values), -1, dtype=np.int64)
    if cut:
        low, high = np.sort(values, axis=1)[:, [cut, count - 1 - cut]].T[:, :, None]
        level = np.where(is_log, stats.trim_mean(values, TRIM, axis=1), level)
        spread = np.where(is_log[:, None], np.clip(values, low, high), values)
    elif count >= STALL_STEPS:
        off = values - np.median(values, axis=1, keepdims=True)
        longest, other_steps = off.max(axis=1), np.sort(np.abs(off), axis=1)[:, -2]
        is_stalled = is_log & (longest > STALL) & (longest > STALL_RATIO * other_steps)
        stalled[is_stalled] = off[is_stalled].argmax(axis=1)
        is_left_out = np.arange(count) == stalled[:, None]
        level = values.mean(axis=1, where=~is_left_out)
        spread = np.where(is_left_out, level[:, None], values)
    included = count - np.where(is_log, 2 * cut, 0) - (stalled >= 0)
    squares = count * spread.var(axis=1)
    variance = np.divide(squares, included * (included - 1), where=included > 1, out=np.full(len(values), np.inf))
    median = pd.Series(variance).groupby(np.where(is_log, equals, -1)).transform("median").to_numpy()
    variance = np.where(is_log, np.maximum(variance, median), variance)
    return _Run(level, variance, np.maximum(included - 1.0, 1), stalled)


def _variance(sides: tuple[list[_Run], list[_Run]], floor: Floats, is_log: Bools) -> tuple[Floats, Floats]:
    """The variance of each row's effect and its degrees of freedom, of steps and runs."""
    steps = [(run.variance / len(side) ** 2, run.df) for side in sides for run in side]  # what each run's steps add
    minimum = sum(variance for variance, _ in steps) + floor
    with np.errstate(divide="ignore", invalid="ignore"):
        df = minimum**2 / sum(variance**2 / free for variance, free in steps)
    df = np.where(np.isfinite(minimum), np.clip(np.nan_to_num(df, nan=1.0, posinf=_KNOWN), 1.0, _KNOWN), 1.0)
    free = len(sides[0]) + len(sides[1]) - 2
    if not free:
        return minimum, df
    between = sum(len(side) * np.var([run.level for run in side], axis=0) for side in sides) / free
    shares = 1 / len(sides[0]) + 1 / len(sides[1])
    between, between_df = _moderated(between, minimum / shares, free, is_log)
    is_above = between * shares > minimum
    return np.maximum(minimum, between * shares), np.where(is_above, np.minimum(between_df, _KNOWN), df)


def _moderated(variance: Floats, floor: Floats, free: int, is_log: Bools) -> tuple[Floats, Floats]:
    """Variances of few runs shrunk toward those of the other rows, and their degrees of freedom (Smyth 2004); with too
    few rows, toward the floor.
    """
    from scipy import optimize, special

    to_floor = (_FLOOR_DF * np.where(np.isfinite(floor), floor, variance) + free * variance) / (_FLOOR_DF + free)
    to_floor_df = np.full(len(variance), float(_FLOOR_DF + free))
    is_used = is_log & (variance > 0)
    if int(is_used.sum()) < _MODERATED:
        return to_floor, to_floor_df
    z = np.log(variance[is_used]) - special.digamma(free / 2) + np.log(free / 2)
    spread = float(z.var(ddof=1)) - float(special.polygamma(1, free / 2))
    prior = _KNOWN
    if spread > float(special.polygamma(1, _KNOWN / 2)):
        prior = 2 * optimize.brentq(lambda x: float(special.polygamma(1, x)) - spread, 1e-3, _KNOWN)
    prior_variance = np.exp(z.mean() + special.digamma(prior / 2) - np.log(prior / 2))
    to_others = (prior * prior_variance + free * variance) / (prior + free)
    return np.where(is_used, to_others, to_floor), np.where(is_used, prior + free, to_floor_df)


def _widening(effect: Floats, variance: Floats, equals: Int64Array, is_log: Bools) -> float:
    """How many times more equal layers disagree about the change than its error predicts; 1.0 where that is chance."""
    rows = pd.DataFrame({"equals": equals, "effect": effect, "error": np.sqrt(variance)})
    rows = rows[is_log & np.isfinite(variance) & (variance > 0)]
    effect_of_equals = rows.groupby("equals")["effect"]
    off = (rows["effect"] - effect_of_equals.transform("median")).abs() / rows["error"]
    off = off[effect_of_equals.transform("size") >= _EQUALS]
    ratio = _MAD_TO_SIGMA * float(off.median())
    is_chance = len(off) < _RESIDUALS or ratio <= 1 + 2 * _MAD_ERROR / np.sqrt(len(off))
    return 1.0 if is_chance else min(ratio, MOST_WIDENING)
