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
from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._ranks.causes import cause_shares, without_cause
from nvprof_kit._ranks.stages import with_equals
from nvprof_kit._result.column import Column, Columns
from nvprof_kit._trace.jobs.tables import SYMMETRIC, JobTables
from nvprof_kit.names import NO_LAYER, NO_PHASE

if TYPE_CHECKING:
    import pandas as pd


WAIT_COLUMNS: Columns = {
    "step": Column("step of the collective, -1 outside steps"),
    "collective": Column("communicator, kind and number", kind="str"),
    "waiting_rank": Column("rank that waited"),
    "late_rank": Column("rank that arrived last"),
    "wait_ns": Column("time from the arrival of the waiting rank to that of the late rank", "ns", kind="float"),
    "cause": Column("main cause of the delay on the late rank", kind="str"),
    "layer": Column("layer in which most of the delay arose", kind="str"),
    "phase": Column("phase in which most of the delay arose", kind="str"),
    "cause_rank": Column(
        "origin of the delay: differs from `late_rank` if that rank had itself waited in another collective"
    ),
}
"""The columns of the table of waits."""

CHARGE_COLUMNS: Columns = {
    "step": Column("step, -1 outside steps", fold="key"),
    "rank": Column("rank that caused the waiting", fold="key"),
    "cause": Column("cause of the waiting", kind="str"),
    "layer": Column("layer in which it lost the time", kind="str"),
    "phase": Column("phase of that layer, or of the loop", kind="str"),
    "wait_ns": Column(
        "time that other ranks waited for it; the rows add up to the total waiting time", "ns", kind="float"
    ),
    "cost_ns": Column(
        "exposed waiting time per waiting rank: the mean over the ranks of the communicator that waits most",
        "ns",
        kind="float",
    ),
}
"""The columns of the table of charges."""

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
        waits: One row per wait with `WAIT_COLUMNS`, for the collectives whose causes were found.
        charges: With `CHARGE_COLUMNS`; for all collectives.
        total_ns: All waiting; the charges add up to it.
        floor_ns: Shorter mean waits are not analyzed.
    """

    waits: pd.DataFrame
    charges: pd.DataFrame
    total_ns: int
    floor_ns: int


def find_waits(tables: JobTables, floor_ns: int) -> Waits:
    """Find the waiting in a job with matched collectives and aligned clocks.

    Args:
        tables: The job's maps.
        floor_ns: The resolution of the clocks.

    Raises:
        AssertionError: The charges do not add up to the waiting: a bug in this package.
    """
    total, is_small = tables.total_wait(), tables.count() <= MOST
    instances = tables.instances(0 if is_small else SHOWN)
    if not is_small:
        instances = instances[instances["n"].cumsum() <= SHOWN_WAITS]
    instances = instances.sort_values("arrival", kind="stable", ignore_index=True)
    if not len(instances):
        return Waits(_waits(instances, None), _summed(_costed(coarse_charges(tables)), total), total, floor_ns)
    instances["instance"] = np.arange(len(instances))
    members = tables.members_of(instances).merge(instances, on=["c", "s", "k"])
    # limited to its own end for a rank that can end before the others arrive, and with two ranks
    wait, until_end = members["arrival"] - members["a"], (members["e"] - members["a"]).clip(lower=0)
    ends_alone = (members["n"] == 2) | ~members["sort"].isin(SYMMETRIC)
    members["wait_ns"] = wait.where(~ends_alone, np.minimum(wait, until_end))
    # waiting time of each collective's ranks during which their devices do nothing else
    bare = members[["wait_ns", "alone"]].min(axis=1)
    instances["exposed_ns"] = np.bincount(members["instance"], weights=bare, minlength=len(instances)).astype(np.int64)
    if is_small:
        shares = _shares(tables, instances, members, floor_ns)
        # regular work of a pipeline stage, and the reasons for a late host
        shares = stage_work(shares, (instances["sort"] == "SendRecv").to_numpy(), tables)
        of = shares["instance"].to_numpy()
        cost = (instances["wait_ns"] / (instances["n"] - 1)).to_numpy()[of] * shares["share"].to_numpy()
        causes = shares.assign(step=instances["step"].to_numpy()[of], rank=shares["late_rank"], cost=cost)
        refined = host_reasons(causes, tables)[list(shares)]
        shares = refined.groupby([name for name in shares if name != "share"], sort=False)["share"].sum().reset_index()
        charges = _charges(shares, instances)
    else:
        charges = coarse_charges(tables)
        charges = host_reasons(charges.assign(cost=charges["wait_ns"] / (charges["n"] - 1).clip(lower=1)), tables)
        shares = _of_steps(charges, instances)
    return Waits(_waits(members, shares), _summed(_costed(charges), total), total, floor_ns)


def _shares(tables: JobTables, instances: pd.DataFrame, members: pd.DataFrame, floor_ns: int) -> pd.DataFrame:
    """The causes of every collective, one by one, if its waiting exceeds the uncertainty of the clocks.

    The late rank is compared with the median of those that waited.
    """
    import pandas as pd

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
    parts: pd.DataFrame = pd.concat([table for table in (shares, unknown) if len(table)], ignore_index=True)
    return parts


def _of_steps(charges: pd.DataFrame, instances: pd.DataFrame) -> pd.DataFrame:
    """The causes of collectives from those of their steps: the late rank's own, otherwise a chain."""
    top = charges.sort_values("wait_ns", ascending=False, kind="stable").drop_duplicates(["step", "rank"])
    keys = {"left_on": ["step", "late_rank"], "right_on": ["step", "rank"], "how": "left"}
    merged = instances[["instance", "step", "late_rank"]].merge(
        top[["step", "rank", "cause", "layer", "phase"]], **keys
    )
    filled = merged.fillna({"cause": "collective", "layer": NO_LAYER, "phase": NO_PHASE})
    shares: pd.DataFrame = filled.assign(share=1.0)[["instance", "late_rank", "cause", "layer", "phase", "share"]]
    return shares


