"""Launch analysis by layer: whether the host keeps the device busy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution, op_owners
from nvprof_kit._analysis.attribution.intervals import exact_sums
from nvprof_kit._analysis.attribution.nesting import Int64Array
from nvprof_kit._analysis.breakdown.host import HostCalls
from nvprof_kit._result.column import Column, Columns
from nvprof_kit._trace.schema import Trace

if TYPE_CHECKING:
    import pandas as pd

LAUNCH_COLUMNS: Columns = {
    "layer": Column("module path, or `(none)`", kind="str"),
    "phase": Column("phase of the layer or of the loop", kind="str"),
    "ops": Column("its own operations whose launching call is in the capture"),
    "gpu_ns": Column("sum of their durations", "ns"),
    "call_ns": Column(
        "sum of the durations of the launching calls; a graph launch is divided among its operations", "ns"
    ),
    "short_ops": Column("number of operations shorter than the call that launched them"),
    "delay_ns": Column(
        "median time from the return of the launching call to the start of the operation; 0 if it started before",
        "ns",
        fold="mean",
    ),
    "idle_ns": Column(
        "time in which the device was idle because the host, in this layer, had not launched the next operation", "ns"
    ),
    "launch_bound": Column("True if `idle_ns` exceeds a tenth of `gpu_ns`", kind="bool", fold="key"),
}
"""The columns of the launch analysis."""

_BOUND = 0.1
_LATE = ("launch", "unknown")


def launch_table(
    trace: Trace,
    attribution: Attribution,
    host: HostCalls,
    parts: pd.DataFrame,
    *,
    is_counted: npt.NDArray[np.bool_],
    of_parts: npt.NDArray[np.bool_],
) -> pd.DataFrame:
    """Launches of the `counted` operations by layer and phase, with `LAUNCH_COLUMNS`; the longest idle first.

    Args:
        trace: The capture.
        attribution: The owner of each operation.
        host: The calls.
        parts: `nvprof_kit._analysis.breakdown.idle.Idle.parts`.
        is_counted: The operations to include, shape ``(n,)``.
        of_parts: The parts to include.
    """
    import pandas as pd

    rows = np.flatnonzero((host.of_op >= 0) & is_counted)
    group, places = _places(attribution, rows)
    count = len(places)
    long, call_ns = (
        (trace.ops["end_ns"].to_numpy() - trace.ops["start_ns"].to_numpy())[rows],
        _shared_duration(host, rows),
    )
    columns = {
        "ops": np.bincount(group, minlength=count),
        "gpu_ns": exact_sums(group, long, count),
        "call_ns": exact_sums(group, call_ns, count),
        "short_ops": np.bincount(group[long < call_ns], minlength=count),
    }
    del long, call_ns
    delay = np.maximum(trace.ops["start_ns"].to_numpy()[rows] - host.end[host.of_op[rows]], 0)
    table = pd.DataFrame(columns, index=places)
    table["delay_ns"] = pd.Series(delay).groupby(group).median().astype("int64").to_numpy()
    launch_gaps = parts.loc[parts["cause"].isin(_LATE) & of_parts, ["layer", "phase", "idle_ns"]]
    idle = launch_gaps.groupby(["layer", "phase"], observed=True, sort=False)["idle_ns"].sum()
    idle.index = pd.MultiIndex.from_frame(idle.index.to_frame().astype(str))
    table = table.join(idle[idle > 0], how="outer").fillna(0).astype("int64")
    table["launch_bound"] = table["idle_ns"] > _BOUND * table["gpu_ns"]
    plain = table.reset_index()
    ranked: pd.DataFrame = plain.sort_values(["idle_ns", "gpu_ns"], ascending=False, kind="stable", ignore_index=True)
    return ranked


def _places(attribution: Attribution, rows: Int64Array) -> tuple[Int64Array, pd.MultiIndex]:
    """Layer and phase of some operations, as an index into the distinct pairs, and these in order of appearance."""
    import pandas as pd

    layer, phase = op_owners(attribution)
    phases = len(phase.categories)
    group, pairs = pd.factorize(layer.codes[rows] * np.int64(phases) + phase.codes[rows])
    codes = zip((layer, phase), np.divmod(pairs, phases), strict=True)
    texts = [categorical.categories.to_numpy()[code].astype(str).astype(object) for categorical, code in codes]
    places: pd.MultiIndex = pd.MultiIndex.from_arrays(texts, names=["layer", "phase"])
    return group, places


def _shared_duration(host: HostCalls, rows: Int64Array) -> Int64Array:
    """Duration of the launching call of some operations divided by the number of operations that it launched."""
    call_of_op = host.of_op
    sharing = np.bincount(call_of_op[call_of_op >= 0], minlength=len(host.tid))
    call = call_of_op[rows]
    shared: Int64Array = (host.end[call] - host.start[call]) // sharing[call]
    return shared
