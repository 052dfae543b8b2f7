"""Which ranks form a communicator, what the program calls it, and which kind of parallelism it serves.

**By time** (`groups_of`). A capture without communicator ids identifies a communicator by its stream. The streams of
two tensor-parallel groups have the same name; the ends of their collectives separate them. Within a group, ends differ
by a constant (the clock offset), and between groups they do not.

**Kinds of parallelism** (`parallel_groups`). The program's name for the group decides, if the capture has one
(``TENSOR_MODEL_PARALLEL_GROUP``, ``mesh_dp``). Otherwise its operations decide: sends between stages are pipeline
parallel, all-to-all is expert parallel, reductions in the forward pass are tensor parallel, and groups that only gather
in the forward or reduce in the backward pass are data parallel.

**By marks** (`listed_groups`). A capture without communicator ids shows only the stream of a collective. Where the
programs' marks list the process groups, the ends of the collectives only decide to which of them a stream belongs.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.intervals import Floats, Int64Array
from nvprof_kit._ranks.columns import COLUMNS
from nvprof_kit._toml import read_toml
from nvprof_kit._trace.jobs.tables import JobTables
from nvprof_kit.issues import Issue, listing, plural
from nvprof_kit.names import Category, GroupName, parse_groups

LEAST_NS = 3_000
"""Two ranks are in one group if from one collective to the next, their ends move relative to each other by less than
this in most of them,"""

TIMES = 8
"""or by less than this multiple of the minimum over all pairs."""

MOST_OF_THEM = 0.75
"""Ranks of different groups can end together most of the time, because they wait for the same ranks in other groups."""

NEARLY_ALL = 0.9
"""A group is taken for several of equal size if in this share of the collectives, its ranks move"""

APART_NS, APART_TIMES = 200_000, 4
"""by more than this relative to those of the others, and by this multiple of what they move within their own. On a GPU
that ranks share, the ends of one collective move by 0.1 ms.
"""

MOST_SAMPLES = 300
"""Maximum number of collectives to compare."""


def groups_of(ends: pd.DataFrame) -> pd.DataFrame:
    """The groups of ranks of communicators identified by streams: comm, rank, part.

    Args:
        ends: The ends of their collectives: comm, s, k, rank, end_ns, size (ranks of the communicator, -1: unknown).
    """
    rows: list[tuple[str, int, int]] = []
    for comm, comm_ends in ends.groupby("comm"):
        if comm_ends["rank"].nunique() < 3:
            continue
        ranks, moved, rarely = movements(comm_ends)
        limit = max(LEAST_NS, TIMES * float(moved.min()))
        size = comm_ends.groupby("rank")["size"].max().reindex(ranks).to_numpy()
        parts = _joined(moved, limit, size)
        if (size <= 0).all():
            parts = _divided(rarely, parts)
        rows += [(str(comm), rank, number) for rank, number in zip(ranks, parts, strict=True)]
    return part_table(rows)


def part_table(rows: list[tuple[str, int, int]]) -> pd.DataFrame:
    """The part of a communicator to which a rank belongs: comm, rank, part."""
    return pd.DataFrame(rows, columns=["comm", "rank", "part"]).astype({"rank": "int64", "part": "int64"})


def movements(comm_ends: pd.DataFrame) -> tuple[list[int], Floats, Floats]:
    """The ranks of a communicator, and how far the ends of two of them move relative to each other from one collective
    to the next: in `MOST_OF_THEM`, and in `NEARLY_ALL`. Infinite below the diagonal, and where they share too few.
    Neither offset nor drift of the clocks matters.

    Args:
        comm_ends: The ends of its collectives: s, k, rank, end_ns.
    """
    # where a rank lost collectives of a step, its others have wrong numbers
    count = comm_ends.groupby(["s", "rank"])["end_ns"].transform("size")
    complete = comm_ends[count == count.groupby(comm_ends["s"]).transform("max")]
    wide = complete.pivot_table(index=["s", "k"], columns="rank", values="end_ns", aggfunc="first")
    ranks = sorted(int(rank) for rank in comm_ends["rank"].unique())
    wide = wide.reindex(columns=ranks)
    changes = np.diff((wide - wide.min()).to_numpy(dtype=np.float64), axis=0)  # exact enough for differences
    changes = changes[:: max(len(changes) // MOST_SAMPLES, 1)]
    moved, rarely = (np.full((len(ranks), len(ranks)), np.inf) for _ in range(2))
    for row in range(len(ranks) - 1):
        distances = np.abs(changes[:, row + 1 :] - changes[:, row, None])
        enough = np.flatnonzero(np.count_nonzero(~np.isnan(distances), axis=0) > 2)
        if len(enough):
            quantiles = np.nanquantile(distances[:, enough], (MOST_OF_THEM, NEARLY_ALL), axis=0)
            moved[row, row + 1 + enough], rarely[row, row + 1 + enough] = quantiles
    return ranks, moved, rarely


def _joined(moved: Floats, limit: float, size: Int64Array) -> list[int]:
    """The part of each rank: the pairs that move least are joined first, up to the communicator's known size."""
    parts = list(range(len(size)))
    room = np.where(size > 1, size, len(size))
    first, second = np.nonzero(moved <= limit)
    order = np.argsort(moved[first, second], kind="stable")
    for a, b in zip(first[order].tolist(), second[order].tolist(), strict=True):
        both = [rank for rank, of in enumerate(parts) if of in (parts[a], parts[b])]
        if parts[a] != parts[b] and len(both) <= room[both].min():
            joined = parts[a]
            for rank in both:
                parts[rank] = joined
    return parts


