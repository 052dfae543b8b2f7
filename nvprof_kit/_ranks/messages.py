"""Matches sends and receives without ids, in jobs of more than two ranks.

The position in a stream identifies the partner only if the stream has a single partner, which the capture does not
show. They are matched stage by stage: all messages of the first stage are with the second; what the second has left is
with the third, and so on. Between two ranks, the sends of one are received by the other in order. So for one clock
offset, the cheapest assignment that keeps the order is found for each step: a receive ends when its send does, or soon
after its own start if the send was early. The same is done from the last stage, and the result that matches more is
used.

Two ranks are only paired if their messages fit clearly better with this offset than with any other, and than those of
any other rank of that stage do. The rest is left unmatched and counted.
"""

from __future__ import annotations

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

COLUMNS = ["rank", "index", "label", "k"]


def pair_messages(
    rows: pd.DataFrame,
    stages: Mapping[int, int],
    spans: Mapping[int, tuple[int, int]] = MappingProxyType({}),
    may_pass: Callable[[int, int], bool] = lambda _one, _other: True,
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Match sends and receives.

    Args:
        rows: Sends and receives: rank, index, kind (Send, Recv, or SendRecv if unknown), step, bytes (-1: unknown),
            start_ns, end_ns on each rank's own clock.
        stages: The pipeline stage of each rank; none may be missing between others.
        spans: First and last number of each rank's layers, if known.
        may_pass: Whether two ranks can be partners, as far as the groups are known.

    Returns:
        As `numbered`.
    """
    rows = rows.sort_values(["rank", "end_ns"], kind="stable", ignore_index=True)

    def may_pair(first: int, second: int) -> bool:
        if not may_pass(first, second):
            return False
        if first not in spans or second not in spans:
            return True
        low, high = sorted((spans[first], spans[second]))
        return high[0] <= low[1] + 1  # a gap means that a stage between them is missing

    chain = pair_chain(rows, stages, may_pair)
    label, k = np.full(len(rows), "", dtype=object), np.arange(len(rows))
    for side in (chain.rows, chain.partners):
        label[side] = [f"ranks {first} and {second}" for first, second in chain.pairs]
    k[chain.partners] = chain.rows
    return numbered(rows.assign(label=label, k=k), "by time they fit no rank or several")


def numbered(rows: pd.DataFrame, reason: str) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Number messages so that both sides of each have the same number.

    Args:
        rows: The messages, with the label of their pair of ranks, '' if unmatched, and their number in it, ``k``; or
            without these columns, if none is matched.
        reason: Why messages are unmatched.

    Returns:
        rank, index, label and k of every message, unmatched ones labeled alone; and how many messages are unmatched.
    """
    if "label" not in rows:
        rows = rows.assign(label="", k=np.arange(len(rows)))
    lone = rows["label"] == ""
    warnings: tuple[str, ...] = ()
    if lone.any():
        warnings = (
            f"{plural(int(lone.sum()), 'message', 'cannot be matched and is/cannot be matched and are')} left out "
            f"(sends and receives of ranks {listing(sorted(set(rows['rank'][lone])))}): the captures do not name "
            f"their communicators, and {reason}; waiting for them is not measured",
        )
    return rows.assign(label=rows["label"].mask(lone, "alone"))[COLUMNS], warnings


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
    times = [rows[name].to_numpy() for name in ("start_ns", "end_ns", "bytes")]
    sides: dict[int, dict[tuple[int, str], Ints]] = {}
    for (rank, step, kind), of_step in rows.groupby(["rank", "step", "kind"], observed=True):
        sides.setdefault(int(str(rank)), {})[int(str(step)), str(kind)] = of_step.index.to_numpy()
    left = {rank: _Side(of_rank, *times) for rank, of_rank in sides.items()}
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
    # assign the messages of all steps; from step to step, the offset follows the clocks' drift
    start = max(len(usable) - TRIED_STEPS, 0) // 2
    rows, partners, without = [_NOTHING], [_NOTHING], set()
    for direction in (usable[start:], usable[:start][::-1]):
        offset = best.offset
        for step in direction:
            fit = _assigned(left[first], left[other], [step], offset)
            if len(fit.rows) and fit.cost <= FIT_NS:
                rows, partners, offset = [*rows, fit.rows], [*partners, fit.partners], fit.offset
            else:
                without.add(step)
    assignment = _Fit(0.0, best.offset, np.concatenate(rows), np.concatenate(partners), frozenset(without))
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
