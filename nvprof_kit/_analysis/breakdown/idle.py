"""How the host keeps up with the device, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution
from nvprof_kit._analysis.attribution.intervals import Cover
from nvprof_kit._analysis.attribution.nesting import NONE, Int64Array
from nvprof_kit._analysis.attribution.operations import op_owners, owners_at
from nvprof_kit._analysis.attribution.windows import Windows
from nvprof_kit._analysis.breakdown.activity import Activity
from nvprof_kit._analysis.breakdown.host import ALLOCATES, WAITS, HostCalls
from nvprof_kit._trace.schema import OP_KINDS, Trace
from nvprof_kit.names import Category

if TYPE_CHECKING:
    import pandas as pd


CAUSES: Mapping[str, str] = {
    "launch": "the host had not launched the next operation yet",
    "sync": "the host could not launch ahead: the gap began while it waited for the device",
    "dataloader": "the host was fetching data",
    "allocation": "the host was in a call that allocates or frees memory",
    "profiler": "the profiler held the host up; not there without it",
    "graph": "between two replays of CUDA graphs",
    "queued": "the next operation was launched already: the device's own gap between operations",
    "other": "no operation follows, or its launch is not in the capture",
}
"""The causes and what they mean."""

_NAMES = tuple(CAUSES)
_DATA_TEXTS = ("data", "dataloader")


@dataclass(frozen=True)
class Idle:
    """The idle gaps of a capture.

    Attributes:
        by_cause: Time by gap and cause (the keys of `CAUSES`) in ns, shape ``(g, 8)``; a row adds up to the gap.
        gaps: A row per gap: window (index), start_ns, idle_ns, cause (the largest), layer and phase the launching
            thread was in when it began, call (the API call it was in, '' for none).
    """

    by_cause: Int64Array
    gaps: pd.DataFrame


class _Next(NamedTuple):
    """What ends each gap: thread of its launching call, or `NONE`; begin and end of the call; whether it is a
    graph's, and another replay's than the operation before the gap.
    """

    tid: Int64Array
    begin: Int64Array
    end: Int64Array
    graph: np.ndarray


def idle(trace: Trace, attribution: Attribution, windows: Windows, active: Activity, host: HostCalls) -> Idle:
    """Tell the cause of every idle gap; without the table `calls` every cause is `other`."""
    import pandas as pd

    start, end = active.gap_start, active.gap_end
    following = _following(trace, windows, active, host)
    by_cause = _split(attribution, host, start, end, following)
    layer, phase = owners_at(attribution.ranges, following.tid, start)
    gaps = pd.DataFrame(
        {
            "window": active.gap_window,
            "start_ns": start,
            "idle_ns": end - start,
            "cause": pd.Categorical.from_codes(by_cause.argmax(axis=1), categories=pd.Index(_NAMES, dtype=object)),
            "layer": layer,
            "phase": phase,
            "call": host.name_at(following.tid, start),
        },
        copy=False,
    )
    return Idle(by_cause, gaps)


def _following(trace: Trace, windows: Windows, active: Activity, host: HostCalls) -> _Next:
    starts = trace.ops["start_ns"].to_numpy()
    origin = int(min(starts.min(initial=0), active.gap_start.min(initial=0)))
    span = int(max(starts.max(initial=0), active.gap_end.max(initial=0))) - origin + 1
    key = windows.of_op * span + (starts - origin)
    order = np.argsort(key, kind="stable")
    lane = windows.device[active.gap_window]
    place = np.searchsorted(key[order], lane * span + (active.gap_end - origin))
    around = np.concatenate(([NONE], order, [NONE]))
    of_op = np.append(windows.of_op, NONE)
    before, op = (np.where(of_op[one] == lane, one, NONE) for one in (around[place], around[place + 1]))
    call = host.of_op
    mine, previous = np.append(call, NONE)[op], np.append(call, NONE)[before]
    is_graph = (trace.ops["graph_node"].to_numpy() >= 0) | (trace.ops["kind"].to_numpy() == OP_KINDS.index("graph"))
    both = np.append(is_graph, False)[op] & np.append(is_graph, False)[before]
    return _Next(host.tid[mine], host.start[mine], host.end[mine], both & (mine != previous))


def _split(
    attribution: Attribution, host: HostCalls, start: Int64Array, end: Int64Array, following: _Next
) -> Int64Array:
    """Time of each gap by cause."""
    by_cause = np.zeros((len(start), len(CAUSES)), dtype=np.int64)
    known = following.tid != NONE
    late = known & (following.end > start)
    covered = np.zeros(len(start), dtype=np.int64)
    for cause, cover in _covers(attribution, host):
        total = np.where(late, cover.inside(following.tid, start, end), 0)
        by_cause[:, _NAMES.index(cause)] = total - covered
        covered = total
    waiting = late & host.is_in(WAITS, following.tid, start)
    rest = np.select(
        [~known, waiting, following.graph, late],
        [_NAMES.index(cause) for cause in ("other", "sync", "graph", "launch")],
        _NAMES.index("queued"),
    )
    by_cause[np.arange(len(start)), rest] += end - start - covered
    return by_cause


def _covers(attribution: Attribution, host: HostCalls) -> list[tuple[str, Cover]]:
    """What the threads were in, each cover holding the ones before it: their differences do not overlap."""
    ranges = attribution.ranges
    loads = ranges.is_one_of((Category.DATA,)) | np.isin(ranges.phase, _DATA_TEXTS)
    data = np.stack([ranges.tid[loads], ranges.start[loads], ranges.end[loads]])
    stretches = [("profiler", host.overheads()), ("allocation", host.of(ALLOCATES)), ("dataloader", data)]
    held = np.zeros((3, 0), dtype=np.int64)
    covers = []
    for cause, more in stretches:
        held = np.concatenate((held, more), axis=1)
        covers.append((cause, Cover(*held)))
    return covers


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
