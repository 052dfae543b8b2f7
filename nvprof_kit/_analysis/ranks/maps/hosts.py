"""Host delays beyond those in idle gaps: data loading, garbage collection, code loading."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution
from nvprof_kit._analysis.attribution.intervals import Cover
from nvprof_kit._analysis.attribution.nesting import Int64Array
from nvprof_kit._trace.schema import Trace
from nvprof_kit.names import Category

if TYPE_CHECKING:
    import pandas as pd

COLLECTS = re.compile(r"(python[ .:]*)?gc([ .:(].*)?|garbage[ _-]collect(ion|or|ing)?.*", re.IGNORECASE)
"""Names of ranges around Python's garbage collection: ``gc``, ``gc.collect``, ``garbage collection``."""

_DATA_TEXTS = ("data", "dataloader")


def collecting(trace: Trace, pid: int) -> Int64Array:
    """Starts and ends of the process's garbage collections, from ranges, shape ``(2, n)``."""
    names = trace.ranges["text"].cat.categories
    codes = np.flatnonzero([COLLECTS.fullmatch(str(name)) is not None for name in names])
    mine = np.isin(trace.ranges["text"].cat.codes.to_numpy(), codes) & (trace.ranges["pid"].to_numpy() == pid)
    return np.stack([trace.ranges[edge].to_numpy()[mine] for edge in ("start_ns", "end_ns")])


def loading_code(trace: Trace) -> Int64Array:
    """Starts and ends of code loading and compilation, shape ``(2, n)``."""
    if trace.loads is None or not len(trace.loads):
        return np.zeros((2, 0), dtype=np.int64)
    return np.stack([trace.loads[edge].to_numpy() for edge in ("start_ns", "end_ns")])


def with_host_causes(gaps: pd.DataFrame, stretches: Mapping[str, Int64Array]) -> pd.DataFrame:
    """Replace the cause of an idle gap if most of it overlaps an interval of another cause."""
    start, took = gaps["start_ns"].to_numpy(), gaps["idle_ns"].to_numpy()
    for cause, (begins, ends) in stretches.items():
        if not len(begins):
            continue
        lane = np.zeros(len(start), dtype=np.int64)
        covered = Cover(np.zeros(len(begins), dtype=np.int64), begins, ends).inside(lane, start, start + took)
        causes = gaps["cause"].cat
        known = gaps["cause"] if cause in causes.categories else causes.add_categories([cause])
        gaps = gaps.assign(cause=known.mask((2 * covered > took) & (took > 0), cause))
    return gaps


def host_times(
    attribution: Attribution, pid: int, pauses: Int64Array, instances: Int64Array
) -> dict[str, npt.NDArray[np.int64]]:
    """Host time of each step instance: loading_ns (data loading) and gc_ns.

    Data loading counts for the enclosing step, otherwise for the next one.
    """
    ranges = attribution.ranges
    loads = (ranges.is_one_of((Category.DATA,)) | np.isin(ranges.phase, _DATA_TEXTS)) & (ranges.pid == pid)
    loads[loads] = _outermost(ranges.start[loads], ranges.end[loads])
    begins = np.full(len(ranges.steps), np.iinfo(np.int64).max)
    steps = np.flatnonzero((ranges.step >= 0) & (ranges.pid == pid))
    np.minimum.at(begins, ranges.step[steps], ranges.start[steps])
    order = np.argsort(begins, kind="stable")
    within = ranges.step_at(np.flatnonzero(loads))
    following = np.append(order, -1)[np.searchsorted(begins[order], ranges.start[loads])]
    of = np.where(within >= 0, within, following)
    spent = _by_step(of, (ranges.end - ranges.start)[loads], len(ranges.steps))
    last = np.append(order, -1)[np.searchsorted(begins[order], pauses[0], side="right") - 1]
    collected = _by_step(last, pauses[1] - pauses[0], len(ranges.steps))
    return {"loading_ns": spent[instances], "gc_ns": collected[instances]}


def _outermost(start: Int64Array, end: Int64Array) -> npt.NDArray[np.bool_]:
    """Which intervals are not nested in another."""
    order = np.lexsort((-end, start))
    reach = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(end[order])[:-1]))[: len(order)]
    outer = np.zeros(len(order), dtype=bool)
    outer[order] = end[order] > reach
    return outer


def _by_step(step: Int64Array, took: Int64Array, count: int) -> Int64Array:
    known = step >= 0
    sums: Int64Array = np.bincount(step[known], weights=took[known], minlength=count).astype(np.int64)
    return sums
