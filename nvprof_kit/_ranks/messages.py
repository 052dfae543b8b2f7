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

    `least_votes` is the number of votes from which on they are partners.
    """

    first: int
    second: int
    least_votes: float
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
    pairs = _partners([pair for pair in voted if not both_ways or _answers(rows, pair)])
    label, k = np.full(len(rows), "", dtype=object), np.arange(len(rows))
    times = np.zeros(len(rows), dtype=np.int64)
    for pair in pairs:
        np.add.at(times, np.concatenate((pair.rows, pair.partners)), 1)
    for pair in pairs:
        sure = (times[pair.rows] == 1) & (times[pair.partners] == 1)
        sends, other = pair.rows[sure], pair.partners[sure]
        label[sends] = label[other] = f"ranks {pair.first} and {pair.second}"
        k[other] = k[sends]
    for pair in pairs:
        _match_rest(rows, pair, label, k)
    if np.count_nonzero(label != "") < LEAST_MATCHED * len(rows):
        label[:], k = "", np.arange(len(rows))
    if (label == "").any() and is_whole:
        chain = pair_chain(rows, stages, lambda a, b: _follow(a, b, stages, spans) and may_pass(a, b))
        if 2 * len(chain.rows) > np.count_nonzero(label != ""):
            label[:], k = "", np.arange(len(rows))
            for side in (chain.rows, chain.partners):
                label[side] = [f"ranks {pair} and {other}" for pair, other in chain.pairs]
            k[chain.partners] = chain.rows
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
    stage_distances = {1, last} if last else {0}
    return [
        (a, b)
        for a in ranks
        for b in ranks
        if a < b and abs(of[a] - of[b]) in stage_distances and _follow(a, b, stages, spans)
    ]


def _follow(first: int, second: int, stages: Mapping[int, int], spans: Mapping[int, tuple[int, int]]) -> bool:
    """Whether the layers of two ranks are adjacent; a gap means that a stage between them is missing."""
    if first not in spans or second not in spans:
        return True
    last = max(stages.values())
    closes_ring = last > 1 and {stages[first], stages[second]} == {0, last}
    low, high = sorted((spans[first], spans[second]))
    return closes_ring or high[0] <= low[1] + 1


def _vote(rows: pd.DataFrame, first: int, second: int) -> _Pair:
    """Find the clock offset with which the most messages of two ranks end together."""
    first_messages, second_messages = (rows[rows["rank"] == rank] for rank in (first, second))
    least_votes = max(LEAST, LEAST_SHARE * min(len(first_messages), len(second_messages)))
    keys = ["row", "kind", "step", "bytes", "end_ns"]
    both = first_messages.assign(row=first_messages.index)[keys].merge(
        second_messages.assign(row=second_messages.index)[keys], on="step", suffixes=("", "_o")
    )
    fits = (both["kind"] != both["kind_o"]) | (both["kind"] == "SendRecv")
    fits &= (both["bytes"] == both["bytes_o"]) | (both["bytes"] < 0) | (both["bytes_o"] < 0)
    both = both[fits]
    distances = (both["end_ns"] - both["end_ns_o"]).to_numpy()
    order = np.argsort(distances, kind="stable")
    distances, first_rows, second_rows = (
        distances[order],
        both["row"].to_numpy()[order],
        both["row_o"].to_numpy()[order],
    )
    until = np.searchsorted(distances, distances + TOGETHER_NS, side="right")
    count = until - np.arange(len(distances))
    if not len(distances):
        return _Pair(first, second, least_votes, 0, 0, first_rows, second_rows)
    best = int(count.argmax())
    elsewhere = (distances > distances[until[best] - 1]) | (distances < distances[best] - TOGETHER_NS)
    rival = int(count[elsewhere].max()) if elsewhere.any() else 0
    chosen = slice(best, int(until[best]))
    ambiguous = np.isin(first_rows[chosen], _twice(first_rows[chosen])) | np.isin(
        second_rows[chosen], _twice(second_rows[chosen])
    )
    first_rows, second_rows = first_rows[chosen][~ambiguous], second_rows[chosen][~ambiguous]
    return _Pair(first, second, least_votes, len(first_rows), rival, first_rows, second_rows)


def _pass_both_ways(rows: pd.DataFrame, stages: Mapping[int, int]) -> bool:
    """Whether neighbours send to each other: both the first and the last stage send and receive."""
    stage = rows["rank"].map(lambda rank: stages.get(rank, 0))
    kinds = [set(rows["kind"][stage == end]) for end in (stage.min(), stage.max())]
    return all({"Send", "Recv"} <= stage_kinds for stage_kinds in kinds)


def _answers(rows: pd.DataFrame, pair: _Pair) -> bool:
    """Whether the messages that end together go both ways: by chance, a lag can make those of one way do so."""
    kinds = rows["kind"].to_numpy()[pair.rows].tolist()
    return min(kinds.count("Send"), kinds.count("Recv")) >= LEAST_WAY * len(kinds) or "SendRecv" in kinds


def _twice(values: Ints) -> Ints:
    distinct, times = np.unique(values, return_counts=True)
    duplicates: Ints = distinct[times > 1]
    return duplicates


def _partners(pairs: list[_Pair]) -> list[_Pair]:
    """The pairs with an unambiguous offset and without a competing pair for the same messages."""
    clear = [pair for pair in pairs if pair.votes >= pair.least_votes and pair.rival <= MARGIN * pair.votes]
    claims: dict[int, list[int]] = {}
    for number, pair in enumerate(pairs):
        for row in (*pair.rows.tolist(), *pair.partners.tolist()):
            claims.setdefault(row, []).append(number)
    undisputed = []
    for pair in clear:
        disputed = Counter(number for row in (*pair.rows.tolist(), *pair.partners.tolist()) for number in claims[row])
        if all(count <= MARGIN * pair.votes for number, count in disputed.items() if pairs[number] is not pair):
            undisputed.append(pair)
    return undisputed


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
        for number in np.unique(step[sends]).tolist():
            sent, received = sends[step[sends] == number], gets[step[gets] == number]
            # a receive ends no earlier than its send
            if len(sent) == len(received) and (end[received] + shift >= end[sent] - TOGETHER_NS).all():
                label[sent] = label[received] = f"ranks {pair.first} and {pair.second}"
                k[received] = k[sent]


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
    chains = [_peeled(rows, stages, way, may_pair) for way in (order, order[::-1])]
    return max(chains, key=lambda one: len(one.rows))


def _peeled(
    rows: pd.DataFrame, stages: Mapping[int, int], order: list[int], may_pair: Callable[[int, int], bool]
) -> Chain:
    """Match stage by stage in this order; ends where a stage's messages do not fit."""
    members = {
        stage: [member for member in sorted(set(rows["rank"])) if stages.get(member, 0) == stage] for stage in order
    }
    left = {member: _side(rows, rows.index[rows["rank"] == member].to_numpy()) for member in sorted(set(rows["rank"]))}
    broken: dict[int, frozenset[int]] = dict.fromkeys(left, frozenset())
    rows_of_pairs, partner_rows, pairs = [_NOTHING], [_NOTHING], []
    for stage, following in pairwise(order):
        choices = [
            (rank, [partner for partner in members[following] if may_pair(rank, partner)]) for rank in members[stage]
        ]
        if not 0 < sum(len(partner) for _, partner in choices) <= TRIED_PAIRS:
            break
        best_fits = {rank: _best(left, broken, rank, partner) for rank, partner in choices}
        partners = [chosen[0] for chosen in best_fits.values() if chosen]
        if len(set(partners)) < len(partners) or not partners:
            break
        for rank, chosen in best_fits.items():
            if chosen is None:
                continue
            other, fit = chosen
            rows_of_pairs, partner_rows = [*rows_of_pairs, fit.rows], [*partner_rows, fit.partners]
            pairs += [(min(rank, other), max(rank, other))] * len(fit.rows)
            broken[other] |= fit.broken
            taken = {step for step, _ in left[other].of} & fit.broken
            left[other] = _without(left[other], fit.partners, taken)
        members[following] = [member for member in members[following] if member in partners]
    return Chain(np.concatenate(rows_of_pairs), np.concatenate(partner_rows), pairs)


