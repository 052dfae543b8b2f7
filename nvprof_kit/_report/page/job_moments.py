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
    segment = np.concatenate([points["ready_segment"], points["end_segment"][points["gates"]]]).astype(np.int64)
    when = np.concatenate([points["a"] - points["queued_ns"], points["e"][points["gates"]]]).astype(np.int64)
    position = np.searchsorted(number, segment, side="right") - 1
    usable = (segment >= 0) & (position >= 0)
    if not usable.any():
        empty: pd.DataFrame = pd.DataFrame(
            {column: [] for column in ("start_ns", "end_ns", "step", "doing", "layer", "phase")}
        )
        return empty
    at, time = reached[position[usable]], when[usable]
    order = np.lexsort((time, at))
    at, first = np.unique(at[order], return_index=True)
    time = np.maximum.accumulate(time[order][first])
    ends = np.interp(reached, at, time)
    ends = np.where(reached < at[0], time[0] - (at[0] - reached), ends)
    ends = np.where(reached > at[-1], time[-1] + (reached - at[-1]), ends).astype(np.int64)
    starts = np.concatenate(([ends[0] - length[0]], ends[:-1])) if len(ends) else ends
    stretches = segments[["step", "doing", "layer", "phase"]].assign(start_ns=starts, end_ns=ends)
    work: pd.DataFrame = stretches[stretches["end_ns"] > stretches["start_ns"]]
    return work


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
    labels = points[["step", "layer", "phase"]]
    parts = [
        labels.assign(start_ns=start, end_ns=begun, doing=WAITING, text=waits),
        labels.assign(start_ns=begun, end_ns=end, doing=TRANSFER, text=points["sort"]),
    ]
    both = pd.concat(parts, ignore_index=True)
    stretches: pd.DataFrame = both[both["end_ns"] > both["start_ns"]].sort_values(
        "start_ns", kind="stable", ignore_index=True
    )
    return stretches


def apart(frame: pd.DataFrame, max_frames: int = 4) -> list[pd.DataFrame]:
    """Split rows into as few frames without overlaps as possible; rows beyond `most` frames are dropped."""
    frames: list[pd.DataFrame] = []
    while len(frame) and len(frames) < max_frames:
        start, end = frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()
        if (start[1:] >= end[:-1]).all():
            frames.append(frame)
            break
        is_free, latest_end = np.zeros(len(frame), dtype=bool), np.iinfo(np.int64).min
        for row, (row_start, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
            if row_start >= latest_end:
                is_free[row], latest_end = True, finish
        frames.append(frame[is_free])
        frame = frame[~is_free]
    return frames
