"""Aligns the clocks of a job's ranks and matches their collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nvprof_kit._ranks.clocks import align, shifted_steps, voted
from nvprof_kit._ranks.groups import ListedGroups, groups_of, listed_groups, listed_parts
from nvprof_kit._ranks.messages import leave_out, pair_messages
from nvprof_kit._ranks.stages import spans_of, stages_of
from nvprof_kit._ranks.words import COARSE_NS, many
from nvprof_kit._trace.jobs.tables import FEW, JobTables

if TYPE_CHECKING:
    import pandas as pd

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
        listed: The process groups that the captures' marks list.
    """

    clocks: pd.DataFrame
    floor_ns: int
    warnings: tuple[str, ...] = ()
    listed: ListedGroups = ListedGroups()


def align_job(tables: JobTables, ranks: list[int]) -> Alignment:
    """Match the collectives of a job and align its clocks.

    Args:
        tables: The job's maps.
        ranks: All ranks.
    """
    import pandas as pd

    rows, most = tables.rows()
    listed = listed_groups(tables.listed_groups(), ranks)
    warnings = listed.warnings
    if len(ranks) > 1 and tables.has_streams():
        if len(ranks) > 2:
            warnings += _separate(tables, ranks, listed)
        warnings += _match_messages(tables, ranks, listed)
    every = 1 if rows <= FEW else max(most // SAMPLES, 1)
    odd = tables.odd_steps()
    ends = tables.ends(every)
    clocks = _clocks(ends, odd, sorted(ranks))
    if every == 1:
        shifted = shifted_steps(ends, clocks, _floor(clocks))
        if len(shifted):
            odd = pd.concat([odd, shifted]).drop_duplicates(ignore_index=True)
            without = _clocks(ends, odd, sorted(ranks))
            if without["offset_ns"].isna().sum() <= clocks["offset_ns"].isna().sum():
                clocks = without
    floor, aligned = _floor(clocks), clocks[clocks["offset_ns"].notna()]
    frame = aligned.assign(drift=aligned["drift_ppm"] / 1e6)[["rank", "at_ns", "offset_ns", "drift"]]
    frame = frame.astype({"offset_ns": "int64"})
    tables.match(frame, _by_time(tables, odd, aligned, floor))
    return Alignment(clocks, floor, warnings, listed)


def _separate(tables: JobTables, ranks: list[int], listed: ListedGroups) -> tuple[str, ...]:
    """Separate communicators identified by streams into the groups that marks list, else into those found by time.

    Returns:
        A warning about communicators of too many ranks to be separated, whose collectives are left out.
    """
    import pandas as pd

    every = len(ranks) <= MOST_SEPARATED
    ends = tables.stream_ends(ranks if every else listed.sampled(sorted(ranks), MOST_SEPARATED))
    members = tables.stream_members()
    known = listed_parts(ends, listed, members)
    found = groups_of(ends[~ends["comm"].isin(known["comm"])])
    warnings: tuple[str, ...] = ()
    if not every:
        several = found.groupby("comm")["part"].nunique()
        mixed = members[members["comm"].isin(several.index[several > 1])]
        found = mixed.assign(part=mixed["rank"])
        if len(mixed):
            warnings = (
                f"{many(mixed['comm'].nunique(), 'communicator', 'is/are')} known only by stream, and by time several "
                "groups of ranks share one: their collectives are not matched, as groups are found by time for at most "
                f"{MOST_SEPARATED} ranks; profile with nvprof_kit.step() or annotate_model: the marks list them",
            )
    parts = [one for one in (known, found) if len(one)]
    if parts:
        tables.split(pd.concat(parts, ignore_index=True))
    return warnings


def _match_messages(tables: JobTables, ranks: list[int], listed: ListedGroups) -> tuple[str, ...]:
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
    if len(ranks) > MOST_SEPARATED:
        found = leave_out(messages, f"partners are found by time for at most {MOST_SEPARATED} ranks")
    else:
        spans = spans_of(layers)
        is_whole = bool(spans) or tables.world_size() == len(ranks)
        found = pair_messages(messages, stages, spans, listed.may_pass, is_whole=is_whole)
    tables.renumber(found.numbers)
    return found.warnings


def _clocks(ends: pd.DataFrame, odd: pd.DataFrame, ranks: list[int]) -> pd.DataFrame:
    """Align the clocks with steps in which no rank lacks collectives. If that does not suffice, use the ends that
    coincide most often in the other steps.
    """
    if not len(odd):
        return align(ends, ranks)
    known = ends.merge(odd.assign(odd=True), on=["c", "s"], how="left")["odd"].isna().to_numpy()
    clocks = align(ends[known] if known.any() else ends, ranks)
    poor = clocks[clocks["offset_ns"].isna() | (clocks["residual_ns"] > COARSE_NS)]["rank"].tolist()
    if not poor or len(ranks) > MOST_SEPARATED:
        return clocks
    again = align(voted(ends, poor), ranks)
    return min(clocks, again, key=_poverty) if known.any() else again


def _poverty(clocks: pd.DataFrame) -> tuple[int, float]:
    """How poor an alignment is: ranks without one, then the residuals of the others."""
    return int(clocks["offset_ns"].isna().sum()), float(clocks["residual_ns"].sum())


def _floor(clocks: pd.DataFrame) -> int:
    """The resolution of the aligned clocks."""
    known = clocks["residual_ns"].dropna()
    return max(round(2 * float(known.median())), LEAST_FLOOR_NS) if len(known) else LEAST_FLOOR_NS


def _by_time(tables: JobTables, odd: pd.DataFrame, clocks: pd.DataFrame, floor: int) -> pd.DataFrame:
    """Renumber steps in which some rank lacks collectives: those that end at the same time are one collective."""
    import pandas as pd

    columns = ["rank", "index", "c", "s", "k"]
    if not len(odd):
        nothing: pd.DataFrame = pd.DataFrame({name: np.zeros(0, dtype=np.int64) for name in columns})
        return nothing
    members = tables.members_of_steps(odd).merge(clocks, on="rank")
    drift = members["drift_ppm"] / 1e6 * (members["end_ns"] - members["at_ns"])
    members["e"] = members["end_ns"] + members["offset_ns"].astype("int64") + drift.round().astype("int64")
    members = members.sort_values(["c", "s", "e"], kind="stable", ignore_index=True)
    fresh = (members["e"].diff() > max(5 * floor, 20_000)) | (members["c"] != members["c"].shift())
    fresh |= (members["s"] != members["s"].shift()) | (members["sort"] != members["sort"].shift())
    members["k"] = 1_000_000 + fresh.cumsum()
    # a rank takes part in a collective only once; its further members are unmatched
    double = members.duplicated(["c", "s", "k", "rank"])
    members.loc[double, "k"] = 2_000_000_000 + np.flatnonzero(double)
    made: pd.DataFrame = members[columns]
    return made