def _side(rows: pd.DataFrame, selected: Ints) -> _Side:
    step, kind = rows["step"].to_numpy(), rows["kind"].to_numpy()
    of: dict[tuple[int, str], list[int]] = {}
    for row in selected.tolist():
        of.setdefault((int(step[row]), str(kind[row])), []).append(row)
    arrays = {key: np.array(places, dtype=np.int64) for key, places in of.items()}
    return _Side(arrays, *(rows[name].to_numpy() for name in ("start_ns", "end_ns", "bytes")))


def _without(side: _Side, taken: Ints, broken: Iterable[int]) -> _Side:
    """The messages of a rank without those taken, and without steps in which it is unknown what is taken."""
    out = set(broken)
    of = {key: rows[~np.isin(rows, taken)] for key, rows in side.of.items() if key[0] not in out}
    return side._replace(of={key: rows for key, rows in of.items() if len(rows)})


def _best(
    left: Mapping[int, _Side], broken: Mapping[int, frozenset[int]], first: int, candidates: list[int]
) -> tuple[int, _Fit] | None:
    """The rank whose messages fit those of `first`, and how; None if none or several do."""
    fits = []
    for other in candidates:
        usable = sorted({step for step, _ in left[first].of} - broken[first] - broken[other])
        best, second = _sampled(left[first], left[other], usable)
        if best is not None:
            fits.append((best, second, other, usable))
    fits.sort(key=lambda fit: fit[0].cost)
    if not fits:
        return None
    best, second, other, usable = fits[0]
    rival = min([second, *(fit[0].cost for fit in fits[1:])])
    if best.cost > FIT_NS or rival < CLEARER * best.cost:
        return None
    assignment = _everywhere(left[first], left[other], usable, best.offset)
    return (other, assignment) if len(assignment.rows) else None


