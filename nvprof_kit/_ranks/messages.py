"""Matches sends and receives without ids, in jobs of more than two ranks.

The position in a stream identifies the partner only if the stream has a single partner, which the capture does not
show. Two ranks of adjacent stages are partners if, with one clock offset, most of their messages end together: a send
of one with a receive of the other, of the same size and in the same step. If another rank or another offset fits nearly
as well, the match is ambiguous; these messages are matched stage by stage (`pair_chain`), or left unmatched and
counted.

Stage by stage: all messages of the first stage are with the second; what the second has left is with the third, and so
on. Between two ranks, the sends of one are received by the other in order. So for one clock offset, the cheapest
assignment that keeps the order is found for each step: a receive ends when its send does, or soon after its own start
if the send was early. The same is done from the last stage, and the result that matches more is used.

Two ranks are only paired if their messages fit clearly better with this offset than with any other, and than those of
any other rank of that stage do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit.issues import listing, plural

if TYPE_CHECKING:
    import pandas as pd

Ints = npt.NDArray[np.int64]

TOGETHER_NS = 50_000
"""Maximum distance of ends that count as together."""

MARGIN = 0.8
"""The runner-up may have at most this share of the winner's votes."""

LEAST, LEAST_SHARE = 3, 1 / 8
"""Minimum number of votes for a pair, and minimum share of the messages of the rank with fewer messages."""

LEAST_WAY = 1 / 8
"""Minimum share of the votes in each direction if stages send to each other."""

LEAST_MATCHED = 1 / 4
"""If a smaller share of all messages has a partner, the partners that end together may do so by chance."""

COLUMNS = ["rank", "index", "label", "k"]


class Passing(NamedTuple):
    """The messages of a job, numbered so that both sides of each have the same number.

    Attributes:
        numbers: rank, index, label (of the pair of ranks) and k of every message; unmatched messages are labeled alone.
        warnings: How many messages are unmatched.
    """

    numbers: pd.DataFrame
    warnings: tuple[str, ...]


class _Pair(NamedTuple):
    """Two ranks with one clock offset: the rows of their messages that end together, one to one.

    `needed` is the number of votes from which on they are partners.
    """

    first: int
    second: int
    needed: float
    votes: int
    rival: int
    rows: Ints
    partners: Ints


def pair_messages(
    rows: pd.DataFrame,
    stages: Mapping[int, int],
    spans: Mapping[int, tuple[int, int]] = MappingProxyType({}),
    may_pass: Callable[[int, int], bool] = lambda _one, _other: True,
    *,
    is_whole: bool = False,
) -> Passing:
    """Match sends and receives.

    Args:
        rows: Sends and receives: rank, index, kind (Send, Recv, or SendRecv if unknown), step, bytes (-1: unknown),
            start_ns, end_ns on each rank's own clock.
        stages: The pipeline stage of each rank.
        spans: First and last number of each rank's layers, if known.
        may_pass: Whether two ranks can be partners, as far as the groups are known.
        is_whole: Whether no stage is missing between others, and ``rows`` has start_ns: messages that fit no rank or
            several are then matched from the first or last stage on.
    """
    rows = rows.sort_values(["rank", "end_ns"], kind="stable", ignore_index=True)
    both_ways = _pass_both_ways(rows, stages)
    voted = [_vote(rows, *two) for two in _neighbours(rows, stages, spans) if may_pass(*two)]
    pairs = _partners([one for one in voted if not both_ways or _answers(rows, one)])
    label, k = np.full(len(rows), "", dtype=object), np.arange(len(rows))
    times = np.zeros(len(rows), dtype=np.int64)
    for one in pairs:
        np.add.at(times, np.concatenate((one.rows, one.partners)), 1)
    for one in pairs:
        sure = (times[one.rows] == 1) & (times[one.partners] == 1)
        mine, other = one.rows[sure], one.partners[sure]
        label[mine] = label[other] = f"ranks {one.first} and {one.second}"
        k[other] = k[mine]
    for one in pairs:
        _match_rest(rows, one, label, k)
    if np.count_nonzero(label != "") < LEAST_MATCHED * len(rows):
        label[:], k = "", np.arange(len(rows))
    if (label == "").any() and is_whole:
        found = pair_chain(rows, stages, lambda a, b: _follow(a, b, stages, spans) and may_pass(a, b))
        if 2 * len(found.rows) > np.count_nonzero(label != ""):
            label[:], k = "", np.arange(len(rows))
            for side in (found.rows, found.partners):
                label[side] = [f"ranks {one} and {other}" for one, other in found.pairs]
            k[found.partners] = found.rows
    return _passing(rows, label, k, "by time they fit no rank or several")


