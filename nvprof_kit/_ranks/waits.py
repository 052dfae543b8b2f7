"""Which rank waits for which, how long, and why: every nanosecond of waiting has one late rank and one cause.

A rank waits in a collective from its own arrival (its kernel's start, on the aligned clock) to that of the last rank.

The collectives of a small job are analyzed one by one (`nvprof_kit._ranks.causes`), those of a large one per step
(`coarse_charges`): a rank is a root if it spends clearly more time computing, copying or idle than its equals (ranks
with the same layers). Waiting for a root is charged to that root. Waiting for a rank that is late without spending more
time is a chain; it is charged to the step's roots in proportion to their excess.

`host_reasons` and `stage_work` refine the causes: a host that is late because of data loading or garbage collection,
and the part of a pipeline stage's time that is regular work and not a fault.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from nvprof_kit._ranks.causes import cause_shares, without_cause
from nvprof_kit._ranks.columns import COLUMNS
from nvprof_kit._ranks.stages import with_equals
from nvprof_kit._trace.jobs.tables import SYMMETRIC, JobTables
from nvprof_kit.names import NO_LAYER, NO_PHASE

MOST = 40_000
"""Maximum number of collectives to analyze one by one; larger jobs are analyzed per step."""

SHOWN = 20_000
"""Maximum number of collectives of a larger job in the table of waits: those with the longest waits."""

SHOWN_WAITS = 300_000
"""Maximum number of waits in that table."""

NO_FAULT = ("start_up", "unresolved", "pipeline")
"""Causes that are no rank's fault."""


@dataclass(frozen=True)
class Waits:
    """The waiting of a job.

    Attributes:
        waits: One row per wait with the columns `waits`, for the collectives whose causes were found.
        charges: With the columns `charges`; for all collectives.
        total_ns: All waiting; the charges add up to it.
    """

    waits: pd.DataFrame
    charges: pd.DataFrame
    total_ns: int


def find_waits(tables: JobTables, floor_ns: int) -> Waits:
    """Find the waiting in a job with matched collectives and aligned clocks.

    Args:
        tables: The job's maps.
        floor_ns: The resolution of the clocks: shorter mean waits are not analyzed.

    Raises:
        AssertionError: The charges do not add up to the waiting: a bug in this package.
    """
    total, is_small = int(tables.value("total_wait")), tables.value("count") <= MOST
    instances = tables.instances(0 if is_small else SHOWN)
    if not is_small:
        instances = instances[instances["n"].cumsum() <= SHOWN_WAITS]
    instances = instances.sort_values("arrival", kind="stable", ignore_index=True).reset_index(names="instance")
    instances = instances.astype({"late_rank": "int64"})
    members = tables.members_of(instances).merge(instances, on=["c", "s", "k"])
    # limited to its own end for a rank that can end before the others arrive, and with two ranks
    wait, until_end = members["arrival"] - members["a"], (members["e"] - members["a"]).clip(lower=0)
    ends_alone = (members["n"] == 2) | ~members["sort"].isin(SYMMETRIC)
    members["wait_ns"] = wait.where(~ends_alone, np.minimum(wait, until_end))
    if is_small:
        shares = _shares(tables, instances, members, floor_ns)
        # regular work of a pipeline stage, and the reasons for a late host
        shares = stage_work(shares, (instances["sort"] == "SendRecv").to_numpy(), tables)
        # waiting time of each collective's ranks during which their devices do nothing else
        exposed = members[["wait_ns", "alone"]].min(axis=1).groupby(members["instance"]).sum()
        exposed_share = exposed / instances["wait_ns"].clip(lower=1)
        of_instance = instances[["step", "c", "n", "wait_ns"]].assign(exposed_share=exposed_share)
        causes = shares.join(of_instance, on="instance").assign(rank=shares["late_rank"])
        causes = host_reasons(causes.assign(cost=causes["wait_ns"] / (causes["n"] - 1) * causes["share"]), tables)
        keys = [name for name in causes if name not in ("share", "cost")]
        shares = causes.groupby(keys, sort=False)["share"].sum().reset_index()
        charges = _in_whole_ns(shares, ["instance"])
    else:
        charges = coarse_charges(tables)
        charges = host_reasons(charges.assign(cost=charges["wait_ns"] / (charges["n"] - 1).clip(lower=1)), tables)
        # the causes of a collective are those of its step: the late rank's own, otherwise a chain
        top = charges.sort_values("wait_ns", ascending=False, kind="stable").drop_duplicates(["step", "rank"])
        top = top.drop(columns="late_rank").rename(columns={"rank": "late_rank"})
        keys = ["step", "late_rank"]
        shares = instances[["instance", *keys]].merge(top[[*keys, "cause", "layer", "phase"]], on=keys, how="left")
        shares = shares.fillna({"cause": "collective", "layer": NO_LAYER, "phase": NO_PHASE}).assign(share=1.0)
    return Waits(_waits(members, shares), _summed(charges, total), total)


