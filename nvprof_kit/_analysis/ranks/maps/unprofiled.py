"""Ranks without a profile: maps of their collectives, and how these match those of profiled ranks.

A collective ends on all ranks at about the same time. If only the duration of a rank's collective is known, the rank
arrived that long before the end; the rank with the shortest duration arrived last. This needs no clock of that rank.

Collectives are matched with those of profiled ranks by kind and size, in order: the one shift at which all agree.
Because steps repeat, several shifts can fit; then the host clocks decide, which are rarely off by a whole step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.nesting import NONE, Int64Array
from nvprof_kit._analysis.ranks.maps.communication import kind_of
from nvprof_kit._trace.jobs.schema import TABLES, RankMap
from nvprof_kit._trace.jobs.tables import JobTables
from nvprof_kit.names import NO_LAYER, NO_PHASE

if TYPE_CHECKING:
    import pandas as pd

LEAST_OVERLAP = 8
"""Minimum number of collectives that must agree; all if there are fewer."""

CLEARER = 3
"""The host clocks decide on a shift if the runner-up is off by this multiple."""

FARTHEST_NS = 2_000_000_000
"""Maximum distance of host clocks; clocks that are further apart are ignored."""

PLACED = ["rank", "index", "c", "s", "k", "step", "sort", "bytes", "size", "comm", "alone", "a", "e"]
"""Columns of placed collectives, as `JobTables` matches them."""


class Placed(NamedTuple):
    """The collectives of ranks without a profile, with columns `PLACED`, and warnings about those not placed."""

    members: pd.DataFrame
    warnings: tuple[str, ...]


def map_unprofiled(found: pd.DataFrame, facts: dict[str, Any]) -> RankMap:
    """The map of a rank without a profile.

    Args:
        found: See `nvprof_kit._trace.jobs.flight_recorder.COLLECTIVES`.
        facts: The schema's table ``ranks``.
    """
    import pandas as pd

    ended = found[found["state"] == "completed"].sort_values("enqueued_ns", kind="stable", ignore_index=True)
    kind = np.array([kind_of(str(one)) for one in ended["kind"]], dtype=object)
    peer = ended["peer"].to_numpy() >= 0
    # sends and receives are numbered separately, and in the inspector's log each kind is
    apart = np.where(peer, " p2p", "") if facts["source"] == "flight_recorder" else " " + kind.astype(str)
    begin, took = ended["enqueued_ns"].to_numpy(), ended["duration_ns"].to_numpy()
    table = pd.DataFrame({"rank": facts["rank"], "index": np.arange(len(ended)), "kind": kind}).assign(
        comm=np.array([f"group {one}" for one in ended["communicator"].astype(str)], dtype=object) + apart,
        stream=NONE, group=ended["description"].astype(str), operation=NONE, sequence=ended["sequence"], step=NONE,
        number=np.arange(len(ended)), bytes=ended["bytes"], size=ended["ranks"], start_ns=begin,
        end_ns=begin + np.maximum(took, 0), launch_ns=begin, alone_ns=np.where(took >= 0, 0, NONE), ready_ns=begin,
        ready_segment=0, end_segment=0, gates=False, layer=NO_LAYER, phase=NO_PHASE,
    )  # fmt: skip
    tables = {"ranks": pd.DataFrame([facts]), "collectives": table}
    frames = {
        name: tables.get(name, pd.DataFrame(columns=list(schema)))[list(schema)].astype(
            {key: column.dtype for key, column in schema.items()}
        )
        for name, schema in TABLES.items()
    }
    return RankMap(**frames)


def dump_warnings(found: pd.DataFrame, tool: str) -> list[str]:
    """Warnings about missing data in a dump."""
    warnings = [f"known by the {tool} alone: its arrival at a collective is known, not what it did before"]
    again = int((found.duplicated() & (found["enqueued_ns"] > 0)).sum())
    if again:
        warnings.append(f"{again} of {len(found)} collectives stand in the file twice, and count twice; take it again")
    open_ = found[found["state"] != "completed"]
    if len(open_):
        first = open_.iloc[0]
        warnings.append(
            f"{len(open_)} collectives had not ended when the dump was written, the first {first['kind']} "
            f"{first['sequence']} of group {first['communicator']}: where the program hangs, it hangs there"
        )
    untimed = int((found["duration_ns"] < 0).sum())
    if untimed:
        warnings.append(
            f"{untimed} of {len(found)} collectives have no duration (duration_ms), so nothing tells when the rank "
            "came to them; set TORCH_NCCL_ENABLE_TIMING=1"
        )
    return warnings


def place(tables: JobTables, clocks: pd.DataFrame) -> Placed:
    """Match the collectives of ranks without a profile.

    Args:
        tables: The job's maps.
        clocks: The clocks of the profiled ranks: rank, at_ns, offset_ns, drift.
    """
    import pandas as pd

    light = tables.unprofiled()
    timed = light[light["took_ns"] >= 0]
    if not tables.has_profiles:
        return Placed(_by_number(timed), ())
    known = _known(tables.profiled_members(), clocks)
    parts, warnings = [], []
    for rank, mine in timed.groupby("rank", sort=True):
        placed = [_placed(one, known) for _, one in mine.groupby("base", sort=False)]
        parts += [one for one in placed if one is not None]
        if not any(one is not None for one in placed):
            warnings.append(
                f"rank {rank} has no profile, and its collectives cannot be told from one another among those of the "
                "profiled ranks (kinds and sizes do not agree, or agree at several places and the clocks do not decide)"
            )
    empty = pd.DataFrame(columns=PLACED)
    return Placed(pd.concat(parts, ignore_index=True) if parts else empty, tuple(warnings))


def _known(members: pd.DataFrame, clocks: pd.DataFrame) -> pd.DataFrame:
    """The collectives of profiled ranks, one row each by time, with their common end and the host's launch time."""
    timed = members.merge(clocks, on="rank")
    drift = (timed["drift"] * (timed["end_ns"] - timed["at_ns"])).round().astype("int64")
    timed["e"] = timed["end_ns"] + timed["offset_ns"] + drift
    timed["unix"] = np.where(timed["epoch_ns"] >= 0, timed["launch_ns"] + timed["epoch_ns"], NONE)
    timed = timed.sort_values(["c", "index"], kind="stable")
    # in the order of the rank with the most collectives in the communicator
    most = timed.groupby(["c", "rank"])["index"].transform("size")
    chosen = timed.assign(most=-most).sort_values(["c", "most", "rank", "index"], kind="stable")
    first = chosen.groupby("c")["rank"].transform("first")
    ends = timed.groupby(["c", "s", "k"])["e"].median().rename("end").round().astype("int64").reset_index()
    made: pd.DataFrame = chosen[chosen["rank"] == first].merge(ends, on=["c", "s", "k"])
    return made


