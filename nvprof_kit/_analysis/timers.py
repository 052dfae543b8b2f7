"""Stages timed on ranks: statistics, skew between ranks, and which rank the others wait for.

A stage that ends with a collective takes every rank as long as the slowest one, and the slowest waits the least. So in
each step the late rank is the one with the *shortest* such stage, and its cost is how much less it waits than the upper
median of the ranks (``docs/timers.md``). The verdict first judges the lost time, then who caused it: always the same
rank, a few ranks together, or a different rank each time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.intervals import nest
from nvprof_kit._analysis.attribution.steps import ALL_STEPS, StepOptions, chosen_steps
from nvprof_kit._result.column import read_columns
from nvprof_kit._result.result import Result
from nvprof_kit._toml import read_toml
from nvprof_kit.errors import require_choice
from nvprof_kit.issues import Issue

if TYPE_CHECKING:
    from nvprof_kit._trace.timer_log import TimerLogs


NOTABLE = 0.10
"""Minimum gap, as a share of the median rank's step, for a warning."""

CRITICAL = 0.20
"""Minimum share for a critical verdict, given at least `ENOUGH_STEPS`."""

ENOUGH_STEPS = 20
CAUSE_SHARE = 0.80
"""Minimum share of the gap that a stage must explain to be named as the cause."""

RECURS = 0.80
"""A rank is a straggler if at least this share of the lost time is in steps in which it is late; otherwise late ranks
change."""

_COLLECTIVE = re.compile(
    r"(?<![a-z])(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier|comms?|communication|sync|synchronize)"
    r"(?![a-z])",
    re.IGNORECASE,
)
"""Matches whole words of a stage's name: `grad_sync` is a collective's stage, `async_log` and `commit_metrics` are not.
"""
_REASONS = read_toml("nvprof_kit._analysis", "timers.toml")["reasons"]
_NAMED = 10
"""Maximum number of listed ranks without a log."""
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_STEP = ("step", "iteration", "iter", "train_step", "training_step")


