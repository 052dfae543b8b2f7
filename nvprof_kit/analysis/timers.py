"""The stages that ranks timed: statistics, skew between ranks, and which rank the others wait for.

The straggler is found as TraceML does it (``docs/timers.md``): in a stage that ends with a collective every rank takes
as long as the slowest, and the slowest itself waits least. So the culprit is the rank with the *shortest* such stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import pandas as pd

from nvprof_kit.analysis.nesting import nest
from nvprof_kit.analysis.stragglers import Verdict, find_straggler, time_of

if TYPE_CHECKING:
    from nvprof_kit.trace.timer_log import TimerLogs

COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "stage": "the stage's name",
        "rank": "the rank; none in a row over all ranks",
        "calls": "times it ran",
        "cpu_total_ns": "time on the CPU clock, summed",
        "cpu_mean_ns": "its mean over the calls",
        "cpu_median_ns": "its median",
        "cpu_p95_ns": "its 95th percentile",
        "cpu_min_ns": "its minimum",
        "cpu_max_ns": "its maximum",
        "cuda_total_ns": "time on the GPU by CUDA events, summed; none where none was taken",
        "cuda_mean_ns": "its mean over the calls",
        "cuda_median_ns": "its median",
        "cuda_p95_ns": "its 95th percentile",
        "cuda_min_ns": "its minimum",
        "cuda_max_ns": "its maximum",
        "skew_start_ns": "mean over the calls of latest less earliest start among the ranks",
        "skew_ns": "mean over the calls of longest less shortest among the ranks, on the GPU where every call has it",
        "slowest": "the rank with the largest mean of that time",
    }
)
"""Columns of `TimersResult.rows`."""


@dataclass(frozen=True)
class TimersOptions:
    """What is asked.

    Attributes:
        by_rank: A row for each stage and rank instead of one for each stage.
        collective: Stages that end with a collective; empty: ``backward``, and whatever is named after one.
        warm_up: Calls of each stage left out of the verdict.
    """

    by_rank: bool = False
    collective: tuple[str, ...] = ()
    warm_up: int = 1


@dataclass(frozen=True)
class TimersResult:
    """The answer.

    Attributes:
        path: What was read.
        rows: Statistics, with the columns of `COLUMNS`; stages in the order of their first start.
        ranks: The ranks with a log.
        wall_ns: From the first start to the last end, over all ranks.
        calls: Every stage run, as read, with ``offset_ns``, its start since the first of all, and ``depth``, the number
            of stages of its rank that hold it.
        verdict: Which rank the others wait for.
        doubts: What may be wrong with the figures.
    """

    path: str
    rows: pd.DataFrame
    ranks: tuple[int, ...]
    wall_ns: int
    calls: pd.DataFrame
    verdict: Verdict
    doubts: tuple[str, ...] = ()


def timers(logs: TimerLogs, options: TimersOptions = TimersOptions()) -> TimersResult:
    """Statistics, skew and verdict of the stages that ranks timed."""
    calls = _with_places(logs.stages)
    keys = ["stage", "rank"] if options.by_rank else ["stage"]
    rows = _statistics(calls, keys).join(_skew(calls), on="stage").reset_index()
    if "rank" not in rows:
        rows["rank"] = pd.array([None] * len(rows), dtype="Int64")
    rows["stage"] = rows["stage"].astype("str")
    ranks = tuple(sorted(map(int, calls["rank"].unique())))
    wall_ns = int(calls["end_ns"].max() - calls["start_ns"].min())
    return TimersResult(
        logs.path,
        rows[list(COLUMNS)],
        ranks,
        wall_ns,
        calls,
        find_straggler(calls, options.collective, options.warm_up),
        (*logs.doubts, *_doubts(calls)),
    )


def _with_places(stages: pd.DataFrame) -> pd.DataFrame:
    order = stages.groupby("stage", observed=True)["start_ns"].min().sort_values(kind="stable").index
    calls = stages.assign(
        stage=stages["stage"].cat.reorder_categories(list(order), ordered=True),
        offset_ns=stages["start_ns"] - stages["start_ns"].min(),
    )
    start, end, rank = (calls[name].to_numpy() for name in ("start_ns", "end_ns", "rank"))
    placed: pd.DataFrame = calls.assign(depth=nest(start, end, rank).depth)
    return placed


def _statistics(calls: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    groups = calls.groupby(keys, observed=True)
    made = groups.size().to_frame("calls")
    for clock in ("cpu", "cuda"):
        times = groups[f"{clock}_ns"]
        for name, values in {
            "total": times.sum(min_count=1),
            "mean": times.mean(),
            "median": times.median(),
            "p95": times.quantile(0.95),
            "min": times.min(),
            "max": times.max(),
        }.items():
            made[f"{clock}_{name}_ns"] = values.astype("Float64").round().astype("Int64")
    return made


def _skew(calls: pd.DataFrame) -> pd.DataFrame:
    """Columns skew_start_ns, skew_ns, slowest by stage; missing where one rank ran it alone."""
    timed = calls.assign(time_ns=time_of(calls))
    each = timed.groupby(["stage", "call"], observed=True).agg(
        ranks=("rank", "nunique"),
        first=("start_ns", "min"),
        last=("start_ns", "max"),
        shortest=("time_ns", "min"),
        longest=("time_ns", "max"),
    )
    shared = each[each["ranks"] > 1]
    means = pd.DataFrame(
        {"skew_start_ns": shared["last"] - shared["first"], "skew_ns": shared["longest"] - shared["shortest"]}
    )
    skew = means.groupby("stage", observed=True).mean().round().astype("Int64")
    by_rank = timed.groupby(["stage", "rank"], observed=True)["time_ns"].mean().unstack()
    slowest = by_rank.idxmax(axis=1).astype("Int64").rename("slowest")
    joined: pd.DataFrame = skew.join(slowest[by_rank.count(axis=1) > 1])
    return joined


def _doubts(calls: pd.DataFrame) -> list[str]:
    counts = calls.groupby(["stage", "rank"], observed=True).size().unstack(fill_value=0)
    uneven = counts.index[counts.min(axis=1) != counts.max(axis=1)]
    doubts = [
        f"stage {stage} ran {counts.loc[stage].min()} to {counts.loc[stage].max()} times, not as often on every rank: "
        "a rank may have been killed; skew is taken over the calls that ranks share"
        for stage in uneven
    ]
    ranks = set(calls["rank"].tolist())
    if missing := sorted(set(range(max(ranks))) - ranks):
        doubts.append(f"no log of rank {', '.join(map(str, missing))}: it is in none of the figures")
    if calls["cuda_ns"].isna().any() and calls["cuda_ns"].notna().any():
        doubts.append("some calls have no GPU time; ranks are compared by the CPU clock")
    return doubts