def _charges(shares: pd.DataFrame, instances: pd.DataFrame) -> pd.DataFrame:
    """The shares in integer nanoseconds; the rounding error is added to the largest."""
    shares = shares.sort_values(["instance", "share"], ascending=[True, False], kind="stable", ignore_index=True)
    instance = shares["instance"].to_numpy()
    wait = instances["wait_ns"].to_numpy()
    ns = np.floor(shares["share"].to_numpy() * wait[instance]).astype(np.int64)
    first = np.flatnonzero(np.diff(instance, prepend=-1))
    ns[first] += wait[instance[first]] - np.add.reduceat(ns, first)
    charges: pd.DataFrame = shares.assign(rank=shares["late_rank"], wait_ns=ns)
    for name in ("step", "c", "n"):
        charges[name] = instances[name].to_numpy()[instance]
    charges["bare"] = (instances["exposed_ns"] / instances["wait_ns"].clip(lower=1)).to_numpy()[instance]
    return charges


def _costed(charges: pd.DataFrame) -> pd.DataFrame:
    """Add the cost to a waiting rank: that of the communicator that waits most for the late rank, because the others
    wait for the same delay as it propagates.
    """
    cost = charges["bare"] * charges["wait_ns"] / (charges["n"] - 1).clip(lower=1)
    real = ~charges["cause"].isin(NO_FAULT)
    keys = [charges["step"], charges["rank"]]
    of_group = cost.where(real, 0).groupby([*keys, charges["c"]]).transform("sum")
    largest = of_group.groupby(keys).transform("max")
    first = charges["c"].where(of_group == largest).groupby(keys).transform("first")
    costed: pd.DataFrame = charges.assign(cost_ns=cost.where(charges["c"] == first, 0.0))
    return costed


def _summed(charges: pd.DataFrame, total_ns: int) -> pd.DataFrame:
    """The charges by step, rank, cause, layer and phase.

    Raises:
        AssertionError: They do not add up to the waiting: a bug in this package.
    """
    keys = list(CHARGE_COLUMNS)[:-2]
    sums: pd.DataFrame = charges.groupby(keys, sort=True)[["wait_ns", "cost_ns"]].sum().reset_index()
    if int(sums["wait_ns"].sum()) != total_ns:
        raise AssertionError(f"{sums['wait_ns'].sum()} ns charged, {total_ns} ns waited: please report this")
    return sums


