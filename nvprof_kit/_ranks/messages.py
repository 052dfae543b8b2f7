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

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nvprof_kit._analysis.attribution.intervals import Floats, Int64Array
from nvprof_kit._ranks.groups import MOST_SEPARATED, ListedGroups
from nvprof_kit._ranks.stages import stages_of
from nvprof_kit.issues import Issue, listing, plural

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._trace.jobs.tables import JobTables


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

_NONE: Int64Array = np.zeros(0, dtype=np.int64)


def match_messages(tables: JobTables, marked_groups: ListedGroups) -> tuple[str, ...]:
    """Match the sends and receives of a pipeline of more than two ranks whose communicators have no names."""
    ranks, world_size = tables.ranks["rank"], int(tables.ranks["world_size"].max())
    messages = tables.frame("messages")
    if not len(messages):
        return ()
    stages = stages_of(tables.layer_medians)
    # within a stage, messages form a ring in which all ranks take part at the same time
    if len(set(stages.values())) < 2 and (messages["kind"] == "SendRecv").any():
        return ()
    if len(ranks) > MOST_SEPARATED:
        numbers, warnings = numbered(messages, f"partners are found by time for at most {MOST_SEPARATED} ranks")
    elif world_size not in (-1, len(ranks)):
        numbers, warnings = numbered(messages, "partners are found by time if all ranks of the job are there")
    else:
        numbers, warnings = pair_messages(messages, stages, marked_groups.may_pass)
    tables.insert("renumbered", numbers)
    return warnings


