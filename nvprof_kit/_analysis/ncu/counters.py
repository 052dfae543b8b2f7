"""The counters of each measured kernel under names that do not depend on the GPU architecture or the ncu release.

A quantity has one name here and several in ncu; the first one in the report is used. Amounts are reported as sums, per
second or per cycle; all are converted to amounts per launch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.intervals import Floats
from nvprof_kit._toml import read_toml
from nvprof_kit._trace.ncu.schema import NcuReport
from nvprof_kit.issues import Issue

_METRICS = read_toml("nvprof_kit._analysis.ncu", "counters.toml")

PERCENTAGES: Mapping[str, Sequence[str]] = _METRICS["percentages"]
"""Quantities that are averaged over time, and the metrics that hold them, the best first."""

AMOUNTS: Mapping[str, Sequence[Mapping[str, int]]] = _METRICS["amounts"]
"""Quantities that add up, and the sums of metrics that give them, the best first: each metric with its factor."""

_FLOPS = {
    f"smsp__sass_thread_inst_executed_op_{kind}{op}_pred_on": factor
    for kind in "fdh"
    for op, factor in (("add", 1.0), ("mul", 1.0), ("fma", 2.0))
}
_TENSOR = re.compile(r"sm__ops_path_tensor_src_[a-z0-9_]+")
_TENSOR_BY_PIPE = re.compile(r"sm__ops_path_tensor_op_[a-z0-9]+_src_[a-z0-9_]+")
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(?P<reason>\w+)_per_issue_active\.ratio")
_NOT_A_STALL = frozenset({"selected", "not_selected"})

AMOUNT_NAMES = (*AMOUNTS, "flop", "tensor_flop")
STALL_PREFIX = "stall_"


def counters(report: NcuReport) -> pd.DataFrame:
    """The quantities of every measured kernel, a row for each result of the report.

    Returns:
        float64 columns: ``duration_ns``; those of `PERCENTAGES`, of 100; the amounts of one launch, `AMOUNT_NAMES`, in
        bytes and operations, a tensor core's not among the ``flop``; and a ``stall_REASON`` for every reason that was
        measured, warps stalled per instruction issued. What was not measured is NaN.
    """
    metrics = report.metrics
    duration = _first(metrics, _METRICS["duration"])
    amounts = {"duration_ns": duration}
    amounts |= {name: _first(metrics, candidates) for name, candidates in PERCENTAGES.items()}
    for name, combinations in AMOUNTS.items():
        sums = (
            np.sum([factor * amount(metrics, base, duration) for base, factor in way.items()], axis=0)
            for way in combinations
        )
        amounts[name] = next((amount for amount in sums if not np.isnan(amount).all()), np.full(len(metrics), np.nan))
    amounts["flop"] = _sum_of_any(metrics, _FLOPS.items(), duration)
    amounts["tensor_flop"] = _sum_of_any(metrics, ((base, 1.0) for base in tensor_bases(metrics)), duration)
    for title in metrics:
        stall = _STALL.fullmatch(str(title))
        if stall and stall["reason"] not in _NOT_A_STALL:
            amounts[f"{STALL_PREFIX}{stall['reason']}"] = metrics[title].to_numpy()
    return pd.DataFrame(amounts)


def missed_links(metrics: pd.DataFrame) -> tuple[Issue, ...]:
    """A warning if ncu counted fewer NVLinks than the GPU has: sum divided by mean is the number it counted."""
    if not len(metrics) or "nvlink__count_physical" not in metrics:
        return ()
    for base in ("nvltx__bytes", "nvlrx__bytes"):
        total, mean = _first(metrics, (f"{base}.sum",)), _first(metrics, (f"{base}.avg",))
        row = int(np.argmax(np.nan_to_num(mean)))  # the largest mean, where rounding in the report matters least
        links = metrics["nvlink__count_physical"].iloc[row]
        if mean[row] > 0 and (count := np.round(total[row] / mean[row])) < links:
            return (Issue.of("missed-links", 1 - count / links, count=count, links=links),)
    return ()


def tensor_bases(names: Iterable[object]) -> list[str]:
    """The tensor cores' operation counters among these metrics, on one level only, so that none counts twice.

    By source type if the report has that, else by pipe and source type. Splits by sparsity, splits by destination next
    to their total, and what Blackwell also samples (``_realtime``) are left out.
    """
    bases = {str(name).split(".")[0] for name in names}
    bases = {base for base in bases if "sparsity" not in base and not base.endswith("_realtime")}
    for level in (_TENSOR, _TENSOR_BY_PIPE):
        if matches := sorted(base for base in bases if level.fullmatch(base)):
            return [base for base in matches if not any(base.startswith(f"{other}_dst_") for other in matches)]
    return []


def _first(metrics: pd.DataFrame, candidates: Iterable[str]) -> Floats:
    """For each result the first of these metrics that it has."""
    values = np.full(len(metrics), np.nan)
    for name in candidates:
        if name in metrics:
            values = np.where(np.isnan(values), metrics[name].to_numpy(), values)
    return values


def amount(metrics: pd.DataFrame, base: str, duration: Floats) -> Floats:
    """The amount of a metric per launch, from its sum, its rate per second, or its rate per cycle."""
    values = _first(metrics, (f"{base}.sum",))
    if f"{base}.sum.per_second" in metrics:
        values = np.where(np.isnan(values), metrics[f"{base}.sum.per_second"].to_numpy() * duration / 1e9, values)
    if f"{base}.sum.per_cycle_elapsed" in metrics:
        cycles = clock(metrics, base) * duration / 1e9
        values = np.where(np.isnan(values), metrics[f"{base}.sum.per_cycle_elapsed"].to_numpy() * cycles, values)
    return values


def clock(metrics: pd.DataFrame, base: str) -> Floats:
    """Cycles per second of the unit that counts a metric: ``smsp`` for ``smsp__inst``."""
    unit = base.split("__", maxsplit=1)[0]
    return _first(metrics, (f"{unit}__cycles_elapsed.avg.per_second", "sm__cycles_elapsed.avg.per_second"))


def _sum_of_any(metrics: pd.DataFrame, parts: Iterable[tuple[str, float]], duration: Floats) -> Floats:
    """The sum of the measured amounts; NaN if none was measured."""
    values = [factor * amount(metrics, base, duration) for base, factor in parts]
    if not values:
        return np.full(len(metrics), np.nan)
    missing = np.isnan(values).all(axis=0)
    return np.where(missing, np.nan, np.nansum(values, axis=0))
