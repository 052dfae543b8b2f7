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
from nvprof_kit._trace.joins import Int64Array
from nvprof_kit._trace.kineto.events import (
    ANNOTATIONS,
    CALL_CATEGORIES,
    COLLECTIONS,
    FUNCTIONS,
    OPERATORS,
    Events,
    number,
)
from nvprof_kit._trace.kineto.stream import NAMES, Args
from nvprof_kit._trace.schema import CALL_KINDS, LOADS_CODE

_KINDS = {"cuda_runtime": "api", "cuda_driver": "api", "overhead": "overhead"}
_KINDS |= {OPERATORS: "operator", COLLECTIONS: "operator"}
_COMPILES = "(dynamo_timed)"
_HOST_END = re.compile(r"\((?:.*\b)?(Pageable|Pinned|Managed)\b")


def read_calls(events: Events) -> dict[str, Any]:
    """Columns of the schema's ``calls``: all CUDA runtime and driver calls, profiler overheads, operators and garbage
    collections.
    """
    rows = events.of(*_KINDS)
    kinds = [CALL_KINDS.index(kind) for kind in _KINDS.values()]
    return {
        **events.spans(rows),
        "correlation": rows["correlation"],
        "kind": np.repeat(np.array(kinds, dtype=np.int8), [len(events.of(category)) for category in _KINDS]),
        "name": events.label(rows["name"]),
        "kernel": events.label(rows["kernel"]),
    }


def read_loads(events: Events) -> dict[str, Any]:
    """Columns of the schema's ``loads``: calls that load code, and torch.compile's events."""
    import pandas as pd

    calls, compiles = events.of(*CALL_CATEGORIES), events.of(OPERATORS, ANNOTATIONS)
    calls = calls[events.by_name(calls, lambda name: LOADS_CODE.match(name) is not None, bool)]
    compiles = compiles[events.by_name(compiles, lambda name: name.endswith(_COMPILES), bool)]
    return events.spans(pd.concat([calls, compiles]))


def read_frames(events: Events) -> dict[str, Any]:
    """Columns of the schema's ``frames``: long calls of Python functions, without modules."""
    rows = events.of(FUNCTIONS)
    return {**events.spans(rows), "name": events.label(rows["name"])}


def read_shapes(events: Events) -> dict[str, Any]:
    """Columns of the schema's ``shapes``: all operators, if any has its arguments recorded."""
    shapes = [[None if isinstance(value, dict) else value for value in json.loads(text)] for text in events.inputs]
    has_shapes = any(value is not None for shape in shapes for value in shape)
    rows = events.of(OPERATORS) if has_shapes else events.of(OPERATORS)[:0]
    inputs = rows["inputs"].to_numpy() if has_shapes else np.zeros(0, dtype=np.int64)
    arguments = labels(inputs, [*map(json.dumps, shapes)])
    return {**events.spans(rows), "name": events.label(rows["name"]), "arguments": arguments}


def host_memory(name: str) -> str:
    """The host memory kind of a copy, from its name: ``Memcpy HtoD (Pageable -> Device)`` gives ``pageable``."""
    match = _HOST_END.search(name)
    return match.group(1).lower() if match else ""


_MAX_ELEMENTS = 1 << 50
"""More than any collective moves."""
_GROUP_END = Args(collective="ncclGroupEnd")
_COALESCED = "nccl:coalesced"


def read_collectives(events: Events) -> dict[str, Any]:
    """Columns of the schema's ``collectives``: one row per kernel with message arguments, and the sends and receives of
    coalesced operations, whose kernels lack them: their operators, and the ends of the groups that launch them.
    """
    import pandas as pd

    kernels = events.of("kernel").iloc[list(events.messages["kernel"])]
    messages = list(events.messages["kernel"].values())
    collectives = kernels.assign(tid=0)
    coalesced = events.of(ANNOTATIONS)
    coalesced = coalesced[events.by_name(coalesced, lambda name: name == _COALESCED, bool)]
    if len(coalesced) and events.messages[OPERATORS]:
        operators = events.of(OPERATORS).iloc[list(events.messages[OPERATORS])]
        launches = events.of(*CALL_CATEGORIES)
        launches = launches[launches["correlation"].isin(kernels["correlation"])].sort_values("start_ns")
        has_kernel = np.zeros(len(operators), dtype=np.bool_)  # these have rows already
        for thread, starts in launches.groupby("tid")["start_ns"]:
            first, end = (np.searchsorted(starts, operators[edge]) for edge in ("start_ns", "end_ns"))
            has_kernel |= (operators["tid"] == thread).to_numpy() & (end > first)
        operators = operators[~has_kernel]
        messages += [events.messages[OPERATORS][row] for row in operators.index]
        messages += [_GROUP_END] * len(coalesced)
        collectives = pd.concat([collectives, pd.concat([operators, coalesced]).assign(correlation=-1)])

    def texts(name: str) -> list[str]:
        return ["" if (value := getattr(message, name)) is None else str(value) for message in messages]

    def numbers(name: str) -> Int64Array:
        values = [number(getattr(message, name)) for message in messages]
        return np.array([-1 if value is None else value for value in values], dtype=np.int64)

    elements = np.maximum(numbers("in_elements"), numbers("out_elements"))
    width_of = NAMES["widths"]
    widths = np.array([1 if kind.startswith("Float8") else width_of.get(kind, 0) for kind in texts("dtype")], np.int64)
    has_bytes = (widths > 0) & (elements >= 0) & (elements < _MAX_ELEMENTS)
    members = texts("group_ranks")
    peers = np.where(numbers("destination") < 0, numbers("source"), numbers("destination")).tolist()
    return {
        **events.spans(collectives),
        "correlation": collectives["correlation"],
        "call": texts("collective"),
        "bytes": np.where(has_bytes, widths * np.where(has_bytes, elements, 0), -1),
        "ranks": numbers("group_size"),
        # equal on all ranks of the group: two groups can have the same ranks, so with PyTorch's name
        "communicator": [
            f"group {name} {ranks}".strip() if name or ranks else ""
            for name, ranks in zip(texts("group_name"), members, strict=True)
        ],
        "description": texts("group_description"),
        "sequence": numbers("collective_sequence"),
        "peers": [ranks if peer < 0 else str(peer) for ranks, peer in zip(members, peers, strict=True)],
    }
