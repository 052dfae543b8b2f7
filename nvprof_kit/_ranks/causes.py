"""Finds where the last rank to arrive lost its time: compares its device time since the last common point with that of
a waiting rank.

The last common point of two ranks is the end of the last collective that both took part in, and for which both devices
had stopped computing: after it both start at the same time. From there to the collective's arrival, each device's time
is divided without gaps into compute in a layer, copies, idle time in a layer because of the host, and waiting in other
collectives. Whatever takes longer on the late rank than on the waiting rank made it late. If that is waiting in another
collective, the causes of that collective apply: a chain leads to its first cause.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache

import numpy as np
import numpy.typing as npt
import pandas as pd

from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array
from nvprof_kit.names import NO_LAYER, NO_PHASE

_KINDS = {
    **dict.fromkeys(("launch", "sync", "after_sync", "off_cpu", "unknown", "graph", "queued", "other"), "host"),
    **{name: name for name in ("compute", "allocation", "profiler", "copy", "transfer")},
    **{"dataloader": "data_loading", "gc": "garbage_collection", "loading": "warm_up"},
}
"""What a device does, by kind; all else is communication."""

TOGETHER_NS = 200_000
"""A collective is a common point of two ranks only if it ended on both within this time: a sender can end long before
its receiver arrives."""

_SHARES = ["instance", "late_rank", "cause", "layer", "phase", "share"]


def cause_shares(
    pairs: pd.DataFrame, points: pd.DataFrame, segments: pd.DataFrame, instances: pd.DataFrame
) -> pd.DataFrame:
    """Cause, layer and phase of the waiting in collectives, with shares that add up to 1 for each.

    Args:
        pairs: Collectives with the last rank to arrive and one that waited: instance, late_rank, peer, late_index,
            peer_index (the index of the collective on each rank).
        points: The collectives of the compared ranks, by rank and index, with their number (instance) among the matched
            ones; those from ``len(instances)`` on are not analyzed.
        segments: The segments of the compared ranks, by rank and segment.
        instances: The collectives by number, ascending by arrival: arrival (aligned, of the last rank), late_rank.

    Returns:
        instance, late_rank (the one at the end of the chain), cause, layer, phase, share.
    """
    first_point = points.groupby("rank")["index"].size().cumsum().shift(1, fill_value=0)
    late_rows, peer_rows = (
        (first_point.reindex(pairs[rank]).to_numpy() + pairs[index]).to_numpy(dtype=np.int64)
        for rank, index in (("late_rank", "late_index"), ("peer", "peer_index"))
    )
    # of each segment the collective that runs alone, which is exposed at its end, when work beside it is done
    collective = segments["collective"].to_numpy()
    point = np.where(collective >= 0, first_point.reindex(segments["rank"]).to_numpy() + collective, NONE)
    instance, end = (np.append(points[name].to_numpy(), NONE)[point.astype(np.int64)] for name in ("instance", "e"))
    exposed = segments.groupby(["rank", "collective"], sort=False)["ns"]
    segments = segments.assign(within=instance, end_ns=end - (exposed.transform("sum") - exposed.cumsum()).to_numpy())
    common = _last_common(points, first_point, pairs, late_rows, peer_rows)
    compared = np.flatnonzero(common[0] != NONE)
    of_late, of_peers = (
        _activity(points, segments, since[compared], rows[compared], instances["arrival"].to_numpy())
        for since, rows in zip(common, (late_rows, peer_rows), strict=True)
    )
    more = excesses(of_late, of_peers)
    more = more.assign(pair=compared[more["pair"]]).join(pairs[["instance", "late_rank"]], on="pair")
    last = instances["late_rank"].to_numpy()
    is_analyzed = more["within"].between(0, len(last) - 1)
    late_within = np.append(last, NONE)[more["within"].where(is_analyzed, NONE)]
    waits, computes = more["doing"] == "communication", more["doing"] == "compute"
    # if the late rank was also last in the other collective, its own transfer took longer; which rank was last in a
    # collective that was not analyzed is unknown
    is_chain = waits & is_analyzed & (more["within"] < more["instance"]) & (late_within != more["late_rank"])
    conditions = [waits & is_analyzed, waits, computes & (more["ops"] > 0), computes]
    more["cause"] = np.select(conditions, ["transfer", "collective", "more_kernels", "slower_kernels"], more["kind"])
    more = more.replace({"layer": {"": NO_LAYER}, "phase": {"": NO_PHASE}})
    unknown = pairs[~pairs.index.isin(more["pair"])]
    cause = np.where(common[0][unknown.index] == NONE, "start_up", "unresolved")
    direct = pd.concat([more.loc[~is_chain, _SHARES], without_cause(unknown, cause)], ignore_index=True)
    return _resolved(direct, more[is_chain], last)


def excesses(of_late: pd.DataFrame, of_peers: pd.DataFrame) -> pd.DataFrame:
    """What a late rank did longer than its peer, with shares that add up to 1 for each pair.

    By kind first, then by layer within a kind: time that only moved between layers, as gaps do, does not count.

    Args:
        of_late: What the late rank of each pair did, see `_activity`.
        of_peers: The same of the peers.

    Returns:
        pair, kind, within, doing, layer, phase, ops (how many more), share.
    """
    both = pd.concat([of_late, of_peers.assign(ns=-of_peers["ns"], ops=-of_peers["ops"])], ignore_index=True)
    both["kind"] = both["doing"].map(_KINDS).fillna("communication")
    keys = ["pair", "kind", "within"]
    of_kind = both.groupby(keys, sort=False)["ns"].sum()
    of_kind = of_kind[of_kind > 0]
    of_pair = (of_kind / of_kind.groupby("pair").transform("sum")).rename("of_pair").reset_index()
    of_layer = both.groupby([*keys, "doing", "layer", "phase"], sort=False)[["ns", "ops"]].sum().reset_index()
    more = of_layer[of_layer["ns"] > 0].merge(of_pair, on=keys)
    return more.assign(share=more["of_pair"] * more["ns"] / more.groupby(keys)["ns"].transform("sum"))


def without_cause(pairs: pd.DataFrame, cause: str | npt.NDArray[np.str_]) -> pd.DataFrame:
    """The shares of collectives whose cause is not resolved."""
    of_pairs = pairs[["instance", "late_rank"]]
    return of_pairs.assign(cause=cause, layer=NO_LAYER, phase=NO_PHASE, share=1.0)


def segment_rows(
    segments: pd.DataFrame, rank: npt.ArrayLike, after: npt.ArrayLike, until: npt.ArrayLike
) -> tuple[Int64Array, Int64Array]:
    """The rows of a rank's segments after one of them and until another: the first, and the one after the last.

    Args:
        segments: The segments of ranks, by rank and segment.
        rank: The ranks.
        after: The segments before the first; -1 for a rank's beginning.
        until: The last segments.
    """
    scale = int(segments["segment"].max()) + 2
    key = (segments["rank"] * scale + segments["segment"]).to_numpy()
    base = np.asarray(rank) * scale
    low, high = (np.searchsorted(key, base + np.asarray(segment), side="right") for segment in (after, until))
    return low, np.maximum(low, high)


def _last_common(
    points: pd.DataFrame, first_point: pd.Series[int], pairs: pd.DataFrame, late_rows: Int64Array, peer_rows: Int64Array
) -> Int64Array:
    """The last common point before each pair, as rows of the points of the late rank and its peer, shape ``(2, n)``;
    `NONE` if there is none.
    """
    ends = np.append(first_point.to_numpy()[1:], len(points))
    rows_of_rank = {rank: slice(*bounds) for rank, *bounds in zip(first_point.index, first_point, ends, strict=True)}
    instance, end, gates = (points[name].to_numpy() for name in ("instance", "e", "gates"))

    @cache
    def common(first: int, second: int) -> tuple[Int64Array, Int64Array]:
        at_first, at_second = rows_of_rank[first], rows_of_rank[second]
        _, *positions = np.intersect1d(instance[at_first], instance[at_second], return_indices=True)
        rows, its = positions[0] + at_first.start, positions[1] + at_second.start
        together = np.abs(end[rows] - end[its]) <= TOGETHER_NS
        if together.any():
            rows, its = rows[together], its[together]
        gating = gates[rows] & gates[its]
        if gating.any():
            rows, its = rows[gating], its[gating]
        order = np.argsort(rows)
        return rows[order], its[order]

    since = np.full((2, len(pairs)), NONE, dtype=np.int64)
    for number, (rank, other) in enumerate(zip(pairs["late_rank"].tolist(), pairs["peer"].tolist(), strict=True)):
        rows, its = common(rank, other)
        at = int(np.searchsorted(rows, late_rows[number])) - 1
        while at >= 0 and its[at] >= peer_rows[number]:
            at -= 1
        if at >= 0:
            since[:, number] = rows[at], its[at]
    return since


def _activity(
    points: pd.DataFrame, segments: pd.DataFrame, since: Int64Array, until: Int64Array, arrival: Int64Array
) -> pd.DataFrame:
    """What devices did from a common point to the start of a collective, both rows of `points`, shape ``(n,)``: pair (a
    row of these), doing, layer, phase, within (the collective that it was in, or `NONE`), ns, ops.
    """
    at, before = points.iloc[until], points.iloc[until - 1]
    low, high = segment_rows(segments, at["rank"], points["end_segment"].to_numpy()[since], at["ready_segment"])
    count = high - low
    rows = np.repeat(low - (np.cumsum(count) - count), count) + np.arange(count.sum())
    ready = segments.iloc[rows].assign(pair=np.repeat(np.arange(len(until)), count))
    # from readiness to arrival: behind another collective on its stream, otherwise launch latency
    end = before["e"].to_numpy()
    is_behind = ((at["index"] > 0) & (end > at["a"] - at["queued_ns"])).to_numpy()
    queued = at[["layer", "phase"]].assign(
        pair=np.arange(len(until)),
        doing=np.where(is_behind, "communication", "queued"),
        within=np.where(is_behind, before["instance"], NONE),
        end_ns=end,
        ns=at["queued_ns"],
        ops=0,
    )
    pieces = pd.concat([ready, queued], ignore_index=True)
    within = pieces["within"].to_numpy()
    for name in ("layer", "phase"):
        pieces[name] = pieces[name].astype(object).mask(within >= 0, "")
    # a collective moves bytes once all its ranks have arrived
    is_analyzed = (within >= 0) & (within < len(arrival))
    all_arrived = np.append(arrival, 0)[np.where(is_analyzed, within, NONE)]
    transfer = np.where(is_analyzed, np.clip(pieces["end_ns"] - all_arrived, 0, pieces["ns"]), 0)
    moved = pieces.assign(doing="transfer", layer="", phase="", within=NONE, ops=0, ns=transfer)[transfer > 0]
    pieces["ns"] -= transfer
    return pd.concat([pieces, moved], ignore_index=True)[["pair", "doing", "layer", "phase", "within", "ns", "ops"]]


def _resolved(direct: pd.DataFrame, chained: pd.DataFrame, last: Int64Array) -> pd.DataFrame:
    """Replace every chain by the causes of the collective it leads to, which began earlier and is already resolved."""
    # sums, not lists: chains meet again and again, so lists of shares would double with every collective
    causes: defaultdict[int, Counter[tuple[int, str, str, str]]] = defaultdict(Counter)
    for instance, rank, cause, layer, phase, share in direct.itertuples(index=False):
        causes[instance][int(rank), cause, layer, phase] += share
    chained = chained.sort_values("instance", kind="stable")
    for instance, within, share in chained[["instance", "within", "share"]].itertuples(index=False):
        earlier = causes.get(within) or {(int(last[within]), "collective", NO_LAYER, NO_PHASE): 1.0}
        total = sum(earlier.values())
        for cause, weight in earlier.items():
            causes[instance][cause] += weight / total * share
    rows = [(instance, *cause, share) for instance, shares in causes.items() for cause, share in shares.items()]
    return pd.DataFrame.from_records(rows, columns=_SHARES)
