"""Finds where the last rank to arrive lost its time: compares its device time since the last common point with that of
a waiting rank.

The last common point of two ranks is the end of the last collective that both took part in, and for which both devices
had stopped computing: after it both start at the same time. From there to the collective's arrival, each device's time
is divided without gaps into compute in a layer, copies, idle time in a layer because of the host, and waiting in other
collectives. Whatever takes longer on the late rank than on the waiting rank made it late. If that is waiting in another
collective, the causes of that collective apply: a chain leads to its first cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

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

_SHARES = ("instance", "late_rank", "cause", "layer", "phase", "share")


class Pair(NamedTuple):
    """Collectives with the last rank to arrive and one that waited, shape ``(i,)`` each.

    Attributes:
        instance: Number of the collective, ascending by arrival.
        late_rank, peer: The two ranks.
        late_index, peer_index: Index of the collective on each rank.
    """

    instance: Int64Array
    late_rank: Int64Array
    peer: Int64Array
    late_index: Int64Array
    peer_index: Int64Array

    def among(self, instances: npt.NDArray[np.bool_]) -> Pair:
        """Select by instance, shape ``(m,)``."""
        selected = instances[self.instance]
        return Pair(*(column[selected] for column in self))


class _Rank(NamedTuple):
    """A rank's collectives by index, and its segments with the time in each in which a collective moved bytes."""

    instance: Int64Array
    ready: Int64Array
    ended: Int64Array
    gates: npt.NDArray[np.bool_]
    a: Int64Array
    e: Int64Array
    queued: Int64Array
    layer: npt.NDArray[np.object_]
    phase: npt.NDArray[np.object_]
    segment: Int64Array
    rows: pd.DataFrame
    transfer: Int64Array


