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
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

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


@dataclass(frozen=True)
class Noise:
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


def within(noise: float) -> str:
    """Where 95 % of the changes between two runs of one program lie, given the noise of a run."""
    factor = math.exp(1.96 * math.sqrt(2) * noise)
    return f"within a factor of {factor:.1f}" if factor > 1.5 else f"within ±{100 * (factor - 1):.1f} %"


@dataclass(frozen=True)
class Effects:
    """The change of each row, arrays of shape ``(rows,)``.

    Attributes:
        base, new: Time per step of each side: the geometric mean, the mean for a row that some step lacks.
        change: ``new / base - 1``, NaN where base is 0.
        low, high: The 95 % interval of `change`; NaN where the samples do not bound it, or a side lacks the row.
        at_most: What `change` lies below with 95 %.
        p: Of the change being none.
        error: Standard error of the change, in the same relative unit; NaN as `change` is.
        df: Its degrees of freedom.
        widening: The factor by which the error was widened because equal layers disagree; 1.0 if they do not.
        stalled: For each run, BASE's first, the step in which each row stalled and which is not counted, or -1.
    """

    base: Floats
    new: Floats
    change: Floats
    low: Floats
    high: Floats
    at_most: Floats
    p: Floats
    error: Floats
    df: Floats
    widening: float
    stalled: tuple[npt.NDArray[np.int64], ...]


@dataclass(frozen=True)
class _Run:
    """A run's level by row, the variance of that level estimated from its steps, its degrees of freedom, and the step
    that is not counted, or -1.
    """

    level: Floats
    variance: Floats
    df: Floats
    stalled: npt.NDArray[np.int64]


