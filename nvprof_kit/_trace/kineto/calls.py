"""What NCCL was asked to move, in a PyTorch trace: the arguments that its kernels carry there.

PyTorch notes a collective's element counts, type and group (``record_param_comms``), and Kineto copies them to the
kernel (``libkineto/src/output_json.cpp`` of PyTorch's Kineto).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from nvprof_kit._trace.kineto.events import Event, Events, number, numbers, threads, times
from nvprof_kit._trace.schema import CALL_KINDS, LOADS_CODE

_KINDS = {"cuda_runtime": "api", "cuda_driver": "api", "overhead": "overhead"}
_COMPILES = "(dynamo_timed)"
_HOST_END = re.compile(r"\((?:.*\b)?(Pageable|Pinned|Managed)\b")


def read_calls(events: Events, process: int) -> dict[str, Any]:
    """Columns of the schema's ``calls``: every CUDA runtime and driver call, and every overhead of the profiler."""
    found = [(kind, event) for category, kind in _KINDS.items() for event in events.by_category.get(category, [])]
    found += [("operator", event) for event in events.operators]
    chosen = [event for _, event in found]
    start, end = times(chosen)
    return {
        "start_ns": start,
        "end_ns": end,
        "tid": threads(chosen),
        "pid": np.full(len(chosen), process, dtype=np.int64),
        "correlation": numbers(chosen, "correlation"),
        "kind": np.array([CALL_KINDS.index(kind) for kind, _ in found], dtype=np.int8),
        "name": [event.name for event in chosen],
    }


def read_loads(events: Events) -> dict[str, Any]:
    """Columns of the schema's ``loads``: calls that load code, and what torch.compile says that it did."""
    found = [event for event in events.calls if LOADS_CODE.match(event.name)]
    others = (*events.operators, *events.annotations)
    found += [event for event in others if event.name.endswith(_COMPILES)]
    start, end = times(found)
    return {"start_ns": start, "end_ns": end}


def host_memory(name: str) -> str:
    """The host's end of a copy from its name: ``Memcpy HtoD (Pageable -> Device)`` gives ``pageable``."""
    found = _HOST_END.search(name)
    return found.group(1).lower() if found else ""


_WIDTHS = {
    **dict.fromkeys(("Byte", "Char", "Bool", "QInt8", "QUInt8"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16", "UInt16"), 2),
    **dict.fromkeys(("Int", "Float", "QInt32", "UInt32", "ComplexHalf"), 4),
    **dict.fromkeys(("Long", "Double", "UInt64", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
"""Bytes of an element by PyTorch's name of its type; types called ``Float8…`` have one."""

_MOST = 1 << 50
"""No collective moves as many."""
_IN, _OUT = "In msg nelems", "Out msg nelems"


def read_collectives(events: Events, process: int) -> dict[str, Any]:
    """Columns of the schema's ``collectives``: a row for each kernel that says what it moves."""
    kernels = [event for kind, found in events.gpu if kind == "kernel" for event in found]
    told = [event for event in kernels if _IN in event.args or _OUT in event.args]
    start, end = times(told)
    return {
        "start_ns": start,
        "end_ns": end,
        "pid": np.full(len(told), process, dtype=np.int64),
        "tid": np.zeros(len(told), dtype=np.int64),
        "correlation": numbers(told, "correlation"),
        "call": [str(event.args.get("Collective name", "")) for event in told],
        "bytes": np.array([_bytes(event) for event in told], dtype=np.int64),
        "ranks": numbers(told, "Group size"),
        "communicator": [_communicator(event.args) for event in told],
        "description": [str(event.args.get("Process Group Description", "")) for event in told],
        "sequence": numbers(told, "Seq"),
        "peers": [str(event.args.get("Process Group Ranks", "")) for event in told],
    }


def _communicator(said: Mapping[str, Any]) -> str:
    """What names the group on every rank: its ranks, with PyTorch's name of it, since ranks may share two groups."""
    name, ranks = str(said.get("Process Group Name", "")), str(said.get("Process Group Ranks", ""))
    return f"group {name} {ranks}".strip() if name or ranks else ""


def _bytes(event: Event) -> int:
    """Bytes of the larger buffer, -1 where the type is unknown."""
    said = event.args
    kind = str(said.get("dtype", ""))
    width = 1 if kind.startswith("Float8") else _WIDTHS.get(kind, 0)
    count = max(number(said.get(_IN)) or 0, number(said.get(_OUT)) or 0)
    return width * count if width and 0 <= count < _MOST else -1
