"""The ranks of a job on one clock, and their collectives matched."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nvprof_kit._analysis.ranks.clocks import align
from nvprof_kit._analysis.ranks.groups import groups_of
from nvprof_kit._analysis.ranks.maps.unprofiled import place
from nvprof_kit._trace.jobs.tables import JobTables

if TYPE_CHECKING:
    import pandas as pd

SAMPLES = 100
"""Collectives of each rank that its clock is found from, about; all of them in a job of few."""

FEW = 2_000_000
"""Collectives of a job that are few."""

TOLD_APART = 256
"""Ranks of a job in which communicators that are named by streams are told apart."""

LEAST_FLOOR_NS = 2_000
"""What no clock tells apart."""


class Alignment(NamedTuple):
    """The ranks of a job on one clock.

    Attributes:
        clocks: With `nvprof_kit._analysis.ranks.clocks.COLUMNS`, of the profiled ranks.
        floor_ns: The time below which they tell nothing apart.
        warnings: Sentences on ranks without a profile whose collectives could not be placed.
    """

    clocks: pd.DataFrame
    floor_ns: int
    warnings: tuple[str, ...] = ()


def align_job(tables: JobTables, ranks: list[int]) -> Alignment:
    """Match the collectives of a job and align its clocks.

    Args:
        tables: The job's maps.
        ranks: Its profiled ranks.
    """
    rows, most = tables.rows()
    if 2 < len(ranks) <= TOLD_APART:
        parts = groups_of(tables.stream_ends())
        if len(parts):
            tables.split(parts)
    every = 1 if rows <= FEW else max(most // SAMPLES, 1)
    odd = tables.odd_steps()
    ends = tables.ends(every)
    if len(odd):
        known = ends.merge(odd.assign(odd=True), on=["c", "s"], how="left")["odd"].isna().to_numpy()
        whole = ends[known]
        ends = whole if len(whole) else ends
    clocks = align(ends, sorted(ranks))
    aligned = clocks[clocks["offset_ns"].notna()]
    residual = float(np.nanmedian(clocks["residual_ns"])) if len(aligned) else 0.0
    floor = max(round(2 * residual), LEAST_FLOOR_NS)
    frame = aligned.assign(drift=aligned["drift_ppm"] / 1e6)[["rank", "at_ns", "offset_ns", "drift"]]
    frame = frame.astype({"offset_ns": "int64"})
    placed = place(tables, frame) if tables.has_unprofiled else None
    tables.match(frame, _by_time(tables, odd, aligned, floor), placed.members if placed else None)
    return Alignment(clocks, floor, placed.warnings if placed else ())


def _by_time(tables: JobTables, odd: pd.DataFrame, clocks: pd.DataFrame, floor: int) -> pd.DataFrame:
    """New numbers for the steps in which some rank lacks collectives: what ends at one moment is one collective."""
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
    # a rank takes part once; its further collectives are unmatched
    double = members.duplicated(["c", "s", "k", "rank"])
    members.loc[double, "k"] = 2_000_000_000 + np.flatnonzero(double)
    made: pd.DataFrame = members[columns]
    return made


def job_warnings(ranks: pd.DataFrame, clocks: pd.DataFrame, tables: JobTables) -> list[str]:
    """What may be missing in a job: ranks, clocks, collectives."""
    there = set(ranks["rank"].tolist())
    world = max(int(ranks["world_size"].max()), max(there) + 1)
    said = []
    missing = sorted(set(range(world)) - there)
    if missing:
        said.append(
            f"{len(missing)} of {world} ranks are missing ({_some(missing)}): who came last may be one of them; "
            "profile them too, or read the waits as lower bounds"
        )
    lost = clocks[clocks["offset_ns"].isna()]["rank"].tolist()
    if lost:
        said.append(f"{len(lost)} ranks share no collective with the others and are not aligned ({_some(lost)})")
    drifting = clocks[clocks["residual_ns"] > 200_000]
    if len(drifting):
        said.append(
            f"{len(drifting)} clocks are aligned to no better than 0.2 ms ({_some(drifting['rank'].tolist())}): "
            "shorter waits between them mean nothing"
        )
    if unlike := tables.unlike():
        said.append(f"{unlike} collectives are of different kinds on different ranks and are left out")
    unmatched = tables.unmatched()
    if unmatched:
        said.append(f"{unmatched} collectives are on one rank only and cannot be matched")
    return said


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
