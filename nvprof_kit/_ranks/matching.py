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
                f"{many(mixed['comm'].nunique(), 'communicator', 'is/are')} known only by stream, and by time several "
                "groups of ranks share one: their collectives are not matched, as groups are found by time for at most "
                f"{MOST_SEPARATED} ranks; profile with nvprof_kit.step() or annotate_model: the marks list them",
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
    if len(ranks) > MOST_SEPARATED:
        pairing = leave_out(messages, f"partners are found by time for at most {MOST_SEPARATED} ranks")
    else:
        spans = spans_of(layers)
        is_whole = bool(spans) or tables.world_size() == len(ranks)
        pairing = pair_messages(messages, stages, spans, marked_groups.may_pass, is_whole=is_whole)
    tables.renumber(pairing.numbers)
    return pairing.warnings


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
    return min(clocks, by_votes, key=_poverty) if is_even.any() else by_votes


def _poverty(clocks: pd.DataFrame) -> tuple[int, float]:
    """How poor an alignment is: ranks without one, then the residuals of the others."""
    return int(clocks["offset_ns"].isna().sum()), float(clocks["residual_ns"].sum())


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
