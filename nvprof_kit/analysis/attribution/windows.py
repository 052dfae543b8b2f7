"""The time of every device, cut into steps: stretches without gap or overlap.

A step on a device lasts from the end of the step before it, but not from before its range began on the CPU, to the
end of its last operation or of its range, whichever is later. So waiting for a step's first kernel belongs to that
step. What lies between two steps, before the first and after the last is a stretch outside steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nvprof_kit.analysis.attribution.attribution import Attribution
from nvprof_kit.analysis.attribution.launches import Launches
from nvprof_kit.analysis.attribution.nesting import NONE, Int64Array
from nvprof_kit.trace.schema import Trace


class Device(NamedTuple):
    """A GPU as one process sees it: the process's key and place among the capture's processes, and the ordinal."""

    pid: int
    process: int
    device: int


@dataclass(frozen=True)
class Windows:
    """Stretches of time by device and start, shape ``(w,)`` each.

    Attributes:
        devices: The devices that ran something.
        of_op: Device of each operation, an index into `devices`, shape ``(n,)``.
        device: Index into `devices`.
        step: Number of the step.
        in_step: False outside steps, where `step` means nothing.
        start, end: In ns.
    """

    devices: tuple[Device, ...]
    of_op: Int64Array
    device: Int64Array
    step: Int64Array
    in_step: np.ndarray
    start: Int64Array
    end: Int64Array


def step_windows(trace: Trace, attribution: Attribution) -> Windows:
    """Cut the time of every device into steps; one stretch outside steps where the capture has none."""
    start, end = trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
    devices, of_op = devices_of(trace)
    instances = _instances(trace, attribution)
    parts = []
    for number, lane in enumerate(devices):
        mine = np.flatnonzero(of_op == number) if len(devices) > 1 else slice(None)
        parts.append(
            _tile(instances, lane.pid, attribution, _Ops(start[mine], end[mine], instances.of_op[mine]), number)
        )
    columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Windows(devices, of_op, *columns)


def devices_of(trace: Trace) -> tuple[tuple[Device, ...], Int64Array]:
    """The devices by process and ordinal, and which of them each operation ran on: the ordinals of two processes may
    name two GPUs.
    """
    import pandas as pd

    pid, device = trace.ops["pid"].to_numpy(), trace.ops["device"].to_numpy()
    (process, processes), (ordinal, ordinals) = (pd.factorize(one, sort=True) for one in (pid, device))
    many = len(ordinals)
    key = process.astype(np.int64) * many + ordinal
    present = np.flatnonzero(np.bincount(key, minlength=len(processes) * many))
    pairs = (divmod(one, many) for one in present.tolist())
    found = tuple(Device(int(processes[place]), place, int(ordinals[one])) for place, one in pairs)
    number = np.zeros(len(processes) * many, dtype=np.int64)
    number[present] = np.arange(len(present))
    return found, number[key]


class _Ops(NamedTuple):
    start: Int64Array
    end: Int64Array
    instance: Int64Array


class _Instances(NamedTuple):
    """The times that a step ran: ranges of steps that follow one another within their process, by process and start."""

    range: Int64Array
    end: Int64Array
    pid: Int64Array
    of_op: Int64Array


def _instances(trace: Trace, attribution: Attribution) -> _Instances:
    """The runs of steps, and which of them launched each operation."""
    ranges = attribution.ranges
    rows, end = np.flatnonzero((ranges.step >= 0) & ranges.first), ranges.whole_end
    rows = rows[np.lexsort((ranges.start[rows], ranges.pid[rows]))]
    kept = []
    for process in np.unique(ranges.pid[rows]):
        mine = rows[ranges.pid[rows] == process]
        reach = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(end[mine])[:-1]))
        kept.append(mine[ranges.start[mine] >= reach])
    chosen = np.concatenate(kept) if kept else rows
    pid, correlation, start = (trace.ops[name].to_numpy() for name in ("pid", "correlation", "start_ns"))
    of_op = np.full(len(pid), NONE, dtype=np.int64)
    if len(chosen):
        calls = Launches(trace)
        call = calls.that_launched(pid, correlation, start)
        moment = np.where(call >= 0, calls.time[call], start)
        for process in np.unique(ranges.pid[chosen]).tolist():
            mine = np.flatnonzero(ranges.pid[chosen] == process)
            ops = np.flatnonzero((pid == process) & (attribution.step >= 0))
            place = np.searchsorted(ranges.start[chosen[mine]], moment[ops], side="right") - 1
            found = mine[np.maximum(place, 0)]
            fits = (place >= 0) & (ranges.step[chosen[found]] == attribution.step[ops])
            of_op[ops] = np.where(fits, found, NONE)
    return _Instances(chosen, end[chosen], ranges.pid[chosen], of_op)


def _tile(
    instances: _Instances, pid: int, attribution: Attribution, ops: _Ops, device: int
) -> tuple[Int64Array, Int64Array, np.ndarray, Int64Array, Int64Array]:
    """Device, step, in_step, start and end of one device's stretches."""
    ranges = attribution.ranges
    first, last = int(ops.start.min()), int(ops.end.max())
    mine = np.flatnonzero(instances.pid == pid)
    latest = np.full(len(instances.range), np.iinfo(np.int64).min)
    told = ops.instance >= 0
    np.maximum.at(latest, ops.instance[told], ops.end[told])
    begins, ends = ranges.start[instances.range[mine]], instances.end[mine]
    finish = np.maximum.accumulate(np.maximum(ends, latest[mine])) if len(mine) else ends
    start = np.maximum(begins, np.concatenate((begins[:1], finish[:-1])))
    # between them, before the first and after the last
    gap_start = np.concatenate(([min(first, int(start[0]))] if len(mine) else [first], finish))
    gap_end = np.concatenate((start, [max(last, int(finish[-1]))] if len(mine) else [last]))
    number = ranges.steps[ranges.step[instances.range[mine]]] if len(mine) else np.zeros(0, dtype=np.int64)
    columns = (
        np.concatenate((number, np.zeros(len(gap_start), dtype=np.int64))),
        np.concatenate((np.ones(len(mine), dtype=bool), np.zeros(len(gap_start), dtype=bool))),
        np.concatenate((start, gap_start)),
        np.concatenate((finish, gap_end)),
    )
    step, in_step, begin, end = columns
    order = np.argsort(begin, kind="stable")
    order = order[end[order] > begin[order]]
    return np.full(len(order), device, dtype=np.int64), step[order], in_step[order], begin[order], end[order]
