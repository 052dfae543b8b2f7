"""Messages of NCCL collectives in a PyTorch trace, from the arguments of the kernel events.

PyTorch records the element counts, dtype and group of a collective (``record_param_comms``), and Kineto copies them to
the kernel event (``libkineto/src/output_json.cpp`` of PyTorch's Kineto).
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.kineto.events import ANNOTATIONS, COLLECTIONS, FUNCTIONS, OPERATORS, Events, joined, number
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
        ("operator", events.of(OPERATORS)), ("operator", events.of(COLLECTIONS))
    ]  # fmt: skip
    rows = joined([part_rows for _, part_rows in parts], ["correlation", "kernel"])
    kinds = [CALL_KINDS.index(kind) for kind, _ in parts]
    present, kernel = np.unique(rows.number("kernel"), return_inverse=True)
    return {
        **rows.columns(process),
        "correlation": rows.number("correlation"),
        "kind": np.repeat(np.array(kinds, dtype=np.int8), [len(part_rows) for _, part_rows in parts]),
        "name": rows.label(),
        "kernel": labels(kernel, ["" if code < 0 else rows.names[code] for code in present.tolist()]),
    }


def read_loads(events: Events, process: int) -> dict[str, Any]:
    """Columns of the schema's ``loads``: calls that load code, and torch.compile's events."""
    loads = events.calls
    loads = loads.take(loads.by_name(lambda name: LOADS_CODE.match(name) is not None, bool))
    cpu_events = joined([events.of(OPERATORS), events.of(ANNOTATIONS)])
    compiles = cpu_events.take(cpu_events.by_name(lambda name: name.endswith(_COMPILES), bool))
    return joined([loads, compiles]).columns(process)


def read_frames(events: Events, process: int) -> dict[str, Any]:
    """Columns of the schema's ``frames``: long calls of Python functions, without modules."""
    return {**events.of(FUNCTIONS).columns(process), "name": events.of(FUNCTIONS).label()}


def read_shapes(events: Events, process: int) -> dict[str, Any]:
    """Columns of the schema's ``shapes``: all operators, if any has its arguments recorded."""
    rows, shape_of_row = events.of(OPERATORS), events.of(OPERATORS).shapes
    if shape_of_row is None or not any(size is not None for shape in events.shapes for size in shape):
        rows, shape_of_row = rows.take(slice(0)), np.zeros(0, dtype=np.int32)
    arguments = labels(shape_of_row, [json.dumps(shape) for shape in events.shapes])
    return {**rows.columns(process), "name": rows.label(), "arguments": arguments}


def host_memory(name: str) -> str:
    """The host memory kind of a copy, from its name: ``Memcpy HtoD (Pageable -> Device)`` gives ``pageable``."""
    match = _HOST_END.search(name)
    return match.group(1).lower() if match else ""


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
    operators = events.of(OPERATORS)
    coalesced = events.of(ANNOTATIONS)
    coalesced = coalesced.take(coalesced.by_name(lambda name: name == _COALESCED, bool))
    if len(coalesced) and operators.collective_arguments:
        operator_rows = np.array(list(operators.collective_arguments), dtype=np.int64)
        with_message = operators.take(operator_rows)
        launched = events.calls.take(np.isin(events.calls.number("correlation"), rows[0].number("correlation")))
        launches_one = np.zeros(len(with_message), dtype=np.bool_)  # their kernels have rows already
        for thread in np.unique(launched.tid).tolist():
            launch_times = np.sort(launched.start_ns[launched.tid == thread])
            first, end = (np.searchsorted(launch_times, edge) for edge in (with_message.start_ns, with_message.end_ns))
            launches_one |= (with_message.tid == thread) & (end > first)
        operator_rows = operator_rows[~launches_one]
        arguments += [operators.collective_arguments[argument] for argument in operator_rows.tolist()]
        rows += [operators.take(operator_rows), coalesced]
        arguments += [_GROUP_END] * len(coalesced)
    collectives = joined(rows, ["correlation"])
    of_kernel = np.arange(len(collectives)) < len(rows[0])
    return {
        **collectives.columns(process),
        "tid": np.where(of_kernel, 0, collectives.tid),
        "correlation": np.where(of_kernel, collectives.number("correlation"), -1),
        "call": [_text(argument.collective) for argument in arguments],
        "bytes": np.array([_bytes(argument) for argument in arguments], dtype=np.int64),
        "ranks": np.array([_number(argument.group_size) for argument in arguments], dtype=np.int64),
        # equal on all ranks of the group: two groups can have the same ranks, so with PyTorch's name
        "communicator": [
            f"group {name} {ranks}".strip() if name or ranks else ""
            for name, ranks in ((_text(argument.group_name), _text(argument.group_ranks)) for argument in arguments)
        ],
        "description": [_text(argument.group_description) for argument in arguments],
        "sequence": np.array([_number(argument.collective_sequence) for argument in arguments], dtype=np.int64),
        "peers": [
            _text(argument.group_ranks) if peer < 0 else str(peer)
            for argument in arguments
            for peer in (_number(argument.source if argument.destination is None else argument.destination),)
        ],
    }


_GROUP_END = Args(collective="ncclGroupEnd")


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _number(value: Any) -> int:
    parsed = number(value)
    return -1 if parsed is None else parsed


def _bytes(arguments: Args) -> int:
    """Bytes of the larger buffer; -1 if the dtype is unknown."""
    kind = _text(arguments.dtype)
    width = 1 if kind.startswith("Float8") else _WIDTHS.get(kind, 0)
    count = max(number(arguments.in_elements) or 0, number(arguments.out_elements) or 0)
    return width * count if width and 0 <= count < _MOST else -1
