"""Aligns the clocks of a job's ranks and matches their collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nvprof_kit._analysis.ranks.clocks import align
from nvprof_kit._analysis.ranks.groups import groups_of
from nvprof_kit._analysis.ranks.lost import shifted_steps, voted
from nvprof_kit._analysis.ranks.maps.unprofiled import place
from nvprof_kit._analysis.ranks.passing import pair_messages
from nvprof_kit._analysis.ranks.stages import spans_of, stages_of
from nvprof_kit._analysis.ranks.words import COARSE_NS
from nvprof_kit._trace.jobs.tables import FEW, JobTables

if TYPE_CHECKING:
    import pandas as pd

SAMPLES = 100
"""Approximate number of collectives per rank used to align its clock; a small job uses all of them."""

TOLD_APART = 256
"""Maximum number of ranks for which communicators identified only by their streams are separated."""

LEAST_FLOOR_NS = 2_000
"""Lower bound of the clock resolution."""


class Alignment(NamedTuple):
    """The aligned clocks of a job's ranks.

    Attributes:
        clocks: With `nvprof_kit._analysis.ranks.clocks.COLUMNS`, of the profiled ranks.
        floor_ns: The resolution of the aligned clocks.
        warnings: Sentences about ranks without a profile whose collectives could not be placed.
    """

    clocks: pd.DataFrame
    floor_ns: int
    warnings: tuple[str, ...] = ()


def align_job(tables: JobTables, ranks: list[int]) -> Alignment:
    """Match the collectives of a job and align its clocks.

    Args:
        tables: The job's maps.
        ranks: The profiled ranks.
    """
    import pandas as pd

    rows, most = tables.rows()
    if 2 < len(ranks) <= TOLD_APART:
        parts = groups_of(tables.stream_ends())
        if len(parts):
            tables.split(parts)
    warnings = _match_messages(tables, ranks)
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
    placed = place(tables, frame) if tables.has_unprofiled else None
    tables.match(frame, _by_time(tables, odd, aligned, floor), placed.members if placed else None)
    return Alignment(clocks, floor, (*warnings, *(placed.warnings if placed else ())))


def _match_messages(tables: JobTables, ranks: list[int]) -> tuple[str, ...]:
    """Match the sends and receives of a pipeline of more than two ranks whose communicators have no names."""
    if max(max(ranks, default=0) + 1, tables.world_size()) < 3 or not 1 < len(ranks) <= TOLD_APART:
        return ()
    messages = tables.messages()
    layers = tables.layer_medians()
    stages = stages_of(layers)
    # within a stage, messages form a ring in which all ranks take part at the same time
    if not len(messages) or (len(set(stages.values())) < 2 and (messages["kind"] == "SendRecv").any()):
        return ()
    found = pair_messages(messages, stages, spans_of(layers))
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
    if not poor or len(ranks) > TOLD_APART:
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
