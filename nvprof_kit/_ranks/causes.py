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
from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array
from nvprof_kit.names import NO_LAYER, NO_PHASE

if TYPE_CHECKING:
    import pandas as pd

_OF_DOING = {
    "launch": "host",
    "sync": "host",
    "after_sync": "host",
    "off_cpu": "host",
    "unknown": "host",
    "graph": "host",
    "queued": "host",
    "other": "host",
    "dataloader": "data_loading",
    "allocation": "allocation",
    "profiler": "profiler",
    "gc": "garbage_collection",
    "loading": "warm_up",
    "copy": "copy",
    "transfer": "transfer",
}
TOGETHER_NS = 200_000
"""A collective is a common point of two ranks only if it ended on both within this time: a sender can end long before
its receiver arrives."""

_SHARES = ["instance", "late_rank", "cause", "layer", "phase", "share"]
_PIECES = ["doing", "layer", "phase", "instance", "ns", "ops"]


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
    import pandas as pd

    arrival, last = instances["arrival"].to_numpy(), instances["late_rank"].to_numpy()
    first_point = points.groupby("rank")["index"].size().cumsum().shift(1, fill_value=0)
    # of each segment, the collective that runs alone, and its transfer, exposed at its end, when work beside it is done
    collective = segments["collective"].to_numpy()
    point = np.where(collective >= 0, first_point.reindex(segments["rank"]).to_numpy() + collective, NONE)
    point = point.astype(np.int64)
    instance = np.append(points["instance"].to_numpy(), NONE)[point]
    exposed = segments.groupby(["rank", "collective"], sort=False)["ns"]
    until = np.append(points["e"].to_numpy(), 0)[point] - (exposed.transform("sum") - exposed.cumsum()).to_numpy()
    transfer_ns = _transfer_ns(instance, until, segments["ns"].to_numpy(), arrival)
    segments = segments.assign(instance=instance, transfer_ns=transfer_ns)
    late_rows, peer_rows = (
        (first_point.reindex(pairs[rank]).to_numpy() + pairs[index]).to_numpy(dtype=np.int64)
        for rank, index in (("late_rank", "late_index"), ("peer", "peer_index"))
    )
    since = _last_common(points, first_point, pairs, late_rows, peer_rows)
    has_common = since[0] != NONE
    started = np.flatnonzero(has_common)
    pieces = []
    for sign, rows, common in ((1, late_rows, since[0]), (-1, peer_rows, since[1])):
        of_side = pd.concat(
            [_activity(points, segments, common[started], rows[started]), _queued(points, rows[started], arrival)],
            ignore_index=True,
        )
        of_side[["ns", "ops"]] *= sign
        pieces.append(of_side.assign(pair=started[of_side["pair"]]))
    both = pd.concat(pieces, ignore_index=True)
    both["kind"] = np.where(both["doing"] == "compute", "compute", both["doing"].map(_OF_DOING).fillna("communication"))
    # first by kind, then by layer within a kind: time that only moved between layers, as gaps do, does not count
    kinds = ["pair", "kind", "instance"]
    net = both.groupby(kinds, sort=False)["ns"].sum().clip(lower=0).rename("net")
    net = net[net > 0].reset_index()
    net["of_pair"] = net["net"] / net.groupby("pair")["net"].transform("sum")
    more = both.groupby([*kinds, "doing", "layer", "phase"], sort=False)[["ns", "ops"]].sum().reset_index()
    more = more[more["ns"] > 0].merge(net, on=kinds)
    more["share"] = more["of_pair"] * more["ns"] / more.groupby(kinds)["ns"].transform("sum")
    direct, chained = _as_shares(more, pairs, last)
    unknown = has_common & ~np.isin(np.arange(len(pairs)), more["pair"])
    direct = pd.concat(
        [direct, without_cause(pairs[~has_common], "start_up"), without_cause(pairs[unknown], "unresolved")],
        ignore_index=True,
    )
    return _resolved(direct, chained, last)


def without_cause(pairs: pd.DataFrame, cause: str) -> pd.DataFrame:
    """The shares of collectives whose cause is not resolved."""
    of_pairs = pairs[["instance", "late_rank"]]
    shares: pd.DataFrame = of_pairs.assign(cause=cause, layer=NO_LAYER, phase=NO_PHASE, share=1.0)
    return shares


def _transfer_ns(instance: Int64Array, until: Int64Array, ns: Int64Array, arrival: Int64Array) -> Int64Array:
    """The part of the time before a moment in which a collective moved bytes: once all its ranks have arrived."""
    is_analyzed = (instance >= 0) & (instance < len(arrival))
    since = np.append(arrival, 0)[np.where(is_analyzed, instance, NONE)]
    return np.where(is_analyzed, np.clip(until - since, 0, ns), 0).astype(np.int64)