class Causes:
    """Finds the causes of waiting in collectives.

    Args:
        points: The collectives of the compared ranks, with a column ``instance`` (number of the matched collective,
            `NONE` for none).
        segments: Their segments.
        arrival: Aligned last arrival of each instance, shape ``(m,)``.
        late_rank: The last rank to arrive in each, shape ``(m,)``.
    """

    def __init__(
        self, points: pd.DataFrame, segments: pd.DataFrame, arrival: Int64Array, late_rank: Int64Array
    ) -> None:
        self._arrival, self._late = arrival, late_rank
        groups = {rank: of_rank for rank, of_rank in segments.groupby("rank", sort=False)}
        empty = segments.iloc[:0]
        self._ranks = {
            int(str(rank)): _rank(of_rank, groups.get(rank, empty), arrival)
            for rank, of_rank in points.groupby("rank", sort=False)
        }
        self._gates: dict[tuple[int, int], tuple[Int64Array, Int64Array]] = {}

    def shares(self, pairs: Pair) -> pd.DataFrame:
        """Cause, layer and phase of each collective's waiting, with shares that add up to 1 for each.

        Returns:
            instance, late_rank (the one at the end of the chain), cause, layer, phase, share.
        """
        import pandas as pd

        late_ready, since = self._windows(pairs.late_rank, pairs.peer, pairs.late_index, pairs.peer_index)
        peer = (since[1], self._ready(pairs.peer, pairs.peer_index))
        has_common = since[0] != NONE
        started = np.flatnonzero(has_common)
        late_rows = self._rows(pairs.late_rank[started], since[0][started], late_ready[started], started)
        peer_rows = self._rows(pairs.peer[started], peer[0][started], peer[1][started], started)
        late_rows = pd.concat([late_rows, self._queued(pairs.late_rank, pairs.late_index, started)], ignore_index=True)
        peer_rows = pd.concat([peer_rows, self._queued(pairs.peer, pairs.peer_index, started)], ignore_index=True)
        peer_rows[["ns", "ops"]] *= -1
        both = pd.concat([late_rows, peer_rows], ignore_index=True)
        both["kind"] = np.where(
            both["doing"] == "compute", "compute", both["doing"].map(_OF_DOING).fillna("communication")
        )
        # first by kind, then by layer within a kind, so that time that only moved between layers, as gaps do, does
        # not count
        kinds = ["pair", "kind", "instance"]
        net = both.groupby(kinds, sort=False)["ns"].sum().clip(lower=0).rename("net")
        net = net[net > 0].reset_index()
        net["of_pair"] = net["net"] / net.groupby("pair")["net"].transform("sum")
        more = both.groupby([*kinds, "doing", "layer", "phase"], sort=False)[["ns", "ops"]].sum().reset_index()
        more = more[more["ns"] > 0].merge(net, on=kinds)
        more["share"] = more["of_pair"] * more["ns"] / more.groupby(kinds)["ns"].transform("sum")
        direct, chained = self._as_shares(more, pairs)
        lacking = np.flatnonzero(~has_common)
        unknown = np.setdiff1d(started, more["pair"].to_numpy())
        direct = pd.concat(
            [direct, _all_of(pairs, lacking, "start_up"), _all_of(pairs, unknown, "unresolved")], ignore_index=True
        )
        return _resolved(direct, chained, self._late)

    def _ready(self, ranks: Int64Array, index: Int64Array) -> Int64Array:
        return np.array(
            [self._ranks[r].ready[i] for r, i in zip(ranks.tolist(), index.tolist(), strict=True)], dtype=np.int64
        )

    def _windows(
        self, late_ranks: Int64Array, peer_ranks: Int64Array, late_index: Int64Array, peer_index: Int64Array
    ) -> tuple[Int64Array, tuple[Int64Array, Int64Array]]:
        """The segment that ends with each late rank's readiness, and those that end with the last common point."""
        ready = self._ready(late_ranks, late_index)
        since = np.full((2, len(late_ranks)), NONE, dtype=np.int64)
        for pair, (late_rank, peer_rank, i, j) in enumerate(
            zip(late_ranks.tolist(), peer_ranks.tolist(), late_index.tolist(), peer_index.tolist(), strict=True)
        ):
            late_points, peer_points = self._common(late_rank, peer_rank)
            at = int(np.searchsorted(late_points, i)) - 1
            while at >= 0 and peer_points[at] >= j:
                at -= 1
            if at >= 0:
                since[0, pair] = self._ranks[late_rank].ended[late_points[at]]
                since[1, pair] = self._ranks[peer_rank].ended[peer_points[at]]
        return ready, (since[0], since[1])

    def _common(self, first: int, second: int) -> tuple[Int64Array, Int64Array]:
        """The common points of two ranks, as indices of each rank's collectives, ascending."""
        if (first, second) not in self._gates:
            a, b = self._ranks[first], self._ranks[second]
            _, first_index, second_index = np.intersect1d(
                np.where(a.instance >= 0, a.instance, -1 - np.arange(len(a.instance)) * 2),
                np.where(b.instance >= 0, b.instance, -2 - np.arange(len(b.instance)) * 2),
                return_indices=True,
            )
            together = np.abs(a.e[first_index] - b.e[second_index]) <= TOGETHER_NS
            if together.any():
                first_index, second_index = first_index[together], second_index[together]
            gating = a.gates[first_index] & b.gates[second_index]
            if gating.any():
                first_index, second_index = first_index[gating], second_index[gating]
            order = np.argsort(first_index)
            self._gates[first, second] = (first_index[order], second_index[order])
        return self._gates[first, second]

    def _rows(self, ranks: Int64Array, since: Int64Array, until: Int64Array, pair: Int64Array) -> pd.DataFrame:
        """Device activity in the ranks' windows: pair, doing, layer, phase, instance (of a collective), ns, ops."""
        import pandas as pd

        parts = []
        for rank in np.unique(ranks).tolist():
            windows, at = np.flatnonzero(ranks == rank), self._ranks[rank]
            low = np.searchsorted(at.segment, since[windows], side="right")
            high = np.maximum(np.searchsorted(at.segment, until[windows], side="right"), low)
            count = high - low
            rows = np.repeat(low - np.concatenate(([0], np.cumsum(count)[:-1])), count) + np.arange(count.sum())
            segments = at.rows.iloc[rows]
            collective = segments["collective"].to_numpy()
            of = np.append(at.instance, NONE)[collective]
            waits = collective >= 0
            frame = pd.DataFrame(
                {
                    "pair": np.repeat(pair[windows], count),
                    "doing": segments["doing"].to_numpy(),
                    "layer": np.where(waits & (of >= 0), "", segments["layer"].to_numpy()),
                    "phase": np.where(waits & (of >= 0), "", segments["phase"].to_numpy()),
                    "instance": np.where(waits, of, NONE),
                    "ns": segments["ns"].to_numpy() - at.transfer[rows],
                    "ops": segments["ops"].to_numpy(),
                }
            )
            moved = at.transfer[rows] > 0
            parts += [frame, frame[moved].assign(doing="transfer", instance=NONE, ns=at.transfer[rows][moved], ops=0)]
        columns = ["pair", "doing", "layer", "phase", "instance", "ns", "ops"]
        table: pd.DataFrame = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)
        return table

    def _queued(self, ranks: Int64Array, index: Int64Array, pairs: Int64Array) -> pd.DataFrame:
        """From readiness to arrival: behind another collective on its stream, otherwise launch latency."""
        import pandas as pd

        rows = []
        for pair in pairs.tolist():
            at, i = self._ranks[int(ranks[pair])], int(index[pair])
            ns = int(at.queued[i])
            behind = i > 0 and int(at.e[i - 1]) > int(at.a[i]) - ns and int(at.instance[i - 1]) >= 0
            activity, of = ("communication", int(at.instance[i - 1])) if behind else ("queued", NONE)
            layer, phase = ("", "") if behind else (at.layer[i], at.phase[i])
            moved = min(max(int(at.e[i - 1] - self._arrival[of]), 0), ns) if 0 <= of < len(self._arrival) else 0
            rows.append((pair, activity, layer, phase, of, ns - moved, 0))
            rows.append((pair, "transfer", "", "", NONE, moved, 0))
        table: pd.DataFrame = pd.DataFrame.from_records(
            rows, columns=["pair", "doing", "layer", "phase", "instance", "ns", "ops"]
        )
        return table

    def _as_shares(self, more: pd.DataFrame, pairs: Pair) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The excesses as shares: those with a direct cause, and those that depend on another collective's causes."""
        share = more["share"].to_numpy()
        pair, activity, of = (more[name].to_numpy() for name in ("pair", "doing", "instance"))
        pair, of = pair.astype(np.int64), of.astype(np.int64)  # empty frames have columns of type object
        late_rank = pairs.late_rank[pair]
        waits = activity == "communication"
        cause = np.where(waits, "collective", more["kind"]).astype(object)
        compute = activity == "compute"
        cause[compute] = np.where(more["ops"].to_numpy()[compute] > 0, "more_kernels", "slower_kernels")
        chain = waits & (of >= 0) & (of < pairs.instance[pair])
        # if the late rank was also last in the other collective, its own transfer took longer
        chain &= self._late[np.where(chain, of, 0)] != late_rank
        # which rank was last in a collective that was not matched is unknown
        cause[waits & ~chain & (of >= 0) & (of < len(self._arrival))] = "transfer"
        frame = more.assign(
            instance=pairs.instance[pair],
            late_rank=late_rank,
            cause=cause,
            share=share,
            of=of,
            layer=np.where(more["layer"] == "", NO_LAYER, more["layer"]),
            phase=np.where(more["phase"] == "", NO_PHASE, more["phase"]),
        )
        return frame.loc[~chain, list(_SHARES)], frame.loc[chain, ["instance", "of", "share"]]