def leave_out(rows: pd.DataFrame, reason: str) -> Passing:
    """Match none of the sends and receives, and say why."""
    return _passing(rows, np.full(len(rows), "", dtype=object), np.arange(len(rows)), reason)


def _passing(rows: pd.DataFrame, label: npt.NDArray[np.object_], k: Ints, reason: str) -> Passing:
    import pandas as pd

    lone = label == ""
    label[lone] = "alone"
    numbers = pd.DataFrame({"rank": rows["rank"], "index": rows["index"], "label": label, "k": k})[COLUMNS]
    warnings: tuple[str, ...] = ()
    if lone.any():
        ranks = sorted(set(rows["rank"][lone].tolist()))
        warnings = (
            f"{plural(int(lone.sum()), 'message', 'cannot be matched and is/cannot be matched and are')} left out "
            f"(sends and receives of ranks {listing(ranks)}): the captures do not name their communicators, and "
            f"{reason}; waiting for them is not measured",
        )
    return Passing(numbers, warnings)


def _neighbours(
    rows: pd.DataFrame, stages: Mapping[int, int], spans: Mapping[int, tuple[int, int]]
) -> list[tuple[int, int]]:
    """Pairs of ranks that may exchange messages: of adjacent stages, and of the first and last stage."""
    ranks = sorted(set(rows["rank"].tolist()))
    of = {rank: stages.get(rank, 0) for rank in ranks}
    last = max(stages.values(), default=0)
    apart = {1, last} if last else {0}
    return [
        (a, b) for a in ranks for b in ranks if a < b and abs(of[a] - of[b]) in apart and _follow(a, b, stages, spans)
    ]


def _follow(one: int, other: int, stages: Mapping[int, int], spans: Mapping[int, tuple[int, int]]) -> bool:
    """Whether the layers of two ranks are adjacent; a gap means that a stage between them is missing."""
    if one not in spans or other not in spans:
        return True
    last = max(stages.values())
    closes_ring = last > 1 and {stages[one], stages[other]} == {0, last}
    return closes_ring or _close(spans[one], spans[other])


def _close(one: tuple[int, int], other: tuple[int, int]) -> bool:
    low, high = sorted((one, other))
    return high[0] <= low[1] + 1


def _vote(rows: pd.DataFrame, first: int, second: int) -> _Pair:
    """Find the clock offset with which the most messages of two ranks end together."""
    one, other = (rows[rows["rank"] == rank] for rank in (first, second))
    needed = max(LEAST, LEAST_SHARE * min(len(one), len(other)))
    keys = ["row", "kind", "step", "bytes", "end_ns"]
    both = one.assign(row=one.index)[keys].merge(other.assign(row=other.index)[keys], on="step", suffixes=("", "_o"))
    fits = (both["kind"] != both["kind_o"]) | (both["kind"] == "SendRecv")
    fits &= (both["bytes"] == both["bytes_o"]) | (both["bytes"] < 0) | (both["bytes_o"] < 0)
    both = both[fits]
    apart = (both["end_ns"] - both["end_ns_o"]).to_numpy()
    order = np.argsort(apart, kind="stable")
    apart, mine, others = apart[order], both["row"].to_numpy()[order], both["row_o"].to_numpy()[order]
    until = np.searchsorted(apart, apart + TOGETHER_NS, side="right")
    count = until - np.arange(len(apart))
    if not len(apart):
        return _Pair(first, second, needed, 0, 0, mine, others)
    best = int(count.argmax())
    elsewhere = (apart > apart[until[best] - 1]) | (apart < apart[best] - TOGETHER_NS)
    rival = int(count[elsewhere].max()) if elsewhere.any() else 0
    chosen = slice(best, int(until[best]))
    unlike = np.isin(mine[chosen], _twice(mine[chosen])) | np.isin(others[chosen], _twice(others[chosen]))
    mine, others = mine[chosen][~unlike], others[chosen][~unlike]
    return _Pair(first, second, needed, len(mine), rival, mine, others)


def _pass_both_ways(rows: pd.DataFrame, stages: Mapping[int, int]) -> bool:
    """Whether neighbours send to each other: both the first and the last stage send and receive."""
    stage = rows["rank"].map(lambda rank: stages.get(rank, 0))
    kinds = [set(rows["kind"][stage == end]) for end in (stage.min(), stage.max())]
    return all({"Send", "Recv"} <= mine for mine in kinds)


