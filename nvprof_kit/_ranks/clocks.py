"""Matches the collectives of a job, and aligns the clocks of its ranks by the ends of those that match.

A collective that every rank needs from every other ends on all of them at about the same time. Within each
communicator, the differences between a rank's ends and those of the first rank are fitted by a line. The fit is robust:
it uses medians of the first and the last third of the samples, so that outliers have no effect. Ranks that share no
communicator are linked through ranks that share one with both: a minimum spanning tree takes the most accurate fits.

In a step in which the capture lost collectives of some ranks, the order of collectives says nothing: clocks are aligned
by the other steps, and its collectives are matched by time.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.intervals import Floats, Int64Array
from nvprof_kit._ranks.columns import COLUMNS
from nvprof_kit._ranks.groups import ListedGroups, listed_groups, separate
from nvprof_kit._trace.jobs.tables import FEW, JobTables

COARSE_NS = 200_000
"""Warn about a clock with a larger residual."""

WAITED_NS, WAITED_TIMES = 100_000, 3
"""A send or receive counts as waiting if it takes at least this long, and this multiple of its counterpart."""

ENOUGH = 12
"""Minimum number of samples to estimate drift."""

FASTEST = 1e-3
"""Maximum drift of two clocks, as a ratio; clocks of computers drift by less than a tenth of it. If the ends of
collectives seem to drift faster, they are not those of the same collectives.
"""

SAMPLES = 100
"""Approximate number of collectives per rank used to align its clock; a small job uses all of them."""

LEAST_FLOOR_NS = 2_000
"""Lower bound of the clock resolution."""


class Line(NamedTuple):
    """A clock's correction at time ``x``: ``offset + drift * (x - at)``, times in ns; the deviation of the samples that
    it was fitted to, and their number.
    """

    at: float
    offset: float
    drift: float
    residual: float = 0.0
    matched: int = 0

    def apply(self, time: float) -> float:
        """The corrected time."""
        return time + self.offset + self.drift * (time - self.at)

    def inverse(self) -> Line:
        """The inverse correction."""
        return self._replace(at=self.at + self.offset, offset=-self.offset, drift=-self.drift / (1 + self.drift))

    def then(self, other: Line) -> Line:
        """This correction followed by another, as accurate as the less accurate of them."""
        offset = other.apply(self.apply(self.at)) - self.at
        drift = (1 + self.drift) * (1 + other.drift) - 1
        return Line(self.at, offset, drift, max(self.residual, other.residual), self.matched)


class Alignment(NamedTuple):
    """The aligned clocks of a job's ranks.

    Attributes:
        tables: The job's maps, with matched collectives.
        clocks: With the columns `clocks`.
        floor_ns: The resolution of the aligned clocks.
        warnings: Sentences about groups that contradict each other or could not be separated, and messages that could
            not be matched.
        marked_groups: The process groups that the captures' marks list.
    """

    tables: JobTables
    clocks: pd.DataFrame
    floor_ns: int
    warnings: tuple[str, ...] = ()
    marked_groups: ListedGroups = ListedGroups()


def align_job(tables: JobTables) -> Alignment:
    """Match the collectives of a job and align its clocks."""
    ranks = tables.ranks["rank"].tolist()
    rows, largest = tables.rows()
    marks = tables.ranks[tables.ranks["groups"] != ""]
    marked_groups = listed_groups(dict(zip(marks["rank"].tolist(), marks["groups"].tolist(), strict=True)), ranks)
    warnings = marked_groups.warnings
    members = tables.frame("stream_members")
    if len(ranks) > 2 and len(members):
        warnings += separate(tables, members, marked_groups)
    if len(members) and max(int(tables.ranks["world_size"].max()), max(ranks) + 1, len(ranks)) > 2:
        from nvprof_kit._ranks.messages import match_messages

        warnings += match_messages(tables, marked_groups)
    odd_steps = tables.frame("odd_steps")
    ends = tables.ends(1 if rows <= FEW else max(largest // SAMPLES, 1))
    is_even = ends.merge(odd_steps.assign(odd=True), on=["c", "s"], how="left")["odd"].isna().to_numpy()
    clocks = align(ends[is_even] if is_even.any() else ends, ranks)
    residuals, aligned = clocks["residual_ns"].dropna(), clocks[clocks["offset_ns"].notna()]
    floor = max(round(2 * float(residuals.median())), LEAST_FLOOR_NS) if len(residuals) else LEAST_FLOOR_NS
    if len(odd_steps):
        tables.insert("renumbered", _by_time(tables.members_of_steps(odd_steps).merge(aligned, on="rank"), floor))
    drift = aligned.assign(drift=aligned["drift_ppm"] / 1e6)[["rank", "at_ns", "offset_ns", "drift"]]
    tables.match(drift.astype({"offset_ns": "int64"}))
    return Alignment(tables, clocks, floor, warnings, marked_groups)


def align(ends: pd.DataFrame, ranks: list[int]) -> pd.DataFrame:
    """The clocks of all ranks, with the columns `clocks`; only those of the largest set of linked ranks are aligned.

    Args:
        ends: Ends of collectives: c (communicator), s and k (identify the collective within it), rank, end_ns, took_ns,
            symmetric.
        ranks: The ranks; the clock of the first aligned one is the reference.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import breadth_first_order, connected_components, minimum_spanning_tree

    ranks = sorted(ranks)
    number_of_rank = {rank: number for number, rank in enumerate(ranks)}
    fits: dict[tuple[int, int], Line] = {}
    for first, rank, line in _fits(ends):
        pair = (number_of_rank[first], number_of_rank[rank])
        if pair not in fits or line.residual < fits[pair].residual:
            fits[pair] = line
    weights = [line.residual + 1 for line in fits.values()]  # no edge has the weight 0
    edges = tuple(np.array(list(fits), dtype=np.int32).reshape(-1, 2).T)  # scipy 1.15 refuses int64
    tree = minimum_spanning_tree(coo_array((weights, edges), shape=(len(ranks), len(ranks))).tocsr())
    _, islands = connected_components(tree, directed=False)
    start = int((islands == np.bincount(islands).argmax()).argmax())
    order, previous = breadth_first_order(tree, start, directed=False)
    clocks, through = {start: Line(0.0, 0.0, 0.0)}, {start: start}
    for number in order[1:].tolist():
        through[number] = int(previous[number])
        pair = (through[number], number)
        to_through = fits[pair] if pair in fits else fits[pair[::-1]].inverse()
        clocks[number] = to_through.then(clocks[through[number]])
    rows = [
        (ranks[number], round(offset), drift * 1e6, residual, matched, round(at), ranks[through[number]])
        for number, (at, offset, drift, residual, matched) in clocks.items()
    ]
    frame: pd.DataFrame = pd.DataFrame.from_records(rows, columns=list(COLUMNS["clocks"]), index="rank").reindex(ranks)
    kinds = {"offset_ns": "Int64", "through": "Int64", "at_ns": "int64", "matched": "int64"}
    return frame.fillna({"at_ns": 0, "matched": 0}).astype(kinds).reset_index()