def pair_messages(
    messages: pd.DataFrame,
    stages: Mapping[int, int],
    may_pass: Callable[[int, int], bool] = lambda _first, _second: True,
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Match the sends and receives of a pipeline.

    Args:
        messages: Sends and receives: rank, index, kind (Send, Recv, or SendRecv if unknown), step, bytes (-1: unknown),
            start_ns, end_ns on each rank's own clock.
        stages: The pipeline stage of each rank; none may be missing between others.
        may_pass: Whether two ranks can be partners, as far as the groups are known.

    Returns:
        As `numbered`.
    """
    messages = messages.sort_values(["rank", "end_ns"], kind="stable", ignore_index=True)
    order = sorted({stages.get(rank, 0) for rank in set(messages["rank"].tolist())})
    chains: list[list[_Match]] = [[]]
    if len(order) > 1 and order == list(range(order[0], order[-1] + 1)):
        chains = [_chain(messages, stages, direction, may_pass) for direction in (order, order[::-1])]
    pair, partner = np.zeros(len(messages), dtype=np.int64), np.arange(len(messages))
    longest = max(chains, key=lambda chain: sum(len(match.rows) for match in chain))
    for number, match in enumerate(longest, 1):
        pair[match.rows] = pair[match.partners] = number
        partner[match.partners] = match.rows
    return numbered(messages, "by time they fit no rank or several", pair, partner)


def numbered(
    messages: pd.DataFrame, reason: str, pair: Int64Array | None = None, number: Int64Array | None = None
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Number messages so that both sides of each have the same number.

    Args:
        messages: The messages.
        reason: Why messages are unmatched.
        pair: The number of each message's pair of ranks, from 1, 0 if unmatched; None if none is matched.
        number: Its number in the pair.

    Returns:
        Of every message its rank and index, and the keys c (its pair of ranks), s and k that match it
        (`nvprof_kit._trace.jobs.tables.JobTables.insert`); and a warning about those that are unmatched.
    """
    pair = np.zeros(len(messages), dtype=np.int64) if pair is None else pair
    number = np.arange(len(messages)) if number is None else number
    unmatched = pair == 0
    warnings: tuple[str, ...] = ()
    if unmatched.any():
        who = plural(int(unmatched.sum()), "message", "cannot be matched and is/cannot be matched and are")
        ranks = listing(sorted(set(messages["rank"][unmatched])))
        warnings = (Issue.of("unmatched-messages", who=who, ranks=ranks, reason=reason),)
    return messages[["rank", "index"]].assign(c=pair, s=-2, k=number), warnings


class _Side(NamedTuple):
    """Messages of a rank by step and kind, as rows in order; and the times and sizes of all rows."""

    of: Mapping[tuple[int, str], Int64Array]
    start: Int64Array
    end: Int64Array
    size: Int64Array

    def counterparts(self, other: _Side, step: int) -> list[tuple[Int64Array, Int64Array, str]]:
        """The messages of a step by kind, with those of another rank that could be their other sides."""
        pairs = [(self.of.get((step, kind), _NONE), other.of.get((step, its), _NONE), kind) for kind, its in _KINDS]
        return [pair for pair in pairs if len(pair[0])]

    def costs(self, other: _Side, rows: Int64Array, its: Int64Array, kind: str, offset: int) -> Floats:
        """How badly each of these messages fits each of another rank with this clock offset, in ns."""
        start, end, size = (times[rows][:, None] for times in (self.start, self.end, self.size))
        its_start, its_end = other.start[its][None, :] + offset, other.end[its][None, :] + offset
        if kind == "Send":
            distance = its_end - np.maximum(end, np.minimum(its_start, its_end))
        elif kind == "Recv":
            distance = end - np.maximum(its_end, np.minimum(start, end))
        else:
            distance = end - its_end
        its_size = other.size[its][None, :]
        size_differs = (size != its_size) & (size >= 0) & (its_size >= 0)
        return np.where(size_differs, WORST_NS, np.minimum(np.abs(distance), WORST_NS)).astype(np.float64)

    def without(self, rows: Int64Array, steps: set[int]) -> _Side:
        """The messages without some of them, and without steps."""
        of = {key: of_key[~np.isin(of_key, rows)] for key, of_key in self.of.items() if key[0] not in steps}
        return self._replace(of={key: of_key for key, of_key in of.items() if len(of_key)})


class _Fit(NamedTuple):
    """An assignment of messages of two ranks: mean cost, clock offset, and rows."""

    cost: float
    offset: int
    rows: Int64Array
    partners: Int64Array


class _Match(NamedTuple):
    """The rank whose messages fit those of another, the rows of both, and the steps in which they do not fit."""

    rank: int
    rows: Int64Array
    partners: Int64Array
    broken: set[int]


def _chain(
    messages: pd.DataFrame, stages: Mapping[int, int], order: list[int], may_pass: Callable[[int, int], bool]
) -> list[_Match]:
    """Match stage by stage in this order; ends where a stage's messages do not fit."""
    times = [messages[name].to_numpy() for name in ("start_ns", "end_ns", "bytes")]
    rows_of: dict[int, dict[tuple[int, str], Int64Array]] = {}
    for (rank, step, kind), of_key in messages.groupby(["rank", "step", "kind"], observed=True):
        rows_of.setdefault(int(str(rank)), {})[int(str(step)), str(kind)] = of_key.index.to_numpy()
    sides = {rank: _Side(of_rank, *times) for rank, of_rank in rows_of.items()}
    ranks = [rank for rank in sorted(sides) if stages.get(rank, 0) == order[0]]
    chain: list[_Match] = []
    for stage in order[1:]:
        members = [rank for rank in sorted(sides) if stages.get(rank, 0) == stage]
        candidates = [{other: sides[other] for other in members if may_pass(rank, other)} for rank in ranks]
        if sum(map(len, candidates)) > TRIED_PAIRS:
            break
        matches = [
            match
            for rank, sides_of_stage in zip(ranks, candidates, strict=True)
            if (match := _best(sides[rank], sides_of_stage))
        ]
        ranks = sorted({match.rank for match in matches})
        if not matches or len(ranks) < len(matches):
            break
        chain += matches
        for match in matches:
            sides[match.rank] = sides[match.rank].without(match.partners, match.broken)
    return chain


def _best(first: _Side, candidates: Mapping[int, _Side]) -> _Match | None:
    """The rank whose messages fit those of a rank, and how; None if none or several do."""
    steps = sorted({step for step, _ in first.of})
    first_tried = max(len(steps) - TRIED_STEPS, 0) // 2
    fits: list[tuple[float, float, int, int]] = []  # the cost, that of another assignment, the rank and its offset
    for rank, side in candidates.items():
        tried = _tried(first, side, steps[first_tried:][:TRIED_STEPS])
        different = [
            fit.cost
            for fit in tried
            if not (np.array_equal(fit.rows, tried[0].rows) and np.array_equal(fit.partners, tried[0].partners))
        ]
        if tried:
            fits.append((tried[0].cost, min(different, default=np.inf), rank, tried[0].offset))
    if not fits:
        return None
    (cost, rival, partner, best_offset), *rivals = sorted(fits)
    if cost > FIT_NS or min([rival, *(other[0] for other in rivals)]) < CLEARER * cost:
        return None
    # assign the messages of all steps; from step to step, the offset follows the clocks' drift
    rows, partners, broken = [_NONE], [_NONE], set()
    for direction in (steps[first_tried:], steps[:first_tried][::-1]):
        offset = best_offset
        for step in direction:
            fit = _assigned(first, candidates[partner], [step], offset)
            if len(fit.rows) and fit.cost <= FIT_NS:
                rows, partners, offset = [*rows, fit.rows], [*partners, fit.partners], fit.offset
            else:
                broken.add(step)
    match = _Match(partner, np.concatenate(rows), np.concatenate(partners), broken)
    return match if len(match.rows) else None


def _tried(first: _Side, second: _Side, steps: list[int]) -> list[_Fit]:
    """The assignments in some steps with the clock offsets with which the most messages end together, cheapest first;
    only those of as many messages as any.
    """
    distances = [_NONE]
    for rows, its, _ in (pair for step in steps for pair in first.counterparts(second, step)):
        shift = np.arange(len(its))[None, :] - np.arange(len(rows))[:, None]
        between = first.end[rows][:, None] - second.end[its][None, :]
        distances.append(between[(shift >= 0) & (shift <= len(its) - len(rows))])
    distance = np.concatenate(distances)
    bins, count = np.unique(distance // BIN_NS, return_counts=True)
    fits: list[_Fit] = []
    for bin_number in bins[np.argsort(-count, kind="stable")][:TRIED_OFFSETS].tolist():
        is_near = np.abs(distance - (bin_number * BIN_NS + BIN_NS // 2)) <= BIN_NS
        fit = _assigned(first, second, steps, int(np.median(distance[is_near])))
        for _ in range(2):
            fit = _assigned(first, second, steps, fit.offset)
        fits.append(fit)
    largest = max((len(fit.rows) for fit in fits), default=0)
    return sorted((fit for fit in fits if len(fit.rows) == largest > 0), key=lambda fit: fit.cost)


def _assigned(first: _Side, second: _Side, steps: list[int], offset: int) -> _Fit:
    """The cheapest assignment of all messages of the first rank with this offset; steps without one are left out."""
    rows, partners, costs = [_NONE], [_NONE], [0.0]
    for step in steps:
        pairs = first.counterparts(second, step)
        if any(len(first_rows) > len(its) for first_rows, its, _ in pairs):
            continue
        for first_rows, its, kind in pairs:
            cost = first.costs(second, first_rows, its, kind, offset)
            columns = _in_order(cost)
            rows, partners = [*rows, first_rows], [*partners, its[columns]]
            costs.append(float(cost[np.arange(len(first_rows)), columns].sum()))
    all_rows, all_partners = np.concatenate(rows), np.concatenate(partners)
    distance = first.end[all_rows] - second.end[all_partners]
    close = distance[np.abs(distance - offset) <= FIT_NS]
    better = int(np.median(close)) if len(close) else offset
    return _Fit(sum(costs) / len(all_rows) if len(all_rows) else np.inf, better, all_rows, all_partners)


def _in_order(cost: Floats) -> Int64Array:
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