def _shares(tables: JobTables, instances: pd.DataFrame, members: pd.DataFrame, floor_ns: int) -> pd.DataFrame:
    """The causes of every collective, one by one, if its waiting exceeds the uncertainty of the clocks.

    The late rank is compared with the median of those that waited.
    """
    last = members[(members["rank"] == members["late_rank"]) & (members["index"] == members["late_index"])]
    waiting = members[members["rank"] != members["late_rank"]]
    waiting = waiting.sort_values(["instance", "wait_ns", "rank"], kind="stable")
    by_instance = waiting.groupby("instance", sort=False)["rank"]
    median = waiting[by_instance.cumcount() == by_instance.transform("size") // 2]
    peers = median[["instance", "rank", "index"]].rename(columns={"rank": "peer", "index": "peer_index"})
    pairs = last.merge(peers, on="instance").sort_values("instance", kind="stable", ignore_index=True)
    is_above_floor = instances["wait_ns"].to_numpy()[pairs["instance"]] > floor_ns * (pairs["n"] - 1)
    unknown = without_cause(pairs[~is_above_floor], "unresolved")
    pairs = pairs[is_above_floor].reset_index(drop=True)
    if not len(pairs):
        return unknown
    ranks = np.union1d(pairs["late_rank"], pairs["peer"]).tolist()
    points = tables.points(ranks).merge(instances[["c", "s", "k", "instance"]], on=["c", "s", "k"], how="left")
    points = points.sort_values(["rank", "index"], kind="stable", ignore_index=True)
    # matched collectives that are not analyzed can still be common points
    code = points.groupby(["c", "s", "k"], sort=False).ngroup()
    points["instance"] = points["instance"].fillna(code + len(instances)).astype(np.int64)
    shares = cause_shares(pairs, points, tables.segments(ranks), instances)
    return pd.concat([table for table in (shares, unknown) if len(table)], ignore_index=True)


def _in_whole_ns(charges: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Multiply `wait_ns` by `share`, in integers that add up to the waiting of each key; the rounding error is added to
    the largest.
    """
    ascending = [True] * len(keys) + [False]
    charges = charges.sort_values([*keys, "share"], ascending=ascending, kind="stable", ignore_index=True)
    ns = (charges["share"] * charges["wait_ns"]).astype("int64")  # both are positive: this rounds down
    missing = charges["wait_ns"] - ns.groupby([charges[key] for key in keys]).transform("sum")
    return charges.assign(wait_ns=ns + missing.where(~charges.duplicated(keys), 0))


def _summed(charges: pd.DataFrame, total_ns: int) -> pd.DataFrame:
    """The charges by step, rank, cause, layer and phase, with the cost to a waiting rank: that of the communicator that
    waits most for the late rank, because the others wait for the same delay as it propagates.

    Raises:
        AssertionError: They do not add up to the waiting: a bug in this package.
    """
    cost = charges["exposed_share"] * charges["wait_ns"] / (charges["n"] - 1).clip(lower=1)
    keys = [charges["step"], charges["rank"]]
    is_fault = ~charges["cause"].isin(NO_FAULT)
    judged = cost.where(is_fault | ~is_fault.groupby(keys).transform("any"), 0)
    of_group = judged.groupby([*keys, charges["c"]]).transform("sum")
    largest = of_group.groupby(keys).transform("max")
    first = charges["c"].where(of_group == largest).groupby(keys).transform("first")
    charges = charges.assign(cost_ns=cost.where(charges["c"] == first, 0.0))
    sums: pd.DataFrame = charges.groupby(list(COLUMNS["charges"])[:-2])[["wait_ns", "cost_ns"]].sum().reset_index()
    if int(sums["wait_ns"].sum()) != total_ns:
        raise AssertionError(f"{sums['wait_ns'].sum()} ns charged, {total_ns} ns waited: please report this")
    return sums


def _waits(members: pd.DataFrame, shares: pd.DataFrame) -> pd.DataFrame:
    top = shares.sort_values("share", ascending=False, kind="stable").drop_duplicates("instance").set_index("instance")
    causes = top[["cause", "layer", "phase", "late_rank"]].rename(columns={"late_rank": "cause_rank"})
    rows = members[members["rank"] != members["late_rank"]].sort_values(["instance", "rank"], kind="stable")
    name = rows["comm"].astype(str) + " " + rows["sort"].astype(str) + " " + rows["k"].astype(str)
    rows = rows.assign(collective=name).join(causes, on="instance").rename(columns={"rank": "waiting_rank"})
    return rows[list(COLUMNS["waits"])].reset_index(drop=True)


LEAST_EXCESS_NS = 20_000
LEAST_SHARE = 0.03
"""Minimum excess in a layer."""

ROOT = 0.25
"""Minimum excess of a root, as a share of the step's largest."""


def coarse_charges(tables: JobTables) -> pd.DataFrame:
    """All waiting by step, c (communicator), rank, cause, layer and phase: wait_ns, exposed_share, and n,
    the communicator's ranks.
    """
    # the roots of each step and their causes
    excesses = tables.excesses(LEAST_EXCESS_NS, LEAST_SHARE)
    excesses = excesses.assign(whole=excesses.groupby(["step", "rank"])["excess_ns"].transform("sum"))
    excesses = excesses[excesses["whole"] >= ROOT * excesses.groupby("step")["whole"].transform("max")]
    compute = np.where(excesses["more_ops"], "more_kernels", "slower_kernels")
    excesses = excesses.assign(cause=np.where(excesses["kind"] == "compute", compute, excesses["kind"]))
    roots = excesses[["step", "rank", "cause", "layer", "phase", "excess_ns"]]
    waited = tables.frame("by_late_rank").assign(rank=lambda rows: rows["late_rank"])
    # the profilers start in the first step, so a late rank there has no root to charge
    is_cold = waited["step"] == waited["step"].min()
    has_root = waited["step"].isin(roots["step"]) & ~is_cold
    by_rank = ["step", "rank"]
    is_root = has_root & pd.MultiIndex.from_frame(waited[by_rank]).isin(pd.MultiIndex.from_frame(roots[by_rank]))
    direct = waited[is_root].merge(roots, on=by_rank)
    sums = {"wait_ns": ("wait_ns", "sum"), "exposed_ns": ("exposed_ns", "sum"), "n": ("n", "max")}
    chains = waited[has_root & ~is_root].groupby(["step", "c"], sort=False, as_index=False).agg(**sums)
    chained = chains.merge(roots, on="step").assign(late_rank=-1)
    unknown = waited[~has_root].assign(excess_ns=1, layer=NO_LAYER, phase=NO_PHASE)
    unknown["cause"] = np.where(is_cold[~has_root], "start_up", "unresolved")
    charges = pd.concat([direct, chained, unknown], ignore_index=True)
    charges["exposed_share"] = charges["exposed_ns"] / charges["wait_ns"].clip(lower=1)
    keys = ["step", "c", "late_rank"]
    charges["share"] = charges["excess_ns"] / charges.groupby(keys)["excess_ns"].transform("sum")
    return _in_whole_ns(charges, keys)


LEAST_NS = 300_000
"""Minimum excess of a host's time over the median of the ranks."""

EXPLAINS = 0.5
"""A host's lateness in a step is attributed to an earlier activity that took at least this share of it."""


def host_reasons(causes: pd.DataFrame, tables: JobTables) -> pd.DataFrame:
    """Rename rows of the cause ``host`` if the host spent more time than others loading data or collecting garbage in
    that step: it lost its lead then, and the device idled later.

    Args:
        causes: step, rank, cause, layer, phase, and cost (how long a waiting rank waits).
        tables: The job's maps.

    Returns:
        The rows, in the same order, with updated cause, layer and phase.
    """
    causes, keys = causes.copy(), ["step", "rank"]
    for column, cause in (("gc_ns", "garbage_collection"), ("loading_ns", "data_loading")):
        excesses = tables.frame("host_excesses", column=column, least_ns=LEAST_NS)
        more = causes[keys].merge(excesses, on=keys, how="left")["excess_ns"].to_numpy()
        costs = causes[keys].assign(
            host=causes["cost"].where(causes["cause"] == "host", 0.0),
            direct=causes["cost"].where(causes["cause"] == cause, 0.0),
        )
        sums = costs.groupby(keys)[["host", "direct"]].transform("sum")
        is_explained = (causes["cause"] == "host") & (more - sums["direct"] >= EXPLAINS * sums["host"])
        causes.loc[is_explained, "cause"] = cause
        if cause == "data_loading":
            causes.loc[is_explained, ["layer", "phase"]] = [NO_LAYER, "data"]
    return causes


def kinds_of(causes: pd.Series[str]) -> pd.Series[str]:
    """The causes, with more and slower kernels as one: ``work``."""
    return causes.replace(["more_kernels", "slower_kernels"], "work")


def stage_work(shares: pd.DataFrame, passed_on: np.ndarray, tables: JobTables) -> pd.DataFrame:
    """Split shares of sends and receives between stages: time that the late stage's equals also spend is regular work.

    Args:
        shares: instance, late_rank, cause, layer, phase, share.
        passed_on: Which instances are sends and receives, shape ``(m,)``.
        tables: The job's maps.
    """
    table = with_equals(tables.layer_medians)
    if table["stage"].nunique() < 2:
        return shares
    keys = ["rank", "layer", "phase"]
    table = table.set_index(keys)
    over = {
        "work": 1 - table["peers_ns"] / table["median_ns"].clip(lower=1),
        "host": 1 - table["peers_idle_ns"] / table["idle_ns"].clip(lower=1),
    }
    kind = kinds_of(shares["cause"])
    by_kind = shares.assign(rank=shares["late_rank"], kind=kind)
    fault = by_kind.join(pd.concat(over, names=["kind"]).rename("fault"), on=["kind", *keys])["fault"].clip(lower=0)
    # work outside layers, such as the loss, is specific to a stage
    fault = fault.fillna(0.0).mask((shares["layer"] == NO_LAYER) & (kind == "work"), 0.0)
    is_split = passed_on[shares["instance"].to_numpy()] & kind.isin(over)
    regular = shares[is_split].assign(cause="pipeline", share=shares["share"] * (1 - fault))
    faulty = shares.assign(share=shares["share"].where(~is_split, shares["share"] * fault))
    both = pd.concat([faulty, regular], ignore_index=True)
    split_shares: pd.DataFrame = both[both["share"] > 0].reset_index(drop=True)
    return split_shares