def _sampled(first: _Side, second: _Side, steps: list[int]) -> tuple[_Fit | None, float]:
    """The best assignment in some steps, and the cost of the best one that differs."""
    start = max(len(steps) - TRIED_STEPS, 0) // 2
    tried = steps[start : start + TRIED_STEPS]
    fits: list[_Fit] = []
    for guess in _offsets(first, second, tried):
        fit = _assigned(first, second, tried, guess)
        for _ in range(2):
            if len(fit.rows):
                fit = _assigned(first, second, tried, fit.offset)
        if len(fit.rows):
            fits.append(fit)
    if not fits:
        return None, np.inf
    largest = max(len(fit.rows) for fit in fits)
    fits = sorted((fit for fit in fits if len(fit.rows) == largest), key=lambda fit: fit.cost)
    best = fits[0]
    different = (
        fit for fit in fits if not (np.array_equal(fit.rows, best.rows) and np.array_equal(fit.partners, best.partners))
    )
    return best, min((fit.cost for fit in different), default=np.inf)


def _offsets(first: _Side, second: _Side, steps: list[int]) -> list[int]:
    """The clock offsets with which the most messages end together."""
    distances = [_NOTHING]
    for step in steps:
        for kind, counterpart in _KINDS:
            rows, its = first.get(step, kind), second.get(step, counterpart)
            if 0 < len(rows) <= len(its):
                between = first.end[rows][:, None] - second.end[its][None, :]
                shift = np.arange(len(its))[None, :] - np.arange(len(rows))[:, None]
                distances.append(between[(shift >= 0) & (shift <= len(its) - len(rows))])
    all_distances = np.concatenate(distances)
    if not len(all_distances):
        return []
    bins, count = np.unique(all_distances // BIN_NS, return_counts=True)
    chosen = bins[np.argsort(-count, kind="stable")][:TRIED_OFFSETS]
    return [
        int(np.median(all_distances[np.abs(all_distances - (first * BIN_NS + BIN_NS // 2)) <= BIN_NS]))
        for first in chosen.tolist()
    ]


def _everywhere(first: _Side, second: _Side, steps: list[int], offset: int) -> _Fit:
    """Assign the messages of all steps; from step to step, the offset follows the clocks' drift."""
    start = max(len(steps) - TRIED_STEPS, 0) // 2
    rows, partners, broken = [_NOTHING], [_NOTHING], set()
    for direction in (steps[start:], steps[:start][::-1]):
        now = offset
        for step in direction:
            fit = _assigned(first, second, [step], now)
            if len(fit.rows) and fit.cost <= FIT_NS:
                rows, partners, now = [*rows, fit.rows], [*partners, fit.partners], fit.offset
            else:
                broken.add(step)
    return _Fit(0.0, offset, np.concatenate(rows), np.concatenate(partners), frozenset(broken))


def _assigned(first: _Side, second: _Side, steps: list[int], offset: int) -> _Fit:
    """The cheapest assignment of all messages of the first rank with this offset; steps without one are left out."""
    rows, partners, costs, distances, broken = [_NOTHING], [_NOTHING], [0.0], [_NOTHING], set()
    for step in steps:
        parts = []
        for kind, counterpart in _KINDS:
            first_rows, its = first.get(step, kind), second.get(step, counterpart)
            if len(first_rows) > len(its):
                broken.add(step)
            elif len(first_rows):
                parts.append((first_rows, its, kind))
        if step in broken:
            continue
        for first_rows, its, kind in parts:
            cost = _cost(first, second, (first_rows, its), kind, offset)
            columns = _in_order(cost)
            rows, partners = [*rows, first_rows], [*partners, its[columns]]
            costs.append(float(cost[np.arange(len(first_rows)), columns].sum()))
            distances.append(first.end[first_rows] - second.end[its[columns]])
    all_distances = np.concatenate(distances)
    close = all_distances[np.abs(all_distances - offset) <= FIT_NS]
    better = int(np.median(close)) if len(close) else offset
    mean = sum(costs) / len(all_distances) if len(all_distances) else np.inf
    return _Fit(mean, better, np.concatenate(rows), np.concatenate(partners), frozenset(broken))


def _cost(first: _Side, second: _Side, rows: tuple[Ints, Ints], kind: str, offset: int) -> npt.NDArray[np.float64]:
    """How badly each message of the first rank fits each of the second, in ns."""
    first_rows, its = rows
    start, end = first.start[first_rows][:, None], first.end[first_rows][:, None]
    second_start, ended = second.start[its][None, :] + offset, second.end[its][None, :] + offset
    if kind == "Send":
        distance = ended - np.maximum(end, np.minimum(second_start, ended))
    elif kind == "Recv":
        distance = end - np.maximum(ended, np.minimum(start, end))
    else:
        distance = end - ended
    size, its_size = first.size[first_rows][:, None], second.size[its][None, :]
    size_differs = (size != its_size) & (size >= 0) & (its_size >= 0)
    cost: npt.NDArray[np.float64] = np.where(size_differs, WORST_NS, np.minimum(np.abs(distance), WORST_NS)).astype(
        np.float64
    )
    return cost


def _in_order(cost: npt.NDArray[np.float64]) -> Ints:
    """The column of each row in the cheapest choice of increasing columns; there are at least as many columns."""
    count, columns = cost.shape
    total = np.full((count + 1, columns + 1), np.inf)
    total[0] = 0.0
    for row in range(count):
        total[row + 1, 1:] = np.minimum.accumulate(total[row, :-1] + cost[row])
    chosen_columns, column = np.zeros(count, dtype=np.int64), columns
    for row in range(count, 0, -1):
        # the first column from which on the total is this low
        column = int(np.argmax(total[row, : column + 1] <= total[row, column]))
        chosen_columns[row - 1] = column - 1
        column -= 1
    return chosen_columns
