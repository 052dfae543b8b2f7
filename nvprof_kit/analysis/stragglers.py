"""Which rank the others wait for.

A collective makes every rank as slow as the slowest, which itself waits least. In a stage that ends with one, the
culprit is the rank with the shortest time and the victim the upper median of the ranks. The gap between them is what
the culprit costs a step. The policy and its thresholds are TraceML's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pandas as pd

NOTABLE = 0.10
"""Share of the victim's step from which on a gap is worth a word."""

CRITICAL = 0.20
"""Share from which on it is critical, given `ENOUGH_STEPS`."""

ENOUGH_STEPS = 20
CAUSE_SHARE = 0.80
"""A stage is named as the cause where it explains so much of the gap."""

RECURS = 0.50
"""The same rank is to wait least in so many of the steps; else the slow rank rotates."""

_COLLECTIVE = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier|comm|sync", re.IGNORECASE)
_STEP = ("step", "iteration", "iter", "train_step", "training_step")


@dataclass(frozen=True)
class Verdict:
    """Which rank the others wait for, if any.

    Attributes:
        severity: ``none``, ``warning``, ``critical``, or ``unknown`` where it cannot be told.
        reason: One sentence.
        rank: The culprit.
        collective: The stages taken for ending with a collective.
        steps: Calls compared.
        gap_ns: What it costs the victim per step, mean.
        score: The gap over the victim's step.
        recurrence: Share of the steps in which this rank waited least.
        cause: The stage in which the culprit takes longer, where one explains the gap.
        cause_share: How much of the gap it explains.
    """

    severity: str
    reason: str
    rank: int | None = None
    collective: tuple[str, ...] = ()
    steps: int = 0
    gap_ns: int = 0
    score: float = 0.0
    recurrence: float = 0.0
    cause: str = ""
    cause_share: float = 0.0


def find_straggler(calls: pd.DataFrame, collective: tuple[str, ...] = (), warm_up: int = 1) -> Verdict:
    """Judge the ranks by the stages that end with a collective.

    Args:
        calls: Every stage run: columns rank, stage, call, cpu_ns, cuda_ns, depth.
        collective: Names of such stages; empty: those named after a collective, else ``backward``, in which DDP
            reduces gradients. For FSDP, which also gathers weights, name ``forward`` too: waiting is then spread
            over the step, and the verdict is a warning at most.
        warm_up: First calls of each stage to leave out.
    """
    if calls["rank"].nunique() < 2:
        return Verdict("unknown", "one rank has nobody to be compared with")
    names = [str(name) for name in calls["stage"].cat.categories]
    chosen = collective or tuple(name for name in names if _COLLECTIVE.search(name))
    chosen = chosen or tuple(name for name in names if name.lower() == "backward")
    if not set(chosen) & set(names):
        what = f"no stage is called {', '.join(chosen)}" if chosen else "no stage is known to end with a collective"
        return Verdict("unknown", f"{what}; name one of {', '.join(names)} with --collective")
    times = _shared_times(calls, warm_up)
    waits = times[[name for name in chosen if name in times]].sum(axis=1, min_count=1).unstack("rank").dropna()
    if waits.empty:
        return Verdict("unknown", "no call of the collective's stage is shared by all ranks after the warm-up")
    outermost = calls.groupby("stage", observed=True)["depth"].median() == 0
    return _judge(times, waits, chosen, [str(name) for name in outermost.index[outermost]])


def time_of(calls: pd.DataFrame) -> pd.Series[int]:
    """The time that ranks are compared by, in ns: the GPU's where every call has it, else the CPU's."""
    return calls["cpu_ns"] if calls["cuda_ns"].isna().any() else calls["cuda_ns"].astype("int64")


def _shared_times(calls: pd.DataFrame, warm_up: int) -> pd.DataFrame:
    """Time of each call: index (call, rank), a column for each stage."""
    timed = calls.assign(time_ns=time_of(calls))
    if timed["call"].max() >= warm_up:
        timed = timed[timed["call"] >= warm_up]
    times = timed.assign(stage=timed["stage"].astype(str)).set_index(["call", "rank", "stage"])["time_ns"]
    made: pd.DataFrame = times.unstack("stage")
    return made


def _judge(times: pd.DataFrame, waits: pd.DataFrame, chosen: tuple[str, ...], outermost: list[str]) -> Verdict:
    means = waits.mean().sort_values(kind="stable")
    culprit, victim = int(means.index[0]), int(means.index[len(means) // 2])
    gap = float(means.loc[victim] - means.loc[culprit])
    whole = _step_time(times, outermost, victim)
    score = gap / whole if whole else 0.0
    steps = len(waits)
    recurrence = float((waits.idxmin(axis=1) == culprit).mean())
    cause, share = _cause(times, chosen, culprit, gap)
    found = {
        "rank": culprit,
        "collective": chosen,
        "steps": steps,
        "gap_ns": round(gap),
        "score": score,
        "recurrence": recurrence,
    }
    waited = f"rank {culprit} waits least in {' + '.join(chosen)}, "
    waited += f"{100 * score:.1f} % of a step less than rank {victim}"
    if score < NOTABLE:
        return Verdict("none", f"no straggler: {waited}", **found)  # type: ignore[arg-type]
    if recurrence < RECURS:
        often = f"only in {100 * recurrence:.0f} % of {steps} steps"
        return Verdict("warning", f"the slow rank rotates: {waited}, but {often}", **found)  # type: ignore[arg-type]
    sharded = {"forward", "backward"} <= {name.lower() for name in chosen}
    severity = "critical" if score >= CRITICAL and steps >= ENOUGH_STEPS and not sharded else "warning"
    reason = f"rank {culprit} is the straggler: it {waited.removeprefix(f'rank {culprit} ')}"
    reason += f", in {100 * recurrence:.0f} % of {steps} steps"
    reason += f"; its {cause} takes longer and explains {100 * share:.0f} % of it" if cause else ""
    return Verdict(severity, reason, **found, cause=cause, cause_share=share)  # type: ignore[arg-type]


def _step_time(times: pd.DataFrame, outermost: list[str], rank: int) -> float:
    """A rank's mean step: the stage called so, or the sum of the stages that lie in no other."""
    own: pd.Series[float] = times[times.index.get_level_values("rank") == rank].mean()
    step = next((name for name in own.index if name.lower() in _STEP), None)
    return float(own[step] if step is not None else own.reindex(outermost).sum())


def _cause(times: pd.DataFrame, chosen: tuple[str, ...], culprit: int, gap: float) -> tuple[str, float]:
    """The stage in which the culprit is slower than the median of the others, and how much of the gap that explains."""
    others = [name for name in times if name not in chosen and str(name).lower() not in _STEP]
    if not others or gap <= 0:
        return "", 0.0
    means = times[others].groupby(level="rank").mean()
    excess = means.loc[culprit] - means.drop(index=culprit).median()
    share = float(excess.max() / gap)
    return (str(excess.idxmax()), min(share, 1.0)) if share >= CAUSE_SHARE else ("", 0.0)