def _last_common(
    points: pd.DataFrame,
    first_point: pd.Series[int],
    pairs: pd.DataFrame,
    late_rows: Int64Array,
    peer_rows: Int64Array,
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


def _activity(points: pd.DataFrame, segments: pd.DataFrame, since: Int64Array, until: Int64Array) -> pd.DataFrame:
    """What devices did from a common point to the readiness for a collective, both rows of `points`, shape ``(n,)``:
    pair (a row of these), doing, layer, phase, instance (of a collective), ns, ops.
    """
    import pandas as pd

    scale = int(segments["segment"].max()) + 2
    key = (segments["rank"] * scale + segments["segment"]).to_numpy()
    base = (points["rank"] * scale).to_numpy()[until]
    low = np.searchsorted(key, base + points["end_segment"].to_numpy()[since], side="right")
    high = np.searchsorted(key, base + points["ready_segment"].to_numpy()[until], side="right")
    count = np.maximum(high - low, 0)
    rows = np.repeat(low - (np.cumsum(count) - count), count) + np.arange(count.sum())
    pieces = segments.iloc[rows].reset_index(drop=True).assign(pair=np.repeat(np.arange(len(until)), count))
    for name in ("layer", "phase"):
        pieces[name] = pieces[name].astype(object).mask(pieces["instance"] >= 0, "")
    moved = pieces[pieces["transfer_ns"] > 0].assign(doing="transfer", instance=NONE, ops=0)
    moved["ns"] = moved["transfer_ns"]
    pieces["ns"] -= pieces["transfer_ns"]
    table: pd.DataFrame = pd.concat([pieces, moved], ignore_index=True)[["pair", *_PIECES]]
    return table


def _queued(points: pd.DataFrame, rows: Int64Array, arrival: Int64Array) -> pd.DataFrame:
    """From readiness to arrival: behind another collective on its stream, otherwise launch latency; as `_activity`."""
    import pandas as pd

    at, before = (points.iloc[shifted].reset_index(drop=True) for shifted in (rows, rows - 1))
    ns = at["queued_ns"]
    behind = (at["index"] > 0) & (before["e"] > at["a"] - ns)
    instance = before["instance"].where(behind, NONE).to_numpy(dtype=np.int64)
    moved = _transfer_ns(instance, before["e"].to_numpy(), ns.to_numpy(), arrival)
    queued = pd.DataFrame({"pair": np.arange(len(rows)), "instance": instance, "ns": ns - moved, "ops": 0})
    queued["doing"] = np.where(behind, "communication", "queued")
    for name in ("layer", "phase"):
        queued[name] = at[name].astype(object).mask(behind, "")
    transfer = queued.assign(doing="transfer", layer="", phase="", instance=NONE, ns=moved)
    table: pd.DataFrame = pd.concat([queued, transfer], ignore_index=True)[["pair", *_PIECES]]
    return table


def _as_shares(more: pd.DataFrame, pairs: pd.DataFrame, last: Int64Array) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The excesses as shares: those with a direct cause, and those that depend on another collective's causes."""
    pair, of = (more[name].to_numpy(dtype=np.int64) for name in ("pair", "instance"))
    instance, late_rank = (pairs[name].to_numpy()[pair] for name in ("instance", "late_rank"))
    waits, compute = (more["doing"] == "communication").to_numpy(), (more["doing"] == "compute").to_numpy()
    cause = np.where(waits, "collective", more["kind"]).astype(object)
    cause[compute] = np.where(more["ops"][compute] > 0, "more_kernels", "slower_kernels")
    chain = waits & (of >= 0) & (of < instance)
    # if the late rank was also last in the other collective, its own transfer took longer
    chain &= last[np.where(chain, of, 0)] != late_rank
    # which rank was last in a collective that was not analyzed is unknown
    cause[waits & ~chain & (of >= 0) & (of < len(last))] = "transfer"
    places = {
        name: more[name].mask(more[name] == "", none) for name, none in (("layer", NO_LAYER), ("phase", NO_PHASE))
    }
    shares = more.assign(instance=instance, late_rank=late_rank, cause=cause, of=of, **places)
    return shares.loc[~chain, _SHARES], shares.loc[chain, ["instance", "of", "share"]]


def _resolved(direct: pd.DataFrame, chained: pd.DataFrame, last: Int64Array) -> pd.DataFrame:
    """Replace every chain by the causes of the collective it leads to, which began earlier and is already resolved."""
    import pandas as pd

    if not len(chained):
        return direct
    # sums, not lists: chains meet again and again, so lists of shares would double with every collective
    reasons: defaultdict[int, Counter[tuple[int, str, str, str]]] = defaultdict(Counter)
    for instance, *reason, share in direct[_SHARES].itertuples(index=False):
        reasons[int(instance)][int(reason[0]), reason[1], reason[2], reason[3]] += share
    for instance, of, share in chained.sort_values("instance", kind="stable").itertuples(index=False):
        earlier = reasons.get(int(of)) or {(int(last[int(of)]), "collective", NO_LAYER, NO_PHASE): 1.0}
        total = sum(earlier.values())
        for cause, weight in earlier.items():
            reasons[int(instance)][cause] += weight / total * share
    rows = [(instance, *cause, share) for instance, shares in reasons.items() for cause, share in shares.items()]
    table: pd.DataFrame = pd.DataFrame.from_records(rows, columns=_SHARES)
    return table