def _fits(ends: pd.DataFrame) -> list[tuple[int, int, Line]]:
    """The fits of each communicator: its first rank, another rank, and the correction to the first rank's clock."""
    if ends["symmetric"].any():
        # a rank that only sends ends before the others: ignore those if the communicator has symmetric collectives
        has = ends.groupby("c")["symmetric"].transform("any")
        ends = ends[ends["symmetric"] | ~has]
    first = ends.groupby("c")["rank"].transform("min")
    base = ends[ends["rank"] == first].rename(columns={"rank": "first", "end_ns": "base_ns", "took_ns": "base_took"})
    pairs = ends[ends["rank"] != first].merge(base.drop(columns="symmetric"), on=["c", "s", "k"])
    # A sender is done once its message is on the way, so a send that starts long before its receive also ends long
    # before it. Of sends and receives, only those in which one side waited for the other end together.
    longer, shorter = pairs[["took_ns", "base_took"]].max(axis=1), pairs[["took_ns", "base_took"]].min(axis=1)
    together = pairs["symmetric"] | ((longer >= WAITED_NS) & (longer >= WAITED_TIMES * shorter))
    enough = together.groupby([pairs["c"], pairs["rank"]]).transform("sum") >= 3
    pairs = pairs[together | ~enough].sort_values(["c", "rank", "base_ns"], kind="stable")
    own_ends, base_ends = pairs["end_ns"].to_numpy(), pairs["base_ns"].to_numpy()
    bounds = np.flatnonzero(pairs[["c", "rank"]].ne(pairs[["c", "rank"]].shift()).any(axis=1)).tolist()
    return [
        (int(pairs["first"].iloc[low]), int(pairs["rank"].iloc[low]), _fit(own_ends[low:high], base_ends[low:high]))
        for low, high in pairwise([*bounds, len(pairs)])
    ]


def _fit(own_ends: Int64Array, base: Int64Array) -> Line:
    """The correction that maps a rank's ends to the first rank's."""
    at = int(own_ends[0])
    offsets = (base - own_ends).astype(np.float64)
    constant = _through(at, offsets, 0.0)
    if len(own_ends) < ENOUGH:
        return constant
    # through the medians of the first and the last third, refined on the residuals
    elapsed = (own_ends - at).astype(np.float64)
    third, slope = len(elapsed) // 3, 0.0
    run = float(np.median(elapsed[-third:]) - np.median(elapsed[:third]))
    for _ in range(3 if run > 0 else 0):
        residuals = offsets - slope * elapsed
        slope += float(np.median(residuals[-third:]) - np.median(residuals[:third])) / run
    sloped = _through(at, offsets - slope * elapsed, slope)
    return sloped if sloped.residual < 0.7 * constant.residual and abs(slope) <= FASTEST else constant


def _through(at: int, offsets: Floats, slope: float) -> Line:
    """The line through the median of the offsets, from which the slope is subtracted."""
    level = float(np.median(offsets))
    return Line(at, level, slope, float(1.4826 * np.median(np.abs(offsets - level))), len(offsets))


def _by_time(members: pd.DataFrame, floor: int) -> pd.DataFrame:
    """Renumber steps in which some rank lacks collectives: those that end at the same time are one collective.

    Args:
        members: Their collectives, with the clocks of their ranks.
        floor: The resolution of the clocks.
    """
    drift = members["drift_ppm"] / 1e6 * (members["end_ns"] - members["at_ns"])
    members["e"] = members["end_ns"] + members["offset_ns"].astype("int64") + drift.round().astype("int64")
    members = members.sort_values(["c", "s", "e"], kind="stable", ignore_index=True)
    is_first = members["e"].diff() > max(5 * floor, 20_000)
    for key in ("c", "s", "sort"):
        is_first |= members[key] != members[key].shift()
    members["k"] = 1_000_000 + is_first.cumsum()
    # a rank takes part in a collective only once; its further members are unmatched
    double = members.duplicated(["c", "s", "k", "rank"])
    members.loc[double, "k"] = 2_000_000_000 + np.flatnonzero(double)
    return members[["rank", "index", "c", "s", "k"]]