def _answers(rows: pd.DataFrame, pair: _Pair) -> bool:
    """Whether the messages that end together go both ways: by chance, a lag can make those of one way do so."""
    kinds = rows["kind"].to_numpy()[pair.rows].tolist()
    return min(kinds.count("Send"), kinds.count("Recv")) >= LEAST_WAY * len(kinds) or "SendRecv" in kinds


def _twice(values: Ints) -> Ints:
    found, times = np.unique(values, return_counts=True)
    made: Ints = found[times > 1]
    return made


def _partners(pairs: list[_Pair]) -> list[_Pair]:
    """The pairs with an unambiguous offset and without a competing pair for the same messages."""
    clear = [one for one in pairs if one.votes >= one.needed and one.rival <= MARGIN * one.votes]
    claims: dict[int, list[int]] = {}
    for place, one in enumerate(pairs):
        for row in (*one.rows.tolist(), *one.partners.tolist()):
            claims.setdefault(row, []).append(place)
    kept = []
    for one in clear:
        disputed = Counter(place for row in (*one.rows.tolist(), *one.partners.tolist()) for place in claims[row])
        if all(count <= MARGIN * one.votes for place, count in disputed.items() if pairs[place] is not one):
            kept.append(one)
    return kept


def _match_rest(rows: pd.DataFrame, pair: _Pair, label: npt.NDArray[np.object_], k: Ints) -> None:
    """Match the rest by order, because a sender can end early; only in steps with as many left on both sides."""
    end, kind, step, rank = (rows[name].to_numpy() for name in ("end_ns", "kind", "step", "rank"))
    if not len(pair.rows):
        return
    offset = int(np.median(end[pair.rows] - end[pair.partners]))
    free = label == ""
    for sender, receiver, shift in ((pair.first, pair.second, offset), (pair.second, pair.first, -offset)):
        sends = np.flatnonzero(free & (rank == sender) & (kind == "Send"))
        gets = np.flatnonzero(free & (rank == receiver) & (kind == "Recv"))
        for one in np.unique(step[sends]).tolist():
            mine, other = sends[step[sends] == one], gets[step[gets] == one]
            # a receive ends no earlier than its send
            if len(mine) == len(other) and (end[other] + shift >= end[mine] - TOGETHER_NS).all():
                label[mine] = label[other] = f"ranks {pair.first} and {pair.second}"
                k[other] = k[mine]


TRIED_STEPS, TRIED_OFFSETS, TRIED_PAIRS = 6, 8, 64
"""Number of steps and of offsets to try for two ranks, and maximum number of pairs of ranks to try."""

BIN_NS = 200_000
"""Offsets that are closer than this are one."""

WORST_NS = 20_000_000
"""Cost of a message is at most this, so that one that was held up for long does not decide."""

FIT_NS = 1_000_000
"""Messages of partners end together to within this, on average,"""

CLEARER = 3
"""and with any other offset or rank, the distance is at least this multiple."""

_KINDS = (("Send", "Recv"), ("Recv", "Send"), ("SendRecv", "SendRecv"))
"""The kinds of a message on the first and on the second rank of a pair."""


class Chain(NamedTuple):
    """The matched messages: rows of the one and of the other side, and the pair of ranks of each."""

    rows: Ints
    partners: Ints
    pairs: list[tuple[int, int]]


class _Side(NamedTuple):
    """Messages of a rank by step and kind, as rows in order; and the times and sizes of all rows."""

    of: Mapping[tuple[int, str], Ints]
    start: Ints
    end: Ints
    size: Ints

    def get(self, step: int, kind: str) -> Ints:
        return self.of.get((step, kind), _NOTHING)


_NOTHING = np.zeros(0, dtype=np.int64)


class _Fit(NamedTuple):
    """An assignment of the messages of two ranks: mean cost, rows, and steps without an assignment."""

    cost: float
    offset: int
    rows: Ints
    partners: Ints
    broken: frozenset[int]


def pair_chain(
    rows: pd.DataFrame, stages: Mapping[int, int], may_pair: Callable[[int, int], bool] = lambda _one, _other: True
) -> Chain:
    """Match the messages of a pipeline, from its first or its last stage on.

    Args:
        rows: Sends and receives in order of time: rank, kind (Send, Recv, SendRecv), step, bytes (-1: unknown),
            start_ns, end_ns on each rank's own clock.
        stages: The pipeline stage of each rank.
        may_pair: Whether two ranks of adjacent stages may be partners.
    """
    order = sorted({stages.get(rank, 0) for rank in set(rows["rank"].tolist())})
    if order != list(range(order[0], order[0] + len(order))) or len(order) < 2:
        return Chain(_NOTHING, _NOTHING, [])
    found = [_peeled(rows, stages, way, may_pair) for way in (order, order[::-1])]
    return max(found, key=lambda one: len(one.rows))