def _rank(points: pd.DataFrame, segments: pd.DataFrame, arrival: Int64Array) -> _Rank:
    names = ("instance", "ready_segment", "end_segment", "gates", "a", "e", "queued_ns", "layer", "phase")
    columns: list[Any] = [*(points[name].to_numpy() for name in names), segments["segment"].to_numpy(), segments]
    # a collective moves bytes once all its ranks have arrived; it is exposed at its end, when work beside it is done
    collective, ns = segments["collective"].to_numpy(), segments["ns"].to_numpy()
    of = np.append(points["instance"].to_numpy(), NONE)[collective]
    is_matched = (collective >= 0) & (of >= 0) & (of < len(arrival))
    since = np.append(points["e"].to_numpy(), 0)[collective] - np.append(arrival, 0)[np.where(is_matched, of, NONE)]
    exposed = segments.groupby("collective", sort=False)["ns"]
    later = (exposed.transform("sum") - exposed.cumsum()).to_numpy()
    columns.append(np.where(is_matched, np.clip(since - later, 0, ns), 0).astype(np.int64))
    return _Rank(*columns)


def unresolved(pairs: Pair) -> pd.DataFrame:
    """The shares of collectives whose cause is not resolved."""
    return _all_of(pairs, np.arange(len(pairs.instance)), "unresolved")


def _all_of(pairs: Pair, selected: Int64Array, cause: str) -> pd.DataFrame:
    import pandas as pd

    table: pd.DataFrame = pd.DataFrame(
        {
            "instance": pairs.instance[selected],
            "late_rank": pairs.late_rank[selected],
            "cause": cause,
            "layer": NO_LAYER,
            "phase": NO_PHASE,
            "share": 1.0,
        }
    )
    return table


def _resolved(direct: pd.DataFrame, chained: pd.DataFrame, late_rank: Int64Array) -> pd.DataFrame:
    """Replace every chain by the causes of the collective it leads to, which began earlier and is already resolved."""
    import pandas as pd

    if not len(chained):
        return direct
    reasons: dict[int, dict[tuple[int, str, str, str], float]] = {}
    for row in direct.itertuples(index=False):
        _add(reasons.setdefault(int(row[0]), {}), (int(row[1]), *row[2:5]), row[5])
    for instance, of, share in chained.sort_values("instance", kind="stable").itertuples(index=False):
        before = reasons.get(int(of)) or {(int(late_rank[int(of)]), "collective", NO_LAYER, NO_PHASE): 1.0}
        total, own_reasons = sum(before.values()), reasons.setdefault(int(instance), {})
        for reason, weight in before.items():
            _add(own_reasons, reason, weight / total * share)
    rows = [(instance, *reason, share) for instance, shares in reasons.items() for reason, share in shares.items()]
    table: pd.DataFrame = pd.DataFrame.from_records(rows, columns=list(_SHARES))
    return table


def _add(shares: dict[tuple[int, str, str, str], float], reason: tuple[int, str, str, str], share: float) -> None:
    """Add a share at once: chains meet again and again, so lists of shares would double with every collective."""
    shares[reason] = shares.get(reason, 0.0) + share
