"""A PyTorch profiler (Kineto) trace as a `Trace`, with our ranges in it or without.

A trace without a GPU has no kernels; there the operations are the stretches in which a CPU operator itself runs,
and not one it calls. Times in the file are microseconds with three decimals and become whole nanoseconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._trace.checks import check_moments, check_operations
from nvprof_kit._trace.domains import named_domains
from nvprof_kit._trace.frames import empty_frame, make_frame
from nvprof_kit._trace.kineto.calls import host_memory, read_calls, read_collectives, read_loads
from nvprof_kit._trace.kineto.events import Event, Events, Int64Array, number, numbers, threads, times
from nvprof_kit._trace.kineto.ranges import read_operators, read_ranges
from nvprof_kit._trace.kineto.stream import TraceFile
from nvprof_kit._trace.schema import OP_KINDS, CaptureInfo, Trace
from nvprof_kit.errors import CaptureError
from nvprof_kit.names import DOMAIN

_NO_GPU = (
    "no GPU operations in this trace: the operations are CPU operators, each counted while none that it calls is "
    "running"
)


def read_kineto(path: Path, domain: str, optional: Collection[str], named: Path) -> Trace:
    """Read a Kineto trace, plain or gzipped.

    Args:
        path: The file.
        domain: Must name our own domain or the default one: Kineto knows no NVTX domains.
        optional: Optional columns and tables wanted.
        named: The path to name in messages.

    Raises:
        CaptureError: The file is cut off, is no Kineto trace, or holds no operation.
    """
    if not {DOMAIN, ""} & {*named_domains(domain)}:
        raise CaptureError(
            f"{named}: a PyTorch trace has no NVTX domains, so --domain {domain!r} cannot be found in it; "
            "leave --domain out"
        )
    file = TraceFile(path, named)
    events = Events.of(file.events(), named)
    on_gpu = any(found for _, found in events.gpu)
    process = events.process
    if process is None:
        raise CaptureError(
            f"{named}: a trace without operators, CUDA calls or kernels; record with nvprof_kit.record or "
            "torch.profiler with CPU (and CUDA) activities"
        )
    if on_gpu:
        ops, api = _gpu_ops(events, process, optional), _launches(events, process, optional)
    else:
        ops, api = _cpu_ops(events.operators, process, optional)
        api |= {"duration_ns": np.zeros_like(api["start_ns"])} if "duration_ns" in optional else {}
    ranges = read_ranges(events, process)
    operators = read_operators(events, process)
    odd = (*check_operations(named, ops, api), *events.warnings)
    check_moments(
        named, (table[edge] for table in (ranges, ops, api) for edge in ("start_ns", "end_ns") if edge in table)
    )
    return Trace(
        info=CaptureInfo(
            path=str(named),
            tool="PyTorch profiler (Kineto)",
            schema=str(file.other.get("schemaVersion", "")),
            domain=DOMAIN,
            gpus=_gpu_names(file.other.get("deviceProperties"), np.unique(ops["device"])) if on_gpu else (),
            ordinals=tuple(np.unique(ops["device"]).tolist()) if on_gpu else (),
            on_gpu=on_gpu,
            warnings=odd if on_gpu else (_NO_GPU, *odd),
        ),
        ranges=make_frame("ranges", ranges) if len(ranges["start_ns"]) else empty_frame("ranges"),
        api=make_frame("api", api),
        ops=make_frame("ops", ops),
        graph_nodes=empty_frame("graph_nodes"),
        calls=make_frame("calls", read_calls(events, process)) if "calls" in optional else None,
        loads=make_frame("loads", read_loads(events)) if "loads" in optional else None,
        collectives=make_frame("collectives", read_collectives(events, process)) if "collectives" in optional else None,
        operators=None if operators is None else make_frame("operators", operators),
    )


# ---------------------------------------------------------------- operations


def _gpu_ops(trace: Events, process: int, optional: Collection[str]) -> dict[str, Any]:
    events = [event for _, found in trace.gpu for event in found]
    kinds = [kind for kind, found in trace.gpu for _ in found]
    start, end = times(events)
    ops: dict[str, Any] = {
        "start_ns": start,
        "end_ns": end,
        "device": numbers(events, "device", 0),
        "pid": np.full(len(events), process, dtype=np.int64),
        "correlation": numbers(events, "correlation"),
        "graph_node": np.where((nodes := numbers(events, "graph node id")) > 0, nodes, -1),
        "kind": np.array([OP_KINDS.index(kind) for kind in kinds], dtype=np.int8),
    }
    return ops | _optional(events, optional)


def _optional(events: list[Event], optional: Collection[str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if "name" in optional:
        made["name"] = [event.name for event in events]
    for column in ("stream", "bytes"):
        if column in optional:
            made[column] = numbers(events, column)
    if "host_memory" in optional:
        made["host_memory"] = [host_memory(event.name) for event in events]
    return made


def _launches(trace: Events, process: int, optional: Collection[str]) -> dict[str, Any]:
    events = [event for event in trace.calls if "correlation" in event.args]
    start, end = times(events)
    return {
        "start_ns": start,
        "tid": threads(events),
        "pid": np.full(len(events), process, dtype=np.int64),
        "correlation": numbers(events, "correlation"),
        **({"duration_ns": end - start} if "duration_ns" in optional else {}),
    }


def _cpu_ops(events: list[Event], process: int, optional: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What CPU operators did themselves, and for each stretch the "call" that launched it: its own begin on its
    own thread.

    ``aten::addmm`` multiplies, but calls ``aten::expand`` on the way: its time is what lies around that, so that
    nothing is lost and nothing counts twice.
    """
    start, end = times(events)
    tid = threads(events)
    operator, begin, finish = _own_stretches(start, end, tid)
    ids = np.arange(len(operator), dtype=np.int64)
    process_of = np.full(len(operator), process, dtype=np.int64)
    ops = {
        "start_ns": begin,
        "end_ns": finish,
        "device": np.zeros(len(operator), dtype=np.int64),
        "pid": process_of,
        "correlation": ids,
        "graph_node": np.full(len(operator), -1, dtype=np.int64),
        "kind": np.full(len(operator), OP_KINDS.index("operator"), dtype=np.int8),
    }
    api = {"start_ns": begin, "tid": tid[operator], "pid": process_of, "correlation": ids}
    return ops | _optional([events[one] for one in operator.tolist()], optional), api


def _own_stretches(start: Int64Array, end: Int64Array, tid: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The stretches in which each operator is the innermost one on its thread: operator, begin and end, shape
    ``(n,)`` each.
    """
    found: list[tuple[int, int, int]] = []
    open_operators: list[int] = []
    now = 0

    def run_until(moment: float) -> None:
        nonlocal now
        while open_operators and now < moment:
            innermost = open_operators[-1]
            until = int(min(end[innermost], moment))
            if until > now:
                found.append((innermost, now, until))
                now = until
            if end[innermost] <= moment:
                open_operators.pop()

    thread: int | None = None
    for operator in np.lexsort((-end, start, tid)).tolist():
        run_until(start[operator] if tid[operator] == thread else math.inf)
        thread, now = tid[operator], int(start[operator])
        open_operators.append(operator)
    run_until(math.inf)
    columns = np.array(found, dtype=np.int64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def _gpu_names(properties: Any, devices: npt.NDArray[np.int64]) -> tuple[str, ...]:
    told = [one for one in properties if isinstance(one, dict)] if isinstance(properties, list) else []
    known = {number(one.get("id")): str(one.get("name", "")) for one in told}
    return tuple(known.get(int(device), "GPU of unknown name") for device in devices)