def _peeled(
    rows: pd.DataFrame, stages: Mapping[int, int], order: list[int], may_pair: Callable[[int, int], bool]
) -> Chain:
    """Match stage by stage in this order; ends where a stage's messages do not fit."""
    members = {stage: [rank for rank in sorted(set(rows["rank"])) if stages.get(rank, 0) == stage] for stage in order}
    left = {rank: _side(rows, rows.index[rows["rank"] == rank].to_numpy()) for rank in sorted(set(rows["rank"]))}
    broken: dict[int, frozenset[int]] = dict.fromkeys(left, frozenset())
    mine, others, pairs = [_NOTHING], [_NOTHING], []
    for stage, following in pairwise(order):
        choices = [(one, [two for two in members[following] if may_pair(one, two)]) for one in members[stage]]
        if not 0 < sum(len(two) for _, two in choices) <= TRIED_PAIRS:
            break
        found = {one: _best(left, broken, one, two) for one, two in choices}
        partners = [chosen[0] for chosen in found.values() if chosen]
        if len(set(partners)) < len(partners) or not partners:
            break
        for one, chosen in found.items():
            if chosen is None:
                continue
            other, fit = chosen
            mine, others = [*mine, fit.rows], [*others, fit.partners]
            pairs += [(min(one, other), max(one, other))] * len(fit.rows)
            broken[other] |= fit.broken
            taken = {step for step, _ in left[other].of} & fit.broken
            left[other] = _without(left[other], fit.partners, taken)
        members[following] = [rank for rank in members[following] if rank in partners]
    return Chain(np.concatenate(mine), np.concatenate(others), pairs)


def _side(rows: pd.DataFrame, which: Ints) -> _Side:
    step, kind = rows["step"].to_numpy(), rows["kind"].to_numpy()
    of: dict[tuple[int, str], list[int]] = {}
    for row in which.tolist():
        of.setdefault((int(step[row]), str(kind[row])), []).append(row)
    arrays = {key: np.array(found, dtype=np.int64) for key, found in of.items()}
    return _Side(arrays, *(rows[name].to_numpy() for name in ("start_ns", "end_ns", "bytes")))


def _without(side: _Side, taken: Ints, broken: Iterable[int]) -> _Side:
    """The messages of a rank without those taken, and without steps in which it is unknown what is taken."""
    out = set(broken)
    of = {key: rows[~np.isin(rows, taken)] for key, rows in side.of.items() if key[0] not in out}
    return side._replace(of={key: rows for key, rows in of.items() if len(rows)})


def _best(
    left: Mapping[int, _Side], broken: Mapping[int, frozenset[int]], one: int, others: list[int]
) -> tuple[int, _Fit] | None:
    """The rank whose messages fit those of `one`, and how; None if none or several do."""
    fits = []
    for other in others:
        usable = sorted({step for step, _ in left[one].of} - broken[one] - broken[other])
        best, second = _sampled(left[one], left[other], usable)
        if best is not None:
            fits.append((best, second, other, usable))
    fits.sort(key=lambda fit: fit[0].cost)
    if not fits:
        return None
    best, second, other, usable = fits[0]
    rival = min([second, *(fit[0].cost for fit in fits[1:])])
    if best.cost > FIT_NS or rival < CLEARER * best.cost:
        return None
    whole = _everywhere(left[one], left[other], usable, best.offset)
    return (other, whole) if len(whole.rows) else None


def _sampled(one: _Side, other: _Side, steps: list[int]) -> tuple[_Fit | None, float]:
    """The best assignment in some steps, and the cost of the best one that differs."""
    middle = max(len(steps) - TRIED_STEPS, 0) // 2
    tried = steps[middle : middle + TRIED_STEPS]
    fits: list[_Fit] = []
    for guess in _offsets(one, other, tried):
        fit = _assigned(one, other, tried, guess)
        for _ in range(2):
            if len(fit.rows):
                fit = _assigned(one, other, tried, fit.offset)
        if len(fit.rows):
            fits.append(fit)
    if not fits:
        return None, np.inf
    most = max(len(fit.rows) for fit in fits)
    fits = sorted((fit for fit in fits if len(fit.rows) == most), key=lambda fit: fit.cost)
    best = fits[0]
    unlike = (fit.cost for fit in fits if not _same(fit, best))
    return best, min(unlike, default=np.inf)


def _same(one: _Fit, other: _Fit) -> bool:
    return bool(np.array_equal(one.rows, other.rows) and np.array_equal(one.partners, other.partners))


