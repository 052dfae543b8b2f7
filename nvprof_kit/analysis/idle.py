"""Why a device is idle: what the thread was doing that launches the next operation.

A gap ends when an operation begins, and that was launched by a call of some thread. If the call had returned before
the gap began, the host was not what the device waited for (`queued`, or `graph` between two graph replays). Else it
was, and the gap is told from what that thread was in: the profiler's own overhead, an allocation, the data loader;
what is left is `sync` where the gap began inside a call that waits for the device, so that nothing could be
launched ahead, `graph` where a graph launch ends it, else `launch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nvprof_kit.analysis.activity import Activity
from nvprof_kit.analysis.attribution import Attribution
from nvprof_kit.analysis.cover import Cover
from nvprof_kit.analysis.host import ALLOCATES, WAITS, HostCalls
from nvprof_kit.analysis.nesting import NONE, Int64Array
from nvprof_kit.analysis.owners import owners_at
from nvprof_kit.analysis.windows import Windows
from nvprof_kit.names import Category
from nvprof_kit.trace.schema import OP_KINDS, Trace

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


def idle(trace: Trace, owned: Attribution, windows: Windows, active: Activity, host: HostCalls) -> Idle:
    """Tell the cause of every idle gap; without the table `calls` every cause is `other`."""
    import pandas as pd

    start, end = active.gap_start, active.gap_end
    following = _following(trace, windows, active, host)
    by_cause = _split(owned, host, start, end, following)
    layer, phase = owners_at(owned.ranges, following.tid, start)
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


def _split(owned: Attribution, host: HostCalls, start: Int64Array, end: Int64Array, following: _Next) -> Int64Array:
    """Time of each gap by cause."""
    by_cause = np.zeros((len(start), len(CAUSES)), dtype=np.int64)
    known = following.tid != NONE
    late = known & (following.end > start)
    covered = np.zeros(len(start), dtype=np.int64)
    for cause, cover in _covers(owned, host):
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


def _covers(owned: Attribution, host: HostCalls) -> list[tuple[str, Cover]]:
    """What the threads were in, each cover holding the ones before it: their differences do not overlap."""
    ranges = owned.ranges
    loads = ranges.is_one_of((Category.DATA,)) | np.isin(ranges.phase, _DATA_TEXTS)
    data = np.stack([ranges.tid[loads], ranges.start[loads], ranges.end[loads]])
    stretches = [("profiler", host.overheads()), ("allocation", host.of(ALLOCATES)), ("dataloader", data)]
    held = np.zeros((3, 0), dtype=np.int64)
    covers = []
    for cause, more in stretches:
        held = np.concatenate((held, more), axis=1)
        covers.append((cause, Cover(*held)))
    return covers
