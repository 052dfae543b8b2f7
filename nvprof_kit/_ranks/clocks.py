"""Matches the collectives of a job, and aligns the clocks of its ranks by the ends of those that match.

A collective that every rank needs from every other ends on all of them at about the same time. Within each
communicator, the differences between a rank's ends and those of the first rank are fitted by a line. The fit is robust:
it uses medians of the first and the last third of the samples, so that outliers have no effect. Ranks that share no
communicator are linked through ranks that share one with both.

In a step in which the capture lost collectives of some ranks, the order of collectives says nothing. `shifted_steps`
finds such steps, and `voted` numbers their collectives by the offset with which most of them end together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._ranks.groups import ListedGroups, groups_of, listed_groups, listed_parts
from nvprof_kit._ranks.messages import numbered, pair_messages
from nvprof_kit._ranks.stages import spans_of, stages_of
from nvprof_kit._result.column import Column, Columns
from nvprof_kit._trace.jobs.tables import FEW, JobTables
from nvprof_kit.issues import plural

if TYPE_CHECKING:
    import pandas as pd

    Ends = npt.NDArray[np.int64]


COARSE_NS = 200_000
"""Warn about a clock with a larger residual."""

COLUMNS: Columns = {
    "rank": Column("rank"),
    "offset_ns": Column(
        "offset to add to the rank's times at `at_ns`; missing if the rank could not be aligned", "ns", kind="float"
    ),
    "drift_ppm": Column("increase of the offset per time after `at_ns`, in parts per million", "ppm", kind="float"),
    "residual_ns": Column(
        "scaled median absolute deviation of the ends of collectives after alignment", "ns", kind="float"
    ),
    "matched": Column("number of collectives used"),
    "at_ns": Column("reference time on the rank's own clock", "ns", kind="float"),
    "through": Column("rank whose clock it was aligned with"),
}
"""The columns of the table of clocks."""

WAITED_NS = 100_000
"""A send or receive counts as waiting if it takes at least this long"""

WAITED_TIMES = 3
"""and this multiple of its counterpart on the other rank."""

ENOUGH = 12
"""Minimum number of samples to estimate drift."""

FASTEST = 1e-3
"""Maximum drift of two clocks, as a ratio; clocks of computers drift by less than a tenth of it. If the ends of
collectives seem to drift faster, they are not those of the same collectives.
"""


class Line(NamedTuple):
    """A clock's correction at time ``x``: ``offset + drift * (x - at)``, times in ns."""

    at: float
    offset: float
    drift: float

    def apply(self, time: float) -> float:
        """The corrected time."""
        return time + self.offset + self.drift * (time - self.at)

    def inverse(self) -> Line:
        """The inverse correction."""
        return Line(self.at + self.offset, -self.offset, -self.drift / (1 + self.drift))

    def then(self, other: Line) -> Line:
        """This correction followed by another."""
        return Line(self.at, other.apply(self.apply(self.at)) - self.at, (1 + self.drift) * (1 + other.drift) - 1)


@dataclass(frozen=True)
class _Fit:
    """Fit of a rank's clock against that of the communicator's first rank."""

    line: Line
    residual: float
    matched: int


def align(ends: pd.DataFrame, ranks: list[int]) -> pd.DataFrame:
    """The clocks of all ranks, with `COLUMNS`.

    Args:
        ends: Ends of collectives: c (communicator), s and k (identify the collective within it), rank, end_ns, took_ns,
            symmetric.
        ranks: The ranks; the first one's clock is the reference.
    """
    import pandas as pd

    by_residual = sorted(_fits(ends).values(), key=lambda members: max(fit.residual for fit in members.values()))
    lines: dict[int, tuple[Line, float, int, int]] = {}
    islands: list[int] = []
    for first in ranks:
        if first in lines:
            continue
        islands.append(first)
        lines[first] = (Line(0.0, 0.0, 0.0), 0.0, 0, first)
        # align every communicator that has an aligned rank, most accurate first, until none is left
        while members := next(
            (of for of in by_residual if any(rank in lines for rank in of) and not all(rank in lines for rank in of)),
            None,
        ):
            aligned_rank = next(rank for rank in members if rank in lines)
            # correction of the communicator's first rank
            back = members[aligned_rank].line.inverse().then(lines[aligned_rank][0])
            for rank, fit in members.items():
                if rank not in lines:
                    residual = max(fit.residual, members[aligned_rank].residual, lines[aligned_rank][1])
                    lines[rank] = (fit.line.then(back), residual, fit.matched, aligned_rank)
    if len(islands) > 1:  # keep the largest connected set of ranks; the others cannot be aligned with it
        roots = {rank: _root(lines, rank) for rank in lines}
        largest = max(islands, key=list(roots.values()).count)
        lines = {rank: line_of_rank for rank, line_of_rank in lines.items() if roots[rank] == largest}
    rows: list[tuple[Any, ...]] = []
    for rank in ranks:
        if rank not in lines:
            rows.append((rank, pd.NA, np.nan, np.nan, 0, 0, pd.NA))
            continue
        line, residual, matched, through = lines[rank]
        rows.append((rank, round(line.offset), line.drift * 1e6, residual, matched, round(line.at), through))
    frame: pd.DataFrame = pd.DataFrame.from_records(rows, columns=list(COLUMNS))
    typed: pd.DataFrame = frame.astype({"offset_ns": "Int64", "through": "Int64", "at_ns": "int64", "matched": "int64"})
    return typed