def _offsets(one: _Side, other: _Side, steps: list[int]) -> list[int]:
    """The clock offsets with which the most messages end together."""
    apart = [_NOTHING]
    for step in steps:
        for kind, counterpart in _KINDS:
            mine, its = one.get(step, kind), other.get(step, counterpart)
            if 0 < len(mine) <= len(its):
                between = one.end[mine][:, None] - other.end[its][None, :]
                place = np.arange(len(its))[None, :] - np.arange(len(mine))[:, None]
                apart.append(between[(place >= 0) & (place <= len(its) - len(mine))])
    every = np.concatenate(apart)
    if not len(every):
        return []
    bins, count = np.unique(every // BIN_NS, return_counts=True)
    chosen = bins[np.argsort(-count, kind="stable")][:TRIED_OFFSETS]
    return [int(np.median(every[np.abs(every - (one * BIN_NS + BIN_NS // 2)) <= BIN_NS])) for one in chosen.tolist()]


def _everywhere(one: _Side, other: _Side, steps: list[int], offset: int) -> _Fit:
    """Assign the messages of all steps; from step to step, the offset follows the clocks' drift."""
    middle = max(len(steps) - TRIED_STEPS, 0) // 2
    rows, partners, broken = [_NOTHING], [_NOTHING], set()
    for part in (steps[middle:], steps[:middle][::-1]):
        now = offset
        for step in part:
            fit = _assigned(one, other, [step], now)
            if len(fit.rows) and fit.cost <= FIT_NS:
                rows, partners, now = [*rows, fit.rows], [*partners, fit.partners], fit.offset
            else:
                broken.add(step)
    return _Fit(0.0, offset, np.concatenate(rows), np.concatenate(partners), frozenset(broken))


def _assigned(one: _Side, other: _Side, steps: list[int], offset: int) -> _Fit:
    """The cheapest assignment of all messages of the first rank with this offset; steps without one are left out."""
    rows, partners, costs, apart, broken = [_NOTHING], [_NOTHING], [0.0], [_NOTHING], set()
    for step in steps:
        parts = []
        for kind, counterpart in _KINDS:
            mine, its = one.get(step, kind), other.get(step, counterpart)
            if len(mine) > len(its):
                broken.add(step)
            elif len(mine):
                parts.append((mine, its, kind))
        if step in broken:
            continue
        for mine, its, kind in parts:
            cost = _cost(one, other, (mine, its), kind, offset)
            place = _in_order(cost)
            rows, partners = [*rows, mine], [*partners, its[place]]
            costs.append(float(cost[np.arange(len(mine)), place].sum()))
            apart.append(one.end[mine] - other.end[its[place]])
    found = np.concatenate(apart)
    close = found[np.abs(found - offset) <= FIT_NS]
    better = int(np.median(close)) if len(close) else offset
    mean = sum(costs) / len(found) if len(found) else np.inf
    return _Fit(mean, better, np.concatenate(rows), np.concatenate(partners), frozenset(broken))


def _cost(one: _Side, other: _Side, rows: tuple[Ints, Ints], kind: str, offset: int) -> npt.NDArray[np.float64]:
    """How badly each message of the first rank fits each of the second, in ns."""
    mine, its = rows
    start, end = one.start[mine][:, None], one.end[mine][:, None]
    there, ended = other.start[its][None, :] + offset, other.end[its][None, :] + offset
    if kind == "Send":
        apart = ended - np.maximum(end, np.minimum(there, ended))
    elif kind == "Recv":
        apart = end - np.maximum(ended, np.minimum(start, end))
    else:
        apart = end - ended
    size, its_size = one.size[mine][:, None], other.size[its][None, :]
    unlike = (size != its_size) & (size >= 0) & (its_size >= 0)
    cost: npt.NDArray[np.float64] = np.where(unlike, WORST_NS, np.minimum(np.abs(apart), WORST_NS)).astype(np.float64)
    return cost


def _in_order(cost: npt.NDArray[np.float64]) -> Ints:
    """The column of each row in the cheapest choice of increasing columns; there are at least as many columns."""
    count, columns = cost.shape
    total = np.full((count + 1, columns + 1), np.inf)
    total[0] = 0.0
    for row in range(count):
        total[row + 1, 1:] = np.minimum.accumulate(total[row, :-1] + cost[row])
    place, column = np.zeros(count, dtype=np.int64), columns
    for row in range(count, 0, -1):
        # the first column from which on the total is this low
        column = int(np.argmax(total[row, : column + 1] <= total[row, column]))
        place[row - 1] = column - 1
        column -= 1
    return place
