"""The ranges of a Kineto trace, from this package or from PyTorch, and the operators with autograd sequence numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from nvprof_kit._trace.annotations import loop_annotation
from nvprof_kit._trace.frames import MISSING_PAYLOAD
from nvprof_kit._trace.kineto.events import ANNOTATIONS, MODULE, MODULES, OPERATORS, Events
from nvprof_kit._trace.kineto.stream import NAMES
from nvprof_kit.issues import Issue
from nvprof_kit.names import Category, parse_kineto_name

if TYPE_CHECKING:  # imported once the events are read, so that both are not in memory at the same time
    import pandas as pd

_BACKWARD_OP = "autograd::engine::evaluate_function: "
_NODE = re.compile(r"\w+Backward\d*")
_NUMBER = re.compile(r"_\d+$")
_LIBRARY_ANNOTATIONS = tuple(NAMES["library_annotations"])


def read_ranges(events: Events, has_ours: bool) -> dict[str, Any]:
    """Columns of the schema's ``ranges``: ranges of this package; without them, PyTorch's own annotations: modules
    (recorded with stacks), steps, optimizer, data loading, and user annotations.
    """
    import pandas as pd

    rows = events.of(ANNOTATIONS)
    ours, loop = events.by_name(rows, parse_kineto_name), events.by_name(rows, loop_annotation)
    if has_ours:
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
            for name, loop_name in zip(events.by_name(rows, str), loop, strict=True)
        ]
    rows, named = rows[[name is not None for name in parsed]], [name for name in parsed if name is not None]
    if not has_ours:
        modules = events.of(MODULES)
        modules = modules.iloc[np.lexsort((-modules["end_ns"], modules["start_ns"], modules["tid"]))]
        paths = _module_paths(modules, events.by_name(modules, lambda name: name[len(MODULE) :]))
        if paths:
            events.warnings.append(Issue.of("class-names", example=paths[-1]))
        rows = pd.concat([rows, modules])
        named += [(path, Category.FORWARD.value) for path in paths]
    return {
        **events.spans(rows),
        "nested": np.ones(len(rows), dtype=bool),
        "left_open": np.zeros(len(rows), dtype=bool),
        "category": [category for _, category in named],
        "text": [text for text, _ in named],
        "payload": np.full(len(rows), MISSING_PAYLOAD, dtype=np.int64),
    }


def _module_paths(calls: pd.DataFrame, names: Iterable[str]) -> list[str]:
    """Paths of module calls, sorted by thread and start, by the nesting of the calls: ``Llama.Block.3.MLP``.

    The trace identifies modules by class and a number of its own. A child is named by its class, and where a parent has
    several children of one class, by its number among these, in the order of their first calls. A module that several
    parents share has a path in each.
    """
    node_of: dict[tuple[int, str], int] = {}  # by the node around it, -1 at the top, and its name
    node_inside: dict[str, int] = {}
    nodes: list[int] = []
    open_calls: list[tuple[int, int, int]] = []
    edges = (calls[name].tolist() for name in ("start_ns", "end_ns", "tid"))
    for name, start, end, thread in zip(names, *edges, strict=True):
        while open_calls and (open_calls[-1][0] <= start or open_calls[-1][1] != thread):
            open_calls.pop()
        if not open_calls and name in node_inside:  # a recompute calls a module outside the modules that hold it
            nodes.append(node_inside[name])
        else:
            nodes.append(node_of.setdefault((open_calls[-1][2] if open_calls else -1, name), len(node_of)))
            if open_calls:
                node_inside.setdefault(name, nodes[-1])
        open_calls.append((end, thread, nodes[-1]))
    siblings: dict[tuple[int, str], int] = Counter((parent, _NUMBER.sub("", name)) for parent, name in node_of)
    counts: Counter[tuple[int, str]] = Counter()
    paths: list[str] = []
    for parent, name in node_of:
        kind = parent, _NUMBER.sub("", name)
        label = f"{kind[1]}.{counts[kind]}" if siblings[kind] > 1 else kind[1]
        counts[kind] += 1
        paths.append(f"{paths[parent]}.{label}" if parent >= 0 else label)
    return [paths[node] for node in nodes]


# ---------------------------------------------------------------- operators


def read_operators(events: Events) -> dict[str, Any] | None:
    """Columns of the schema's ``operators``: operators with autograd sequence numbers; None if ranges of this package
    cover the backward pass.
    """
    import pandas as pd

    parsed = events.by_name(events.of(ANNOTATIONS), parse_kineto_name)
    if any(name is not None and name[1] == Category.BACKWARD.value for name in parsed):
        return None
    operators = events.of(OPERATORS)
    made_on = operators["forward_thread"]
    is_engine = events.by_name(operators, lambda name: name.startswith(_BACKWARD_OP), bool)
    is_numbered = ~is_engine & (operators["sequence"] >= 0)
    is_node = (made_on != 0) | events.by_name(operators, lambda name: _NODE.fullmatch(name) is not None, bool)
    parts = [operators[is_part] for is_part in (is_engine, is_numbered & is_node, is_numbered & ~is_node)]
    if len(parts[0]) and not len(parts[1]):
        events.warnings.append(Issue.of("sequence-numbers:missing"))
    rows = pd.concat(parts)
    position = np.arange(len(rows))
    # PyTorch's numbers of forward threads are not system thread ids: each stands for the only thread, or for the one
    # from which a flow event leads to a node with this number
    numbers, thread_code = np.unique(rows["forward_thread"], return_inverse=True)
    forward_tids = parts[2]["tid"].unique()
    if len(forward_tids) == 1:
        threads = np.where(numbers != 0, forward_tids[0], -1)
    else:
        arrows, key = events.arrows, ["tid", "start_ns"]
        # of operators with the same start, the last one is the innermost
        nodes = operators[[*key, "forward_thread"]].drop_duplicates(key, keep="last")
        ends = arrows[~arrows["is_forward_end"]].merge(nodes, on=key)
        starts = arrows[arrows["is_forward_end"]].drop_duplicates("id", keep="last").rename(columns={"tid": "thread"})
        links = ends.merge(starts[["id", "thread"]], on="id")
        links = links[links["forward_thread"] != 0].drop_duplicates("forward_thread").set_index("forward_thread")
        threads = links["thread"].reindex(numbers, fill_value=-1).to_numpy(dtype=np.int64)
    return {
        **events.spans(rows),
        "backward": position < len(parts[0]) + len(parts[1]),
        "engine": position < len(parts[0]),
        "sequence": rows["sequence"],
        "forward_tid": threads[thread_code],
        "name": events.label(rows["name"], lambda name: name.removeprefix(_BACKWARD_OP)),
    }
