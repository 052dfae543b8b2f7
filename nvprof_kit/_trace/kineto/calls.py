"""Messages of NCCL collectives in a PyTorch trace, from the arguments of the kernel events.

PyTorch records the element counts, dtype and group of a collective (``record_param_comms``), and Kineto copies them to
the kernel event (``libkineto/src/output_json.cpp`` of PyTorch's Kineto).
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.kineto.events import Events, Rows, joined, number
from nvprof_kit._trace.kineto.stream import Args
from nvprof_kit._trace.schema import CALL_KINDS, LOADS_CODE

_KINDS = {"cuda_runtime": "api", "cuda_driver": "api", "overhead": "overhead"}
_COMPILES = "(dynamo_timed)"
_HOST_END = re.compile(r"\((?:.*\b)?(Pageable|Pinned|Managed)\b")


def read_calls(events: Events, process: int) -> dict[str, Any]:
    """Columns of the schema's ``calls``: all CUDA runtime and driver calls, profiler overheads, operators and garbage
    collections.
    """
    parts = [(kind, events.of(category)) for category, kind in _KINDS.items()] + [
        ("operator", events.operators), ("operator", events.collections)
    ]  # fmt: skip
    rows = joined([found for _, found in parts], ["correlation"])
    kinds = [CALL_KINDS.index(kind) for kind, _ in parts]
    return {
        "start_ns": rows.start_ns,
        "end_ns": rows.end_ns,
        "tid": rows.tid,
        "pid": np.full(len(rows), process, dtype=np.int64),
        "correlation": rows.number("correlation"),
        "kind": np.repeat(np.array(kinds, dtype=np.int8), [len(found) for _, found in parts]),
        "name": rows.label(),
    }


def read_loads(events: Events) -> dict[str, Any]:
    """Columns of the schema's ``loads``: calls that load code, and torch.compile's events."""
    loads = events.calls
    loads = loads.take(loads.by_name(lambda name: LOADS_CODE.match(name) is not None, bool))
    others = joined([events.operators, events.annotations])
    found = joined([loads, others.take(others.by_name(lambda name: name.endswith(_COMPILES), bool))])
    return {"start_ns": found.start_ns, "end_ns": found.end_ns}


def read_frames(events: Events, process: int) -> dict[str, Any]:
    """Columns of the schema's ``frames``: long calls of Python functions, without modules."""
    rows = events.functions
    return {
        "start_ns": rows.start_ns,
        "end_ns": rows.end_ns,
        "pid": np.full(len(rows), process, dtype=np.int64),
        "tid": rows.tid,
        "name": rows.label(),
    }


def read_shapes(events: Events, process: int) -> dict[str, Any]:
    """Columns of the schema's ``shapes``: all operators, if any has its arguments recorded."""
    rows, which = events.operators, events.operators.shapes
    if which is None or not any(one is not None for shape in events.shapes for one in shape):
        rows, which = rows.take(slice(0)), np.zeros(0, dtype=np.int32)
    return {
        "start_ns": rows.start_ns,
        "end_ns": rows.end_ns,
        "pid": np.full(len(rows), process, dtype=np.int64),
        "tid": rows.tid,
        "name": rows.label(),
        "arguments": labels(which, [json.dumps(shape) for shape in events.shapes]),
    }


def host_memory(name: str) -> str:
    """The host memory kind of a copy, from its name: ``Memcpy HtoD (Pageable -> Device)`` gives ``pageable``."""
    found = _HOST_END.search(name)
    return found.group(1).lower() if found else ""


_WIDTHS = {
    **dict.fromkeys(("Byte", "Char", "Bool", "QInt8", "QUInt8"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16", "UInt16"), 2),
    **dict.fromkeys(("Int", "Float", "QInt32", "UInt32", "ComplexHalf"), 4),
    **dict.fromkeys(("Long", "Double", "UInt64", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
"""Bytes per element by PyTorch dtype name; ``Float8…`` types have one byte."""

_MOST = 1 << 50
"""More than any collective moves."""


_COALESCED = "nccl:coalesced"


def read_collectives(events: Events, process: int) -> dict[str, Any]:
    """Columns of the schema's ``collectives``: one row per kernel with message arguments, and the sends and receives of
    coalesced operations, whose kernels lack them: their operators, and the ends of the groups that launch them.
    """
    kernels = events.of("kernel")
    arguments = list(kernels.collective_arguments.values())
    rows = [kernels.take(np.array(list(kernels.collective_arguments), dtype=np.int64))]
    operators = events.operators
    coalesced = events.annotations
    coalesced = coalesced.take(coalesced.by_name(lambda name: name == _COALESCED, bool))
    if len(coalesced) and operators.collective_arguments:
        passing = np.array(list(operators.collective_arguments), dtype=np.int64)
        passing = passing[~_launches_one(operators.take(passing), rows[0], events.calls)]
        arguments += [operators.collective_arguments[one] for one in passing.tolist()]
        rows += [operators.take(passing), coalesced]
        arguments += [_GROUP_END] * len(coalesced)
    found = joined(rows, ["correlation"])
    of_kernel = np.arange(len(found)) < len(rows[0])
    return {
        "start_ns": found.start_ns,
        "end_ns": found.end_ns,
        "pid": np.full(len(arguments), process, dtype=np.int64),
        "tid": np.where(of_kernel, 0, found.tid),
        "correlation": np.where(of_kernel, found.number("correlation"), -1),
        "call": [_text(one.collective) for one in arguments],
        "bytes": np.array([_bytes(one) for one in arguments], dtype=np.int64),
        "ranks": np.array([_number(one.group_size) for one in arguments], dtype=np.int64),
        "communicator": [_communicator(one) for one in arguments],
        "description": [_text(one.group_description) for one in arguments],
        "sequence": np.array([_number(one.collective_sequence) for one in arguments], dtype=np.int64),
        "peers": [_peers(one) for one in arguments],
    }


def _launches_one(operators: Rows, kernels: Rows, calls: Rows) -> npt.NDArray[np.bool_]:
    """Which operators launch one of the kernels themselves."""
    found = np.zeros(len(operators), dtype=np.bool_)
    launched = calls.take(np.isin(calls.number("correlation"), kernels.number("correlation")))
    for thread in np.unique(launched.tid).tolist():
        moments = np.sort(launched.start_ns[launched.tid == thread])
        begin, end = (np.searchsorted(moments, edge) for edge in (operators.start_ns, operators.end_ns))
        found |= (operators.tid == thread) & (end > begin)
    return found


_GROUP_END = Args(collective="ncclGroupEnd")


def _peers(arguments: Args) -> str:
    """The peer of a send or receive, else the ranks of the group."""
    given = arguments.destination if arguments.destination is not None else arguments.source
    peer = number(given)
    return str(peer) if peer is not None and peer >= 0 else _text(arguments.group_ranks)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _number(value: Any) -> int:
    known = number(value)
    return -1 if known is None else known


def _communicator(arguments: Args) -> str:
    """An id of the group that is equal on all its ranks: its ranks and PyTorch's group name, because two groups can
    have the same ranks.
    """
    name, ranks = _text(arguments.group_name), _text(arguments.group_ranks)
    return f"group {name} {ranks}".strip() if name or ranks else ""


def _bytes(arguments: Args) -> int:
    """Bytes of the larger buffer; -1 if the dtype is unknown."""
    kind = _text(arguments.dtype)
    width = 1 if kind.startswith("Float8") else _WIDTHS.get(kind, 0)
    count = max(number(arguments.in_elements) or 0, number(arguments.out_elements) or 0)
    return width * count if width and 0 <= count < _MOST else -1
