"""The timeline of selected ranks on the common clock: work by layer, waiting in collectives, and transfers.

The data of a rank gives the time per layer between two synchronization points, but not its order. Between these points,
layers are drawn in the order of the data, with their durations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

WAITING, TRANSFER = "waiting", "transfer"
_WORK_COLUMNS = ("start_ns", "end_ns", "step", "doing", "layer", "phase")


def work_of(points: pd.DataFrame, segments: pd.DataFrame) -> pd.DataFrame:
    """A row for each piece of a rank's segments, on the common clock.

    Args:
        points: The collectives of one rank, with the columns of `nvprof_kit._trace.jobs.tables.JobTables.points`.
        segments: Its segments, in order.

    Returns:
        start_ns, end_ns, step, doing, layer, phase; empty if no point gives the time of the segments.
    """
    import pandas as pd

    length = segments["ns"].to_numpy(dtype=np.int64)
    reached = np.cumsum(length)
    number = segments["segment"].to_numpy()
    known = np.concatenate([points["ready_segment"], points["end_segment"][points["gates"]]]).astype(np.int64)
    when = np.concatenate([points["a"] - points["queued_ns"], points["e"][points["gates"]]]).astype(np.int64)
    place = np.searchsorted(number, known, side="right") - 1
    usable = (known >= 0) & (place >= 0)
    if not usable.any():
        empty: pd.DataFrame = pd.DataFrame(
            {one: [] for one in ("start_ns", "end_ns", "step", "doing", "layer", "phase")}
        )
        return empty
    at, moment = reached[place[usable]], when[usable]
    order = np.lexsort((moment, at))
    at, first = np.unique(at[order], return_index=True)
    moment = np.maximum.accumulate(moment[order][first])
    ends = np.interp(reached, at, moment)
    ends = np.where(reached < at[0], moment[0] - (at[0] - reached), ends)
    ends = np.where(reached > at[-1], moment[-1] + (reached - at[-1]), ends).astype(np.int64)
    starts = np.concatenate(([ends[0] - length[0]], ends[:-1])) if len(ends) else ends
    every = segments[["step", "doing", "layer", "phase"]].assign(start_ns=starts, end_ns=ends)
    made: pd.DataFrame = every[every["end_ns"] > every["start_ns"]]
    return made


def collectives_of(points: pd.DataFrame) -> pd.DataFrame:
    """The waiting and transfers of one rank's collectives: start_ns, end_ns, step, doing, text.

    Args:
        points: With a, e, arrival (the last rank's), late_rank, sort, step.
    """
    import pandas as pd

    points = points.sort_values("a", kind="stable")
    start, end = points["a"].to_numpy(dtype=np.int64), points["e"].to_numpy(dtype=np.int64)
    begun = np.clip(points["arrival"].to_numpy(dtype=np.int64), start, np.maximum(end, start))
    waits = points["sort"] + ", waits for rank " + points["late_rank"].astype(str)
    own = points[["step", "layer", "phase"]]
    parts = [
        own.assign(start_ns=start, end_ns=begun, doing=WAITING, text=waits),
        own.assign(start_ns=begun, end_ns=end, doing=TRANSFER, text=points["sort"]),
    ]
    both = pd.concat(parts, ignore_index=True)
    made: pd.DataFrame = both[both["end_ns"] > both["start_ns"]].sort_values(
        "start_ns", kind="stable", ignore_index=True
    )
    return made


def apart(frame: pd.DataFrame, most: int = 4) -> list[pd.DataFrame]:
    """Split rows into as few frames without overlaps as possible; rows beyond `most` frames are dropped."""
    frames: list[pd.DataFrame] = []
    while len(frame) and len(frames) < most:
        start, end = frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()
        if (start[1:] >= end[:-1]).all():
            frames.append(frame)
            break
        kept, reach = np.zeros(len(frame), dtype=bool), np.iinfo(np.int64).min
        for place, (begin, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
            if begin >= reach:
                kept[place], reach = True, finish
        frames.append(frame[kept])
        frame = frame[~kept]
    return frames
