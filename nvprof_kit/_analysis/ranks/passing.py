"""Matches sends and receives without ids, in jobs of more than two ranks.

The position in a stream identifies the partner only if the stream has a single partner, which the capture does not
show. Two ranks of adjacent stages are partners if, with one clock offset, most of their messages end together: a send
of one with a receive of the other, of the same size and in the same step. If another rank or another offset fits nearly
as well, the match is ambiguous; these messages are matched stage by stage (`nvprof_kit._analysis.ranks.chains`), or
left unmatched and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.ranks.chains import pair_chain
from nvprof_kit._analysis.ranks.words import many, some

if TYPE_CHECKING:
    import pandas as pd

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

Ints = npt.NDArray[np.int64]


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
            f"{many(int(lone.sum()), 'message', 'cannot be matched and is/cannot be matched and are')} left out (sends "
            f"and receives of ranks {some(ranks)}): the captures do not name their communicators, and {reason}; "
            "waiting for them is not measured",
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
