"""Read a PyTorch profiler (Kineto) trace as a `Trace`, with or without ranges of this package.

A trace without a GPU has no kernels; its operations are the self time intervals of CPU operators. Times in the file are
microseconds with three decimals and become integer nanoseconds.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nvprof_kit._trace.frames import empty_frame, make_frame
from nvprof_kit._trace.kineto.calls import (
    host_memory,
    read_calls,
    read_collectives,
    read_frames,
    read_loads,
    read_shapes,
)
from nvprof_kit._trace.kineto.events import MISSING, OPERATORS, Events, Int64Array, Rows, joined, number
from nvprof_kit._trace.kineto.ranges import has_ours, read_operators, read_ranges
from nvprof_kit._trace.kineto.stream import TraceFile
from nvprof_kit._trace.reader import named_domains
from nvprof_kit._trace.schema import OP_KINDS, SOUGHT, CaptureInfo, Trace
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue, as_issues
from nvprof_kit.names import DOMAIN

_NO_GPU = Issue(
    "no-gpu",
    "note",
    1.0,
    "no GPU operations in this trace: the operations are CPU operators, each counted while none that it calls is "
    "running",
)


_OPTIONAL: Mapping[str, Callable[[Events, int], dict[str, Any]]] = {
    "calls": read_calls,
    "loads": read_loads,
    "collectives": read_collectives,
    "shapes": read_shapes,
    "frames": read_frames,
}
"""The readers of the optional tables."""


def read_kineto(path: Path, domain: str, optional: Collection[str], named: Path) -> Trace:
    """Read a Kineto trace, plain or gzipped.

    Args:
        path: The file.
        domain: Must be this package's domain or the default one: Kineto has no NVTX domains.
        optional: The optional columns and tables to read.
        named: The path to name in messages.

    Raises:
        CaptureError: The file is truncated, is not a Kineto trace, or contains no operation.
    """
    if not {DOMAIN, ""} & {*named_domains(domain)}:
        raise CaptureError(
            f"{named}: a PyTorch trace has no NVTX domains, so --domain {domain!r} cannot be found in it; "
            "leave --domain out"
        )
    file = TraceFile(path, named, shapes="shapes" in optional)
    events = Events(file.batches(), named, shapes="shapes" in optional)
    on_gpu = any(len(device_rows) for _, device_rows in events.gpu)
    process = events.process
    if process is None:
        raise CaptureError(
            f"{named}: a trace without operators, CUDA calls or kernels; record with nvprof_kit.record or "
            "torch.profiler with CPU (and CUDA) activities"
        )
    if not has_ours(events):
        optional = {*optional, "name"}  # the names of kernels may have to show the layers
    if on_gpu:
        ops, api = _gpu_ops(events, process, optional)
    else:
        ops, api = _cpu_ops(events.of(OPERATORS), process, optional)
        api |= {"duration_ns": np.zeros_like(api["start_ns"])} if "duration_ns" in optional else {}
    ranges = read_ranges(events, process)
    ours = has_ours(events)
    operators = read_operators(events, process)
    properties = file.other.get("deviceProperties")
    gpus = [gpu for gpu in properties if isinstance(gpu, dict)] if isinstance(properties, list) else []
    name_of_gpu = {number(gpu.get("id")): str(gpu.get("name", "")) for gpu in gpus}
    devices = np.unique(ops["device"]).tolist() if on_gpu else []
    event_warnings = as_issues("events", events.warnings)
    return Trace(
        info=CaptureInfo(
            path=str(named),
            tool="PyTorch profiler (Kineto)",
            schema=str(file.other.get("schemaVersion", "")),
            domain=DOMAIN,
            gpus=tuple(name_of_gpu.get(device, "GPU of unknown name") for device in devices),
            ordinals=tuple(devices),
            on_gpu=on_gpu,
            evidence="" if ours or not on_gpu else SOUGHT,
            warnings=event_warnings if on_gpu else (_NO_GPU, *event_warnings),
        ),
        ranges=make_frame("ranges", ranges) if len(ranges["start_ns"]) else empty_frame("ranges"),
        api=make_frame("api", api),
        ops=make_frame("ops", ops),
        graph_nodes=empty_frame("graph_nodes"),
        **{name: make_frame(name, read(events, process)) for name, read in _OPTIONAL.items() if name in optional},
        operators=None if operators is None else make_frame("operators", operators),
    )


# ---------------------------------------------------------------- operations


def _gpu_ops(events: Events, process: int, optional: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Operations on the GPU, and the calls that launch them."""
    parts = events.gpu
    rows = joined([part_rows for _, part_rows in parts], ["device", "stream", "correlation", "bytes", "graph_node"])
    kinds = np.array([OP_KINDS.index(kind) for kind, _ in parts], dtype=np.int8)
    nodes = rows.number("graph_node")
    ops: dict[str, Any] = {
        "start_ns": rows.start_ns,
        "end_ns": rows.end_ns,
        "device": rows.number("device", 0),
        "pid": np.full(len(rows), process, dtype=np.int64),
        "correlation": rows.number("correlation"),
        "graph_node": np.where(nodes > 0, nodes, -1),
        "kind": np.repeat(kinds, [len(part_rows) for _, part_rows in parts]),
    }
    calls = events.calls
    calls = calls.take(calls.number("correlation", MISSING) != MISSING)
    api = {
        "start_ns": calls.start_ns,
        "tid": calls.tid,
        "pid": np.full(len(calls), process, dtype=np.int64),
        "correlation": calls.number("correlation"),
        **({"duration_ns": calls.end_ns - calls.start_ns} if "duration_ns" in optional else {}),
    }
    return ops | _optional(rows, optional), api


