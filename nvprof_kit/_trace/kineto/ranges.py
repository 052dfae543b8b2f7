"""The ranges of a Kineto trace, from this package or from PyTorch, and the operators with autograd sequence numbers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from nvprof_kit._trace.annotations import loop_annotation
from nvprof_kit._trace.frames import MISSING_PAYLOAD
from nvprof_kit._trace.kineto.events import ANNOTATIONS, MISSING, MODULES, OPERATORS, Events, Rows, joined
from nvprof_kit.issues import Issue
from nvprof_kit.names import Category, parse_kineto_name

_BACKWARD_OP = "autograd::engine::evaluate_function: "
_NODE = re.compile(r"\w+Backward\d*")
_MODULE = "nn.Module: "
_NUMBER = re.compile(r"_\d+$")
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


def read_ranges(events: Events, process: int) -> dict[str, Any]:
    """Columns of the schema's ``ranges``: ranges of this package; without them, PyTorch's own annotations: modules
    (recorded with stacks), steps, optimizer, data loading, and user annotations.
    """
    annotations = events.of(ANNOTATIONS)
    ours = annotations.by_name(parse_kineto_name)
    loop = annotations.by_name(loop_annotation)
    if has_ours(events):
        # what our ranges say too counts once
        categories = {category for _, category in filter(None, ours.tolist())}
        phases = {text for text, category in filter(None, ours.tolist()) if category == Category.PHASE.value}
        parsed = [
            our_name or (other if other and other[0] not in phases and other[1] not in categories else None)
            for our_name, other in zip(ours, loop, strict=True)
        ]
    else:
        # an annotation outside the loop keeps its text; those of libraries are ignored
        parsed = [
            loop_name or ((name, "") if name and not name.startswith(_LIBRARY_ANNOTATIONS) else None)
            for name, loop_name in zip(annotations.by_name(str), loop, strict=True)
        ]
    ranged = np.flatnonzero([name is not None for name in parsed])
    rows, named = annotations.take(ranged), [name for name in parsed if name is not None]
    if not has_ours(events):
        calls, paths = _modules(events.of(MODULES))
        if paths:
            text = (
                f"layers are from PyTorch's module events: named by class and order ({paths[-1]}), not by their names "
                "in the model; nvprof-kit record --annotate, or annotate_model(model), gives these"
            )
            events.warnings.append(Issue("class-names", "note", 1.0, text))
        rows = joined([rows, calls])
        named += [(path, Category.FORWARD.value) for path in paths]
    return {
        **rows.columns(process),
        "nested": np.ones(len(rows), dtype=bool),
        "left_open": np.zeros(len(rows), dtype=bool),
        "category": [category for _, category in named],
        "text": [text for text, _ in named],
        "payload": np.full(len(rows), MISSING_PAYLOAD, dtype=np.int64),
    }


def has_ours(events: Events) -> bool:
    """Whether the trace has ranges of this package."""
    return any(name is not None for name in events.of(ANNOTATIONS).by_name(parse_kineto_name))


def _modules(calls: Rows) -> tuple[Rows, list[str]]:
    """Module calls with paths, by the nesting of the calls: ``Llama.Block.3.MLP``.

    The trace identifies modules by class and a number of its own. A child is named by its class, and where a parent has
    several children of one class, by its number among these, in the order of their first calls. A module that several
    parents share has a path in each.
    """
    calls = calls.take(np.lexsort((-calls.end_ns, calls.start_ns, calls.tid)))
    names = calls.by_name(lambda name: name[len(_MODULE) :]).tolist()
    start, end, thread = calls.start_ns.tolist(), calls.end_ns.tolist(), calls.tid.tolist()
    parent_call = np.full(len(names), -1, dtype=np.int64)
    open_calls: list[int] = []
    for call in range(len(names)):
        while open_calls and (thread[open_calls[-1]] != thread[call] or end[open_calls[-1]] <= start[call]):
            open_calls.pop()
        parent_call[call] = open_calls[-1] if open_calls else -1
        open_calls.append(call)
    return calls, _paths(names, parent_call.tolist())


def _paths(names: list[str], parents: list[int]) -> list[str]:
    """The path of each call from its name and the call around it, which comes before it."""
    scopes: list[int] = []
    scope_of: dict[tuple[int, str], int] = {}
    siblings: dict[tuple[int, str], dict[str, int]] = {}
    within: dict[str, int] = {}
    for name, parent in zip(names, parents, strict=True):
        if parent < 0 and name in within:  # a recompute calls a module outside the modules that hold it
            scopes.append(within[name])
            continue
        above = scopes[parent] if parent >= 0 else -1
        scope = scope_of.setdefault((above, name), len(scope_of))
        kind = _NUMBER.sub("", name)
        numbers = siblings.setdefault((above, kind), {})
        numbers.setdefault(name, len(numbers))
        scopes.append(scope)
        if parent >= 0:
            within.setdefault(name, scope)
    paths: list[str] = []
    for above, name in scope_of:
        kind = _NUMBER.sub("", name)
        numbers = siblings[above, kind]
        path_name = f"{kind}.{numbers[name]}" if len(numbers) > 1 else kind
        paths.append(f"{paths[above]}.{path_name}" if above >= 0 else path_name)
    return [paths[scope] for scope in scopes]


# ---------------------------------------------------------------- operators


def read_operators(events: Events, process: int) -> dict[str, Any] | None:
    """Columns of the schema's ``operators``: operators with autograd sequence numbers; None if ranges of this package
    cover the backward pass.
    """
    import pandas as pd

    parsed = events.of(ANNOTATIONS).by_name(parse_kineto_name)
    if any(parsed_name is not None and parsed_name[1] == Category.BACKWARD.value for parsed_name in parsed):
        return None
    operators = events.of(OPERATORS)
    engine = operators.by_name(lambda name: name.startswith(_BACKWARD_OP), bool)
    numbered = ~engine & (operators.number("sequence", MISSING) != MISSING)
    made_on = operators.number("forward_thread", 0)
    is_node = (made_on != 0) | operators.by_name(lambda name: _NODE.fullmatch(name) is not None, bool)
    groups = [np.flatnonzero(group) for group in (engine, numbered & is_node, numbered & ~is_node)]
    if len(groups[0]) and not len(groups[1]):
        text = "no cpu_op event of the backward pass has args.Sequence number: it is not joined with the forward"
        events.warnings.append(Issue("sequence-numbers", "warning", 1.0, text))
    rows = operators.take(np.concatenate(groups))
    position = np.arange(len(rows))
    # PyTorch's numbers of forward threads are not system thread ids: each stands for the only thread, or for the one
    # from which a flow event leads to a node with this number
    numbers, thread_code = np.unique(rows.number("forward_thread", 0), return_inverse=True)
    forward_tids = np.unique(operators.tid[groups[2]])
    if len(forward_tids) == 1:
        threads = np.where(numbers != 0, forward_tids[0], -1)
    else:
        arrows, key = pd.DataFrame(events.arrows), ["tid", "start_ns"]
        nodes = pd.DataFrame({"tid": operators.tid, "start_ns": operators.start_ns, "number": made_on})
        # of operators with the same start, the last one is the innermost
        ends = arrows[~arrows["is_forward_end"]].merge(nodes.drop_duplicates(key, keep="last"), on=key)
        starts = arrows[arrows["is_forward_end"]].drop_duplicates("id", keep="last").rename(columns={"tid": "thread"})
        links = ends.merge(starts[["id", "thread"]], on="id")
        links = links[links["number"] != 0].drop_duplicates("number").set_index("number")
        threads = links["thread"].reindex(numbers, fill_value=-1).to_numpy(dtype=np.int64)
    return {
        **rows.columns(process),
        "backward": position < len(groups[0]) + len(groups[1]),
        "engine": position < len(groups[0]),
        "sequence": rows.number("sequence"),
        "forward_tid": threads[thread_code],
        "name": rows.label(lambda name: name.removeprefix(_BACKWARD_OP)),
    }