def _waits(members: pd.DataFrame, shares: pd.DataFrame | None) -> pd.DataFrame:
    import pandas as pd

    if shares is None:
        nothing: pd.DataFrame = pd.DataFrame({name: [] for name in WAIT_COLUMNS})
        return nothing
    top = shares.sort_values("share", ascending=False, kind="stable").drop_duplicates("instance").set_index("instance")
    rows = members[members["rank"] != members["late_rank"]].sort_values(["instance", "rank"], kind="stable")
    top = top.reindex(rows["instance"])
    number = rows["k"].astype(str)
    table: pd.DataFrame = pd.DataFrame(
        {
            "step": rows["step"].to_numpy(),
            "collective": (rows["comm"].astype(str) + " " + rows["sort"].astype(str) + " " + number).to_numpy(),
            "waiting_rank": rows["rank"].to_numpy(),
            "late_rank": rows["late_rank"].to_numpy(),
            "wait_ns": rows["wait_ns"].to_numpy(),
            "cause": top["cause"].to_numpy(),
            "layer": top["layer"].to_numpy(),
            "phase": top["phase"].to_numpy(),
            "cause_rank": top["late_rank"].to_numpy(),
        }
    )
    return table


LEAST_EXCESS_NS = 20_000
LEAST_SHARE = 0.03
"""Minimum excess in a layer."""

ROOT = 0.25
"""Minimum excess of a root, as a share of the step's largest."""


def coarse_charges(tables: JobTables) -> pd.DataFrame:
    """All waiting by step, c (communicator), rank, cause, layer and phase: wait_ns, bare (its exposed share), and n,
    the communicator's ranks.
    """
    import pandas as pd

    waited = tables.by_late_rank().rename(columns={"late_rank": "rank"})
    waited["bare"] = waited["exposed_ns"] / waited["wait_ns"].clip(lower=1)
    # the roots of each step and their causes
    more = tables.excesses(LEAST_EXCESS_NS, LEAST_SHARE)
    more = more.assign(whole=more.groupby(["step", "rank"])["excess_ns"].transform("sum"))
    more = more[more["whole"] >= ROOT * more.groupby("step")["whole"].transform("max")]
    compute = np.where(more["more_ops"], "more_kernels", "slower_kernels")
    more = more.assign(cause=np.where(more["kind"] == "compute", compute, more["kind"]), weight=more["excess_ns"])
    shares = more[["step", "rank", "cause", "layer", "phase", "weight"]]
    roots = shares.groupby(["step", "rank"], sort=False)["weight"].sum().reset_index()
    by_rank = waited.merge(roots[["step", "rank"]], on=["step", "rank"], how="left", indicator="root")
    # the profilers start in the first step, so a late rank there has no root to charge
    cold = by_rank["step"] == by_rank["step"].min()
    is_root = (by_rank["root"] == "both").to_numpy() & ~cold.to_numpy()
    by_rank = by_rank.drop(columns="root")
    direct = by_rank[is_root].merge(shares, on=["step", "rank"])
    direct["share"] = direct["weight"] / direct.groupby(["step", "c", "rank"])["weight"].transform("sum")
    by_comm = (
        by_rank[~is_root & ~cold.to_numpy()]
        .groupby(["step", "c"], sort=False)
        .agg(wait_ns=("wait_ns", "sum"), n=("n", "max"), exposed_ns=("exposed_ns", "sum"))
        .reset_index()
    )
    by_comm["bare"] = by_comm["exposed_ns"] / by_comm["wait_ns"].clip(lower=1)
    chained = by_comm.merge(shares, on="step")
    chained["share"] = chained["weight"] / chained.groupby(["step", "c"])["weight"].transform("sum")
    lonely = by_rank[~is_root & ~(by_rank["step"].isin(shares["step"]) & ~cold).to_numpy()]
    cause = np.where(lonely["step"] == by_rank["step"].min(), "start_up", "unresolved")
    unknown = lonely.assign(cause=cause, layer=NO_LAYER, phase=NO_PHASE)
    parts = [_whole(direct, ["step", "c", "rank"]), _whole(chained, ["step", "c"]), unknown]
    columns = ["step", "c", "n", "rank", "cause", "layer", "phase", "wait_ns", "bare"]
    charges: pd.DataFrame = pd.concat([table[columns] for table in parts], ignore_index=True)
    return charges