def _placed(mine: pd.DataFrame, known: pd.DataFrame) -> pd.DataFrame | None:
    """Match a rank's collectives of one communicator; None if no shift fits or the shift is ambiguous."""
    mine = mine.sort_values("index", kind="stable", ignore_index=True)
    found = []
    for _, group in known.groupby("c", sort=False):
        its = group.reset_index(drop=True)
        sizes = {int(mine["size"].max()), int(its["size"].max())} - {NONE}
        if len(sizes) < 2:
            found += [(*one, its) for one in _shifts(mine, its)]
    if not found:
        return None
    found.sort(key=lambda one: one[1])
    sure = len(found) == 1 or (found[0][1] <= FARTHEST_NS and CLEARER * max(found[0][1], 1) <= found[1][1])
    if not sure:
        return None
    shift, _, its = found[0]
    at = np.arange(len(mine)) + shift
    inside = (at >= 0) & (at < len(its))
    here, there = mine[inside].reset_index(drop=True), its.iloc[at[inside]].reset_index(drop=True)
    placed = there[["c", "s", "k", "sort", "bytes", "size", "comm"]].assign(
        rank=here["rank"], index=here["index"], step=NONE, alone=here["took_ns"], a=there["end"] - here["took_ns"],
        e=there["end"],
    )  # fmt: skip
    made: pd.DataFrame = placed[PLACED]
    return made


def _shifts(mine: pd.DataFrame, its: pd.DataFrame) -> list[tuple[int, float]]:
    """Shifts at which all kinds and sizes agree, each with the resulting distance of the host clocks."""
    least = min(LEAST_OVERLAP, len(mine), len(its))
    sorts = (mine["sort"].to_numpy(), its["sort"].to_numpy())
    sizes = (mine["bytes"].to_numpy(), its["bytes"].to_numpy())
    launched = (mine["launch_ns"].to_numpy(), its["unix"].to_numpy())
    found = []
    for shift in range(least - len(mine), len(its) - least + 1):
        low, high = max(0, -shift), min(len(mine), len(its) - shift)
        one, other = slice(low, high), slice(low + shift, high + shift)
        if not _agree(sorts, sizes, (one, other)):
            continue
        paired = launched[1][other] >= 0
        apart = np.abs(launched[0][one][paired] - launched[1][other][paired])
        found.append((shift, float(np.median(apart)) if len(apart) else np.inf))
    return found


def _agree(
    sorts: tuple[npt.NDArray[Any], npt.NDArray[Any]], sizes: tuple[Int64Array, Int64Array], at: tuple[slice, slice]
) -> bool:
    if not bool((sorts[0][at[0]] == sorts[1][at[1]]).all()):
        return False
    one, other = sizes[0][at[0]], sizes[1][at[1]]
    return bool(((one == other) | (one < 0) | (other < 0)).all())


def _by_number(timed: pd.DataFrame) -> pd.DataFrame:
    """The collectives of a job without any profile, matched by sequence number: each ends its shortest duration after
    its last enqueue.
    """
    keys = ["c", "sequence"]
    groups = timed.groupby(keys, sort=False)
    end = groups["launch_ns"].transform("max") + groups["took_ns"].transform("min")
    made = timed.assign(s=-2, k=timed["sequence"], step=NONE, alone=timed["took_ns"], e=end, a=end - timed["took_ns"])
    table: pd.DataFrame = made[made["sequence"] >= 0].drop_duplicates(["rank", *keys])[PLACED]
    return table