def _root(lines: dict[int, tuple[Line, float, int, int]], rank: int) -> int:
    while lines[rank][3] != rank:
        rank = lines[rank][3]
    return rank


def _fits(ends: pd.DataFrame) -> dict[int, dict[int, _Fit]]:
    """By communicator and rank: the correction to the clock of the communicator's first rank."""
    import pandas as pd

    if not len(ends):
        return {}
    if ends["symmetric"].any():
        # a rank that only sends ends before the others: ignore those if the communicator has symmetric collectives
        has = ends.groupby("c")["symmetric"].transform("any")
        ends = ends[ends["symmetric"] | ~has]
    first = ends.groupby("c")["rank"].transform("min")
    base = ends[ends["rank"] == first][["c", "s", "k", "end_ns", "took_ns"]]
    pairs = ends.merge(base.rename(columns={"end_ns": "base_ns", "took_ns": "base_took"}), on=["c", "s", "k"])
    pairs = pairs[_together(pairs)]
    fits: dict[int, dict[int, _Fit]] = {}
    pairs = pairs.sort_values(["c", "rank", "base_ns"], kind="stable")
    key = np.flatnonzero(
        np.diff(pairs["rank"].to_numpy(), prepend=-1) | (np.diff(pd.factorize(pairs["c"])[0], prepend=-1) != 0)
    )
    bounds = np.append(key, len(pairs))
    comm, rank = pairs["c"].to_numpy(), pairs["rank"].to_numpy()
    own_ends, other = pairs["end_ns"].to_numpy(), pairs["base_ns"].to_numpy()
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        fit = _fit(own_ends[low:high], other[low:high])
        fits.setdefault(int(comm[low]), {})[int(rank[low])] = fit
    return {c: members for c, members in fits.items() if len(members) > 1}