def _divided(moved: Floats, parts: list[int]) -> list[int]:
    """The parts; one that consists of groups of equal size, far from each other, is divided into these."""
    from scipy.cluster.hierarchy import fcluster, linkage

    divided = np.array(parts)
    for number in sorted(set(parts)):
        members = np.flatnonzero(np.array(parts) == number)
        among = moved[np.ix_(members, members)]
        upper = np.triu(np.isfinite(among), 1)
        if len(members) < 4 or not upper.any():
            continue
        merges = linkage(np.minimum(among, 1e18)[np.triu_indices(len(members), 1)], "single")
        for count in range(len(members) // 2, 1, -1):
            groups = fcluster(merges, count, "maxclust")
            is_inside, sizes = groups[:, None] == groups[None, :], np.bincount(groups)[1:]
            if sizes.min() < max(2, sizes.max()):
                continue
            least_distance = max(APART_NS, APART_TIMES * float(among[upper & is_inside].max()))
            if float(among[upper & ~is_inside].min(initial=np.inf)) >= least_distance:
                divided[members] = [members[groups == group][0] for group in groups]
                break
    return [int(first) for first in divided]


_NAMES = {
    parallel: re.compile(rf"(?:^|[^a-z])(?:{terms})(?:[^a-z]|$)", re.IGNORECASE)
    for parallel, terms in read_toml("nvprof_kit._ranks", "groups.toml").items()
}
_FORWARD = (Category.FORWARD.value, Category.RECOMPUTE.value)
_POINT_TO_POINT = {"Send", "Recv", "SendRecv"}
_LISTED = 16


def parallel_groups(tables: JobTables, stages: Mapping[int, int], marked_groups: ListedGroups) -> pd.DataFrame:
    """The groups, with the columns `groups`.

    Args:
        tables: The job's maps, with separated communicators.
        stages: The pipeline stage of each rank.
        marked_groups: The groups that the marks list, which name a group without a name by its ranks.
    """
    rows = []
    for _, comm_uses in tables.frame("uses").groupby("c", sort=False):
        ranks = sorted({int(rank) for use_ranks in comm_uses["ranks"] for rank in use_ranks})
        name, kinds = str(comm_uses["group"].max()), sorted(filter(None, set(comm_uses["kind"])))
        name = name or marked_groups.name_of(ranks, passes_on=set(kinds) <= _POINT_TO_POINT)
        parallel, found_by = named_parallel(name), "name"
        if parallel == "unknown":
            parallel, found_by = used_parallel(comm_uses, len({stages.get(rank, 0) for rank in ranks}) > 1), "use"
        size = max(int(comm_uses["size"].max()), len(ranks))
        comm, count = str(comm_uses["comm"].iloc[0]), int(comm_uses["collectives"].sum())
        rows.append((comm, name, parallel, found_by, size, listing(ranks, _LISTED), ", ".join(kinds), count))
    frame: pd.DataFrame = pd.DataFrame.from_records(rows, columns=list(COLUMNS["groups"]))
    return frame.sort_values(["parallel", "group", "ranks"], kind="stable", ignore_index=True)


def named_parallel(name: str) -> str:
    """The kind of parallelism according to the group's name, ``unknown`` if the name does not say."""
    starts = {parallel: match.start() for parallel, pattern in _NAMES.items() if (match := pattern.search(name))}
    return min(starts, key=lambda parallel: starts[parallel]) if starts else "unknown"


def used_parallel(uses: pd.DataFrame, spans_stages: bool) -> str:
    """The kind of parallelism according to the group's operations.

    Args:
        uses: kind, phase and collectives of the group.
        spans_stages: Whether its ranks are in several pipeline stages.
    """
    kinds = set(uses["kind"])
    forward = set(uses[uses["phase"].isin(_FORWARD)]["kind"])
    if kinds & _POINT_TO_POINT and not kinds & {"ReduceScatter", "AllGather"}:
        return "pipeline" if spans_stages else "context" if forward & _POINT_TO_POINT else "unknown"
    if "AllToAll" in kinds:
        return "expert"
    if forward & {"AllReduce", "ReduceScatter"}:
        return "tensor"
    return "data" if kinds & {"AllReduce", "ReduceScatter", "AllGather", "Broadcast"} else "unknown"


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
        members = frozenset(ranks)
        groups = {group.name: group for rank in members for group in self.of.get(rank, ())}.values()
        enclosing = [group for group in groups if members <= frozenset(group.ranks)]
        size = min((len(group.ranks) for group in enclosing), default=0) if passes_on else len(members)
        names = {group.description or group.name for group in enclosing if len(group.ranks) == size}
        return names.pop() if len(names) == 1 else ""

    def sampled(self, ranks: Sequence[int], limit: int) -> list[int]:
        """At most this many of the ranks, such that many of them share their groups."""
        available, chosen, waiting = set(ranks), dict.fromkeys(ranks[:1]), deque(ranks[:1])
        while waiting and len(chosen) < min(limit, len(available)):
            for group in self.of.get(waiting.popleft(), ()):
                sample = [rank for rank in group.ranks[:: max(len(group.ranks) // SAMPLED, 1)] if rank in available]
                waiting.extend(rank for rank in sample if rank not in chosen)
                chosen |= dict.fromkeys(sample)
        return sorted([*chosen, *(rank for rank in ranks if rank not in chosen)][:limit])

    def partitions(self, ranks: Sequence[int]) -> list[dict[int, GroupName]]:
        """By description: the group of each rank, where each rank is in exactly one group of that description."""
        group_of_rank: dict[str, dict[int, GroupName]] = {}
        several: set[str] = set()
        for rank in ranks:
            for group in filter(lambda group: len(group.ranks) > 1, self.of.get(rank, ())):
                described = group.description or group.name
                if group_of_rank.setdefault(described, {}).setdefault(rank, group) is not group:
                    several.add(described)
        return [of for name, of in sorted(group_of_rank.items()) if len(of) == len(ranks) and name not in several]

    def may_pass(self, first: int, second: int) -> bool:
        """Whether two ranks can send to each other: they share a group, of pipeline parallelism if they have one."""
        if first not in self.of or second not in self.of:
            return True
        pipelines = [group for group in self.of[first] if named_parallel(group.description) == "pipeline"]
        return any(second in group.ranks for group in pipelines or self.of[first])


def listed_groups(mark_of_rank: Mapping[int, str], ranks: Iterable[int] = ()) -> ListedGroups:
    """The groups by rank; none if marks contradict each other or their rank.

    Args:
        mark_of_rank: By rank, the text of its mark (`nvprof_kit.names.groups_text`).
        ranks: All ranks; those without a mark are in the groups that others list.
    """
    of = {rank: tuple(parse_groups(text)) for rank, text in sorted(mark_of_rank.items())}
    by_name: dict[str, dict[int, GroupName]] = {}
    for rank, groups in of.items():
        for group in groups:
            by_name.setdefault(group.name, {})[rank] = group
    contradicting: set[int] = set()
    for group_of_rank in by_name.values():
        ranks_of_first = next(iter(group_of_rank.values())).ranks
        contradicting |= group_of_rank.keys() - set(ranks_of_first)
        contradicting |= {
            rank
            for rank, group in group_of_rank.items()
            if group.ranks is not ranks_of_first and group.ranks != ranks_of_first
        }
    if contradicting:
        return ListedGroups(warnings=(Issue.of("contradicting-groups", ranks=listing(sorted(contradicting))),))
    without_mark = set(ranks).difference(mark_of_rank)
    for group_of_rank in by_name.values() if without_mark else ():
        group = next(iter(group_of_rank.values()))
        for rank in without_mark.intersection(group.ranks):
            of[rank] = (*of.get(rank, ()), group)
    return ListedGroups({rank: groups for rank, groups in of.items() if groups})


def listed_parts(ends: pd.DataFrame, marked_groups: ListedGroups, members: pd.DataFrame) -> pd.DataFrame:
    """The groups of ranks of communicators identified by streams, of those that the marks list: comm, rank, part.

    Communicators that no list of groups fits are left out.

    Args:
        ends: See `nvprof_kit._ranks.groups.groups_of`; of all ranks or a sample.
        marked_groups: The groups.
        members: All ranks of the communicators: comm, rank.
    """
    rows: list[tuple[str, int, int]] = []
    ranks_of_comm = {str(comm): sorted(map(int, ranks)) for comm, ranks in members.groupby("comm")["rank"]}
    for comm, comm_ends in ends.groupby("comm"):
        ranks, moved, _ = movements(comm_ends)
        size = comm_ends.groupby("rank")["size"].max()
        is_pair = np.triu(np.isfinite(moved), 1)
        fits = []
        for groups in marked_groups.partitions(ranks_of_comm[str(comm)]):
            parts = np.array([min(groups[rank].ranks) for rank in ranks])
            is_inside = parts[:, None] == parts[None, :]
            within, across = moved[is_pair & is_inside], moved[is_pair & ~is_inside]
            if len(within) and all(size[rank] in (0, -1, len(groups[rank].ranks)) for rank in ranks):
                median_across = float(np.median(across)) if len(across) else np.inf
                fits.append((float(np.median(within)), median_across, groups))
        close = max(LEAST_NS, CLOSE_TIMES * min((within for within, *_ in fits), default=0.0))
        close = min(close, max(LEAST_NS, TIMES * float(moved.min())))
        if close_fits := [fit for fit in fits if fit[0] <= close]:
            within, across, groups = min(close_fits, key=lambda fit: len({group.name for group in fit[2].values()}))
            if within <= APART_SHARE * across:
                rows += [(str(comm), rank, min(group.ranks)) for rank, group in groups.items()]
    return part_table(rows)


MOST_SEPARATED = 256
"""Maximum number of ranks whose ends are compared to separate communicators identified only by their streams. In a job
with more, a sample decides which of the listed groups a communicator is.
"""


def separate(tables: JobTables, members: pd.DataFrame, marked_groups: ListedGroups) -> tuple[str, ...]:
    """Separate communicators identified by streams into the groups that marks list, else into those found by time.

    Returns:
        A warning about communicators of too many ranks to be separated, whose collectives are left out.
    """
    ranks = sorted(tables.ranks["rank"].tolist())
    compares_all = len(ranks) <= MOST_SEPARATED
    ends = tables.stream_ends(ranks if compares_all else marked_groups.sampled(ranks, MOST_SEPARATED))
    marked_parts = listed_parts(ends, marked_groups, members)
    timed_parts = groups_of(ends[~ends["comm"].isin(marked_parts["comm"])])
    warnings: tuple[str, ...] = ()
    if not compares_all:
        several = timed_parts.groupby("comm")["part"].nunique()
        mixed = members[members["comm"].isin(several.index[several > 1])]
        timed_parts = mixed.assign(part=mixed["rank"])
        if len(mixed):
            who = plural(mixed["comm"].nunique(), "communicator", "is/are")
            warnings = (Issue.of("unseparated", who=who, limit=MOST_SEPARATED),)
    tables.insert("parts", pd.concat([marked_parts, timed_parts], ignore_index=True))
    return warnings