def effects(
    base: Sequence[Floats], new: Sequence[Floats], equals: npt.NDArray[np.int64], run_noise: float, widen: bool = True
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

    logs = np.logical_and.reduce([(run > 0).all(axis=1) for run in (*base, *new)])
    before, after = ([_run(run, logs, equals) for run in side] for side in (base, new))
    estimate = [np.mean([run.level for run in side], axis=0) for side in (before, after)]
    scale = np.where(logs | (estimate[0] <= 0), 1.0, estimate[0])
    effect = (estimate[1] - estimate[0]) / scale
    floor = [np.where(logs, 1.0, level / scale) ** 2 * run_noise**2 for level in estimate]
    variance, df = _variance(before, after, floor, scale, logs)
    widening = _widening(effect, variance, equals, logs) if widen else 1.0
    error = np.sqrt(variance) * widening
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(effect == 0, 0.0, np.abs(effect) / error)
    half, one_sided = stats.t.ppf(0.975, df) * error, stats.t.ppf(0.95, df) * error
    is_known, both = logs | (estimate[0] > 0), logs | ((estimate[0] > 0) & (estimate[1] > 0))
    change = _relative(effect, logs, is_known)
    low, high, at_most = (_relative(effect + by, logs, both) for by in (-half, half, one_sided))
    base_time, new_time = (np.where(logs, np.exp(np.where(logs, level, 0.0)), level) for level in estimate)
    # a stall of NEW may come back in each run, which is a slowdown and few steps cannot tell: count it in the bound
    rows = np.flatnonzero(np.logical_or.reduce([run.stalled >= 0 for run in after]))
    base_mean, new_mean = (np.mean([run[rows].mean(axis=1) for run in side], axis=0) for side in (base, new))
    at_most[rows] = np.fmax(at_most[rows], new_mean / base_mean - 1)
    return Effects(
        base_time,
        new_time,
        change,
        low,
        high,
        at_most,
        np.asarray(2 * stats.t.sf(t, df)),
        np.where(np.isfinite(error) & is_known, error, np.nan),
        df,
        widening,
        tuple(run.stalled for run in (*before, *after)),
    )


def _relative(value: Floats, logs: npt.NDArray[np.bool_], is_known: npt.NDArray[np.bool_]) -> Floats:
    with np.errstate(over="ignore"):
        relative = np.where(logs, np.expm1(np.where(logs, value, 0.0)), value)
    return np.where(is_known & np.isfinite(relative) & np.isfinite(value), relative, np.nan)


def _run(times: Floats, logs: npt.NDArray[np.bool_], equals: npt.NDArray[np.int64]) -> _Run:
    import pandas as pd

    count = times.shape[1]
    cut = int(TRIM * count)
    level, variance = _mean(times, 0)
    stalled = np.full(len(times), -1, dtype=np.int64)
    if logs.any():
        values = np.log(times[logs])
        if not cut and count >= STALL_STEPS:
            off = values - np.median(values, axis=1, keepdims=True)
            longest, other_steps = off.max(axis=1), np.sort(np.abs(off), axis=1)[:, -2]
            is_stalled = (longest > STALL) & (longest > STALL_RATIO * other_steps)
            stalled[logs] = np.where(is_stalled, off.argmax(axis=1), -1)
        level[logs], variance[logs] = _mean(values, cut)
        rows = np.flatnonzero(stalled >= 0)
        if len(rows):
            included = np.arange(count) != stalled[rows, None]
            level[rows], variance[rows] = _mean(np.log(times[rows][included].reshape(len(rows), count - 1)), 0)
        of_equals = pd.Series(variance[logs]).groupby(equals[logs])
        variance[logs] = np.maximum(variance[logs], of_equals.transform("median").to_numpy(dtype=np.float64))
    return _Run(level, variance, np.maximum(count - 2 * cut - 1.0 - (stalled >= 0), 1), stalled)


def _mean(values: Floats, cut: int) -> tuple[Floats, Floats]:
    """The trimmed mean of each row and its variance (Yuen 1974); without a cut the mean and its variance."""
    count = values.shape[1]
    ordered = np.sort(values, axis=1)
    included = ordered[:, cut : count - cut]
    if count < 2:
        return included.mean(axis=1), np.full(len(values), np.inf)
    clipped = np.clip(values, included[:, :1], included[:, -1:])
    left = included.shape[1]
    return included.mean(axis=1), clipped.var(axis=1, ddof=1) * (count - 1) / (left * (left - 1))


def _variance(
    before: list[_Run], after: list[_Run], floor: list[Floats], scale: Floats, logs: npt.NDArray[np.bool_]
) -> tuple[Floats, Floats]:
    """The variance of each row's effect and its degrees of freedom."""
    sides = list(zip((before, after), floor, strict=True))
    steps = [
        (run.variance / scale**2 / len(side) ** 2, run.df) for side, _ in sides for run in side
    ]  # what each run's steps add
    minimum = sum(variance for variance, _ in steps) + sum(low / len(side) for side, low in sides)
    with np.errstate(divide="ignore", invalid="ignore"):
        df = minimum**2 / sum(variance**2 / free for variance, free in steps)
    df = np.clip(np.nan_to_num(df, nan=1.0, posinf=_KNOWN), 1.0, _KNOWN)
    df = np.where(np.isfinite(minimum), df, 1.0)
    free = len(before) + len(after) - 2
    if not free:
        return np.asarray(minimum), df
    squares = sum(
        ((levels - levels.mean(axis=0)) ** 2).sum(axis=0)
        for levels in (np.array([run.level for run in side]) / scale for side, _ in sides)
    )
    shares = 1 / len(before) + 1 / len(after)
    between, moderated = _moderated(np.asarray(squares) / free, np.asarray(minimum) / shares, free, logs)
    seen = between * shares
    return np.maximum(minimum, seen), np.where(seen > minimum, np.minimum(moderated, _KNOWN), df)


def _moderated(variance: Floats, floor: Floats, free: int, logs: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Variances of few runs shrunk toward those of the other rows, and their degrees of freedom (Smyth 2004); with too
    few rows, toward the floor.
    """
    from scipy import optimize, special

    used = logs & (variance > 0)
    own_df = np.full(len(variance), float(_FLOOR_DF + free))
    to_floor = (_FLOOR_DF * np.where(np.isfinite(floor), floor, variance) + free * variance) / (_FLOOR_DF + free)
    if int(used.sum()) < _MODERATED:
        return to_floor, own_df
    z = np.log(variance[used]) - special.digamma(free / 2) + np.log(free / 2)
    spread = float(z.var(ddof=1)) - float(special.polygamma(1, free / 2))
    maximum = float(special.polygamma(1, _KNOWN / 2))
    prior = _KNOWN
    if spread > maximum:
        prior = 2 * optimize.brentq(lambda x: float(special.polygamma(1, x)) - spread, 1e-3, _KNOWN)
    prior_variance = np.exp(z.mean() + special.digamma(prior / 2) - np.log(prior / 2))
    drawn = (prior * prior_variance + free * variance) / (prior + free)
    return np.where(used, drawn, to_floor), np.where(used, prior + free, own_df)


def _widening(effect: Floats, variance: Floats, equals: npt.NDArray[np.int64], logs: npt.NDArray[np.bool_]) -> float:
    """How many times more equal layers disagree about the change than its error predicts; 1.0 where that is chance."""
    import pandas as pd

    rows = pd.DataFrame({"group": equals, "effect": effect, "error": np.sqrt(variance)})[logs & np.isfinite(variance)]
    rows = rows[(rows["error"] > 0) & (rows.groupby("group")["effect"].transform("size") >= _EQUALS)]
    if len(rows) < _RESIDUALS:
        return 1.0
    off = (rows["effect"] - rows.groupby("group")["effect"].transform("median")).abs() / rows["error"]
    ratio = _MAD_TO_SIGMA * float(off.median())
    return min(ratio, MOST_WIDENING) if ratio > 1 + 2 * _MAD_ERROR / np.sqrt(len(rows)) else 1.0
