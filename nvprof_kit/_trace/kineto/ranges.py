"""The ranges of a Kineto trace: ours, or what PyTorch itself annotates, and the operators that autograd counts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from nvprof_kit._trace.annotations import loop_annotation
from nvprof_kit._trace.frames import MISSING_PAYLOAD
from nvprof_kit._trace.kineto.events import Event, Events, number, threads, times
from nvprof_kit.names import Category, parse_kineto_name

_BACKWARD_OP = "autograd::engine::evaluate_function: "
_NODE = re.compile(r"\w+Backward\d*")
_MODULE = "nn.Module: "
_LIBRARY_ANNOTATIONS = (
    "nccl:",
    "c10d::",
    "gloo:",
    "##",
    "Torch-Compiled Region",
    "DistributedDataParallel.",
    "FSDP::",
    "PyTorch Profiler",
)
_Named = tuple[Event, str, str]


def read_ranges(events: Events, process: int) -> dict[str, Any]:
    """Columns of the schema's ``ranges``: our ranges; in a trace without them what PyTorch itself annotates: modules
    (recorded with stacks), steps, optimizer, data loading, and what the user annotated.
    """
    ours = _ours(events)
    if ours:
        have = {category for _, _, category in ours}
        loop = [(event, *found) for event in events.annotations if (found := loop_annotation(event.name))]
        chosen = ours + [one for one in loop if one[2] not in have]
    else:
        named = [(event, *_plain_annotation(event.name)) for event in events.annotations]
        chosen = [one for one in named if one[1]] + _modules(events)
    kept = [event for event, _, _ in chosen]
    start, end = times(kept)
    return {
        "start_ns": start,
        "end_ns": end,
        "pid": np.full(len(kept), process, dtype=np.int64),
        "tid": threads(kept),
        "nested": np.ones(len(kept), dtype=bool),
        "left_open": np.zeros(len(kept), dtype=bool),
        "category": [category for _, _, category in chosen],
        "text": [text for _, text, _ in chosen],
        "payload": np.full(len(kept), MISSING_PAYLOAD, dtype=np.int64),
    }


def _ours(events: Events) -> list[_Named]:
    return [(event, *found) for event in events.annotations if (found := parse_kineto_name(event.name))]


def _plain_annotation(name: str) -> tuple[str, str]:
    """The same for any annotation of a trace without our ranges: what is not of the loop says by its text what it is,
    a library's own is nothing.
    """
    if name.startswith(_LIBRARY_ANNOTATIONS):
        return "", Category.USER.value
    return loop_annotation(name) or (name, "")


def _modules(events: Events) -> list[_Named]:
    """The calls of modules, each module under the path of its first call inside another: ``Llama_0.Block_3.MLP_3``.

    The trace knows a module by its class and a number, and not by its name in the model.
    """
    calls = [event for event in events.python if event.name.startswith(_MODULE)]
    start, end = times(calls)
    thread = threads(calls)
    path: dict[str, str] = {}
    open_calls: list[int] = []
    found: list[_Named] = []
    for call in np.lexsort((-end, start, thread)).tolist():
        while open_calls and (thread[open_calls[-1]] != thread[call] or end[open_calls[-1]] <= start[call]):
            open_calls.pop()
        name = calls[call].name[len(_MODULE) :]
        around = path[calls[open_calls[-1]].name[len(_MODULE) :]] if open_calls else ""
        if around and "." not in path.get(name, "") and name not in around.split("."):
            path[name] = f"{around}.{name}"
        path.setdefault(name, name)
        found.append((calls[call], name, Category.FORWARD.value))
        open_calls.append(call)
    return [(event, path[name], category) for event, name, category in found]


# ---------------------------------------------------------------- operators


def read_operators(events: Events, process: int) -> dict[str, Any] | None:
    """Columns of the schema's ``operators``: what autograd counts; None where our ranges tell the backward pass."""
    if any(category == Category.BACKWARD.value for _, _, category in _ours(events)):
        return None
    engine, nodes, forward = _by_kind(events)
    if engine and not nodes:
        events.warnings.append(
            "no cpu_op event of the backward pass has args.Sequence number: it is not joined with the forward"
        )
    found = engine + nodes + forward
    start, end = times(found)
    place = np.arange(len(found))
    threads_of = _forward_threads(events, forward)
    name = [event.name.removeprefix(_BACKWARD_OP) for event in found]
    return {
        "start_ns": start,
        "end_ns": end,
        "pid": np.full(len(found), process, dtype=np.int64),
        "tid": threads(found),
        "backward": place < len(engine) + len(nodes),
        "engine": place < len(engine),
        "sequence": [_or(number(event.args.get("Sequence number")), -1) for event in found],
        "forward_tid": [threads_of.get(_forward_thread(event), -1) for event in found],
        "name": name,
    }


def _by_kind(events: Events) -> tuple[list[Event], list[Event], list[Event]]:
    """What the engine does for nodes, the nodes' own work, and the operators of the forward that have a number."""
    engine: list[Event] = []
    nodes: list[Event] = []
    forward: list[Event] = []
    for event in events.operators:
        name = event.name
        if name.startswith(_BACKWARD_OP):
            engine.append(event)
        elif "Sequence number" in event.args:
            (nodes if _forward_thread(event) or _NODE.fullmatch(name) else forward).append(event)
    return engine, nodes, forward


def _forward_thread(event: Event) -> int:
    """PyTorch's own number of the thread whose forward made a node; it is no thread id of the system."""
    return number(event.args.get("Fwd thread id")) or 0


def _or(value: int | None, missing: int) -> int:
    return missing if value is None else value


def _forward_threads(events: Events, forward: Sequence[Event]) -> dict[int, int]:
    """Thread ids behind PyTorch's numbers: the arrows from forward to backward tell; one thread alone is it."""
    nodes = {(event.tid, event.ts): _forward_thread(event) for event in events.operators}
    begins = {arrow.id: arrow.tid for arrow in events.arrows if arrow.begins}
    known: dict[int, int] = {}
    for arrow in events.arrows:
        its = nodes.get((arrow.tid, arrow.ts), 0)
        if not arrow.begins and its and arrow.id in begins:
            known.setdefault(its, begins[arrow.id])
    alone = {event.tid for event in forward}
    if len(alone) == 1:
        (thread,) = alone
        known = {its: thread for its in set(nodes.values()) if its}
    return known