def _together(pairs: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """The pairs that end at the same time. A sender is done once its message is on the way, so a send that starts long
    before its receive also ends long before it. Of sends and receives, only those in which one side waited for the
    other end together. If there are too few of them, use all pairs.
    """
    import pandas as pd

    own_duration, other = pairs["took_ns"].to_numpy(), pairs["base_took"].to_numpy()
    longer, shorter = np.maximum(own_duration, other), np.minimum(own_duration, other)
    waited = (longer >= WAITED_NS) & (longer >= WAITED_TIMES * shorter)
    itself = (pairs["end_ns"] == pairs["base_ns"]).to_numpy() & (own_duration == other)
    chosen = pairs["symmetric"].to_numpy() | waited | itself
    enough = (
        pd.Series(chosen & ~itself).groupby([pairs["c"].to_numpy(), pairs["rank"].to_numpy()]).transform("sum") >= 3
    )
    together: npt.NDArray[np.bool_] = chosen | ~enough.to_numpy()
    return together


def _fit(own_ends: npt.NDArray[np.int64], base: npt.NDArray[np.int64]) -> _Fit:
    """The correction that maps a rank's ends to the first rank's."""
    at = int(own_ends[0])
    offsets = (base - own_ends).astype(np.float64)
    level = float(np.median(offsets))
    spread = _deviation(offsets - level)
    if len(own_ends) < ENOUGH:
        return _Fit(Line(at, level, 0.0), spread, len(own_ends))
    elapsed = (own_ends - at).astype(np.float64)
    # through the medians of the first and the last third, refined on the residuals
    third, slope = max(len(elapsed) // 3, 1), 0.0
    run = float(np.median(elapsed[-third:]) - np.median(elapsed[:third]))
    for _ in range(3 if run > 0 else 0):
        residuals = offsets - slope * elapsed
        slope += float(np.median(residuals[-third:]) - np.median(residuals[:third])) / run
    without_drift = offsets - slope * elapsed
    start = float(np.median(without_drift))
    sloped = _deviation(without_drift - start)
    if sloped < 0.7 * spread and abs(slope) <= FASTEST:
        return _Fit(Line(at, start, slope), sloped, len(own_ends))
    return _Fit(Line(at, level, 0.0), spread, len(own_ends))


def _deviation(residuals: npt.NDArray[np.float64]) -> float:
    return float(1.4826 * np.median(np.abs(residuals))) if len(residuals) else 0.0


TOGETHER_NS = 100_000
"""Ends on the aligned clock that are further apart belong to different collectives, whatever their order,"""

TIMES = 10
"""unless the distance is within this multiple of the clock resolution."""

LEAST_VOTES = 5
LEAST_SHARE = 0.3
"""An offset is accepted if at least this many collectives, and this share of the rank's, end together with it."""

MOST = 2_000
"""Maximum number of a rank's collectives in a communicator for voting on offsets."""


def shifted_steps(ends: pd.DataFrame, clocks: pd.DataFrame, floor_ns: int) -> pd.DataFrame:
    """Steps in which ranks have equally many collectives, but not the same ones: c, s.

    In such a step, more collectives end together when matched by time than when matched by order, or as many do, and
    others that are matched by order do not.

    Args:
        ends: See `nvprof_kit._trace.jobs.tables.JobTables.ends`; all of them.
        clocks: The clocks as far as known, with `nvprof_kit._ranks.clocks.COLUMNS`.
        floor_ns: The resolution of the clocks.
    """
    aligned = ends[(ends["s"] != -2) & ends["symmetric"]].merge(clocks[clocks["offset_ns"].notna()], on="rank")
    drift = aligned["drift_ppm"] / 1e6 * (aligned["end_ns"] - aligned["at_ns"])
    aligned["e"] = aligned["end_ns"] + aligned["offset_ns"].astype("int64") + drift.round().astype("int64")
    limit = max(TIMES * floor_ns, TOGETHER_NS)
    groups = aligned.groupby(["c", "s", "k"])["e"]
    is_together, has_others = groups.transform("max") - groups.transform("min") <= limit, groups.transform("size") > 1
    aligned["by_order"], aligned["apart"] = is_together & has_others, ~is_together & has_others
    aligned = aligned.sort_values(["c", "s", "e"], kind="stable", ignore_index=True)
    is_first = (
        (aligned["e"].diff() > limit) | (aligned["c"] != aligned["c"].shift()) | (aligned["s"] != aligned["s"].shift())
    )
    aligned["moment"] = is_first.cumsum()
    is_double = aligned.duplicated(["moment", "rank"], keep=False)
    aligned["by_time"] = (aligned.groupby("moment")["e"].transform("size") > 1) & ~is_double
    sums = aligned.groupby(["c", "s"])[["by_order", "by_time", "apart"]].sum().reset_index()
    mixed = (sums["apart"] > 0) & (sums["by_order"] > 0) & (sums["by_time"] == sums["by_order"])
    shifted: pd.DataFrame = sums[(sums["by_time"] > sums["by_order"]) | mixed][["c", "s"]]
    return shifted


def voted(ends: pd.DataFrame, ranks: list[int]) -> pd.DataFrame:
    """Renumber the ends of ranks by the clock offset with which the most end together with the communicator's first
    rank.

    Args:
        ends: As for `shifted_steps`; ranks without such an offset are unchanged.
        ranks: The ranks.
    """
    import pandas as pd

    parts = [ends[~ends["rank"].isin(ranks)]]
    for _, members in ends[ends["s"] != -2].groupby("c"):
        first = int(members["rank"].min())
        base = members[members["rank"] == first]
        for rank, rank_ends in members[members["rank"].isin(ranks)].groupby("rank"):
            if rank == first or max(len(rank_ends), len(base)) > MOST:
                parts.append(rank_ends)
                continue
            both = rank_ends.merge(base[["s", "k", "end_ns"]], on="s", suffixes=("", "_base"))
            offsets = (both["end_ns_base"] - both["end_ns"]).to_numpy()
            # the largest set of differences within `TOGETHER_NS`
            order = np.argsort(offsets, kind="stable")
            until = np.searchsorted(offsets[order], offsets[order] + TOGETHER_NS, side="right")
            best = int((until - np.arange(len(order))).argmax()) if len(order) else 0
            chosen = order[best : until[best]] if len(order) else order
            enough = len(chosen) >= max(LEAST_VOTES, LEAST_SHARE * min(len(rank_ends), len(base)))
            agreed = both.iloc[chosen].drop_duplicates(["s", "k"]).drop_duplicates(["s", "k_base"])
            parts.append(agreed.assign(k=agreed["k_base"])[list(ends)] if enough else rank_ends)
    renumbered: pd.DataFrame = pd.concat(parts, ignore_index=True)
    return renumbered


SAMPLES = 100
"""Approximate number of collectives per rank used to align its clock; a small job uses all of them."""

MOST_SEPARATED = 256
"""Maximum number of ranks whose ends are compared to separate communicators identified only by their streams. In a job
with more, a sample decides which of the listed groups a communicator is.
"""

LEAST_FLOOR_NS = 2_000
"""Lower bound of the clock resolution."""


class Alignment(NamedTuple):
    """The aligned clocks of a job's ranks.

    Attributes:
        clocks: With `nvprof_kit._ranks.clocks.COLUMNS`.
        floor_ns: The resolution of the aligned clocks.
        warnings: Sentences about groups that contradict each other or could not be separated, and messages that could
            not be matched.
        marked_groups: The process groups that the captures' marks list.
    """

    clocks: pd.DataFrame
    floor_ns: int
    warnings: tuple[str, ...] = ()
    marked_groups: ListedGroups = ListedGroups()


def align_job(tables: JobTables, ranks: list[int]) -> Alignment:
    """Match the collectives of a job and align its clocks.

    Args:
        tables: The job's maps.
        ranks: All ranks.
    """
    import pandas as pd

    rows, largest = tables.rows()
    marked_groups = listed_groups(tables.listed_groups(), ranks)
    warnings = marked_groups.warnings
    if len(ranks) > 1 and tables.has_streams():
        if len(ranks) > 2:
            warnings += _separate(tables, ranks, marked_groups)
        warnings += _match_messages(tables, ranks, marked_groups)
    stride = 1 if rows <= FEW else max(largest // SAMPLES, 1)
    uneven_steps = tables.odd_steps()
    ends = tables.ends(stride)
    clocks = _clocks(ends, uneven_steps, sorted(ranks))
    if stride == 1:
        shifted = shifted_steps(ends, clocks, _floor(clocks))
        if len(shifted):
            uneven_steps = pd.concat([uneven_steps, shifted]).drop_duplicates(ignore_index=True)
            without = _clocks(ends, uneven_steps, sorted(ranks))
            if without["offset_ns"].isna().sum() <= clocks["offset_ns"].isna().sum():
                clocks = without
    floor, aligned = _floor(clocks), clocks[clocks["offset_ns"].notna()]
    frame = aligned.assign(drift=aligned["drift_ppm"] / 1e6)[["rank", "at_ns", "offset_ns", "drift"]]
    frame = frame.astype({"offset_ns": "int64"})
    tables.match(frame, _by_time(tables, uneven_steps, aligned, floor))
    return Alignment(clocks, floor, warnings, marked_groups)


def _separate(tables: JobTables, ranks: list[int], marked_groups: ListedGroups) -> tuple[str, ...]:
    """Separate communicators identified by streams into the groups that marks list, else into those found by time.

    Returns:
        A warning about communicators of too many ranks to be separated, whose collectives are left out.
    """
    import pandas as pd

    compares_all = len(ranks) <= MOST_SEPARATED
    ends = tables.stream_ends(ranks if compares_all else marked_groups.sampled(sorted(ranks), MOST_SEPARATED))
    members = tables.stream_members()
    marked_parts = listed_parts(ends, marked_groups, members)
    timed_parts = groups_of(ends[~ends["comm"].isin(marked_parts["comm"])])
    warnings: tuple[str, ...] = ()
    if not compares_all:
        several = timed_parts.groupby("comm")["part"].nunique()
        mixed = members[members["comm"].isin(several.index[several > 1])]
        timed_parts = mixed.assign(part=mixed["rank"])
        if len(mixed):
            warnings = (
                f"{plural(mixed['comm'].nunique(), 'communicator', 'is/are')} known only by stream, and by time "
                "several groups of ranks share one: their collectives are not matched, as groups are found by time for "
                f"at most {MOST_SEPARATED} ranks; profile with nvprof_kit.step() or annotate_model: the marks list "
                "them",
            )
    parts = [table for table in (marked_parts, timed_parts) if len(table)]
    if parts:
        tables.split(pd.concat(parts, ignore_index=True))
    return warnings


def _match_messages(tables: JobTables, ranks: list[int], marked_groups: ListedGroups) -> tuple[str, ...]:
    """Match the sends and receives of a pipeline of more than two ranks whose communicators have no names."""
    if tables.world_size() < 3 and max(ranks) < 2:
        return ()
    messages = tables.messages()
    if not len(messages):
        return ()
    layers = tables.layer_medians()
    stages = stages_of(layers)
    # within a stage, messages form a ring in which all ranks take part at the same time
    if len(set(stages.values())) < 2 and (messages["kind"] == "SendRecv").any():
        return ()
    spans = spans_of(layers)
    if len(ranks) > MOST_SEPARATED:
        numbers, warnings = numbered(messages, f"partners are found by time for at most {MOST_SEPARATED} ranks")
    elif spans or tables.world_size() == len(ranks):
        numbers, warnings = pair_messages(messages, stages, spans, marked_groups.may_pass)
    else:
        numbers, warnings = numbered(messages, "partners are found by time if all ranks of the job are there")
    tables.renumber(numbers)
    return warnings


def _clocks(ends: pd.DataFrame, uneven_steps: pd.DataFrame, ranks: list[int]) -> pd.DataFrame:
    """Align the clocks with steps in which no rank lacks collectives. If that does not suffice, use the ends that
    coincide most often in the other steps.
    """
    if not len(uneven_steps):
        return align(ends, ranks)
    is_even = ends.merge(uneven_steps.assign(odd=True), on=["c", "s"], how="left")["odd"].isna().to_numpy()
    clocks = align(ends[is_even] if is_even.any() else ends, ranks)
    poor = clocks[clocks["offset_ns"].isna() | (clocks["residual_ns"] > COARSE_NS)]["rank"].tolist()
    if not poor or len(ranks) > MOST_SEPARATED:
        return clocks
    by_votes = align(voted(ends, poor), ranks)
    if not is_even.any():
        return by_votes
    # the better alignment leaves fewer ranks unaligned, then has the smaller residuals
    return min(clocks, by_votes, key=lambda table: (table["offset_ns"].isna().sum(), table["residual_ns"].sum()))


def _floor(clocks: pd.DataFrame) -> int:
    """The resolution of the aligned clocks."""
    residuals = clocks["residual_ns"].dropna()
    return max(round(2 * float(residuals.median())), LEAST_FLOOR_NS) if len(residuals) else LEAST_FLOOR_NS


def _by_time(tables: JobTables, uneven_steps: pd.DataFrame, clocks: pd.DataFrame, floor: int) -> pd.DataFrame:
    """Renumber steps in which some rank lacks collectives: those that end at the same time are one collective."""
    import pandas as pd

    columns = ["rank", "index", "c", "s", "k"]
    if not len(uneven_steps):
        nothing: pd.DataFrame = pd.DataFrame({name: np.zeros(0, dtype=np.int64) for name in columns})
        return nothing
    members = tables.members_of_steps(uneven_steps).merge(clocks, on="rank")
    drift = members["drift_ppm"] / 1e6 * (members["end_ns"] - members["at_ns"])
    members["e"] = members["end_ns"] + members["offset_ns"].astype("int64") + drift.round().astype("int64")
    members = members.sort_values(["c", "s", "e"], kind="stable", ignore_index=True)
    is_first = (members["e"].diff() > max(5 * floor, 20_000)) | (members["c"] != members["c"].shift())
    is_first |= (members["s"] != members["s"].shift()) | (members["sort"] != members["sort"].shift())
    members["k"] = 1_000_000 + is_first.cumsum()
    # a rank takes part in a collective only once; its further members are unmatched
    double = members.duplicated(["c", "s", "k", "rank"])
    members.loc[double, "k"] = 2_000_000_000 + np.flatnonzero(double)
    renumbered: pd.DataFrame = members[columns]
    return renumbered
