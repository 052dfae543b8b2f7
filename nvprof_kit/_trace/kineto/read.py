"""Read a PyTorch profiler (Kineto) trace as a `Trace`, with or without ranges of this package.

A trace without a GPU has no kernels; its operations are the self time intervals of CPU operators. Times in the file are
microseconds with three decimals and become integer nanoseconds.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from nvprof_kit._trace.frames import empty_frame, make_frame
from nvprof_kit._trace.joins import Int64Array
from nvprof_kit._trace.kineto.calls import (
    host_memory,
    read_calls,
    read_collectives,
    read_frames,
    read_loads,
    read_shapes,
)
from nvprof_kit._trace.kineto.events import ANNOTATIONS, CALL_CATEGORIES, GPU_CATEGORIES, OPERATORS, Events, number
from nvprof_kit._trace.kineto.ranges import read_operators, read_ranges
from nvprof_kit._trace.kineto.stream import TraceFile
from nvprof_kit._trace.reader import Request, Source, named_domains
from nvprof_kit._trace.schema import OP_KINDS, SOUGHT, CaptureInfo, Trace
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue
from nvprof_kit.names import DOMAIN, parse_kineto_name

_OPTIONAL: Mapping[str, Callable[[Events], dict[str, Any]]] = {
    "calls": read_calls,
    "loads": read_loads,
    "collectives": read_collectives,
    "shapes": read_shapes,
    "frames": read_frames,
}
"""The readers of the optional tables."""


def read_kineto(source: Source, request: Request) -> Trace:
    """Read a Kineto trace, plain or gzipped. The domain asked for must be this package's or the default one: Kineto has
    no NVTX domains.

    Raises:
        CaptureError: The file is truncated, is not a Kineto trace, or contains no operation.
    """
    named, optional = source.named, request.optional
    if not {DOMAIN, ""} & {*named_domains(request.domain)}:
        raise CaptureError.of("no-domains", path=named, domain=request.domain)
    file = TraceFile(source.path, named)
    events = Events(file.batches(), named, shapes="shapes" in optional)
    if events.process is None:
        raise CaptureError.of("empty-trace", path=named)
    has_ours = any(name is not None for name in events.by_name(events.of(ANNOTATIONS), parse_kineto_name))
    if not has_ours:
        optional |= {"name"}  # the names of kernels may have to show the layers
    on_gpu = bool(len(events.of(*GPU_CATEGORIES)))
    ops, api = _operations(events, optional)
    ranges, operators = read_ranges(events, has_ours), read_operators(events)
    properties = file.other.get("deviceProperties")
    gpus = [gpu for gpu in properties if isinstance(gpu, dict)] if isinstance(properties, list) else []
    name_of_gpu = {number(gpu.get("id")): str(gpu.get("name", "")) for gpu in gpus}
    devices = np.unique(ops["device"]).tolist() if on_gpu else []
    return Trace(
        info=CaptureInfo(
            path=str(named),
            tool="PyTorch profiler (Kineto)",
            schema=str(file.other.get("schemaVersion", "")),
            domain=DOMAIN,
            gpus=tuple(name_of_gpu.get(device, "GPU of unknown name") for device in devices),
            ordinals=tuple(devices),
            on_gpu=on_gpu,
            evidence="" if has_ours or not on_gpu else SOUGHT,
            warnings=(*(() if on_gpu else (Issue.of("no-gpu"),)), *events.warnings),
        ),
        ranges=make_frame("ranges", ranges),
        api=make_frame("api", api),
        ops=make_frame("ops", ops),
        graph_nodes=empty_frame("graph_nodes"),
        **{name: make_frame(name, read(events)) for name, read in _OPTIONAL.items() if name in optional},
        operators=None if operators is None else make_frame("operators", operators),
    )


def _operations(events: Events, optional: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Operations and the calls that launch them. Without a GPU each is an interval of an operator's self time, with a
    "call" at its start: ``aten::addmm`` calls ``aten::expand``, which is not in its self time, so all counts once.
    """
    rows = events.of(*GPU_CATEGORIES)
    if len(rows):
        kinds = np.array([OP_KINDS.index(kind) for kind in GPU_CATEGORIES.values()], dtype=np.int8)
        counts = [len(events.of(category)) for category in GPU_CATEGORIES]
        graph_node = rows["graph_node"].where(rows["graph_node"] > 0, -1)
        rows = rows.assign(kind=np.repeat(kinds, counts), graph_node=graph_node)
        calls = events.of(*CALL_CATEGORIES)
        calls = calls[calls["correlation"] != -1]
    else:
        operators = events.of(OPERATORS)
        columns = (operators[name].to_numpy() for name in ("start_ns", "end_ns", "tid"))
        operator, start_ns, end_ns = _self_times(*columns)
        rows = operators.iloc[operator].assign(start_ns=start_ns, end_ns=end_ns, operator_call=operator, device=0)
        rows = rows.assign(correlation=np.arange(len(rows)), kind=OP_KINDS.index("operator"), graph_node=-1)
        rows = rows.assign(stream=-1, bytes=-1)
        calls = rows.assign(end_ns=rows["start_ns"])
    names = ["device", "correlation", "graph_node", "kind", *({"operator_call"} & {*rows})]
    names += [name for name in ("stream", "bytes") if name in optional]
    ops = events.spans(rows) | {name: rows[name] for name in names}
    for name, value in (("name", str), ("host_memory", host_memory)):
        if name in optional:
            ops[name] = events.label(rows["name"], value)
    api = events.spans(calls) | {"correlation": calls["correlation"]}
    if "duration_ns" in optional:
        api["duration_ns"] = calls["end_ns"] - calls["start_ns"]
    return ops, api


def _self_times(start: Int64Array, end: Int64Array, tid: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The intervals in which each operator is the innermost on its thread: operator, begin and end, shape ``(n,)``
    each. An operator that is never innermost gets an empty interval at its start, so that it is counted.
    """
    intervals = array("q")
    open_operators: list[int] = []
    now, thread = 0, None
    starts, ends, threads = start.tolist(), end.tolist(), tid.tolist()

    def run_until(limit: float) -> None:
        nonlocal now
        while open_operators and now < limit:
            innermost = open_operators[-1]
            until = int(min(ends[innermost], limit))
            if until > now:
                intervals.extend((innermost, now, until))
                now = until
            if ends[innermost] <= limit:
                open_operators.pop()

    for operator in np.lexsort((-end, start, tid)).tolist():
        run_until(starts[operator] if threads[operator] == thread else math.inf)
        thread, now = threads[operator], starts[operator]
        open_operators.append(operator)
    run_until(math.inf)
    owner, since, until = np.frombuffer(intervals, dtype=np.int64).reshape(-1, 3).T
    never = np.setdiff1d(np.arange(len(start)), owner)
    return np.append(owner, never), np.append(since, start[never]), np.append(until, start[never])