def _optional(rows: Rows, optional: Collection[str]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    if "name" in optional:
        columns["name"] = rows.label()
    for column in ("stream", "bytes"):
        if column in optional:
            columns[column] = rows.number(column)
    if "host_memory" in optional:
        columns["host_memory"] = rows.label(host_memory)
    return columns


def _cpu_ops(rows: Rows, process: int, optional: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Self time intervals of CPU operators, each with a synthetic launch "call" at its start on its thread.

    ``aten::addmm`` calls ``aten::expand``: its self time excludes that call, so all time counts exactly once.
    """
    operator, since, finish = _own_stretches(rows.start_ns, rows.end_ns, rows.tid)
    ids = np.arange(len(operator), dtype=np.int64)
    process_of = np.full(len(operator), process, dtype=np.int64)
    ops = {
        "start_ns": since,
        "end_ns": finish,
        "operator_call": operator,
        "device": np.zeros(len(operator), dtype=np.int64),
        "pid": process_of,
        "correlation": ids,
        "graph_node": np.full(len(operator), -1, dtype=np.int64),
        "kind": np.full(len(operator), OP_KINDS.index("operator"), dtype=np.int8),
    }
    api = {"start_ns": since, "tid": rows.tid[operator], "pid": process_of, "correlation": ids}
    return ops | _optional(rows.take(operator), optional), api


def _own_stretches(start: Int64Array, end: Int64Array, tid: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The intervals in which each operator is the innermost on its thread: operator, begin and end, shape ``(n,)``
    each. An operator that is never innermost gets an empty interval at its start, so that it is counted.
    """
    flat = array("q")
    open_operators: list[int] = []
    now, thread = 0, None
    starts, ends, threads = start.tolist(), end.tolist(), tid.tolist()

    def run_until(limit: float) -> None:
        nonlocal now
        while open_operators and now < limit:
            innermost = open_operators[-1]
            until = int(min(ends[innermost], limit))
            if until > now:
                flat.extend((innermost, now, until))
                now = until
            if ends[innermost] <= limit:
                open_operators.pop()

    for operator in np.lexsort((-end, start, tid)).tolist():
        run_until(starts[operator] if threads[operator] == thread else math.inf)
        thread, now = threads[operator], starts[operator]
        open_operators.append(operator)
    run_until(math.inf)
    owner, since, finish = np.frombuffer(flat, dtype=np.int64).reshape(-1, 3).T
    without = np.setdiff1d(np.arange(len(start)), owner)
    empty = start[without]
    return np.append(owner, without), np.append(since, empty), np.append(finish, empty)
