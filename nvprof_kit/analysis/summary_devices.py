"""How busy every GPU is, and the CPU beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit.analysis.nesting import Int64Array
from nvprof_kit.analysis.summary_facts import Facts

if TYPE_CHECKING:
    import pandas as pd

NO_CPU = (
    "how busy the CPU is was not recorded: nsys watches it with --cpuctxsw=process-tree (which needs the right to use "
    "perf events; nsys status -e tells)"
)
"""What to do where a capture does not tell of the CPU."""

_Stretches = tuple[Int64Array, Int64Array]
"""Starts and ends of stretches in which threads ran, in ns."""

_COLUMNS = ("process", "device", "name", "wall_ns", "busy_ns", "utilisation")


def device_view(facts: Facts) -> pd.DataFrame:
    """Every GPU: how long it was watched and how much of that it ran something. And the CPU over the same time: of each
    process that uses a GPU, and of all others together, the time of its threads on a CPU, which may exceed the wall.
    """
    import pandas as pd

    table: pd.DataFrame = pd.concat([_gpus(facts), _cpus(facts)], ignore_index=True)
    table = table.astype({"process": "Int64", "device": "Int64", "wall_ns": "Int64", "busy_ns": "Int64"})
    table["utilisation"] = (table["busy_ns"] / table["wall_ns"].clip(lower=1)).astype("Float64")
    if facts.by_step:
        table = table.sort_values("step", kind="stable", ignore_index=True)
    made: pd.DataFrame = table[[*facts.step_columns, *_COLUMNS]]
    return made


def _gpus(facts: Facts) -> pd.DataFrame:
    steps = facts.states(("process", "device"))
    steps["busy_ns"] = steps["wall_ns"] - steps["idle_ns"]
    steps["name"] = [facts.trace.info.gpu_name(device) for device in steps["device"].tolist()]
    return steps


def _cpus(facts: Facts) -> pd.DataFrame:
    """The CPU's rows, over the time in which the first GPU of each process was watched."""
    import pandas as pd

    windows, rows = facts.windows, []
    first = {one.pid: place for place, one in reversed([*enumerate(windows.devices)])}
    for pid, place in sorted(first.items(), key=lambda pair: pair[1]):
        mine = np.flatnonzero(windows.device == place)
        process = windows.devices[place].process
        for busy, name in ((_threads(facts, pid), "CPU"), *_others(facts, first, place)):
            spent = np.full(len(mine), -1) if busy is None else _inside(busy, windows.start[mine], windows.end[mine])
            rows += [
                (int(step) if inside else None, process if name == "CPU" else None, None, name, wall, ns)
                for step, inside, wall, ns in zip(
                    windows.step[mine], windows.in_step[mine], (windows.end - windows.start)[mine], spent, strict=True
                )
            ]
    # as objects, since floats, which pandas takes for numbers beside None, do not hold every step's number
    frame = pd.DataFrame(rows, columns=["step", "process", "device", "name", "wall_ns", "busy_ns"], dtype=object)
    frame = frame.astype({"step": "Int64", "process": "Int64", "device": "Int64"})
    summed = frame.groupby([*facts.step_columns, "process", "device", "name"], dropna=False, sort=False)
    table = summed[["wall_ns", "busy_ns"]].sum().reset_index()
    table["busy_ns"] = table["busy_ns"].astype("Int64").where(table["busy_ns"] >= 0)
    made: pd.DataFrame = table
    return made


def _threads(facts: Facts, pid: int) -> _Stretches | None:
    """Starts and ends of the stretches that a process's threads ran, None where nobody watched."""
    scheduled = facts.trace.scheduled
    if scheduled is None or not len(scheduled):
        return None
    mine = scheduled[scheduled["pid"] == pid]
    return mine["start_ns"].to_numpy(), mine["end_ns"].to_numpy()


def _others(facts: Facts, known: dict[int, int], place: int) -> list[tuple[_Stretches, str]]:
    """The same of all processes that use no GPU, once: data loaders' workers and whatever else nsys watched."""
    scheduled = facts.trace.scheduled
    if place != 0 or scheduled is None or scheduled["pid"].isin(known).all():
        return []
    rest = scheduled[~scheduled["pid"].isin(known)]
    return [((rest["start_ns"].to_numpy(), rest["end_ns"].to_numpy()), "CPU, other processes")]


def _inside(stretches: _Stretches, low: Int64Array, high: Int64Array) -> Int64Array:
    """How much of some stretches, added up, lies in each window, shape ``(w,)``."""
    return _until(stretches, high) - _until(stretches, low)


def _until(stretches: _Stretches, moment: Int64Array) -> Int64Array:
    """How much of the stretches, added up, lies before each moment."""
    total = np.zeros(len(moment), dtype=np.int64)
    for edges, sign in zip(map(np.sort, stretches), (1, -1), strict=True):
        before = np.searchsorted(edges, moment)
        total += sign * (before * moment - np.concatenate(([0], np.cumsum(edges)))[before])
    return total