@dataclass(frozen=True)
class Verdict:
    """Which rank the others wait for, if any.

    Attributes:
        severity: ``none``, ``warning``, ``critical``, or ``unknown`` if it cannot be determined.
        reason: One sentence.
        rank: The late rank; None if there is no single late rank.
        collective: The stages assumed to end with a collective.
        steps: Number of compared calls.
        gap_ns: Cost of lateness to the other ranks per step: the mean over steps of the upper median minus the minimum
            of the ranks' times in the collective's stages.
        score: The gap divided by the median rank's step time.
        recurrence: Share of the lost time in steps in which this rank is late.
        cause: The stage in which the late rank takes longer, if one explains the gap.
        cause_share: Share of the gap that it explains.
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


def find_straggler(calls: pd.DataFrame, collective: tuple[str, ...] = ()) -> Verdict:
    """Judge the ranks by the stages that end with a collective, without the first call of each, the warm-up.

    Args:
        calls: Every stage call: columns rank, stage, call, cpu_ns, cuda_ns, depth.
        collective: Names of such stages; if empty, those named after a collective, else ``backward``, in which DDP
            reduces gradients. For FSDP, which also gathers weights, add ``forward``: waiting is then spread over the
            step, and the verdict is at most a warning.
    """
    if calls["rank"].nunique() < 2:
        return Verdict("unknown", _REASONS["single"])
    names = [str(name) for name in calls["stage"].cat.categories]
    backward = tuple(name for name in names if name.lower() == "backward")
    chosen = collective or tuple(name for name in names if _COLLECTIVE.search(_CAMEL.sub("_", name))) or backward
    if not chosen:
        return Verdict("unknown", _REASONS["no_stage"].format(names=", ".join(names)))
    timed = calls.assign(time_ns=time_of(calls), stage=calls["stage"].astype(str))
    timed = timed[timed["call"] > 0] if timed["call"].max() > 0 else timed
    times: pd.DataFrame = timed.set_index(["call", "rank", "stage"])["time_ns"].unstack("stage")
    verdict = _judge_stages(calls, times, chosen)
    # nobody waits in a barrier after DDP's backward, where the ranks have waited for each other already. Of two ranks,
    # that backward is shorter on one does not show which: it may compute less, and wait in no stage at all
    hidden = not collective and backward and backward != chosen and calls["rank"].nunique() > 2
    if verdict.severity == "none" and hidden:
        before = _judge_stages(calls, times, backward)
        return before if before.severity in ("warning", "critical") else verdict
    return verdict


def _judge_stages(calls: pd.DataFrame, times: pd.DataFrame, chosen: tuple[str, ...]) -> Verdict:
    """Judge the ranks by the time in some stages: what is lost in each step, then who loses it."""
    # a row per step, a column per rank
    waits = times[[name for name in chosen if name in times]].sum(axis=1, min_count=1).unstack("rank").dropna()
    if waits.empty:
        return Verdict("unknown", _REASONS["not_shared"])
    ordered = np.sort(waits.to_numpy(dtype=np.float64), axis=1)
    shortest_waits, victim_waits = ordered[:, 0], ordered[:, ordered.shape[1] // 2]
    gaps = victim_waits - shortest_waits
    gap, steps = float(gaps.mean()), len(waits)
    # closer to the latest rank than to the median
    is_late = waits.to_numpy(dtype=np.float64) < (shortest_waits + gaps / 2)[:, None]
    total_gap = gaps.sum()
    by_rank = (is_late * gaps[:, None]).sum(axis=0) / total_gap if total_gap else np.zeros(waits.shape[1])
    ranks = [int(rank) for rank in waits.columns]
    order = sorted(range(len(ranks)), key=lambda at: (-by_rank[at], ranks[at]))
    worst, recurrence = ranks[order[0]], float(by_rank[order[0]])
    median_rank = int(waits.mean().sort_values(kind="stable").index[len(ranks) // 2])
    # the stage named like a step, or the sum of the outermost stages
    stage_means: pd.Series[float] = times[times.index.get_level_values("rank") == median_rank].mean()
    step = next((name for name in stage_means.index if name.lower() in _STEP), None)
    outermost = calls.groupby("stage", observed=True)["depth"].median() == 0
    outermost_means = stage_means.reindex([str(name) for name in outermost.index[outermost]])
    step_ns = float(stage_means[step] if step is not None else outermost_means.sum())
    score = gap / step_ns if step_ns else 0.0
    facts: dict[str, Any] = {"collective": chosen, "steps": steps, "gap_ns": round(gap), "score": score}
    stage = " + ".join(chosen)
    cost = f"{100 * score:.1f} % of a step"
    if score < NOTABLE:
        reason = _REASONS["none"].format(stage=stage, cost=cost)
        return Verdict("none", reason, rank=worst if recurrence >= RECURS else None, recurrence=recurrence, **facts)
    sharded = {"forward", "backward"} <= {name.lower() for name in chosen}
    severity = "critical" if score >= CRITICAL and steps >= ENOUGH_STEPS and not sharded else "warning"
    if len(gaps) > 2 and np.median(gaps) < NOTABLE * step_ns and gaps.max() > total_gap / 2:
        call = int(waits.index[int(gaps.argmax())])
        reason = _REASONS["one_call"].format(call=call, percent=100 * gaps.max() / total_gap, stage=stage)
        return Verdict("warning", reason, recurrence=recurrence, **facts)
    recurring = [at for at in order if by_rank[at] >= RECURS]
    if not recurring:
        often = [at for at in order if by_rank[at] >= RECURS / 3]
        sentence = _REASONS["in_turn" if len(often) == 2 and by_rank[often].sum() >= RECURS else "rotates"]
        named = " and ".join(str(ranks[at]) for at in often)
        reason = sentence.format(ranks=named, stage=stage, cost=cost, rank=worst, percent=100 * recurrence)
        return Verdict("warning", reason, recurrence=recurrence, **facts)
    *first, last = (str(ranks[at]) for at in sorted(recurring))
    named = f"{', '.join(first)} and {last}" if first else last
    cause, share = _cause(times, chosen, worst, gap)
    late_steps = int(is_late[:, order[0]][gaps >= NOTABLE * step_ns].sum())
    sentence = _REASONS["stragglers" if first else "straggler"]
    reason = sentence.format(ranks=named, stage=stage, cost=cost, late=late_steps, steps=steps)
    reason += _REASONS["cause"].format(cause=cause, percent=100 * share) if cause else ""
    late_rank = worst if len(recurring) == 1 else None
    return Verdict(severity, reason, rank=late_rank, recurrence=recurrence, cause=cause, cause_share=share, **facts)


def time_of(calls: pd.DataFrame) -> pd.Series[int]:
    """The time for comparing ranks, in ns: GPU time if every call has it, else CPU time."""
    return calls["cpu_ns"] if calls["cuda_ns"].isna().any() else calls["cuda_ns"].astype("int64")


def _cause(times: pd.DataFrame, chosen: tuple[str, ...], culprit: int, gap: float) -> tuple[str, float]:
    """The stage in which the late rank is slower than the median of the others, and how much of the gap it explains."""
    other_stages = [name for name in times if name not in chosen and str(name).lower() not in _STEP]
    if not other_stages or gap <= 0:
        return "", 0.0
    means = times[other_stages].groupby(level="rank").mean()
    excess: Any = means.loc[culprit] - means.drop(index=culprit).median()
    share = float(excess.max() / gap)
    return (str(excess.idxmax()), min(share, 1.0)) if share >= CAUSE_SHARE else ("", 0.0)


COLUMNS = read_columns("nvprof_kit._analysis", "timers")
"""Columns of `Timers.rows`."""

CALL_COLUMNS = read_columns("nvprof_kit._analysis", "timers-calls")
"""Columns of `Timers.calls`."""


@dataclass(frozen=True, repr=False, eq=False)
class Timers(Result):
    """How long the timed stages take on each rank, how much the ranks differ, and which rank the others wait for.

    Attributes:
        path: The files or folders.
        rows: Statistics; columns `COLUMNS`; stages in order of their first start.
        ranks: The ranks with a log.
        wall_ns: Time from the first start to the last end over all ranks.
        calls: One row per call; the columns of ``timers-calls``.
        verdict: Which rank the others wait for.
        warnings: What may be wrong with the times.
        by_call: Whether `to_frame` returns one row per call.
    """

    path: str
    rows: pd.DataFrame
    ranks: tuple[int, ...]
    wall_ns: int
    calls: pd.DataFrame
    verdict: Verdict
    warnings: tuple[Issue, ...] = ()
    by_call: bool = False

    columns: ClassVar = {"timers": COLUMNS, "timers-calls": CALL_COLUMNS}

    @property
    def schema(self) -> str:
        """Name of the JSON schema."""
        return "timers-calls" if self.by_call else "timers"

    def table(self, view: str | None = None) -> pd.DataFrame:
        """One row per stage, per stage and rank, or per call, as requested."""
        return self.calls if self.by_call and view is None else super().table(view)


def timers(
    logs: TimerLogs,
    by: Literal["rank", "call"] | None = None,
    collective: tuple[str, ...] = (),
    steps: StepOptions = ALL_STEPS,
) -> Timers:
    """Statistics, skew and verdict of the stages that ranks timed; the arguments are those of `TimerLog.timers`."""
    calls = logs.stages
    for stage in collective:
        require_choice(stage, calls["stage"].cat.categories, "collective")
    if steps.selects:
        number = np.arange(int(calls["call"].max()) + 1)
        calls = calls[chosen_steps(steps, number, logs.path)[calls["call"].to_numpy()]].reset_index(drop=True)
        calls["stage"] = calls["stage"].cat.remove_unused_categories()
    order = calls.groupby("stage", observed=True)["start_ns"].min().sort_values(kind="stable").index
    calls = calls.assign(
        stage=calls["stage"].cat.reorder_categories(list(order), ordered=True),
        offset_ns=calls["start_ns"] - calls["start_ns"].min(),
        depth=nest(*(calls[name].to_numpy() for name in ("start_ns", "end_ns", "rank"))).depth,
    )
    groups = calls.groupby(["stage", "rank"] if by == "rank" else ["stage"], observed=True)
    rows = groups.size().to_frame("calls")
    for clock in ("cpu", "cuda"):
        times = groups[f"{clock}_ns"]
        values = times.agg(["mean", "median", "min", "max"])
        values = values.assign(total=times.sum(min_count=1), p95=times.quantile(0.95)).astype("Float64")
        rows = rows.join(values.round().astype("Int64").add_prefix(f"{clock}_").add_suffix("_ns"))
    rows = rows.join(_skew(calls), on="stage").reset_index()
    if "rank" not in rows:
        rows["rank"] = pd.array([None] * len(rows), dtype="Int64")
    rows["stage"] = rows["stage"].astype("str")
    return Timers(
        path=logs.path,
        rows=rows[list(COLUMNS)],
        ranks=tuple(sorted(map(int, calls["rank"].unique()))),
        wall_ns=int(calls["end_ns"].max() - calls["start_ns"].min()),
        calls=calls[list(CALL_COLUMNS)],
        verdict=find_straggler(calls, collective),
        warnings=(*logs.warnings, *_warnings(calls)),
        by_call=by == "call",
    )


def _skew(calls: pd.DataFrame) -> pd.DataFrame:
    """Columns skew_start_ns, skew_ns, slowest by stage; missing if only one rank ran it."""
    timed = calls.assign(time_ns=time_of(calls))
    timed_calls = timed.rename(columns={"start_ns": "skew_start_ns", "time_ns": "skew_ns"})
    of_call = timed_calls.groupby(["stage", "call"], observed=True)
    times = of_call[["skew_start_ns", "skew_ns"]]
    shared: pd.DataFrame = (times.max() - times.min())[of_call["rank"].nunique() > 1]
    skew = shared.groupby("stage", observed=True).mean().round().astype("Int64")
    by_rank = timed.groupby(["stage", "rank"], observed=True)["time_ns"].mean().unstack()
    slowest = by_rank.idxmax(axis=1).astype("Int64").rename("slowest")
    return skew.join(slowest[by_rank.count(axis=1) > 1])


def _warnings(calls: pd.DataFrame) -> list[Issue]:
    counts = calls.groupby(["stage", "rank"], observed=True).size().unstack(fill_value=0)
    uneven = counts.index[counts.min(axis=1) != counts.max(axis=1)]
    of_stages = ((stage, counts.loc[stage]) for stage in uneven)
    issues = [Issue.of("uneven-stage", stage=stage, least=of.min(), most=of.max()) for stage, of in of_stages]
    ranks = set(calls["rank"].tolist())
    if missing := sorted(set(range(max(ranks))) - ranks):
        named = ", ".join(map(str, missing[:_NAMED])) + (f" and {len(missing) - _NAMED} more" * (len(missing) > _NAMED))
        issues.append(Issue.of("missing-logs", ranks=named))
    # a rank has another clock if all of its calls end earlier or later than the median rank's
    ends = calls.assign(stage=calls["stage"].astype(str)).pivot_table("end_ns", ["stage", "call"], "rank").dropna()
    median_end = ends.median(axis=1)
    offsets = ends.sub(median_end, axis=0).loc[median_end.sort_values(kind="stable").index]
    steps = median_end.groupby(level="stage").diff().median()
    tolerance = max(50e6, 0.0 if pd.isna(steps) else float(steps) / 2)
    quarter = max(len(offsets) // 4, 1)
    went: Any = offsets.iloc[-quarter:].median() - offsets.iloc[:quarter].median()
    for rank, offset in offsets.median().items():
        if abs(went[rank]) > tolerance:
            direction = "forward" if went[rank] > 0 else "back"
            issues.append(Issue.of("set-clock", rank=rank, seconds=abs(went[rank]) / 1e9, direction=direction))
        elif abs(offset) > tolerance:
            direction = "ahead of" if offset > 0 else "behind"
            issues.append(Issue.of("other-clock", rank=rank, seconds=abs(offset) / 1e9, direction=direction))
    if calls["cuda_ns"].isna().any() and calls["cuda_ns"].notna().any():
        issues.append(Issue.of("cpu-clock"))
    return issues