def _whole(shared: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """The shares in integer nanoseconds that add up to each wait."""
    shared = shared.sort_values([*keys, "share"], kind="stable", ignore_index=True)
    ns = np.floor(shared["share"].to_numpy() * shared["wait_ns"].to_numpy()).astype(np.int64)
    groups = shared.groupby(keys, sort=False)
    last = ~shared.duplicated(keys, keep="last").to_numpy()
    total_wait = groups["wait_ns"].transform("first").to_numpy()
    total = shared.assign(ns=ns).groupby(keys, sort=False)["ns"].transform("sum").to_numpy()
    exact: pd.DataFrame = shared.assign(wait_ns=ns + np.where(last, total_wait - total, 0))
    return exact


LEAST_NS = 300_000
"""Minimum excess of a host's time over the median of the ranks."""

EXPLAINS = 0.5
"""A host's lateness in a step is attributed to an earlier activity that took at least this share of it."""

_WORK = ("more_kernels", "slower_kernels")


def host_reasons(causes: pd.DataFrame, tables: JobTables) -> pd.DataFrame:
    """Rename rows of the cause ``host`` if the host spent more time than others loading data or collecting garbage in
    that step: it lost its lead then, and the device idled later.

    Args:
        causes: step, rank, cause, layer, phase, and cost (how long a waiting rank waits).
        tables: The job's maps.

    Returns:
        The rows, in the same order, with updated cause, layer and phase.
    """
    renamed_causes = causes.copy()
    for column, cause in (("gc_ns", "garbage_collection"), ("loading_ns", "data_loading")):
        more = tables.host_excesses(column, LEAST_NS)
        if not len(more):
            continue
        sums = renamed_causes.assign(host=renamed_causes["cost"].where(renamed_causes["cause"] == "host", 0.0))
        sums["direct"] = renamed_causes["cost"].where(renamed_causes["cause"] == cause, 0.0)
        explained = (
            sums.groupby(["step", "rank"])[["host", "direct"]].sum().reset_index().merge(more, on=["step", "rank"])
        )
        explained = explained[explained["excess_ns"] - explained["direct"] >= EXPLAINS * explained["host"]]
        merged = renamed_causes[["step", "rank"]].merge(
            explained[["step", "rank"]], on=["step", "rank"], how="left", indicator="is"
        )
        renamed = (merged["is"] == "both").to_numpy() & (renamed_causes["cause"] == "host").to_numpy()
        renamed_causes.loc[renamed, "cause"] = cause
        if cause == "data_loading":
            renamed_causes.loc[renamed, ["layer", "phase"]] = [NO_LAYER, "data"]
    named: pd.DataFrame = renamed_causes
    return named


def stage_work(shares: pd.DataFrame, passed_on: np.ndarray, tables: JobTables) -> pd.DataFrame:
    """Split shares of sends and receives between stages: time that the late stage's equals also spend is regular work.

    Args:
        shares: instance, late_rank, cause, layer, phase, share.
        passed_on: Which instances are sends and receives, shape ``(m,)``.
        tables: The job's maps.
    """
    import pandas as pd

    table = with_equals(tables.layer_medians)
    if table["stage"].nunique() < 2:
        return shares
    over = {
        "work": 1 - table["peers_ns"] / table["median_ns"].clip(lower=1),
        "host": 1 - table["peers_idle_ns"] / table["idle_ns"].clip(lower=1),
    }
    kinds = [
        table[["rank", "layer", "phase"]].assign(kind=kind, over=value.clip(lower=0)) for kind, value in over.items()
    ]
    keys = ["rank", "layer", "phase", "kind"]
    kind = np.where(shares["cause"].isin(_WORK), "work", shares["cause"])
    share_keys = shares.assign(rank=shares["late_rank"], kind=kind)[keys]
    fault = share_keys.merge(pd.concat(kinds), on=keys, how="left")["over"].to_numpy()
    # work outside layers, such as the loss, is specific to a stage
    fault = np.where(np.isnan(fault) | ((shares["layer"] == NO_LAYER) & (kind == "work")).to_numpy(), 0.0, fault)
    split = passed_on[shares["instance"].to_numpy()] & np.isin(kind, list(over))
    regular = shares[split].assign(cause="pipeline", share=shares["share"][split] * (1 - fault[split]))
    faulty = shares.assign(share=np.where(split, shares["share"] * fault, shares["share"]))
    both = pd.concat([faulty, regular], ignore_index=True)
    split_shares: pd.DataFrame = both[both["share"] > 0].reset_index(drop=True)
    return split_shares
