"""Launch analysis by layer: whether the host keeps the device busy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution
from nvprof_kit._analysis.attribution.nesting import NONE, Int64Array
from nvprof_kit._analysis.attribution.operations import op_owners
from nvprof_kit._analysis.breakdown.host import HostCalls
from nvprof_kit._analysis.breakdown.idle import Idle
from nvprof_kit._trace.schema import Trace

if TYPE_CHECKING:
    import pandas as pd

LAUNCH_COLUMNS = {
    "layer": "module path, or `(none)`",
    "phase": "phase of the layer or of the loop",
    "ops": "its own operations whose launching call is in the capture",
    "gpu_ns": "sum of their durations",
    "call_ns": "sum of the durations of the launching calls; a graph launch is divided among its operations",
    "short_ops": "number of operations shorter than the call that launched them",
    "delay_ns": "median time from the return of the launching call to the start of the "
    "operation; 0 if it started before",
    "idle_ns": "time in which the device was idle because the host, in this layer, had not launched the next operation",
    "launch_bound": "True if `idle_ns` exceeds a tenth of `gpu_ns`",
}
"""The columns of the launch analysis."""

_BOUND = 0.1
_LATE = ("launch", "unknown")


def launch_table(
    trace: Trace, attribution: Attribution, host: HostCalls, idling: Idle, *, counted: npt.NDArray[np.bool_]
) -> pd.DataFrame:
    """Launches of the `counted` operations by layer and phase, with `LAUNCH_COLUMNS`; the longest idle first."""
    import pandas as pd

    layer, phase = op_owners(attribution)
    call = host.of_op
    start, end = trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
    took = _shared_duration(host, call)
    told = (call >= 0) & counted
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
    late = idling.parts[idling.parts["cause"].isin(_LATE)]
    idle = late.groupby(["layer", "phase"], observed=True, sort=False)["idle_ns"].sum()
    table = table.join(idle[idle > 0], how="outer").fillna(0).astype("int64")
    table["launch_bound"] = table["idle_ns"] > _BOUND * table["gpu_ns"]
    plain = table.reset_index().astype({"layer": str, "phase": str})
    made: pd.DataFrame = plain.sort_values(["idle_ns", "gpu_ns"], ascending=False, kind="stable", ignore_index=True)
    return made


def _shared_duration(host: HostCalls, call: Int64Array) -> Int64Array:
    """Duration of each operation's launching call divided by the number of operations it launched, 0 without a call."""
    sharing = np.bincount(np.where(call >= 0, call, len(host.tid) - 1), minlength=len(host.tid))
    took = (host.end - host.start) // np.maximum(sharing, 1)
    took[NONE] = 0
    shared: Int64Array = took[call]
    return shared
