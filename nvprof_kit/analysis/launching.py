"""How the host keeps up with the device: launches by layer, and how many launched operations wait at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit.analysis.attribution import Attribution
from nvprof_kit.analysis.host import HostCalls
from nvprof_kit.analysis.idle import Idle
from nvprof_kit.analysis.intervals import exact_sums
from nvprof_kit.analysis.nesting import NONE, Int64Array
from nvprof_kit.analysis.owners import op_owners
from nvprof_kit.analysis.windows import Windows
from nvprof_kit.trace.schema import Trace

if TYPE_CHECKING:
    import pandas as pd

LAUNCH_COLUMNS = {
    "layer": "module path, or `(none)`",
    "phase": "phase of the layer or of the loop",
    "ops": "operations of its own whose launching call is in the capture",
    "gpu_ns": "sum of their durations",
    "call_ns": "sum of the durations of the calls that launched them, a graph launch shared by its operations",
    "short_ops": "operations that are shorter than the call that launched them",
    "delay_ns": "median time from a launching call's return to the operation's start; 0 where it started before",
    "idle_ns": "time in which the device was idle because the host, here, had not launched on",
    "launch_bound": "the idle time exceeds a tenth of the operations' time",
}
"""The columns of the launch analysis."""

_BOUND = 0.1


def launch_table(trace: Trace, owned: Attribution, host: HostCalls, idling: Idle) -> pd.DataFrame:
    """Launches by layer and phase, with `LAUNCH_COLUMNS`; the longest idle first."""
    import pandas as pd

    layer, phase = op_owners(owned)
    call = host.of_op
    start, end = trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
    took = _shared_duration(host, call)
    told = call >= 0
    frame = pd.DataFrame(
        {
            "layer": layer,
            "phase": phase,
            "ops": 1,
            "gpu_ns": end - start,
            "call_ns": took,
            "short_ops": end - start < took,
            "delay_ns": np.maximum(start - host.end[call], 0),
        },
        copy=False,
    )[told]
    groups = frame.groupby(["layer", "phase"], observed=True, sort=False)
    table = groups[["ops", "gpu_ns", "call_ns", "short_ops"]].sum()
    table["delay_ns"] = groups["delay_ns"].median().astype("int64")
    late = idling.gaps.assign(idle_ns=idling.by_cause[:, 0])
    idle = late.groupby(["layer", "phase"], observed=True, sort=False)["idle_ns"].sum()
    table = table.join(idle[idle > 0], how="outer").fillna(0).astype("int64")
    table["launch_bound"] = table["idle_ns"] > _BOUND * table["gpu_ns"]
    plain = table.reset_index().astype({"layer": str, "phase": str})
    made: pd.DataFrame = plain.sort_values(["idle_ns", "gpu_ns"], ascending=False, kind="stable", ignore_index=True)
    return made


def _shared_duration(host: HostCalls, call: Int64Array) -> Int64Array:
    """Duration of the call that launched each operation, divided by the operations it launched, 0 without one."""
    sharing = np.bincount(np.where(call >= 0, call, len(host.tid) - 1), minlength=len(host.tid))
    took = (host.end - host.start) // np.maximum(sharing, 1)
    took[NONE] = 0
    shared: Int64Array = took[call]
    return shared


QUEUE_COLUMNS = {
    "queue_mean": "operations launched and not yet begun, averaged over time",
    "queue_max": "the most at once",
    "queue_empty": "share of the time in which none waited",
}


def queue_depth(trace: Trace, windows: Windows, host: HostCalls) -> pd.DataFrame:
    """How many launched operations wait for the device, a row per window with `QUEUE_COLUMNS`.

    An operation waits from the return of its launching call to its start. Averages are over a window's time.
    """
    import pandas as pd

    call = host.of_op
    rows = np.flatnonzero(call >= 0)
    begin, end = host.end[call[rows]], trace.ops["start_ns"].to_numpy()[rows]
    waits = end > begin
    rows, begin, end = rows[waits], begin[waits], end[waits]
    low = int(min(windows.start.min(initial=0), begin.min(initial=0)))
    span = int(max(windows.end.max(initial=0), end.max(initial=0))) - low + 1
    lane = windows.of_op[rows] * span - low
    opens, closes = (windows.device * span + (edge - low) for edge in (windows.start, windows.end))
    moment = np.concatenate((lane + begin, lane + end, opens, closes))
    change = np.repeat([1, -1, 0], [len(rows), len(rows), 2 * len(opens)])
    order = np.argsort(moment, kind="stable")
    depth, length = np.cumsum(change[order])[:-1], np.diff(moment[order])
    window = np.searchsorted(opens, moment[order][:-1], side="right") - 1
    keep = (length > 0) & (window >= 0)
    keep[keep] = moment[order][:-1][keep] < closes[window[keep]]
    depth, length, window = depth[keep], length[keep], window[keep]
    count = len(opens)
    whole = np.maximum(windows.end - windows.start, 1)
    most = np.zeros(count, dtype=np.int64)
    np.maximum.at(most, window, depth)
    made: pd.DataFrame = pd.DataFrame(
        {
            "queue_mean": exact_sums(window, depth * length, count) / whole,
            "queue_max": most,
            "queue_empty": exact_sums(window[depth == 0], length[depth == 0], count) / whole,
        }
    )
    return made
