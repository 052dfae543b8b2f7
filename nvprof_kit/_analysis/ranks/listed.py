"""The process groups that the programs' marks list: which ranks form a communicator, and what the program calls it.

A capture without communicator ids shows only the stream of a collective. The marks tell which groups there are; the
ends of the collectives only decide to which of them a stream belongs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._analysis.ranks.groups import LEAST_NS, TIMES, movements, part_table
from nvprof_kit._analysis.ranks.parallel import named_parallel
from nvprof_kit._analysis.ranks.words import some
from nvprof_kit.names import GroupName, parse_groups

if TYPE_CHECKING:
    import pandas as pd

CLOSE_TIMES = 3
"""Groups fit a stream if their ranks' ends move by at most this multiple of those of the groups that move least (and by
at most `TIMES` that of the two ranks that move least, which may be in no common group),
"""

APART_SHARE = 0.7
"""and by at most this share of what ranks of different groups move."""

SAMPLED = 8
"""Number of ranks of a group to compare in a job of many ranks."""


@dataclass(frozen=True)
class ListedGroups:
    """The groups of each rank whose capture has the mark, and warnings about marks that contradict each other."""

    of: Mapping[int, tuple[GroupName, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def name_of(self, ranks: Iterable[int], *, passes_on: bool) -> str:
        """The description of the only group with these ranks (or, of sends and receives, the smallest that contains
        them); '' if there is none or several.
        """
        wanted = frozenset(ranks)
        every = {group.name: group for rank in wanted for group in self.of.get(rank, ())}.values()
        found = [group for group in every if len(wanted) == len(group.ranks) and wanted == frozenset(group.ranks)]
        if passes_on and not found:
            around = [group for group in every if wanted <= frozenset(group.ranks)]
            least = min((len(group.ranks) for group in around), default=0)
            found = [group for group in around if len(group.ranks) == least]
        names = {group.description or group.name for group in found}
        return names.pop() if len(names) == 1 else ""

    def sampled(self, ranks: Sequence[int], most: int) -> list[int]:
        """At most this many of the ranks, such that many of them share their groups."""
        there, chosen, waiting = set(ranks), dict.fromkeys(ranks[:1]), deque(ranks[:1])
        while waiting and len(chosen) < min(most, len(there)):
            for group in self.of.get(waiting.popleft(), ()):
                found = [rank for rank in group.ranks[:: max(len(group.ranks) // SAMPLED, 1)] if rank in there]
                waiting.extend(rank for rank in found if rank not in chosen)
                chosen |= dict.fromkeys(found)
        return sorted([*chosen, *(rank for rank in ranks if rank not in chosen)][:most])

    def may_pass(self, one: int, other: int) -> bool:
        """Whether two ranks can send to each other: they share a group, of pipeline parallelism if they have one."""
        if one not in self.of or other not in self.of:
            return True
        pipelines = [group for group in self.of[one] if named_parallel(group.description) == "pipeline"]
        return any(other in group.ranks for group in pipelines or self.of[one])


def listed_groups(listed: Mapping[int, str], ranks: Iterable[int] = ()) -> ListedGroups:
    """The groups by rank; none if marks contradict each other or their rank.

    Args:
        listed: By rank, the text of its mark (`nvprof_kit.names.groups_text`).
        ranks: All ranks; those without a mark are in the groups that others list.
    """
    of = {rank: tuple(parse_groups(text)) for rank, text in sorted(listed.items())}
    every: dict[str, GroupName] = {}
    members: dict[str, set[int]] = {}
    odd: set[int] = set()
    for rank, groups in of.items():
        for group in groups:
            first = every.setdefault(group.name, group)
            if first.ranks is not group.ranks and first.ranks != group.ranks:
                odd.add(rank)
            members.setdefault(group.name, set()).add(rank)
    for group in every.values():
        odd |= members[group.name].difference(group.ranks)
    if odd:
        return ListedGroups(
            warnings=(
                f"the process groups that the marks of ranks {some(sorted(odd))} list contradict those of other ranks "
                "or their own rank: they are left out, and groups are found by time; are the captures of one run?",
            )
        )
    without = set(ranks).difference(listed)
    for group in every.values() if without else ():
        for rank in without.intersection(group.ranks):
            of[rank] = (*of.get(rank, ()), group)
    return ListedGroups({rank: groups for rank, groups in of.items() if groups})


def listed_parts(ends: pd.DataFrame, listed: ListedGroups, members: pd.DataFrame) -> pd.DataFrame:
    """The groups of ranks of communicators identified by streams, of those that the marks list: comm, rank, part.

    Communicators that no list of groups fits are left out.

    Args:
        ends: See `nvprof_kit._analysis.ranks.groups.groups_of`; of all ranks or a sample.
        listed: The groups.
        members: All ranks of the communicators: comm, rank.
    """
    rows: list[tuple[str, int, int]] = []
    every = {str(comm): sorted(map(int, ranks)) for comm, ranks in members.groupby("comm")["rank"]}
    for comm, mine in ends.groupby("comm"):
        ranks, moved, _ = movements(mine)
        size = mine.groupby("rank")["size"].max().reindex(ranks).to_numpy()
        fits = []
        for groups in _partitions(listed, every[str(comm)]):
            first = {name: min(group.ranks) for name, group in {one.name: one for one in groups.values()}.items()}
            part_of = {rank: first[group.name] for rank, group in groups.items()}
            parts = np.array([part_of[rank] for rank in ranks])
            known = np.triu(np.isfinite(moved), 1)
            inside = parts[:, None] == parts[None, :]
            within, across = moved[known & inside], moved[known & ~inside]
            fitting = all(one <= 0 or one == len(groups[rank].ranks) for rank, one in zip(ranks, size, strict=True))
            if len(within) and fitting:
                apart = float(np.median(across)) if len(across) else np.inf
                fits.append((float(np.median(within)), apart, len(first), part_of))
        close = max(LEAST_NS, CLOSE_TIMES * min((fit[0] for fit in fits), default=0.0))
        close = min(close, max(LEAST_NS, TIMES * float(moved.min())))
        fits = sorted((fit for fit in fits if fit[0] <= close), key=lambda fit: fit[2])
        if fits and fits[0][0] <= APART_SHARE * fits[0][1]:
            rows += [(str(comm), rank, part) for rank, part in fits[0][3].items()]
    return part_table(rows)


def _partitions(listed: ListedGroups, ranks: Sequence[int]) -> list[dict[int, GroupName]]:
    """By description: the group of each rank, where each rank is in exactly one group of that description."""
    found: dict[str, dict[int, GroupName]] = {}
    several: set[str] = set()
    for rank in ranks:
        for group in listed.of.get(rank, ()):
            described = group.description or group.name
            if len(group.ranks) > 1 and found.setdefault(described, {}).setdefault(rank, group) is not group:
                several.add(described)
    return [of for name, of in sorted(found.items()) if len(of) == len(ranks) and name not in several]
